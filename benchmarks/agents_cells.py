"""Read the memory bench's documents with one agent and one model: a cell per task and length. A part of benchmarks/agents.py.

    agents_cells.py --model DIR --out FILE.json --cells update:8,update:32 --documents 64 --documents_seed 0 TRAIN_OPTIONS

The agent is that of the train options. FILE.json is written after each cell; cells that are in it are not read again. Every agent
reads the same documents of a seed, greedily. `seconds` are CPU seconds of the whole process, on one thread, while `max_rows`
documents are read at once: other work on the machine changes them little.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from memrl.data.bench.miniature import make_bench_sample
from memrl.evaluation.baselines import BASELINES
from memrl.scoring.verify import strict_match
from memrl.types import Sample, Trajectory
from memrl.utils.files import write_whole
from memrl.utils.seeds import stable_id

if TYPE_CHECKING:
    from memrl.config import TrainConfig

EARLY = 0.2  # the evidence of an early document ends within this share of it
MAX_ROWS = 64
RETRIEVED = 50  # tokens that retrieval shows: two chunks
ORDERS = {"two_hop_forward": "forward", "two_hop_reversed": "reversed"}


def make_document(task: str, chunks: int, seed: int, index: int) -> Sample:
    """Document `index` of a cell; tasks with `_early` have all evidence in the first fifth."""
    name, early = task.removesuffix("_early"), task.endswith("_early")
    for attempt in range(10_000):
        number = stable_id("agents", seed, task, chunks, index, attempt)
        order = ORDERS.get(name)
        sample = make_bench_sample("two_hop" if order else name, chunks, number, variation=None if early else index, order=order)
        if not early or max(sample.metadata["evidence_chunks"]) < EARLY * chunks:
            return sample
    raise ValueError(f"{task}: no document of {chunks} chunks has its evidence in the first fifth; give longer ones")


def make_documents(cell: str, seed: int, number: int) -> list[Sample]:
    """The documents of a cell, `TASK:CHUNKS`; the same for every agent."""
    task, chunks = cell.split(":")
    return [make_document(task, int(chunks), seed, index) for index in range(number)]


def cost(trajectory: Trajectory) -> dict[str, float]:
    turns = trajectory.turns
    return {
        "turns": len(turns),
        "prompt_tokens": sum(len(turn.prompt_ids) for turn in turns),
        "response_tokens": sum(len(turn.response_ids) for turn in turns),
        "read": trajectory.scores.get("sections_read", sum(turn.kind == "memory" for turn in turns)),
    }


def read_cells(
    config: TrainConfig, method: str, model: Path, documents: dict[str, list[Sample]], done: Callable[[str, dict], None]
) -> None:
    """Read the documents of each cell, and call `done` with its name and figures; a method of eval.py replaces the agent."""
    from memrl.evaluation.methods import Method, MethodOptions, make_methods
    from memrl.model.hf_config import longest_text, read_config
    from memrl.reading.open_model import ReaderOptions, open_llm
    from memrl.tokenizer import load_tokenizer
    from memrl.training.inputs import build_agent

    agent = build_agent(config.agent)
    shown = MethodOptions(retrieval_tokens=RETRIEVED, passage_tokens=agent.chunk_tokens)
    reader = make_methods([method], shown, agent, longest_text(read_config(model)))[method] if method else Method("", agent)
    llm = open_llm(model, load_tokenizer(model), agent, ReaderOptions(max_rows=MAX_ROWS, threads=1, device="cpu", cache_gib=1.0))
    for cell, samples in documents.items():
        began = time.process_time()
        sessions = (llm.session(stable_id(cell, index)) for index in range(len(samples)))
        found = llm.run(reader.run(session, sample) for session, sample in zip(sessions, samples, strict=True))
        figures: dict[str, Any] = {"seconds": time.process_time() - began}
        figures["right"] = [strict_match(t.response, s.answers, s.match) for t, s in zip(found, samples, strict=True)]
        costs = [cost(trajectory) for trajectory in found]
        done(cell, figures | {name: [row[name] for row in costs] for name in costs[0]})


def solve_cells(name: str, documents: dict[str, list[Sample]]) -> dict[str, dict]:
    """The figures of a baseline without a model, by its name."""
    answer = BASELINES[name]
    return {
        cell: {"right": [strict_match(answer(sample).response, sample.answers, sample.match) for sample in samples]}
        for cell, samples in documents.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--method", default="", help="a method of eval.py that reads instead of the agent")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cells", required=True)
    parser.add_argument("--documents", type=int, required=True)
    parser.add_argument("--documents_seed", type=int, required=True)
    arguments, train = parser.parse_known_args()
    from memrl.commands.train import parse

    config = parse(train)
    cells = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {}
    missing = [cell for cell in arguments.cells.split(",") if cell not in cells]
    documents = {cell: make_documents(cell, arguments.documents_seed, arguments.documents) for cell in missing}

    def done(cell: str, figures: dict) -> None:
        cells[cell] = figures
        write_whole(arguments.out, json.dumps(cells) + "\n")

    read_cells(config, arguments.method, arguments.model, documents, done)
    return 0


if __name__ == "__main__":
    sys.exit(main())
