"""Kill a training run at random moments, or flip bits in its checkpoints; resume it, and compare with an uninterrupted run.

    python benchmarks/faults.py [--kills 20] [--flips 20] [--ranks 2] [--seed 0] [--out runs/faults]

The run is small (a random model, 12 steps, a checkpoint every second step, a validation every third) and real: torchrun,
DeepSpeed ZeRO-3, train.py. All its processes are killed together. Half of the kills fall into a save: they wait for its temporary
folder to appear, then for some random milliseconds. The others fall into a step, or into the start, where a resumed run
tidies up. After each kill every checkpoint must be whole; the next start must take up the newest. A folder gets up to
four kills, then its run is let go to the end and compared; equal means equal bytes.

A flip is one random bit of a random file of the newest checkpoint of the finished run, each in a copy of its own. The next start
must name that checkpoint as damaged, go back to the one before, and end with the same bytes. Exit code 1 where anything differs.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from safetensors import safe_open

from tests.tiny_run import make_run

TRAIN = ROOT / "train.py"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
KILLS_PER_RUN = 4
STEPS = 12
SECTIONS = {"rl": {"steps": STEPS}, "validation": {"every": 3, "samples": 4}}
COMPARED = (
    "metrics.jsonl",
    "rollouts.jsonl",
    "validation.jsonl",
    "model/model.safetensors",
    "best/model.safetensors",
    "best/best.json",
    f"checkpoints/step-{STEPS}/model/model.safetensors",
)


class Run:
    """A training process and its folder."""

    def __init__(self, arguments: list[str], folder: Path, ranks: int):
        self.folder, self.log = folder, folder.with_suffix(".log")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
        command = [sys.executable, *launcher, str(TRAIN), *arguments, "--run_dir", str(folder)]
        self.started = time.monotonic()
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=ENVIRONMENT)

    def is_running(self) -> bool:
        return self.process.poll() is None

    def steps_logged(self) -> int:
        metrics = self.folder / "metrics.jsonl"
        return metrics.read_text().count("\n") if metrics.exists() else 0

    def wait_until(self, happened) -> None:
        while self.is_running() and not happened():
            time.sleep(0.001)

    def kill(self) -> None:
        """SIGKILL to the process and all its descendants, which torchrun puts into sessions of their own."""
        found = [self.process.pid, *descendants(self.process.pid)]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in found:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    pass
        self.process.wait()
        while any(is_alive(pid) for pid in found):
            time.sleep(0.01)

    def resumed_after(self) -> int:
        """The step that the log says the run was taken up after; 0 for a run from its beginning."""
        words = self.log.read_text().partition("resuming after step ")[2].split()
        return int(words[0]) if words else 0


def descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *descendants(child)]
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_moment(run: Run, kind: str, rng: random.Random) -> None:
    """Return when the run is where the kill belongs, or has ended."""
    if kind == "start":
        until = run.started + rng.uniform(0, 25)
        run.wait_until(lambda: time.monotonic() > until)
        return
    # The run says what it is when it has loaded everything and shortened its logs.
    run.wait_until(lambda: "parameters" in run.log.read_text())
    target = run.steps_logged() + rng.randint(1, 2)
    run.wait_until(lambda: run.steps_logged() >= target)
    if kind == "save":
        run.wait_until(lambda: any(run.folder.glob("checkpoints/tmp-*")))
        time.sleep(rng.uniform(0, 0.25))
    else:
        time.sleep(rng.uniform(0, 1.0))


def newest(folder: Path) -> int:
    return max((int(path.name[5:]) for path in folder.glob("checkpoints/step-*")), default=0)


def damage(folder: Path) -> list[str]:
    """What is not whole in the folder of a run that was killed."""
    found = []
    for checkpoint in folder.glob("checkpoints/step-*"):
        try:
            assert json.loads((checkpoint / "state.json").read_text())["step"] == int(checkpoint.name[5:])
            with safe_open(checkpoint / "model" / "model.safetensors", "pt") as weights:
                assert len(list(weights.keys())) > 0
        except Exception as error:
            found.append(f"{checkpoint.name}: {type(error).__name__} {error}")
    return found


def differences(one: Path, other: Path) -> list[str]:
    return [name for name in COMPARED if (one / name).read_bytes() != (other / name).read_bytes()]


def kill_once(run: Run, kind: str, rng: random.Random) -> str | None:
    """Kill the run at such a moment; returns where it was, None when it had ended before."""
    wait_for_moment(run, kind, rng)
    if not run.is_running():
        return None
    run.kill()
    names = sorted(path.name for path in run.folder.glob("checkpoints/*"))
    hidden = sorted(path.name for path in run.folder.glob(".*.*"))
    return f"{run.steps_logged():>2} steps logged; {', '.join(names + hidden) or 'no checkpoint'}"


def torture(arguments: list[str], folder: Path, ranks: int, kinds: list[str], rng: random.Random) -> tuple[int, list[str]]:
    """Kill one run at the given kinds of moments, resuming it after each; returns the kills done and what went wrong."""
    wrong: list[str] = []
    kills = 0
    while True:
        expected = newest(folder)
        run = Run(arguments, folder, ranks)
        where = kill_once(run, kinds[kills], rng) if kills < len(kinds) else None
        if where is None:
            break
        wrong += damage(folder)
        after = run.resumed_after() if "parameters" in run.log.read_text() else expected
        if after != expected:
            wrong.append(f"taken up after step {after} instead of {expected}")
        print(f"| {folder.name} | {kinds[kills]:<5} | {where} | {'; '.join(wrong) or 'whole'} |", flush=True)
        kills += 1
    code = run.process.wait()
    if code or run.resumed_after() != expected:
        wrong.append(f"ended with code {code}, taken up after step {run.resumed_after()} instead of {expected}; see {run.log}")
    return kills, wrong


def kill_runs(arguments: list[str], options: argparse.Namespace, rng: random.Random) -> int:
    """Do the kills; returns the number of runs that were lost or differ."""
    kills, runs, lost = 0, 0, 0
    print("| run | kill | where it was | checkpoints |\n| --- | --- | --- | --- |", flush=True)
    while kills < options.kills:
        count = min(KILLS_PER_RUN, options.kills - kills)
        kinds = ["save", rng.choice(["step", "start"])] * ((count + 1) // 2)
        folder = options.out / f"killed-{runs}"
        done, wrong = torture(arguments, folder, options.ranks, kinds[:count], rng)
        if not wrong:
            wrong = [f"{name} differs" for name in differences(options.out / "whole", folder)]
        print(f"| {folder.name} | end | {done} kills, then to the end | {'; '.join(wrong) or 'equal bytes'} |", flush=True)
        kills, runs, lost = kills + done, runs + 1, lost + bool(wrong)
    print(f"\n{kills} kills, {runs} runs of {options.ranks} ranks, {lost} of them lost or different")
    return lost


def flip_bit(checkpoint: Path, rng: random.Random) -> str:
    """Flip one bit of a random file of DeepSpeed's state, the model or the folder itself; returns where."""
    part = rng.choice(["engine/*", "model/*", "*"])
    file = rng.choice(sorted(path for path in checkpoint.glob(part) if path.is_file()))
    content = bytearray(file.read_bytes())
    bit = rng.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)
    return f"{file.relative_to(checkpoint)}, bit {bit:,} of {8 * len(content):,}"


