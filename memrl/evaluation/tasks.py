"""What is evaluated: documents with questions whose answers are known, by length.

A task makes its documents one at a time, so a run over many long ones holds only those that are being read.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from memrl.agents.memory import AgentConfig
from memrl.tokenizer import Tokenizer
from memrl.types import Sample
from memrl.utils.files import fingerprint
from memrl.utils.lengths import read_length
from memrl.utils.seeds import stable_id

if TYPE_CHECKING:
    from memrl.data.ruler import RulerFiles

Length = int | str
SAMPLES = 128  # documents of each length where nobody says, the original's number
CHARACTERS_PER_TOKEN, TOKENS_PER_PARAGRAPH = 4, 140  # of English text; of a paragraph of HotpotQA, heading included
FILE_TYPES = (".jsonl", ".parquet")


def length_units() -> dict[str, str]:
    """What the lengths of each generated task count, by the task's name."""
    from memrl.data.ruler import TASKS

    return {**dict.fromkeys(TASKS, "tokens"), "needle": "chunks", "ruler_hotpotqa": "documents"}


class Task(Protocol):
    """
    Attributes:
        name: stands in every row.
        length_unit: what lengths count ("chunks", "tokens", "documents"); "" for a task that has none.
        default_lengths: what is run when nobody says.
        max_length: longer documents are refused; None where the task has no lengths.
        version: changes when the same (length, index, seed) means another document.
        is_slow: making a long document takes so long that other readings should go on meanwhile.
    """

    name: str
    length_unit: str
    default_lengths: tuple[Length, ...]
    max_length: int | None
    version: str
    is_slow: bool

    def count(self, length: Length, wanted: int | None) -> int:
        """How many documents of this length are run when `wanted` are asked for (None: nobody says)."""
        ...

    def sample(self, length: Length, index: int, seed: int) -> Sample:
        """The document number `index` of this length, a function of the arguments alone."""
        ...

    def num_tokens(self, length: Length) -> int:
        """About how many tokens a document of this length has; for the order of work and the time left."""
        ...

    def check(self, lengths: Sequence[Length], seed: int) -> None:
        """Raise the ValueError that all documents of one of these lengths would end in, where that is cheaply known."""
        ...


class NeedleTask:
    """The miniature's documents: facts about many names, one of which is asked for. Lengths are chunks.

    With the miniature's own tokenizer a chunk is one generated chunk. With any other tokenizer or chunk
    size the document has as many of the same sentences as fill `length * chunk_tokens` tokens.
    """

    name = "needle"
    length_unit = "chunks"
    default_lengths: tuple[Length, ...] = (1, 4, 16)
    max_length = 10_000_000  # more is a slip of the keys, and making the document would seem to hang
    is_slow = False

    def __init__(self, tokenizer: Tokenizer, agent: AgentConfig):
        self.chunk_tokens = agent.chunk_tokens
        self.version = f"1, chunks of {self.chunk_tokens} tokens"
        self.mean_tokens, self.most_tokens = _sentence_tokens(tokenizer)

    def count(self, length: Length, wanted: int | None) -> int:
        return SAMPLES if wanted is None else wanted

    def sample(self, length: Length, index: int, seed: int) -> Sample:
        from memrl.data.needle import make_sample

        seed = stable_id(seed, self.name, length, index)
        return make_sample(length, seed, segments_per_chunk=self.segments_per_chunk(length))

    def num_tokens(self, length: Length) -> int:
        return int(length) * self.chunk_tokens

    def num_chunks(self, length: Length, count: int) -> int:
        """Chunks of `count` documents together."""
        return int(length) * count

    def check(self, lengths: Sequence[Length], seed: int) -> None:
        pass

    def segments_per_chunk(self, length: int) -> int:
        """As many sentences as fit with near certainty; what single chunks are longer by averages out with length."""
        tokens = self.mean_tokens + (self.most_tokens - self.mean_tokens) / math.sqrt(length)
        return max(1, math.floor(self.chunk_tokens / tokens))


