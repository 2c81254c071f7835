"""The miniature over several seeds, and the ablation that must stay flat: one table, with the bars it has to clear.

    python benchmarks/miniature.py [--seeds 0 1 2] [--jobs 2] [--out runs/miniature]

Each run has one thread; with --jobs 2 two of them share the machine and print into OUT/*.log. A finished run is not repeated.
"""

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def train(run_dir: Path, *arguments: str, quiet: bool = False) -> dict:
    """Run train.py to its end and return its report and mean rewards."""
    if not (run_dir / "report.json").exists():
        command = [sys.executable, ROOT / "train.py", *arguments, "--run_dir", run_dir]
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        with run_dir.with_suffix(".log").open("w") if quiet else nullcontext() as log:
            subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT if quiet else None)
    report = json.loads((run_dir / "report.json").read_text())
    rewards = [json.loads(line)["reward/strict"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return report | {"first_reward": sum(rewards[:10]) / 10, "last_reward": sum(rewards[-10:]) / 10}


def accuracy(entries: list[dict], length: int) -> float:
    return next(entry["strict"] for entry in entries if entry["length"] == length)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "miniature")
    arguments = parser.parse_args()
    tiny = ["--config", str(ROOT / "configs" / "tiny.yaml")]
    final_only = ["--config", str(ROOT / "configs" / "ablations" / "final_only.yaml")]
    first = arguments.seeds[0]
    todo = {f"seed {seed}": (f"seed{seed}", [*tiny, "--seed", str(seed)]) for seed in arguments.seeds}
    todo[f"final answer only, seed {first}"] = (f"final_only{first}", [*tiny, *final_only, "--seed", str(first)])
    with ThreadPoolExecutor(arguments.jobs) as pool:
        futures = {
            name: pool.submit(train, arguments.out / folder, *options, quiet=arguments.jobs > 1)
            for name, (folder, options) in todo.items()
        }
        try:
            runs = {name: future.result() for name, future in futures.items()}
        except BaseException:  # Ctrl-C too: what waits for its turn must not begin now
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    lengths = [entry["length"] for entry in runs[f"seed {first}"]["after"]]
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
