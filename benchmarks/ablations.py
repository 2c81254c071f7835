"""The ablations of configs/ablations on the miniature, over several seeds: one table and one picture, with intervals.

    python benchmarks/ablations.py --seeds 0,1,2 [--only gspo,cispo] [--jobs 2] [--out runs/ablations]

The base is configs/tiny.yaml, made cheaper (SETTINGS below); every other option goes to train.py, for all variants alike, as in
`--rl.steps 100`. Where two files NAME.yaml and NAME_miniature.yaml are there, the second is taken. Every variant of a seed reads
the same documents after training, so changes are paired. A finished run is not repeated, an interrupted one goes on, a failed one
is named in the table and ends no other. How to read the table: docs/ablations.md.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.ablation_plot import plot_ablations
from benchmarks.ablation_table import SeedResult, Variant, format_table
from memrl.commands.train import DEFAULT_CONFIG, parse
from memrl.config import TrainConfig, differences, flatten, validate, validate_start
from memrl.data.needle import make_sample
from memrl.evaluation.tasks import parse_lengths
from memrl.utils.command_line import user_errors
from memrl.utils.files import write_whole
from memrl.utils.journal import read_records
from memrl.utils.progress import Progress, format_seconds
from memrl.utils.seeds import stable_id

# Fewer and smaller steps than configs/tiny.yaml's: near its end all that works answers everything right, and nothing differs.
SETTINGS = {
    "rl.steps": 24,
    "rl.prompts_per_step": 16,
    "data.max_chunks": 8,
    "device": "cpu",
    "threads": 1,
    "checkpoint.every": 10,
    "checkpoint.keep_last": 1,
    "report.lengths": [],
    "log.rollouts": 1,
    "log.tensorboard": False,
}
BASE = "base"
COPIED = "copied_from"  # a file in a start/ that another run has made
PATIENCE_S = 90  # for a run that was asked to stop to finish its step and save it
BEGIN, END = "<!-- the table begins -->", "<!-- the table ends -->"


@dataclass(eq=False)
class Run:
    """One variant with one seed: `train.py`, then `eval.py` on the documents of the seed."""

    variant: str
    seed: int
    config: TrainConfig
    arguments: list[str]
    documents: list[Path]
    source: "Run | None" = None  # makes the warm start that this run would make too
    error: str = ""
    commands: Iterator[list[str]] = field(default_factory=lambda: iter(()))

    @property
    def folder(self) -> Path:
        return Path(self.config.run_dir)

    @property
    def start(self) -> Path:
        return self.folder / "start"

    def evaluations(self) -> list[tuple[Path, Path]]:
        """Model folders, and the folders of their answers; a start that is another run's is evaluated there."""
        own = [] if (self.start / COPIED).exists() else [(self.start, self.folder / "before")]
        return [*own, (self.folder / "model", self.folder / "after")]

    @property
    def finished(self) -> bool:
        return all((results / "summary.json").exists() for _, results in self.evaluations())

    def steps_done(self) -> int:
        """By the log, which a run that resumes cuts back to its last checkpoint."""
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def is_ready(self, active: Container["Run"]) -> bool:
        """Not while another run is at the start that it shares; sources stand before those that need them."""
        return self.source is None or self.source.start.exists() or self.source not in active

    def prepare(self) -> None:
        """Make what the commands need."""
        share_start(self)

    def remaining(self) -> Iterator[list[str]]:
        """The commands that are left, each looked up when the one before it is done."""
        if not (self.folder / "after" / "summary.json").exists():
            yield [str(ROOT / "train.py"), *self.arguments]
        for model, results in self.evaluations():
            if not (results / "summary.json").exists():
                tasks = ",".join(map(str, self.documents))
                yield [
                    *(str(ROOT / "eval.py"), "--model", str(model), "--task", tasks, "--out", str(results)),
                    *("--threads", "1", "--device", "cpu"),
                ]


def find_variants(folder: Path) -> dict[str, Path]:
    """Config files by variant; NAME_miniature.yaml comes before NAME.yaml."""
    paths = sorted(folder.glob("*.yaml"), key=lambda path: path.stem)  # NAME stands before NAME_miniature, which replaces it
    return {path.stem.removesuffix("_miniature"): path for path in paths}


