"""Kill the miniature's RL run with SIGKILL at random moments, resume it each time, and compare with a run that nobody killed.

    python benchmarks/kill_resume.py [--kills 3] [--steps 30] [--out runs/kill_resume]

Equal means equal bytes: metrics, logged rollouts and the exported weights.
"""

import argparse
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def command(run_dir: Path, steps: int) -> list[str]:
    options = ["--rl.steps", str(steps), "--checkpoint.every", "4", "--report.lengths", "[]"]
    return [sys.executable, str(ROOT / "train.py"), "--run_dir", str(run_dir), *options]


def steps_done(run_dir: Path) -> int:
    metrics = run_dir / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def kill_after(run_dir: Path, steps: int, target: int, delay: float) -> None:
    """Start the run, let it log `target` steps in all and some `delay` seconds more, and kill it."""
    process = subprocess.Popen(command(run_dir, steps), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while steps_done(run_dir) < target and process.poll() is None:
        time.sleep(0.002)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    print(f"killed after {steps_done(run_dir)} logged steps; checkpoints folder: {', '.join(left) or 'empty'}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "kill_resume")
    arguments = parser.parse_args()
    shutil.rmtree(arguments.out, ignore_errors=True)
    whole, killed = arguments.out / "whole", arguments.out / "killed"
    subprocess.run(command(whole, arguments.steps), check=True)
    rng = random.Random(arguments.seed)
    for target in sorted(rng.sample(range(1, arguments.steps), arguments.kills)):
        kill_after(killed, arguments.steps, target, rng.random())
    subprocess.run(command(killed, arguments.steps), check=True)
    failed = False
    for name in ("metrics.jsonl", "rollouts.jsonl", "start/model.safetensors", "model/model.safetensors"):
        same = (whole / name).read_bytes() == (killed / name).read_bytes()
        failed |= not same
        print(f"{name}: {'equal' if same else 'DIFFERENT'}, {(whole / name).stat().st_size:,} bytes")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
