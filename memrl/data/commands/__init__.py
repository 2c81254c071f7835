"""The commands of `python -m memrl.data`, a module each with `add_command(commands)`; `memrl.data.__main__` lists them."""
