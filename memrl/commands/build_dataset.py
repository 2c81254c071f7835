"""`memrl data hotpotqa`, `squad`, `musique`, `ruler`, `ruler_hotpotqa` and `needle`: write data sets of long documents."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from memrl.data.ruler import TASKS, RulerFiles, make_ruler
from memrl.utils.command_line import Command, PositiveInt, argument, check_out
from memrl.utils.lengths import read_length

if TYPE_CHECKING:
    from memrl.types import Sample

SUFFIXES = (".jsonl", ".parquet")
_POOL = "more paragraphs to draw from: HotpotQA, SQuAD or MuSiQue files, or lists of objects with title and text"


@dataclass(kw_only=True)
class Drawing(Command):
    """Which paragraphs are put beside a question's own."""

    seed: int = 0
    """Seed of the draw and the order of the paragraphs."""
    pool: list[Path] = argument("--pool", type=Path, nargs="+", default=[], metavar="FILE", help=_POOL)
    repeat: Literal["refuse", "report"] = "refuse"
    """If there are too few paragraphs: refuse, or repeat some and report how many in each sample."""


@dataclass(kw_only=True)
class LongDocumentsCommand(Drawing):
    """What the commands for HotpotQA, SQuAD and MuSiQue share."""

    kind: ClassVar[str]

    input: list[Path] = argument("input", type=Path, nargs="+", metavar="INPUT", help="files, or folders of .parquet files")
    out: Path
    """Data set to write, .jsonl or .parquet."""
    documents: PositiveInt | None = None
    """Paragraphs in each document; give this or --tokens."""
    tokens: str | None = None
    """Length of each document in tokens, 32k for example: never more, at most 1% less; needs --tokenizer."""
    tokenizer: Path | None = None
    """Folder of the model whose tokenizer counts the tokens."""
    limit: PositiveInt | None = None
    """Use only this many questions, the first ones."""

    def run(self) -> None:
        from memrl.data import write_samples
        from memrl.data.corpora import read_pool, read_sources, source_files
        from memrl.data.documents import LongDocuments
        from memrl.data.paragraphs import Pool
        from memrl.tokenizer import load_tokenizer

        files, pool_files = source_files(self.input), source_files(self.pool)
        inputs = [*files, *pool_files]
        check_out(self.out, inputs, SUFFIXES)
        size, unit = self.size()
        source = read_sources(files, self.kind)
        pool = Pool([*source.paragraphs, *read_pool(pool_files)])
        tokenizer = load_tokenizer(self.tokenizer) if self.tokenizer else None
        documents = LongDocuments(pool, tokenizer, self.repeat)
        draw = documents.of_tokens if unit == "tokens" else documents.of_documents
        questions = source.questions[: self.limit]
        counted = Repeats(lambda index: draw(questions[index], size, self.seed))
        write_samples(self.out, counted, len(questions), self.recipe(inputs), self.kind)
        left_out = f"; {source.num_unanswerable} without an answer are left out" if source.num_unanswerable else ""
        print(f"{self.out}: {len(questions)} questions, {size} {unit} each{counted.report()}{left_out}")

    def size(self) -> tuple[int, str]:
        """Length of the documents, and its unit."""
        if self.documents is not None and self.tokens is None and self.tokenizer is None:
            return self.documents, "documents"
        if self.documents is not None or self.tokens is None or self.tokenizer is None:
            raise ValueError("give either --documents N, or --tokens N and --tokenizer DIR, which belong together")
        size = read_length(self.tokens)
        if size is None:
            raise ValueError(f"--tokens: {self.tokens!r} is not a length; give a positive whole number like 800, 32k or 1m")
        return size, "tokens"

    def recipe(self, inputs: list[Path]) -> dict[str, Any]:
        """All that the data set depends on; written beside it, and compared when the command is run again."""
        from memrl.data.documents import FORMAT
        from memrl.utils.files import fingerprint

        size, unit = self.size()
        recipe = {
            "command": self.kind,
            "format": FORMAT,
            "input": [f"{path.name} {fingerprint([path])}" for path in inputs],
            "seed": self.seed,
            "repeat": self.repeat,
        }
        if self.tokenizer is None:
            return {**recipe, unit: size}
        files = [self.tokenizer / name for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")]
        return {**recipe, unit: size, "tokenizer": fingerprint(file for file in files if file.is_file())}


class Hotpotqa(LongDocumentsCommand):
    """Put the paragraphs of each HotpotQA question among others drawn at random, numbered and shuffled.

    INPUT is HotpotQA's .json or .json.gz, or the Hugging Face hub's .parquet.
    """

    kind = "hotpotqa"


class Squad(LongDocumentsCommand):
    """Put the paragraph of each SQuAD question among others drawn at random, numbered and shuffled.

    INPUT is SQuAD v1.1 or v2.0 as .json or .json.gz, or the Hugging Face hub's .parquet. Questions without an answer are left
    out.
    """

    kind = "squad"


class Musique(LongDocumentsCommand):
    """Put the paragraphs of each MuSiQue question among others drawn at random, numbered and shuffled.

    INPUT is MuSiQue's .jsonl or .jsonl.gz. Questions without an answer are left out.
    """

    kind = "musique"


class Repeats:
    """Makes samples and counts the copies of paragraphs in them."""

    def __init__(self, make: Callable[[int], "Sample"]):
        self._make, self._repeated, self._documents = make, 0, 0

    def __call__(self, index: int) -> "Sample":
        sample = self._make(index)
        self._repeated += sample.metadata["repeated"]
        self._documents += sample.metadata["num_documents"]
        return sample

    def report(self) -> str:
        """How many of the paragraphs that were written are copies; "" if none is."""
        return f"; {self._repeated} of the {self._documents} paragraphs just written are copies" if self._repeated else ""


@dataclass(kw_only=True)
class RulerHotpotqa(Drawing):
    """Write FOLDER/ruler_hotpotqa_N.FORMAT for each number of documents N, the same questions in each."""

    input: Path = argument("input", type=Path, metavar="INPUT", help="HotpotQA file: .json, .json.gz, or the hub's .parquet")
    documents: str
    """Numbers of paragraphs in a document, separated by commas: 50,200,800."""
    out: Path
    """Folder of the files; it is created."""
    samples: PositiveInt = 128
    """Use this many questions, the first ones."""
    format: Literal["parquet", "jsonl"] = "parquet"
    """Format of the files."""

    def run(self) -> None:
        from memrl.data import write_samples
        from memrl.data.ruler_hotpotqa import RulerHotpotQA
        from memrl.evaluation.tasks import parse_lengths

        check_out(self.out)
        counts = parse_lengths(self.documents)
        files = RulerFiles(hotpotqa=str(self.input), pool=[str(path) for path in self.pool], repeat=self.repeat)
        task = RulerHotpotQA(files)
        count = min(self.samples, task.num_questions)
        fewer = f" (all that there are, not {self.samples})" if count < self.samples else ""
        self.out.mkdir(exist_ok=True)
        for documents in counts:
            path = self.out / f"{task.name}_{documents}.{self.format}"
            recipe = {"command": task.name, "version": task.version, "documents": documents, "seed": self.seed}
            recipe["repeat"] = self.repeat
            make = Repeats(partial(_sample, task, documents, self.seed))
            write_samples(path, make, count, recipe, f"{documents} documents")
            print(f"{path}: {count} questions{fewer}, {documents} documents each{make.report()}")


@dataclass(kw_only=True)
class Ruler(RulerFiles, Command):
    """Write TASK_LENGTH.FORMAT for each task and length. The same command continues if it was stopped."""

    lengths: str
    """Tokens of a whole sample, several separated by commas: 4k,1m."""
    tokenizer: Path
    """Folder of the model or of its tokenizer."""
    out: Path
    """Folder to write to; it is created."""
    tasks: str = "all"
    """Names separated by commas, or all 13."""
    samples: PositiveInt = 128
    """Samples of each task and length."""
    pool: list[str] = argument("--pool", type=str, nargs="+", default=[], metavar="FILE", help=f"for qa_1 and qa_2, {_POOL}")
    seed: int = 0
    """Seed of all draws."""
    format: Literal["parquet", "jsonl"] = "parquet"
    """Format of the files."""

    def run(self) -> None:
        from memrl.data import write_samples
        from memrl.data.ruler.qa import QaGenerator
        from memrl.evaluation.tasks import parse_lengths
        from memrl.tokenizer import load_tokenizer

        names, lengths = parse_tasks(self.tasks), parse_lengths(self.lengths)
        if self.out.exists() and not self.out.is_dir():
            raise ValueError(f"--out {self.out}: is a file; give the name of a folder")
        tokenizer = load_tokenizer(self.tokenizer)
        # Open and check every task before anything is written.
        tasks = {name: make_ruler(name, tokenizer, self) for name in names}
        for name, task in tasks.items():
            if task.num_questions is not None and task.num_questions < self.samples:
                raise ValueError(f"--samples {self.samples}: {name} has {task.num_questions} questions; give that many or fewer")
        for task in tasks.values():
            task.sample(lengths[0], 0, self.seed)
            if isinstance(task, QaGenerator):
                task.check(lengths[-1])
        self.out.mkdir(parents=True, exist_ok=True)
        for name, task in tasks.items():
            for length in lengths:
                path = self.out / f"{name}_{length}.{self.format}"
                recipe = {"task": name, "length": length, "seed": self.seed, "version": task.version}
                write_samples(path, partial(_sample, task, length, self.seed), self.samples, recipe, path.stem)
                print(f"{path}: {self.samples} samples")


@dataclass(kw_only=True)
class Needle(Command):
    """Write a document of the miniature's own language as a text file, and print the question to ask with its answer."""

    chunks: PositiveInt
    """Length of the document in chunks."""
    out: Path
    """Text file to write."""
    seed: int = 0
    """Seed of all draws."""

    def run(self) -> None:
        from memrl.data.needle import make_sample
        from memrl.utils.files import write_whole

        check_out(self.out)
        sample = make_sample(self.chunks, self.seed)
        write_whole(self.out, sample.context + "\n")
        place = sample.metadata["needle_chunk"] + 1
        print(f"{self.out}: {self.chunks} chunks, the fact stands in chunk {place}")
        print(f'ask "{sample.question}"; the answer is "{sample.answers[0]}"')


def parse_tasks(text: str) -> list[str]:
    """`all`, or names separated by commas, each once.

    Raises:
        ValueError: an unknown name, or one given twice.
    """
    if text == "all":
        return list(TASKS)
    names = [name.strip() for name in text.split(",")]
    for place, name in enumerate(names):
        if name not in TASKS:
            raise ValueError(f"--tasks: there is no task {name!r}; give all, or some of {', '.join(TASKS)}")
        if name in names[:place]:
            raise ValueError(f"--tasks: {name} is given twice; give each task once")
    return names


def _sample(task, size: int, seed: int, index: int) -> "Sample":
    return task.sample(size, index, seed)
