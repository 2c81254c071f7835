"""All agents on the memory bench in the miniature's language, before and after RL, over several seeds: tables and a picture.

    python benchmarks/agents.py --seeds 1,2,3 [--only memory,gated] [--jobs 2] [--out runs/agents] [--publish]

Each variant below is configs/tiny.yaml, configs/agents/tiny_bench.yaml and the file of its agent; every other option goes to
train.py, for all variants alike, as in `--rl.steps 40`. One start per seed serves all agents, and all read the same documents.
A finished run is not repeated, an interrupted one goes on, and a failed one ends no other. See docs/agents_bench.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import agents_table as tables
from benchmarks.ablation_table import steps_to_level
from benchmarks.ablations import Run, execute, publish, share_start
from benchmarks.agents_cells import make_documents, solve_cells
from memrl.commands.train import DEFAULT_CONFIG, parse
from memrl.training.inputs import build_agent, run_inputs
from memrl.utils.command_line import user_errors
from memrl.utils.files import write_whole
from memrl.utils.journal import read_records
from memrl.utils.progress import format_seconds

CONFIGS = ROOT / "configs" / "agents"
SHARED = [DEFAULT_CONFIG, CONFIGS / "tiny_bench.yaml"]
SETTINGS = {"checkpoint.every": 10, "checkpoint.keep_last": 1, "log.rollouts": 1, "log.tensorboard": False}
TASKS = ("two_hop_forward", "two_hop_reversed", "update", "listing", "distractors", "counting")
LENGTHS = (8, 32)
CELLS = tuple(f"{task}:{chunks}" for chunks in LENGTHS for task in TASKS)
EARLY_CHUNKS = 32
EARLY = tuple(f"{task}_early:{EARLY_CHUNKS}" for task in ("two_hop_forward", "distractors"))
ORDERED = "two_hop_forward:16"  # the cell of the comparison of rewards
LEVELS = (0.8, 0.9)  # of the mean reward of five steps, when sampling
BASE = "memory"


@dataclass(frozen=True)
class Variant:
    """
    Attributes:
        file: config file of the agent; none for the memory agent, tiny_bench.yaml's own.
        settings: further settings.
        trained: whether it is trained; else only its start is read with, or the model of the variant `model_of`.
        cells: what is read.
        method: a method of eval.py that reads instead of the agent.
    """

    file: str = ""
    settings: tuple[str, ...] = ()
    trained: bool = True
    model_of: str = ""
    cells: tuple[str, ...] = CELLS
    method: str = ""


TWO_HOP = ("--data.tasks=[bench_two_hop_forward]", "--data.min_chunks=12", "--data.max_chunks=16", "--rl.steps=30")
COST = ROOT / "benchmarks" / "reading_cost.py:right_and_short"
READ_ALL = "--agent.options={exit_gate: false, tags: false}"
VARIANTS = {
    "memory": Variant(cells=(*CELLS, *EARLY)),
    "gated": Variant("tiny_gated.yaml", cells=(*CELLS, *EARLY)),
    "gated_cost": Variant("tiny_gated_cost.yaml", (f"--reward.function={COST}",), cells=(*CELLS, *EARLY)),
    "gated_reads_all": Variant("tiny_gated.yaml", (READ_ALL,), False, "gated_cost", EARLY),
    "passes": Variant("tiny_passes.yaml"),
    "recall": Variant("tiny_recall.yaml"),
    "map_reduce": Variant("tiny_map_reduce.yaml", trained=False),
    "chat": Variant("tiny_chat.yaml"),
    "one_shot": Variant(trained=False, method="one_shot"),
    "retrieval": Variant(trained=False, method="retrieval"),
    "outcome": Variant(settings=TWO_HOP, cells=(ORDERED,)),
    "per_turn": Variant("tiny_memory_gain.yaml", TWO_HOP, cells=(ORDERED,)),
}
COMPARED = ("outcome", "per_turn")  # not lines of the tables


@dataclass(eq=False)
class AgentRun(Run):
    """A variant with one seed: `train.py`, and `agents_cells.py` before and after."""

    kind: Variant = field(default_factory=Variant)
    number: int = 0  # documents of a cell
    needs: AgentRun | None = None  # trains the model that this run reads with

    def is_ready(self, active: Container[Run]) -> bool:
        return super().is_ready(active) and (self.needs is None or self.needs.finished or bool(self.needs.error))

    def prepare(self) -> None:
        """Copy the seed's start. Its inputs are this run's own: the prompts of another agent."""
        if self.start.exists() or self.source is None or not self.source.start.exists():
            return
        share_start(self)
        inputs = run_inputs(build_agent(self.config.agent), self.config)
        write_whole(self.folder / "inputs.json", json.dumps(inputs))

    def evaluations(self) -> list[tuple[Path, Path]]:
        """Models, and the files of what they read."""
        before = (self.start, self.folder / "before.json")
        other = self.folder.parent.parent / (self.kind.model_of or self.variant) / self.folder.name / "model"
        after = (other, self.folder / "after.json")
        return [*([] if self.kind.model_of else [before]), *([after] if self.kind.trained or self.kind.model_of else [])]

    @property
    def trained(self) -> bool:
        return not self.kind.trained or ((self.folder / "model").exists() and self.steps_done() >= self.config.rl.steps)

    @property
    def finished(self) -> bool:
        return self.trained and all(set(self.kind.cells) <= read_figures(file).keys() for _, file in self.evaluations())

    def remaining(self) -> Iterator[list[str]]:
        if not self.trained:
            yield [str(ROOT / "train.py"), *self.arguments]
        for model, file in self.evaluations():
            if not set(self.kind.cells) <= read_figures(file).keys():
                wanted = ["--cells", ",".join(self.kind.cells), "--documents", str(self.number), "--method", self.kind.method]
                own = ["--model", str(model), "--out", str(file), "--documents_seed", str(self.seed)]
                yield [str(ROOT / "benchmarks" / "agents_cells.py"), *own, *wanted, *self.arguments]


@dataclass
class Stages:
    """What a variant answered before and after RL, and the mean reward of each step, all by seed."""

    before: dict[int, dict[str, dict]] = field(default_factory=dict)
    after: dict[int, dict[str, dict]] = field(default_factory=dict)
    rewards: dict[int, list[float]] = field(default_factory=dict)


def read_figures(path: Path) -> dict[str, dict]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def plan(names: Sequence[str], seeds: Sequence[int], out: Path, documents: int, extra: list[str]) -> list[AgentRun]:
    """All runs, seed by seed; the first of a seed makes the start. Raises ValueError for a wrong setting."""
    runs: list[AgentRun] = []
    for seed in seeds:
        source: AgentRun | None = None
        for name in names:
            kind, folder = VARIANTS[name], out / name / f"seed{seed}"
            files = [*SHARED, *([CONFIGS / kind.file] if kind.file else [])]
            arguments = [part for file in files for part in ("--config", str(file))]
            arguments += [*(f"--{key}={value}" for key, value in SETTINGS.items()), *kind.settings, *extra]
            arguments += [f"--seed={seed}", f"--run_dir={folder}"]
            run = AgentRun(name, seed, parse(arguments), arguments, [], source, kind=kind, number=documents)
            source = source or run
            run.needs = next((other for other in runs if other.seed == seed and other.variant == kind.model_of), None)
            runs.append(run)
    return runs


def show_tables(found: dict[str, Stages], seeds: Sequence[int], documents: int) -> str:
    """All tables in Markdown."""
    lines = {name: stages for name, stages in found.items() if VARIANTS[name].cells[: len(CELLS)] == CELLS}
    before = {name: stages.before for name, stages in lines.items()}
    after = {name: stages.after for name, stages in lines.items() if stages.after}
    last = after | {name: results for name, results in before.items() if name not in after}  # untrained ones as they are
    fixed: dict[str, dict[int, dict]] = {"oracle": {}, "chance": {}}
    for seed in seeds:
        samples = {cell: make_documents(cell, seed, documents) for cell in CELLS}
        for name, results in fixed.items():
            results[seed] = solve_cells(name, samples)
    parts, marks = [], 0
    by_length = {chunks: [cell for cell in CELLS if cell.endswith(f":{chunks}")] for chunks in LENGTHS}
    for chunks, cells in by_length.items():
        title = f"**{chunks} chunks: answered right, before → after RL, %**"
        parts.append(f"{title}\n\n{tables.accuracy_table(after, before, fixed, cells)}")
    for chunks, cells in by_length.items() if BASE in last else ():
        table, count = tables.change_table(last, BASE, cells)
        parts.append(f"**{chunks} chunks: paired change against `{BASE}`, points, all after RL**\n\n{table}")
        marks += count
    parts.append(f"{marks} of these cells differ beyond the interval, with one sign over the seeds.")
    for chunks, cells in by_length.items():
        parts.append(f"**{chunks} chunks: cost of a document, after RL**\n\n{tables.cost_table(last, cells)}")
    return "\n\n".join([*parts, gate_table(found), reward_table(found)])


def gate_table(found: dict[str, Stages]) -> str:
    """Documents with all evidence in the first fifth: accuracy, chunks read, and changes against who reads all."""
    rows, bases = [], [name for name in ("memory", "gated_reads_all") if name in found and found[name].after]
    for cell in EARLY:
        for name, stages in found.items():
            if EARLY[0] not in VARIANTS[name].cells or not stages.after:
                continue
            right = tables.cell_accuracy(stages.after, cell)
            shares = tables.read_share(stages.after, cell, EARLY_CHUNKS)
            changes = [tables.change_text(stages.after, found[base].after, cell) if base != name else "" for base in bases]
            read = f"{100 * statistics.mean(shares):.0f} ({100 * min(shares):.0f} to {100 * max(shares):.0f})"
            rows.append([tables.cell_name(cell), name, tables.accuracy_text(right), read, *changes])
    header = ["documents", "agent", "right, %", "chunks read, %", *(f"change against {base}" for base in bases)]
    return "**Evidence in the first fifth of the document**\n\n" + tables.markdown(header, rows)


def reward_table(found: dict[str, Stages]) -> str:
    """Per-turn rewards against the outcome alone, on the two-hop task."""
    rows = []
    for name in COMPARED:
        if name not in found or not found[name].after:
            continue
        stages = found[name]
        shown = []
        for level in LEVELS:
            steps = [steps_to_level(rewards, level) for _, rewards in sorted(stages.rewards.items())]
            shown.append(", ".join("never" if step is None else str(step) for step in steps))
        change = tables.change_text(stages.after, found[COMPARED[0]].after, ORDERED) if name != COMPARED[0] else ""
        last = [statistics.mean(rewards[-5:]) for rewards in stages.rewards.values()]
        right = tables.accuracy_text(tables.cell_accuracy(stages.after, ORDERED))
        rows.append([name, *shown, f"{statistics.mean(last):.2f} ({min(last):.2f} to {max(last):.2f})", right, change])
    levels = [f"steps to {level:g}, by seed" for level in LEVELS]
    header = ["reward", *levels, "reward, last 5 steps", f"right, % ({tables.cell_name(ORDERED)})", "change"]
    return "**Two-hop, forward: rewards of turns against the outcome alone**\n\n" + tables.markdown(header, rows)


def collect(runs: Sequence[AgentRun]) -> dict[str, Stages]:
    """What each variant answered, by seed; runs that are not finished are left out."""
    found: dict[str, Stages] = {}
    for run in runs:
        stages = found.setdefault(run.variant, Stages())
        if run.finished:
            for _, file in run.evaluations():
                (stages.before if file.stem == "before" else stages.after)[run.seed] = read_figures(file)
            if run.kind.trained:
                stages.rewards[run.seed] = [r["reward/strict"] for _, r in read_records(run.folder / "metrics.jsonl")]
    return found


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind, allow_abbrev=False)
    parser.add_argument("--seeds", default="1,2,3", help="with commas between (default 1,2,3)")
    parser.add_argument("--only", default=",".join(VARIANTS), help="variants with commas between (default: all)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs at a time (default: one per core)")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "agents")
    parser.add_argument("--documents", type=int, default=64, help="per cell and seed (default 64)")
    parser.add_argument("--tables", action="store_true", help="run nothing; show the tables of what is finished")
    parser.add_argument("--publish", action="store_true", help="also write docs/agents_bench.md's tables and picture")
    return parser.parse_known_args()


def main() -> int:
    arguments, extra = parse_arguments()
    with user_errors():
        names = [name.strip() for name in arguments.only.split(",")]
        if unknown := [name for name in names if name not in VARIANTS]:
            raise ValueError(f"--only names {unknown[0]!r}; there are {', '.join(VARIANTS)}")
        if not all(part.strip().isdecimal() for part in arguments.seeds.split(",")):
            raise ValueError(f"--seeds is {arguments.seeds!r}; give whole numbers like 1,2,3")
        seeds = sorted({int(part) for part in arguments.seeds.split(",")})
        runs = plan(names, seeds, arguments.out, arguments.documents, extra)
    began = time.monotonic()
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler)
        execute([] if arguments.tables else runs, arguments.jobs, "agents")
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130
    found = collect(runs)
    text = show_tables(found, seeds, arguments.documents)
    write_whole(arguments.out / "agents.md", text + "\n")
    print(text)
    for run in runs:
        if run.error:
            print(f"{run.variant}, seed {run.seed}: {run.error}")
    print(f"{len(runs)} runs, {format_seconds(time.monotonic() - began)} of this command; {arguments.out / 'agents.md'}")
    picture = arguments.out / "agents.png"
    lines = {name: stages for name, stages in found.items() if VARIANTS[name].cells[: len(CELLS)] == CELLS and name in found}
    tables.plot_agents(picture, lines, CELLS[len(CELLS) // 2 :], f"Agents on the memory bench, {len(seeds)} seeds")
    if arguments.publish:
        with user_errors():
            publish(ROOT / "docs" / "agents_bench.md", text, picture)
    return int(any(run.error for run in runs))


if __name__ == "__main__":
    sys.exit(main())
