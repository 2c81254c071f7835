"""The miniature over several seeds, and the ablation that must stay flat: one table, with the bars it has to clear.

    python benchmarks/miniature.py [--seeds 0 1 2] [--out runs/miniature]

A finished run is not repeated. Three seeds and the ablation take about 15 minutes on two cores.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def train(run_dir: Path, *arguments: str) -> dict:
    """Run train.py to its end and return its report and its seconds."""
    if not (run_dir / "report.json").exists():
        subprocess.run([sys.executable, ROOT / "train.py", *arguments, "--run_dir", run_dir], check=True)
    report = json.loads((run_dir / "report.json").read_text())
    rewards = [json.loads(line)["reward/strict"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return report | {"first_reward": sum(rewards[:10]) / 10, "last_reward": sum(rewards[-10:]) / 10}


def accuracy(entries: list[dict], length: int) -> float:
    return next(entry["strict"] for entry in entries if entry["length"] == length)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "miniature")
    arguments = parser.parse_args()
    tiny = ["--config", str(ROOT / "configs" / "tiny.yaml")]
    runs = {f"seed {s}": train(arguments.out / f"seed{s}", *tiny, "--seed", str(s)) for s in arguments.seeds}
    ablation = ["--config", str(ROOT / "configs" / "ablations" / "final_only.yaml")]
    seed = arguments.seeds[0]
    runs[f"final answer only, seed {seed}"] = train(
        arguments.out / f"final_only{seed}", *tiny, *ablation, "--seed", str(seed)
    )
    lengths = [entry["length"] for entry in runs[f"seed {seed}"]["after"]]
    print("\n| run | | " + " | ".join(map(str, lengths)) + " | reward, first and last 10 steps |")
    print("|" + " --- |" * (len(lengths) + 3))
    for name, run in runs.items():
        reward = f"{run['first_reward']:.2f} -> {run['last_reward']:.2f}"
        for when, last in (("before", ""), ("after", reward)):
            cells = [f"{accuracy(run[when], length):.3f}" for length in lengths]
            print(f"| {name} | {when} | " + " | ".join(cells) + f" | {last} |")
    failed = []
    for name, run in runs.items():
        if name.startswith("seed"):
            trained = min(accuracy(run["after"], 8), 1.0)
            checks = {
                "64 chunks before RL <= 0.30": accuracy(run["before"], 64) <= 0.30,
                "64 chunks after RL >= 0.95": accuracy(run["after"], 64) >= 0.95,
                "512 chunks after RL >= 0.90": accuracy(run["after"], 512) >= 0.90,
                "512 chunks at most 5 points below 8": accuracy(run["after"], 512) >= trained - 0.05,
            }
        else:
            checks = {"64 chunks after RL <= 0.30": accuracy(run["after"], 64) <= 0.30}
        failed += [f"{name}: {check}" for check, passed in checks.items() if not passed]
    print("\nmissed: " + "; ".join(failed) if failed else "\nall bars cleared")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
