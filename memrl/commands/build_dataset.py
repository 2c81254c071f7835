"""`memrl data hotpotqa`, `squad`, `musique`, `ruler`, `ruler_hotpotqa` and `needle`: write data sets of long documents."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from memrl.data.ruler import POOL, TASKS, RulerFiles, make_ruler
from memrl.utils.bounds import bounded, read_length
from memrl.utils.command_line import Command, argument, check_out
from memrl.utils.plain_text import printable

if TYPE_CHECKING:
    from memrl.types import Sample

SUFFIXES = (".jsonl", ".parquet")
MOST_CHUNKS = 1_000_000  # of a needle's text; these are 100 MB
MOST_PARAGRAPHS, MOST_TOKENS = 100_000, 2**25  # of a document; the longest published ones have 25,600 and 4 million


@dataclass(kw_only=True)
class Drawing(Command):
    """Which paragraphs are put beside a question's own."""

    seed: int = bounded(0, 0, 2**63 - 1)
    """Seed of the draw and the order of the paragraphs."""
    pool: list[Path] = argument("--pool", type=Path, nargs="+", default=[], metavar="FILE", help=POOL)
    repeat: Literal["refuse", "report"] = "refuse"
    """If there are too few paragraphs: refuse, or repeat some and report how many in each sample."""

    def write(self, out: Path, make: Callable[[int], "Sample"], count: int, recipe: dict[str, Any], label: str) -> str:
        """Write the samples; return how many of their paragraphs are copies, to be printed, or "" if none is."""
        from memrl.data import write_samples

        repeated = total = 0

        def counted(index: int) -> "Sample":
            nonlocal repeated, total
            sample = make(index)
            repeated += sample.metadata["repeated"]
            total += sample.metadata["num_documents"]
            return sample

        write_samples(out, counted, count, recipe, label)
        return f"; {repeated} of the {total} paragraphs just written are copies" if repeated else ""


