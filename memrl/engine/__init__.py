"""Ranks and DeepSpeed: the partitioned policy, its checkpoint files, the frozen reference."""
