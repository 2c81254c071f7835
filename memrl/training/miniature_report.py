"""Table and picture at the end of a miniature run: greedy accuracy by document length, before and after RL."""

import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from memrl.data.generated import generator
from memrl.engine import distributed
from memrl.evaluation.accuracy_plot import plot_accuracy
from memrl.evaluation.runner import evaluate
from memrl.evaluation.summary import summarize
from memrl.evaluation.tasks import Length, NeedleTask, Task
from memrl.llm import Decoding, LocalLLM
from memrl.model import Transformer
from memrl.sampler import Sampler
from memrl.training.trainer import Trainer
from memrl.types import Sample
from memrl.utils.bounded_files import read_json
from memrl.utils.files import write_whole
from memrl.utils.progress import Progress
from memrl.utils.seeds import stable_id

MAX_SHORT = 64  # chunks; of longer documents report.samples_long are read instead of report.samples
EVALUATION_SEED = 1_000_003  # makes the documents differ from those of training


class GeneratedTasks(Task):
    """The run's own tasks, which take turns over the documents of a length, as in training."""

    length_unit = "chunks"

    def __init__(self, tasks: Sequence[str], chunk_tokens: int):
        self.tasks, self.name, self.tokens_per_unit = tasks, ",".join(tasks), chunk_tokens

    def sample(self, length: Length, index: int, seed: int) -> Sample:
        return generator(self.tasks, index)(int(length), stable_id(seed, self.name, length, index))


def has_report(trainer: Trainer, name: str) -> bool:
    """Whether `report_NAME.json` exists and was made with the present settings; equal on all ranks."""
    try:
        content = read_json(trainer.run.path / f"report_{name}.json")
        is_current = content["settings"] == asdict(trainer.config.report) and isinstance(content["summary"], list)
    except (ValueError, KeyError, TypeError):
        is_current = False
    return distributed.from_rank_0(is_current)


def evaluate_policy(trainer: Trainer, name: str, model: Transformer) -> None:
    """Evaluate `model` on the report's documents and write `report_NAME.json`. Collective over ranks.

    The documents are the same for every name, so "before" and "after" can be compared.
    """
    path = trainer.run.path / f"report_{name}.json"
    options, agent = trainer.config.report, trainer.agent
    sampler = Sampler(model, trainer.tokenizer, max_rows=options.max_rows, attention=trainer.attention)
    llm = LocalLLM(sampler, trainer.tokenizer, Decoding(temperature=0.0), agent.prompts.system)
    tasks = trainer.config.data.tasks
    task = NeedleTask(trainer.tokenizer, agent) if tasks == ["needle"] else GeneratedTasks(tasks, agent.chunk_tokens)
    rank, world = distributed.rank(), distributed.world_size()
    long = [length for length in options.lengths if length > MAX_SHORT]
    short = [length for length in options.lengths if length <= MAX_SHORT]
    total = (sum(long) * options.samples_long + sum(short) * options.samples) // world
    seed, rows = EVALUATION_SEED + trainer.config.seed, []
    with Progress(f"accuracy {name} RL", total, "chunks", stream=None if rank == 0 else io.StringIO()) as progress:
        for lengths, count in ((long, options.samples_long), (short, options.samples)):
            rows += evaluate(llm, task, lengths, count, agent, seed, shard=(rank, world), on_chunk=progress.advance)
    rows = distributed.gather_lists(rows)
    if rank == 0:
        write_whole(path, json.dumps({"settings": asdict(options), "summary": summarize(rows)}, indent=2) + "\n")
    distributed.barrier()


def write_report(folder: Path, trained_to: int) -> None:
    """Print the table and write `report.json` and `report.png` from the two evaluations."""
    before, after = (json.loads((folder / f"report_{name}.json").read_text())["summary"] for name in ("before", "after"))
    write_whole(folder / "report.json", json.dumps({"before": before, "after": after}, indent=2) + "\n")
    plot_accuracy(
        folder / "report.png",
        {"before RL": before, "after RL": after},
        title="A memory agent before and after reinforcement learning",
        trained_to=trained_to,
    )
    print(format_table(before, after))
    print(f"picture: {folder / 'report.png'}")


def format_table(before: list[dict], after: list[dict]) -> str:
    """The strict accuracies as a Markdown table, one column per length, with 95% intervals in percent."""
    lines = [["chunks", *(entry["length"] for entry in after)], ["---"] * (1 + len(after))]
    for name, entries in (("before RL", before), ("after RL", after)):
        lines.append([name, *(f"{entry['strict']:.3f}" for entry in entries)])
        bounds = [[100 * bound for bound in entry["strict_interval"]] for entry in entries]
        lines.append(["95% interval", *("{:.0f}-{:.0f}%".format(*pair) for pair in bounds)])
    lines.append(["documents", *(entry["n"] for entry in after)])
    return "\n".join(f"| {name:<12} | " + " | ".join(f"{cell!s:>7}" for cell in cells) + " |" for name, *cells in lines)
