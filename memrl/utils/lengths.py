"""Read lengths such as 800, 32k or 1m."""

import re


def read_length(text: str) -> int | None:
    """`800`, `32k` or `1m` (k is 1024, m is 1024 * 1024) as a whole number of at least 1; None for anything else."""
    match = re.fullmatch(r"\s*(\d{1,15})\s*([kKmM]?)\s*", text, re.ASCII)
    return int(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()] or None if match else None
