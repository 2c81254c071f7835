"""Reading back what a run logs, also while it is still being written."""

import json
from pathlib import Path

from memrl.utils.files import read_whole


def read_records(path: str | Path) -> list[tuple[int, dict]]:
    """The objects of a JSON lines file with their line numbers, from 1.

    A torn last line, which a run may be in the middle of writing, is left out.

    Raises:
        ValueError: no such file, a line that is not a JSON object, or bytes that are not UTF-8; names file and line.
    """
    path = Path(path)
    *lines, torn = read_whole(path).split(b"\n")
    records = []
    for number, line in enumerate([*lines, torn], 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number > len(lines):
                break
            reason = "is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else "is not JSON"
            raise ValueError(f"{path}, line {number} {reason}") from None
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number} is not a JSON object")
        records.append((number, record))
    return records
