"""The tasks of an evaluation: documents of given lengths, with questions and gold answers.

A task makes its documents one at a time, so a run over many long ones holds only those that are being read.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from memrl.agents.agent_config import AgentConfig
from memrl.data import bench, load_samples
from memrl.data.bench.miniature import is_spoken, make_bench_sample
from memrl.data.dataset_writer import hash_files
from memrl.data.needle import SENTENCE_WORDS, make_sample
from memrl.tokenizer import Tokenizer
from memrl.types import Sample
from memrl.utils.bounds import read_length
from memrl.utils.plain_text import printable
from memrl.utils.seeds import stable_id

if TYPE_CHECKING:
    from memrl.data.ruler import RulerFiles, RulerTask
    from memrl.data.ruler_hotpotqa import RulerHotpotQA

Length = int | str
MOST_LENGTHS = 1000  # of a command
SAMPLES = 128  # documents of each length by default, as in the original
CHARACTERS_PER_TOKEN, TOKENS_PER_PARAGRAPH = 4, 140  # of English text; of a paragraph of HotpotQA, heading included


def length_units() -> dict[str, str]:
    """The unit of each generated task's lengths, by the task's name."""
    from memrl.data.longtasks import TASKS as LONG_TASKS
    from memrl.data.ruler import TASKS

    made_of_tokens = dict.fromkeys((*TASKS, *LONG_TASKS, *bench.ENGLISH), "tokens")
    return {**made_of_tokens, **dict.fromkeys(bench.NAMES, "chunks"), "needle": "chunks", "ruler_hotpotqa": "documents"}


class Task:
    """Documents with questions, by length and index.

    Attributes:
        name: stands in every row.
        version: changes when the same (length, index, seed) means another document.
        length_unit: "chunks", "tokens" or "documents"; "" for a task without lengths.
        default_lengths: the lengths that are run if none are given.
        max_length: longer documents are refused; None for a task without lengths.
        tokens_per_unit: of length, about.
        is_slow: a long document takes so long to make that it is made in a thread, while other readings go on.
    """

    name: str
    version: str
    length_unit: str
    default_lengths: tuple[Length, ...]
    max_length: int | None
    tokens_per_unit: int = 1
    is_slow: bool = False

    def count(self, length: Length, wanted: int | None) -> int:
        """How many documents of this length are run if `wanted` are requested; None: the default."""
        return SAMPLES if wanted is None else wanted

    def sample(self, length: Length, index: int, seed: int) -> Sample:
        """The document number `index` of this length, a function of the arguments alone."""
        raise NotImplementedError

    def num_tokens(self, length: Length) -> int:
        """About how many tokens a document of this length has; for the order of work and the time left."""
        return int(length) * self.tokens_per_unit

    def check(self, lengths: Sequence[Length], seed: int) -> None:
        """Raise the ValueError that all documents of one of these lengths would raise, if that is quick to find out."""


class NeedleTask(Task):
    """The miniature's documents: facts about many names, one of which the question is about. Lengths are chunks.

    With the miniature's own tokenizer a chunk is one generated chunk. With any other tokenizer or chunk
    size the document has as many of the same sentences as fill `length * chunk_tokens` tokens.
    """

    name, length_unit, default_lengths = "needle", "chunks", (1, 4, 16)
    max_length = 100_000  # of 5000 tokens that are 500 million, 140 times the longest published document

    def __init__(self, tokenizer: Tokenizer, agent: AgentConfig):
        self.tokens_per_unit = agent.chunk_tokens
        self.version = f"1, chunks of {agent.chunk_tokens} tokens"
        # Tokens of a generated sentence: the mean over many, and the highest mean over a chunk of a hundred.
        chunks = [len(tokenizer.encode(make_sample(1, seed, segments_per_chunk=100).context)) / 100 for seed in range(200)]
        self.mean_tokens, self.most_tokens = sum(chunks) / len(chunks), max(chunks)

    def sample(self, length: Length, index: int, seed: int) -> Sample:
        chunks = int(length)
        # As many sentences as fit with near certainty; single chunks above the mean average out with length.
        tokens = self.mean_tokens + (self.most_tokens - self.mean_tokens) / math.sqrt(chunks)
        sentences = max(1, math.floor(self.tokens_per_unit / tokens))
        return make_sample(chunks, stable_id(seed, self.name, length, index), segments_per_chunk=sentences)


class BenchTask(Task):
    """A task of the bench in the miniature's language. Lengths are chunks; the index is the number of the variation."""

    length_unit, default_lengths, max_length = "chunks", (4, 16, 64), NeedleTask.max_length

    def __init__(self, name: str, agent: AgentConfig):
        self.name, self.tokens_per_unit = name, agent.chunk_tokens
        self.version = f"1, chunks of {agent.chunk_tokens} tokens"

    def sample(self, length: Length, index: int, seed: int) -> Sample:
        identity = stable_id(seed, self.name, length, index)
        sentences = max(1, self.tokens_per_unit // SENTENCE_WORDS)
        return make_bench_sample(bench.NAMES[self.name], int(length), identity, variation=index, segments_per_chunk=sentences)

    def check(self, lengths: Sequence[Length], seed: int) -> None:
        self.sample(min(map(int, lengths)), 0, seed)


class FileTask(Task):
    """A file of samples: every document as it is. Its only length is `file`. Files of documents count for its version."""

    length_unit, default_lengths, max_length = "", ("file",), None

    def __init__(self, path: str | Path, allow_files: bool = False, hotpotqa: str | None = None):
        self.samples = load_samples(path, allow_files, hotpotqa)
        self.name, self.version = Path(path).stem, hash_files(self.samples.paths)

    def count(self, length: Length, wanted: int | None) -> int:
        return len(self.samples) if wanted is None else min(wanted, len(self.samples))

    def sample(self, length: Length, index: int, seed: int) -> Sample:
        return self.samples[index]

    def num_tokens(self, length: Length) -> int:
        return self._mean_tokens

    @cached_property
    def _mean_tokens(self) -> int:
        some = range(0, len(self.samples), -(-len(self.samples) // 32))  # an estimate from at most 32 samples
        return round(sum(len(self.samples[index].context) for index in some) / len(some) / CHARACTERS_PER_TOKEN)


@dataclass
class GeneratedTask(Task):
    """RULER's tasks, RULER-HotpotQA, the long tasks and the bench in English: documents made to a length by `memrl.data`."""

    name: str
    generator: RulerTask | RulerHotpotQA
    length_unit: str
    default_lengths: tuple[Length, ...]
    max_length: int | None
    tokens_per_unit: int = 1
    is_slow = True

    def __post_init__(self):
        self.version = self.generator.version

    def count(self, length: Length, wanted: int | None) -> int:
        wanted, available = super().count(length, wanted), self.generator.num_questions
        return wanted if available is None else min(wanted, available)

    def sample(self, length: Length, index: int, seed: int) -> Sample:
        return self.generator.sample(int(length), index, seed)

    def check(self, lengths: Sequence[Length], seed: int) -> None:
        # The shortest has the least room for its question. The longest shows whether there are enough documents.
        numbers = [int(length) for length in lengths]
        for length in sorted({min(numbers), max(numbers)} if self.length_unit == "documents" else {min(numbers)}):
            self.generator.sample(length, 0, seed)
        # In tokens the longest would take seconds to make; whether there are enough paragraphs is known at once.
        check = getattr(self.generator, "check", None)  # only the tasks with paragraphs have it
        if check is not None:
            check(max(numbers))


def make_tasks(
    names: Sequence[str], tokenizer: Tokenizer, agent: AgentConfig, files: RulerFiles | None = None, allow_files: bool = False
) -> list[Task]:
    """Tasks by name, or from the path of a file of samples; `ruler` stands for RULER's thirteen, `bench` for its five, and
    the names of `longtasks.GROUPS` for their tasks.

    The bench is in English unless the tokenizer is the miniature's.

    Args:
        tokenizer: of the model that will read. Tasks with lengths in tokens get a copy: they run in a thread beside the sampler.
        files: sources of RULER's documents, and of the original's files that number HotpotQA's paragraphs.
        allow_files: documents of a file of samples may stand outside its folder.

    Raises:
        ValueError: no such task, two of one name, a file without samples, or a missing file that a task needs.
    """
    from memrl.data.bench.english import EnglishTask
    from memrl.data.longtasks import GROUPS, make_long_task
    from memrl.data.longtasks import TASKS as LONG_TASKS
    from memrl.data.ruler import TASKS, RulerFiles, make_ruler
    from memrl.data.ruler_hotpotqa import RulerHotpotQA

    files = files or RulerFiles()
    thread_tokenizer = cache(lambda: copy.deepcopy(tokenizer))

    def make(name: str) -> Task:
        if name == NeedleTask.name:
            return NeedleTask(tokenizer, agent)
        if name in TASKS or name in LONG_TASKS:
            make_generator = make_ruler if name in TASKS else make_long_task
            return GeneratedTask(name, make_generator(name, thread_tokenizer(), files), "tokens", (8192, 16384, 32768), 2**25)
        if name in bench.NAMES and is_spoken(tokenizer):
            return BenchTask(name, agent)
        if name in bench.NAMES or name in bench.ENGLISH:
            name = f"{name.removesuffix('_english')}_english"
            made = EnglishTask(name, bench.ENGLISH[name], thread_tokenizer(), agent.chunk_tokens, files.essays)
            return GeneratedTask(name, made, "tokens", (8192, 16384, 32768), 2**25)
        if name == "ruler_hotpotqa":
            return GeneratedTask(name, RulerHotpotQA(files), "documents", (50, 100, 200), 10**5, TOKENS_PER_PARAGRAPH)
        if not name.endswith((".jsonl", ".json", ".parquet")):
            known = ", ".join((NeedleTask.name, "bench", *bench.NAMES, "ruler", *TASKS, "ruler_hotpotqa", *GROUPS, *LONG_TASKS))
            raise ValueError(f"there is no task {name!r}; give the path of a .jsonl, .json or .parquet file, or one of {known}")
        if not Path(name).is_file():
            raise ValueError(f"task {name}: there is no such file")
        return FileTask(name, allow_files, files.hotpotqa)

    groups = {"ruler": TASKS, "bench": tuple(bench.NAMES), **GROUPS}
    tasks = [make(one) for name in names for one in groups.get(name, (name,))]
    known = [task.name for task in tasks]
    if len(set(known)) < len(known):
        twice = max(known, key=known.count)
        raise ValueError(f"task holds two tasks named {twice!r}; run them into two --out folders")
    return tasks


def choose_lengths(tasks: Sequence[Task], given: Sequence[int] | None) -> dict[str, list[Length]]:
    """By task, the lengths that are run: the given ones (in rising order) for every task with lengths, else each task's defaults.

    Raises:
        ValueError: no task has lengths, tasks have different units, or a length is above a task's maximum.
    """
    if given is None:
        return {task.name: list(task.default_lengths) for task in tasks}
    units = {task.length_unit: task.name for task in tasks if task.length_unit}
    if not units:
        raise ValueError(
            f"lengths is given, but {', '.join(t.name for t in tasks)} has documents of fixed length; leave --lengths out"
        )
    if len(units) > 1:
        meanings = ", ".join(f"{unit} of {name}" for unit, name in units.items())
        raise ValueError(f"lengths cannot be {meanings} at once; run the tasks by separate commands, or leave --lengths out")
    for task in tasks:
        if task.max_length is not None and given[-1] > task.max_length:
            most = f"{task.max_length} {task.length_unit}"
            raise ValueError(f"lengths holds {given[-1]}; a document of {task.name} has at most {most}")
    return {task.name: list(given if task.length_unit else task.default_lengths) for task in tasks}


def parse_lengths(text: str) -> list[int]:
    """`1,4,16` or `8k,1m` (k is 1024, m is 1024 * 1024), in rising order.

    Raises:
        ValueError: nothing given, a part that is no positive whole number, or a length given twice.
    """
    lengths: set[int] = set()
    for part in text.split(","):
        length = read_length(part)
        if length is None:
            shown = printable(part, 40) or "nothing"
            raise ValueError(f"lengths holds {shown!r}; give positive whole numbers like 1,4,16 or 8k,1m")
        if length in lengths:
            raise ValueError(f"lengths holds {part.strip()!r} twice; give each length once")
        lengths.add(length)
        if len(lengths) > MOST_LENGTHS:
            raise ValueError(f"lengths holds more than {MOST_LENGTHS} lengths; give fewer")
    return sorted(lengths)
