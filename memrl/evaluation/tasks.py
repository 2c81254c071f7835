"""What is evaluated: documents with questions whose answers are known, by length.

A task makes its documents one at a time, so a run over many long ones holds only those that are being read.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from memrl.agents.memory import AgentConfig
from memrl.files import fingerprint
from memrl.reading import stable_id
from memrl.tokenizer import Tokenizer
from memrl.types import Sample

Length = int | str


class Task(Protocol):
    """
    Attributes:
        name: stands in every row.
        length_unit: what lengths count ("chunks", "tokens"); "" for a task that has none.
        default_lengths: what is run when nobody says.
        max_length: longer documents are refused; None where the task has no lengths.
        version: changes when the same (length, index, seed) means another document.
    """

    name: str
    length_unit: str
    default_lengths: tuple[Length, ...]
    max_length: int | None
    version: str

    def count(self, length: Length, wanted: int | None) -> int:
        """How many documents of this length are run when `wanted` are asked for (None: nobody says)."""
        ...

    def sample(self, length: Length, index: int, seed: int) -> Sample:
        """The document number `index` of this length, a function of the arguments alone."""
        ...

    def num_chunks(self, length: Length, count: int) -> int:
        """About how many chunks `count` documents of this length have together; for the time left."""
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
    version = "1"

    def __init__(self, tokenizer: Tokenizer, agent: AgentConfig):
        self.chunk_tokens = agent.chunk_tokens
        self.mean_tokens, self.most_tokens = _sentence_tokens(tokenizer)

    def count(self, length: Length, wanted: int | None) -> int:
        return 128 if wanted is None else wanted

    def sample(self, length: Length, index: int, seed: int) -> Sample:
        from memrl.data.needle import make_sample

        seed = stable_id(seed, self.name, length, index)
        return make_sample(length, seed, segments_per_chunk=self.segments_per_chunk(length))

    def num_chunks(self, length: Length, count: int) -> int:
        return int(length) * count

    def segments_per_chunk(self, length: int) -> int:
        """As many sentences as fit with near certainty; what single chunks are longer by averages out with length."""
        tokens = self.mean_tokens + (self.most_tokens - self.mean_tokens) / math.sqrt(length)
        return max(1, math.floor(self.chunk_tokens / tokens))


class FileTask:
    """A JSON lines file of one's own: every document as it is. It has one "length", `file`."""

    length_unit = ""
    default_lengths: tuple[Length, ...] = ("file",)
    max_length = None

    def __init__(self, path: str | Path, tokenizer: Tokenizer, agent: AgentConfig):
        from memrl.data.custom import load_jsonl

        self.name = Path(path).stem
        self.samples: Sequence[Sample] = load_jsonl(path)
        self.version = fingerprint([path])
        start = self.samples[0].context[:20_000]
        self._chunks_per_character = len(tokenizer.encode(start)) / max(1, len(start)) / agent.chunk_tokens

    def count(self, length: Length, wanted: int | None) -> int:
        return len(self.samples) if wanted is None else min(wanted, len(self.samples))

    def sample(self, length: Length, index: int, seed: int) -> Sample:
        return self.samples[index]

    def num_chunks(self, length: Length, count: int) -> int:
        some = range(0, count, -(-count // 32))  # all of a large file would have to be read for this
        characters = sum(len(self.samples[index].context) for index in some) * count / len(some)
        return round(characters * self._chunks_per_character + count / 2)


def _sentence_tokens(tokenizer: Tokenizer) -> tuple[float, float]:
    """Tokens of a generated sentence: the mean over many, and the highest mean over a chunk of a hundred."""
    from memrl.data.needle import make_sample

    chunks = [len(tokenizer.encode(make_sample(1, seed, segments_per_chunk=100).context)) / 100 for seed in range(200)]
    return sum(chunks) / len(chunks), max(chunks)


def make_task(name: str, tokenizer: Tokenizer, agent: AgentConfig) -> Task:
    """A task by name, or from the path of a `.jsonl` file.

    Raises:
        ValueError: no such task, or a file that does not hold samples.
    """
    if name == NeedleTask.name:
        return NeedleTask(tokenizer, agent)
    if name.endswith(".jsonl"):
        if not Path(name).is_file():
            raise ValueError(f"task {name}: there is no such file")
        return FileTask(name, tokenizer, agent)
    raise ValueError(f"there is no task {name!r}; give needle, or the path of a .jsonl file")


def parse_lengths(text: str) -> list[int]:
    """`1,4,16` or `8k,1m` (k is 1024, m is 1024 * 1024), in rising order.

    Raises:
        ValueError: nothing given, something that is no positive whole number, or a length given twice.
    """
    lengths = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,15})\s*([kKmM]?)\s*", part, re.ASCII)
        length = int(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()] if match else 0
        if length < 1:
            shown = part.strip() or "nothing"
            raise ValueError(f"lengths holds {shown!r}; give positive whole numbers like 1,4,16 or 8k,1m")
        if length in lengths:
            raise ValueError(f"lengths holds {part.strip()!r} twice; give each length once")
        lengths.append(length)
    return sorted(lengths)
