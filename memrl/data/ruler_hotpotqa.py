"""RULER-HotpotQA: the same HotpotQA questions on documents of 50 to 25,600 paragraphs, 7K to 3.6M tokens (arXiv 2507.02259, 4.1).

The questions come in the file's order, so that index i is the same question at every length; with the same seed a shorter
document's paragraphs are among the longer one's.

DEPARTS from the MemAgent code: the order of the paragraphs is each sample's own (`memrl.data.documents`), and all lengths are
made and read alike.
"""

from typing import TYPE_CHECKING

from memrl.data.corpora import read_pool, read_source
from memrl.data.documents import LongDocuments
from memrl.data.paragraphs import Pool
from memrl.types import Sample
from memrl.utils.files import fingerprint

if TYPE_CHECKING:
    from memrl.data.ruler import RulerFiles

FORMAT = "1"  # raised whenever the same arguments come to mean another sample
LENGTHS = tuple(50 * 2**power for power in range(10))
NUM_SAMPLES = 128  # of the paper's evaluation


class RulerHotpotQA:
    """
    Attributes:
        num_questions: how many there are in the file; indices are below it.
        answer_tokens: the answer's budget, RULER's for question answering.
        version: changes when the same arguments to `sample` mean another sample.
    """

    name = "ruler_hotpotqa"
    answer_tokens = 32

    def __init__(self, files: "RulerFiles"):
        """
        Raises:
            ValueError: no file is given, or one cannot be read.
        """
        if files.hotpotqa is None:
            raise ValueError(f"{self.name} asks the questions of a published file; give --hotpotqa FILE")
        source = read_source(files.hotpotqa, "hotpotqa")
        self._questions = source.questions
        self.num_questions = len(source.questions)
        self._documents = LongDocuments(Pool([*source.paragraphs, *read_pool(files.pool)]), repeat=files.repeat)
        self.version = f"{FORMAT}-{fingerprint([files.hotpotqa, *files.pool])}"

    def sample(self, length: int, index: int, seed: int) -> Sample:
        """The question number `index` of the file on `length` documents, a pure function of the arguments.

        Raises:
            ValueError: no such question, or more documents than there are paragraphs.
        """
        if not 0 <= index < self.num_questions:
            raise ValueError(f"{self.name}: there is no question {index}; the file has {self.num_questions}, counted from 0")
        return self._documents.of_documents(self._questions[index], length, seed)
