"""The algorithm: roll out, compare within groups, update. `advantage`, `loss` and `packing` are pure functions."""
