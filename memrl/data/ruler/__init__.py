"""RULER (arXiv 2404.06654): thirteen tasks on documents of an exact number of tokens. docs/ruler.md describes them.

Eleven tasks are synthetic (`needles`, `chains`, `counts`), two ask the questions of SQuAD and HotpotQA (`qa`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from memrl.utils.command_line import argument

if TYPE_CHECKING:
    from memrl.data.ruler.task import RulerTask
    from memrl.tokenizer import Tokenizer

TASKS = tuple(
    "niah_single_1 niah_single_2 niah_single_3 niah_multikey_1 niah_multikey_2 niah_multikey_3 niah_multivalue niah_multiquery "
    "vt cwe fwe qa_1 qa_2".split()
)
POOL = "more paragraphs to draw from: HotpotQA, SQuAD or MuSiQue files, or lists of objects with title and text"


@dataclass
class RulerFiles:
    """The user's files that some of the tasks are made from."""

    essays: str | None = None
    """text to hide needles in, for niah_single_2, niah_single_3, niah_multikey_1, niah_multivalue and niah_multiquery, and the
    stories of state_tracking: a folder of .txt or .txt.gz files, or one file; repeated if a document is longer"""
    squad: str | None = None
    """SQuAD questions and paragraphs, for qa_1: a JSON file, .gz or not"""
    hotpotqa: str | None = None
    """HotpotQA questions and paragraphs, for qa_2: JSON, .gz or not, or the hub's parquet"""
    pool: list[str] = argument("--pool", type=str, nargs="+", default=[], metavar="FILE", help=POOL)
    repeat: Literal["refuse", "report"] = "refuse"
    """if qa_1 or qa_2 needs more paragraphs than there are: refuse the length, or repeat some and count them in the metadata"""


def make_ruler(name: str, tokenizer: Tokenizer, files: RulerFiles) -> RulerTask:
    """A task by name.

    Raises:
        ValueError: an unknown task, or a file that the task needs is not given or cannot be read.
    """
    from memrl.data.ruler.chains import ChainTask
    from memrl.data.ruler.counts import CommonWords, FrequentWords
    from memrl.data.ruler.needles import KINDS, NiahTask
    from memrl.data.ruler.qa import QaGenerator

    if name in ("qa_1", "qa_2"):
        return QaGenerator(name, tokenizer, files)
    if name in KINDS:
        return NiahTask(name, tokenizer, files.essays)
    synthetic = {"vt": ChainTask, "cwe": CommonWords, "fwe": FrequentWords}
    if name not in synthetic:
        raise ValueError(f"there is no RULER task {name!r}; the tasks are {', '.join(TASKS)}")
    return synthetic[name](name, tokenizer)