@dataclass(kw_only=True)
class LongDocumentsCommand(Drawing):
    """What the commands for HotpotQA, SQuAD and MuSiQue share."""

    kind: ClassVar[str]

    input: list[Path] = argument("input", type=Path, nargs="+", metavar="INPUT", help="files, or folders of .parquet files")
    out: Path
    """Data set to write, .jsonl or .parquet."""
    documents: int | None = bounded(None, 1, MOST_PARAGRAPHS)
    """Paragraphs in each document; give this or --tokens."""
    tokens: str | None = None
    """Length of each document in tokens, 32k for example: never more, at most 1% less; needs --tokenizer."""
    tokenizer: Path | None = None
    """Folder of the model whose tokenizer counts the tokens."""
    limit: int | None = bounded(None, at_least=1)
    """Use only this many questions, the first ones."""

    def run(self) -> None:
        from memrl.data.corpora import read_pool, read_sources, source_files
        from memrl.data.documents import FORMAT, LongDocuments
        from memrl.data.paragraphs import Pool
        from memrl.tokenizer import load_tokenizer
        from memrl.utils.files import fingerprint

        files, pool_files = source_files(self.input), source_files(self.pool)
        inputs = [*files, *pool_files]
        check_out(self.out, inputs, SUFFIXES)
        size, unit = self.size()
        source = read_sources(files, self.kind)
        pool = Pool([*source.paragraphs, *read_pool(pool_files)])
        # All that the data set depends on; written beside it, and compared when the command is run again.
        recipe = {"command": self.kind, "format": FORMAT, "input": [f"{path.name} {fingerprint([path])}" for path in inputs]}
        recipe |= {"seed": self.seed, "repeat": self.repeat, unit: size}
        if self.tokenizer is not None:
            names = [self.tokenizer / name for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")]
            recipe["tokenizer"] = fingerprint(name for name in names if name.is_file())
        documents = LongDocuments(pool, load_tokenizer(self.tokenizer) if self.tokenizer else None, self.repeat)
        draw = documents.of_tokens if unit == "tokens" else documents.of_documents
        questions = source.questions[: self.limit]
        copies = self.write(self.out, lambda index: draw(questions[index], size, self.seed), len(questions), recipe, self.kind)
        left_out = f"; {source.left_out}" if source.left_out else ""
        print(f"{self.out}: {len(questions)} questions, {size} {unit} each{copies}{left_out}")

    def size(self) -> tuple[int, str]:
        """Length of the documents, and its unit."""
        if self.documents is not None and self.tokens is None and self.tokenizer is None:
            return self.documents, "documents"
        if self.documents is not None or self.tokens is None or self.tokenizer is None:
            raise ValueError("give either --documents N, or --tokens N and --tokenizer DIR, which belong together")
        size = read_length(self.tokens)
        if size is None or size > MOST_TOKENS:
            wrong = f"{printable(self.tokens, 40)!r} is not a length up to {MOST_TOKENS}"
            raise ValueError(f"--tokens: {wrong}; give a positive whole number like 800, 32k or 1m")
        return size, "tokens"


class Hotpotqa(LongDocumentsCommand):
    """Put the paragraphs of each HotpotQA question (.json, .json.gz, the hub's .parquet) among others drawn at random."""

    kind = "hotpotqa"


class Squad(LongDocumentsCommand):
    """Put the paragraph of each answerable SQuAD question (.json, .json.gz, the hub's .parquet) among others drawn at random."""

    kind = "squad"


class Musique(LongDocumentsCommand):
    """Put the paragraphs of each answerable MuSiQue question (.jsonl or .jsonl.gz) among others drawn at random."""

    kind = "musique"


@dataclass(kw_only=True)
class RulerHotpotqa(Drawing):
    """Write FOLDER/ruler_hotpotqa_N.FORMAT for each number of documents N, the same questions in each."""

    input: Path = argument("input", type=Path, metavar="INPUT", help="HotpotQA file: .json, .json.gz, or the hub's .parquet")
    documents: str
    """Numbers of paragraphs in a document, separated by commas: 50,200,800."""
    out: Path
    """Folder of the files; it is created."""
    samples: int = bounded(128, at_least=1)
    """Use this many questions, the first ones."""
    format: Literal["parquet", "jsonl"] = "parquet"
    """Format of the files."""

    def run(self) -> None:
        from memrl.data.ruler_hotpotqa import RulerHotpotQA
        from memrl.evaluation.tasks import parse_lengths

        counts = parse_lengths(self.documents)
        if counts[-1] > MOST_PARAGRAPHS:
            raise ValueError(f"--documents: {counts[-1]} is more than {MOST_PARAGRAPHS} paragraphs; give fewer")
        files = RulerFiles(hotpotqa=str(self.input), pool=[str(path) for path in self.pool], repeat=self.repeat)
        task = RulerHotpotQA(files)
        count = min(self.samples, task.num_questions)
        fewer = f" (all that there are, not {self.samples})" if count < self.samples else ""
        self.out.mkdir(exist_ok=True)
        for documents in counts:
            path = self.out / f"{task.name}_{documents}.{self.format}"
            recipe = {"command": task.name, "version": task.version, "documents": documents}
            recipe |= {"seed": self.seed, "repeat": self.repeat}
            copies = self.write(path, partial(task.sample, documents, seed=self.seed), count, recipe, f"{documents} documents")
            print(f"{path}: {count} questions{fewer}, {documents} documents each{copies}")


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
    samples: int = bounded(128, at_least=1)
    """Samples of each task and length."""
    seed: int = bounded(0, 0, 2**63 - 1)
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
                write_samples(path, partial(task.sample, length, seed=self.seed), self.samples, recipe, path.stem)
                print(f"{path}: {self.samples} samples")


@dataclass(kw_only=True)
class Needle(Command):
    """Write a document of the miniature's own language as a text file, and print the question to ask with its answer."""

    chunks: int
    """Length of the document in chunks."""
    out: Path
    """Text file to write."""
    seed: int = bounded(0, 0, 2**63 - 1)
    """Seed of all draws."""

    def run(self) -> None:
        from memrl.data.needle import make_sample
        from memrl.utils.files import write_whole

        check_out(self.out)
        if not 1 <= self.chunks <= MOST_CHUNKS:
            raise ValueError(f"chunks is {self.chunks}; it must be between 1 and {MOST_CHUNKS}")
        sample = make_sample(self.chunks, self.seed)
        text = sample.context + "\n"
        if not self.out.is_file():
            write_whole(self.out, text)
        elif self.out.stat().st_size != len(text.encode()) or self.out.read_bytes() != text.encode():
            raise ValueError(f"--out {self.out}: exists and is another text; delete it or choose another name")
        place = sample.metadata["needle_chunk"] + 1
        print(f"{self.out}: {self.chunks} chunks, the fact stands in chunk {place}")
        print(f'ask "{sample.question}"; the answer is "{sample.answers[0]}"')


def parse_tasks(text: str) -> list[str]:
    """`all`, or names separated by commas; ValueError for an unknown name or one given twice."""
    if text == "all":
        return list(TASKS)
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in TASKS:
            raise ValueError(f"--tasks: there is no task {name!r}; give all, or some of {', '.join(TASKS)}")
        if names.count(name) > 1:
            raise ValueError(f"--tasks: {name} is given twice; give each task once")
    return names
