"""memrl: memory agents that read documents of any length, trained by reinforcement learning. Read `types.py` first."""

import sys

__version__ = "0.2.0"

if sys.platform == "win32":  # run folders are locked with fcntl, which Windows does not have
    raise ImportError("memrl runs on Linux and macOS; on Windows use WSL")