def plan(
    configs: dict[str, list[Path]], seeds: Sequence[int], out: Path, documents: dict[int, list[Path]], extra: list[str]
) -> tuple[list[Run], list[Variant]]:
    """All runs, those of the base first, and the variants that need none because the base has their settings.

    Raises:
        ValueError: a setting is wrong, or a finished run has other settings.
    """
    runs, same, base = [], [], None
    sources: dict[str, Run] = {}
    for name, files in configs.items():
        tiny, *changes = files
        shared = ["--config", str(tiny), *(f"--{key}={value}" for key, value in SETTINGS.items())]
        shared += [*(part for path in changes for part in ("--config", str(path))), *extra]  # later ones win
        config = replace(parse(shared), run_dir="")
        validate(config)
        validate_start(config)
        base = config if base is None else base
        if config == base and name != BASE:
            same.append(Variant(name, note=f"is the {BASE}"))
            continue
        for seed in seeds:
            folder = out / name / f"seed{seed}"
            arguments = [*shared, f"--seed={seed}", f"--run_dir={folder}"]
            run = Run(name, seed, replace(config, seed=seed, run_dir=str(folder)), arguments, documents[seed])
            # All that a warm start is made of; see memrl/training/run.py.
            start = repr((seed, config.agent, config.warm_start))
            run.source = sources.get(start)
            sources.setdefault(start, run)
            check_finished(run)
            runs.append(run)
    return runs, same


def check_finished(run: Run) -> None:
    # train.py itself refuses to go on with other settings, but it is not asked about a run that is finished.
    path = run.folder / "config.yaml"
    if not run.finished or not path.exists():
        return
    old, new = flatten(yaml.safe_load(path.read_text(encoding="utf-8"))), flatten(run.config.to_dict())
    if differ := differences(old, new, free=("run_dir",)):
        raise ValueError(f"{run.folder} is finished with other settings ({'; '.join(differ)}); delete it, or give another --out")


def write_documents(folder: Path, lengths: Sequence[int], count: int, seed: int) -> list[Path]:
    """One JSON lines file per length; chunks are the miniature's own, whatever a variant's chunk size is.

    Raises:
        ValueError: the folder has other documents.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for length in lengths:
        samples = (make_sample(length, stable_id("ablations", seed, length, index)) for index in range(count))
        rows = [{"id": s.id, "question": s.question, "context": s.context, "answers": list(s.answers)} for s in samples]
        files[folder / f"chunks_{length}.jsonl"] = "".join(json.dumps(row) + "\n" for row in rows)
    present = {path: path.read_text(encoding="utf-8") for path in folder.glob("*.jsonl")}
    if present and present != files:
        raise ValueError(f"{folder} holds other documents; give the same --lengths and --documents, or another --out")
    for path, text in files.items():
        write_whole(path, text)
    return list(files)


def share_start(run: Run) -> None:
    """Give a run that has not begun the warm start of another one, bit for bit what it would make itself."""
    if run.start.exists() or run.source is None or not run.source.start.exists():
        return
    run.folder.mkdir(parents=True, exist_ok=True)
    fresh = run.folder / "start.new"
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(run.source.start, fresh)
    # What a run folder with a start must hold; see training/checkpoint.py. The prompts, and so their fingerprint, are the same.
    shutil.copyfile(run.source.folder / "inputs.json", run.folder / "inputs.json")
    write_whole(run.folder / "config.yaml", yaml.safe_dump(run.config.to_dict(), sort_keys=False))
    (fresh / COPIED).write_text(f"{run.source.folder}\n", encoding="utf-8")
    fresh.rename(run.start)


def execute(runs: Sequence[Run], jobs: int, name: str = "ablations") -> None:
    """Run what is not finished, `jobs` at a time; an exception (Ctrl-C, for one) stops what is running."""
    waiting = [run for run in runs if not run.finished]
    active: dict[Run, subprocess.Popen] = {}
    total = sum(run.config.rl.steps for run in runs)

    def steps_done() -> int:
        return sum(run.config.rl.steps if run.finished or run.error else run.steps_done() for run in runs)

    with Progress(name, total, "steps", start=steps_done()) as progress:
        try:
            while waiting or active:
                while len(active) < jobs and (run := next((run for run in waiting if run.is_ready(active)), None)):
                    waiting.remove(run)
                    run.prepare()
                    run.commands = run.remaining()
                    active[run] = launch(run, next(run.commands))
                time.sleep(0.5)
                for run, process in list(active.items()):
                    if process.poll() is None:
                        continue
                    del active[run]
                    command = next(run.commands, None) if process.returncode == 0 else None
                    if command is not None:
                        active[run] = launch(run, command)
                        continue
                    if process.returncode != 0:
                        run.error = f"{last_line(run.folder.with_suffix('.log'))} (exit code {process.returncode})"
                    progress.log(f"{run.variant}, seed {run.seed}: {run.error or 'done'}")
                ended = sum(run.finished or bool(run.error) for run in runs)
                progress.set(steps_done(), runs=f"{ended}/{len(runs)}")
        finally:
            stop(active.values())


def launch(run: Run, arguments: list[str]) -> subprocess.Popen:
    run.folder.mkdir(parents=True, exist_ok=True)
    with open(run.folder.with_suffix(".log"), "a", encoding="utf-8") as log:
        return subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C reaches this process alone, which then asks each run to stop once
        )


def stop(processes: Sequence[subprocess.Popen]) -> None:
    """Ask, wait, and then kill, with whatever processes they have started."""
    processes = list(processes)
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + PATIENCE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            deadline = 0.0
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output")[:300]


def load_result(run: Run, lengths: Sequence[int]) -> SeedResult:
    rewards = [record["reward/strict"] for _, record in read_records(run.folder / "metrics.jsonl")]
    seconds = sum(record.get("step_s", 0.0) for _, record in read_records(run.folder / "timing.jsonl"))
    right: dict[str, dict[int, list[bool]]] = {}
    for _, results in run.evaluations():
        rows = {(row["task"], row["index"]): bool(row["strict"]) for _, row in read_records(results / "samples.jsonl")}
        tasks = {length: f"chunks_{length}" for length in lengths}
        right[results.name] = {
            length: [rows[task, index] for index in range(sum(key[0] == task for key in rows))] for length, task in tasks.items()
        }
    return SeedResult(right["after"], rewards, seconds, right.get("before", {}))


def collect(name: str, runs: Sequence[Run], lengths: Sequence[int]) -> Variant:
    mine = [run for run in runs if run.variant == name]
    results = {run.seed: load_result(run, lengths) for run in mine if run.finished}
    return Variant(name, results, {run.seed: run.error or "not run" for run in mine if not run.finished})


def publish(page: Path, table: str, picture: Path) -> None:
    """Put the table between the marks of docs/ablations.md, and the picture beside it."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"{page} lacks the marks {BEGIN} and {END}, between which the table goes; put them back")
    write_whole(page, f"{before}{BEGIN}\n\n{table}\n\n{END}{after}")
    shutil.copyfile(picture, page.with_suffix(".png"))


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind, allow_abbrev=False)
    parser.add_argument("--seeds", default="0,1,2", help="with commas between (default 0,1,2)")
    parser.add_argument("--only", help=f"variants with commas between; the {BASE} is always run (default: all)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs at a time (default: one per core)")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "ablations")
    parser.add_argument("--lengths", default="8,64", help="chunks of the documents that are read afterwards (default 8,64)")
    parser.add_argument("--documents", type=int, default=128, help="per length and seed (default 128)")
    parser.add_argument("--publish", action="store_true", help="also write docs/ablations.md's table and docs/ablations.png")
    arguments, extra = parser.parse_known_args()
    if arguments.jobs < 1 or arguments.documents < 1:
        parser.error("--jobs and --documents must be at least 1")
    return arguments, extra


