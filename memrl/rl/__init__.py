"""The algorithm: sample trajectories, compare within groups, update. `advantage`, `loss` and `packing` are pure functions."""