class FileTask:
    """A file of samples of one's own: every document as it is. It has one "length", `file`."""

    length_unit = ""
    default_lengths: tuple[Length, ...] = ("file",)
    max_length = None
    is_slow = False

    def __init__(self, path: str | Path):
        from memrl.data import load_samples

        self.name = Path(path).stem
        self.samples: Sequence[Sample] = load_samples(path)
        self.version = fingerprint([path])
        self._num_tokens: int | None = None

    def count(self, length: Length, wanted: int | None) -> int:
        return len(self.samples) if wanted is None else min(wanted, len(self.samples))

    def sample(self, length: Length, index: int, seed: int) -> Sample:
        return self.samples[index]

    def num_tokens(self, length: Length) -> int:
        if self._num_tokens is None:
            some = range(0, len(self.samples), -(-len(self.samples) // 32))  # a large file is not read for an estimate
            characters = sum(len(self.samples[index].context) for index in some) / len(some)
            self._num_tokens = round(characters / CHARACTERS_PER_TOKEN)
        return self._num_tokens

    def check(self, lengths: Sequence[Length], seed: int) -> None:
        pass


class GeneratedTask:
    """RULER's tasks and RULER-HotpotQA: documents made to a length, by a generator of `memrl.data`."""

    is_slow = True

    def __init__(
        self,
        name: str,
        generator,
        length_unit: str,
        default_lengths: tuple[Length, ...],
        max_length: int,
        tokens_per_unit: int = 1,
    ):
        self.name, self.length_unit, self.default_lengths, self.max_length = name, length_unit, default_lengths, max_length
        self.version: str = generator.version
        self._generator, self._tokens_per_unit = generator, tokens_per_unit

    def count(self, length: Length, wanted: int | None) -> int:
        most = self._generator.num_questions
        wanted = SAMPLES if wanted is None else wanted
        return wanted if most is None else min(wanted, most)

    def sample(self, length: Length, index: int, seed: int) -> Sample:
        return self._generator.sample(int(length), index, seed)

    def num_tokens(self, length: Length) -> int:
        return int(length) * self._tokens_per_unit

    def check(self, lengths: Sequence[Length], seed: int) -> None:
        # The shortest has the least room for its question. How many documents there are, the longest tells, and quickly.
        for length in sorted({min(lengths), max(lengths)} if self.length_unit == "documents" else {min(lengths)}):
            self._generator.sample(int(length), 0, seed)
        # In tokens the longest would take seconds to make; whether there are paragraphs enough is known at once.
        if hasattr(self._generator, "check"):
            self._generator.check(int(max(lengths)))


def _sentence_tokens(tokenizer: Tokenizer) -> tuple[float, float]:
    """Tokens of a generated sentence: the mean over many, and the highest mean over a chunk of a hundred."""
    from memrl.data.needle import make_sample

    chunks = [len(tokenizer.encode(make_sample(1, seed, segments_per_chunk=100).context)) / 100 for seed in range(200)]
    return sum(chunks) / len(chunks), max(chunks)


def make_tasks(names: Sequence[str], tokenizer: Tokenizer, agent: AgentConfig, files: RulerFiles | None = None) -> list[Task]:
    """Tasks by name, or from the path of a file of samples; `ruler` stands for RULER's thirteen.

    Args:
        tokenizer: of the model that will read. What makes documents gets a copy: it runs beside the sampler.
        files: what RULER's documents are made from.

    Raises:
        ValueError: no such task, two of one name, a file that does not hold samples, or one that a task needs and lacks.
    """
    from memrl.data.ruler import TASKS, RulerFiles

    files = RulerFiles() if files is None else files
    expanded = [one for name in names for one in (TASKS if name == "ruler" else (name,))]
    aside = copy.deepcopy(tokenizer) if set(expanded) & set(TASKS) else tokenizer
    tasks = [_make_task(name, tokenizer, aside, agent, files) for name in expanded]
    known = [task.name for task in tasks]
    if len(set(known)) < len(known):
        twice = max(known, key=known.count)
        raise ValueError(f"task names two tasks that are called {twice!r}; run them into two --out folders")
    return tasks


def _make_task(name: str, tokenizer: Tokenizer, aside: Tokenizer, agent: AgentConfig, files: RulerFiles) -> Task:
    from memrl.data.ruler import TASKS, make_ruler

    if name == NeedleTask.name:
        return NeedleTask(tokenizer, agent)
    if name in TASKS:
        return GeneratedTask(name, make_ruler(name, aside, files), "tokens", (8192, 16384, 32768), 2**25)
    if name == "ruler_hotpotqa":
        from memrl.data.ruler_hotpotqa import RulerHotpotQA

        return GeneratedTask(name, RulerHotpotQA(files), "documents", (50, 100, 200), 10**6, TOKENS_PER_PARAGRAPH)
    if name.endswith(FILE_TYPES):
        if not Path(name).is_file():
            raise ValueError(f"task {name}: there is no such file")
        return FileTask(name)
    known = ", ".join((NeedleTask.name, "ruler", *TASKS, "ruler_hotpotqa"))
    raise ValueError(f"there is no task {name!r}; give the path of a .jsonl or .parquet file, or of {known}")


def choose_lengths(tasks: Sequence[Task], given: Sequence[int] | None) -> dict[str, list[Length]]:
    """By task, the lengths that are run: the given ones for every task that has lengths, or each task's own.

    Raises:
        ValueError: nothing that they apply to, tasks whose lengths mean different things, or a length beyond a task's bound.
    """
    if given is None:
        return {task.name: list(task.default_lengths) for task in tasks}
    units = {task.length_unit: task.name for task in tasks if task.length_unit}
    if not units:
        raise ValueError(f"lengths is given, but {', '.join(t.name for t in tasks)} is read as it is; leave --lengths out")
    if len(units) > 1:
        meanings = ", ".join(f"{unit} of {name}" for unit, name in units.items())
        raise ValueError(f"lengths cannot be {meanings} at once; run the tasks by separate commands, or leave --lengths out")
    for task in tasks:
        if task.length_unit and given[-1] > task.max_length:
            raise ValueError(
                f"lengths holds {given[-1]}; a document of {task.name} has at most {task.max_length} {task.length_unit}"
            )
    return {task.name: list(given if task.length_unit else task.default_lengths) for task in tasks}


def parse_lengths(text: str) -> list[int]:
    """`1,4,16` or `8k,1m` (k is 1024, m is 1024 * 1024), in rising order.

    Raises:
        ValueError: nothing given, something that is no positive whole number, or a length given twice.
    """
    lengths = []
    for part in text.split(","):
        length = read_length(part)
        if length is None:
            shown = part.strip() or "nothing"
            raise ValueError(f"lengths holds {shown!r}; give positive whole numbers like 1,4,16 or 8k,1m")
        if length in lengths:
            raise ValueError(f"lengths holds {part.strip()!r} twice; give each length once")
        lengths.append(length)
    return sorted(lengths)