def main() -> int:
    arguments, extra = parse_arguments()
    known = find_variants(ROOT / "configs" / "ablations")
    with user_errors():
        names = arguments.only.split(",") if arguments.only else list(known)
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"--only names {unknown[0]!r}; there are {', '.join(known)}")
        if not all(part.strip().isdecimal() for part in arguments.seeds.split(",")):
            raise ValueError(f"--seeds is {arguments.seeds!r}; give whole numbers like 0,1,2")
        seeds, lengths = sorted({int(part) for part in arguments.seeds.split(",")}), parse_lengths(arguments.lengths)
        folders = {seed: arguments.out / "documents" / f"seed{seed}" for seed in seeds}
        documents = {seed: write_documents(folder, lengths, arguments.documents, seed) for seed, folder in folders.items()}
        configs = {BASE: [DEFAULT_CONFIG]} | {name: [DEFAULT_CONFIG, known[name]] for name in names}
        runs, same = plan(configs, seeds, arguments.out, documents, extra)
    began = time.monotonic()
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler)
        execute(runs, arguments.jobs)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130
    variants = [collect(name, runs, lengths) for name in dict.fromkeys(run.variant for run in runs)]
    table, picture = format_table([*variants, *same], variants[0], lengths), arguments.out / "ablations.png"
    write_whole(arguments.out / "ablations.md", table + "\n")
    print(table)
    print(f"{len(runs)} runs, {format_seconds(time.monotonic() - began)} of this command; {arguments.out / 'ablations.md'}")
    if variants[0].results:
        title = f"Ablations on the miniature, {len(seeds)} seed{'s' if len(seeds) > 1 else ''}"
        plot_ablations(picture, variants, variants[0], max(lengths), title)
        if arguments.publish:
            with user_errors():
                publish(ROOT / "docs" / "ablations.md", table, picture)
    return int(any(run.error for run in runs))


if __name__ == "__main__":
    sys.exit(main())
