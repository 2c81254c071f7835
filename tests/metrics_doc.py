"""What docs/metrics.md says that a run logs, to be held against what it logs."""

import json
import re
from pathlib import Path

DOC = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"


def documented(section: str) -> dict[str, str]:
    """The names in the table below a heading of docs/metrics.md, with the last column: only where it is logged, or empty."""
    text = DOC.read_text(encoding="utf-8")
    body = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in body.splitlines() if line.startswith("| `")]
    return {name: row[-1].strip() for row in rows for name in re.findall(r"`([^`]+)`", row[0])}


def pattern_of(name: str) -> re.Pattern[str]:
    """What a documented name stands for: KIND and NAME are words of the agent or of the reward function."""
    return re.compile(re.sub("KIND|NAME", r"[\\w.]+", name))


def assert_documented(run_dir: Path) -> None:
    """Every name that a run logged has its formula, and each step has every name that is promised without a condition."""
    table = documented("metrics.jsonl")
    for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        logged = json.loads(line).keys()
        unknown = [name for name in logged if not any(pattern_of(known).fullmatch(name) for known in table)]
        assert not unknown, f"docs/metrics.md does not explain {sorted(unknown)}"
        missing = {name for name, only_where in table.items() if not only_where} - logged
        assert not missing, f"docs/metrics.md promises {sorted(missing)}"
    for name in ("validation.jsonl", "timing.jsonl", "rollouts.jsonl"):
        path = run_dir / name
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            unknown = json.loads(line).keys() - documented(name).keys()
            assert not unknown, f"docs/metrics.md does not explain {sorted(unknown)} of {name}"
