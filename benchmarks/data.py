"""The data side on real files: RULER to exact lengths, RULER-HotpotQA, a training set, and one evaluation over all of them.

    python benchmarks/data.py --tokenizer DIR --hotpotqa FILE --squad FILE --essays FOLDER [--train FILE] [--pool FILE ...]
                              [--lengths 4k,32k,128k,1m] [--documents 50,200,800,6400] [--parts ruler,documents,...]

    ruler       a sample of each of RULER's 13 tasks at each length: seconds, and tokens of context, question and answer budget
    documents   RULER-HotpotQA at each number of documents: seconds and tokens a sample
    training    `memrl data hotpotqa` to parquet, read back by a training run's loader
    evaluation  eval.py on all of it with a small random model: every task meets every method

A fresh task for each length, so that no sample profits from another's counted sentences. Where the paragraphs do not suffice,
some are repeated and the table says how many. Bars: every RULER sample within 1% below its length, a million tokens in 30 s.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from memrl.data.ruler import TASKS, RulerFiles, make_ruler
from memrl.evaluation.tasks import parse_lengths
from memrl.tokenizer import load_tokenizer

PARTS = ("ruler", "documents", "training", "evaluation")
SECONDS, SHARE, MILLION = 30.0, 0.99, 1_000_000


def table(*rows: tuple) -> None:
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |", flush=True)


def measure_ruler(tokenizer, files: RulerFiles, lengths: list[int]) -> list[str]:
    missed = []
    table(("task", "length", "context", "with question and answer", "share", "repeated", "seconds"), ("---",) * 7)
    for name in TASKS:
        for length in lengths:
            task = make_ruler(name, tokenizer, files)
            began = time.perf_counter()
            sample = task.sample(length, 0, 0)
            seconds = time.perf_counter() - began
            sizes = sample.metadata["tokens"]
            context, question = (len(tokenizer.encode(text)) for text in (sample.context, sample.question))
            total = context + question + sizes["answer_budget"] + sizes["reserve"]
            repeated = sample.metadata.get("repeated", "")
            table((name, f"{length:,}", f"{context:,}", f"{total:,}", f"{total / length:.4f}", repeated, f"{seconds:.1f}"))
            if not SHARE * length <= total <= length:
                missed.append(f"{name} at {length} has {total} tokens")
            if length >= MILLION and seconds > SECONDS:
                missed.append(f"{name} at {length} took {seconds:.0f} s")
    return missed


def measure_documents(tokenizer, files: RulerFiles, counts: list[int]) -> None:
    from memrl.data.ruler_hotpotqa import RulerHotpotQA

    task = RulerHotpotQA(files)
    table(("documents", "tokens", "repeated", "seconds"), ("---",) * 4)
    for count in counts:
        began = time.perf_counter()
        sample = task.sample(count, 0, 0)
        seconds = time.perf_counter() - began
        tokens = len(tokenizer.encode(sample.context))
        table((f"{count:,}", f"{tokens:,}", sample.metadata["repeated"], f"{seconds:.1f}"))


def call(*command: object) -> None:
    print("+", *command, flush=True)
    subprocess.run([str(part) for part in command], check=True, cwd=ROOT)


def build_training_set(source: Path, out: Path) -> None:
    from memrl.data import load_samples

    target = out / "train.parquet"
    call(sys.executable, "-m", "memrl", "data", "hotpotqa", source, "--out", target, "--documents", 200)
    samples = load_samples(target)
    print(f"{len(samples)} samples, {target.stat().st_size / 2**20:.1f} MiB; {samples[0].id}: {samples[0].question}")


def evaluate(tokenizer, files: RulerFiles, out: Path) -> None:
    from memrl.model import TransformerConfig, save_model
    from memrl.model.loader import from_scratch

    shape = TransformerConfig(151_936, 64, 128, 2, 4, 2, 16, tie_word_embeddings=True)
    save_model(from_scratch(shape, seed=0), out / "model", tokenizer=tokenizer)
    common = [sys.executable, "eval.py", "--model", out / "model", "--methods", "memory,one_shot,retrieval", "--samples", 1]
    common += ["--agent.memory_tokens", 16, "--agent.answer_tokens", 16, "--repeat", "report", "--hotpotqa", files.hotpotqa]
    common += ["--pool", *([f"[{','.join(files.pool)}]"] if files.pool else ["[]"])]
    sources = ["--squad", files.squad, "--essays", files.essays]
    call(*common, "--task", "ruler", "--lengths", "4k,8k", *sources, "--out", out / "ruler")
    call(*common, "--task", "ruler_hotpotqa", "--lengths", "50,100", "--out", out / "hotpotqa")
    call(sys.executable, "-m", "memrl", "report", out / "ruler", out / "hotpotqa", "--out", out / "report")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--hotpotqa", type=Path, required=True)
    parser.add_argument("--squad", type=Path, required=True)
    parser.add_argument("--essays", type=Path, required=True)
    parser.add_argument("--train", type=Path, help="HotpotQA questions to train on; those of --hotpotqa if not given")
    parser.add_argument("--pool", type=Path, nargs="*", default=[])
    parser.add_argument("--lengths", type=parse_lengths, default=[4096, 32768, 131072, 2**20])
    parser.add_argument("--documents", type=parse_lengths, default=[50, 200, 800, 6400])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "data")
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(arguments.tokenizer)
    given = {name: str(getattr(arguments, name).absolute()) for name in ("essays", "squad", "hotpotqa")}
    files = RulerFiles(**given, pool=[str(path.absolute()) for path in arguments.pool], repeat="report")
    missed = []
    for part in arguments.parts.split(","):
        print(f"\n{part}", flush=True)
        if part == "ruler":
            missed = measure_ruler(tokenizer, files, arguments.lengths)
        elif part == "documents":
            measure_documents(tokenizer, files, arguments.documents)
        elif part == "training":
            build_training_set((arguments.train or arguments.hotpotqa).absolute(), out)
        elif part == "evaluation":
            evaluate(tokenizer, files, out)
        else:
            parser.error(f"there is no part {part!r}; the parts are {', '.join(PARTS)}")
    print(*(f"missed: {line}" for line in missed), sep="\n")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
