"""Ranks and DeepSpeed: the partitioned policy, how it is loaded, and its checkpoint files."""
