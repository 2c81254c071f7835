"""memrl: memory agents that read documents of any length, trained by reinforcement learning. Read `types.py` first."""
