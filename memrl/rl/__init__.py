"""The algorithm: `advantage`, `loss` and `packing` are pure functions; `rollout` and `trainer` put them to work."""