def flip_runs(arguments: list[str], options: argparse.Namespace, rng: random.Random) -> int:
    """Do the flips; returns the number of them that were not found, or after which the run was lost or differs."""
    whole, lost = options.out / "whole", 0
    before = max(int(path.name[5:]) for path in whole.glob("checkpoints/step-*") if path.name != f"step-{STEPS}")
    print("| flip | where | found | resumed after | end |\n| --- | --- | --- | --- | --- |", flush=True)
    for number in range(options.flips):
        folder = options.out / f"flipped-{number}"
        shutil.copytree(whole, folder)
        where = flip_bit(folder / "checkpoints" / f"step-{STEPS}", rng)
        run = Run(arguments, folder, options.ranks)
        code = run.process.wait()
        found = f"the checkpoint after step {STEPS} is damaged" in run.log.read_text()
        wrong = [f"code {code}"] if code else [f"{name} differs" for name in differences(whole, folder)]
        is_right = found and run.resumed_after() == before and not wrong
        end = "; ".join(wrong) or "equal bytes"
        print(f"| {number} | {where} | {'yes' if found else 'NO'} | {run.resumed_after()} | {end} |", flush=True)
        lost += not is_right
        if is_right:
            shutil.rmtree(folder)
    print(f"\n{options.flips} flipped bits, runs of {options.ranks} ranks, {lost} not found, lost or different")
    return lost


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--flips", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the bits")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "faults")
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    arguments = make_run(options.out, **SECTIONS)
    whole = Run(arguments, options.out / "whole", options.ranks)
    if whole.process.wait():
        print(f"the uninterrupted run ended with code {whole.process.returncode}; see {whole.log}")
        return 1
    parts = [part for part, count in ((kill_runs, options.kills), (flip_runs, options.flips)) if count]
    lost = sum(part(arguments, options, random.Random(options.seed)) for part in parts)
    print(f"compared: {', '.join(COMPARED)}")
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
