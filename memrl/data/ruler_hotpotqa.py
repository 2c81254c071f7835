"""RULER-HotpotQA: the same HotpotQA questions on documents of 50 to 25,600 paragraphs, 7K to 3.6M tokens (arXiv 2507.02259, 4.1).

The questions come in the file's order, so index i is the same question at every length; with the same seed, the paragraphs of a
shorter document are among those of a longer one.

DEPARTS from the MemAgent code: each sample has its own order of paragraphs (`memrl.data.documents`), and all lengths are made and
read alike.
"""

from typing import TYPE_CHECKING

from memrl.data.ruler.qa import FORMAT, QuestionFile
from memrl.types import Sample
from memrl.utils.files import fingerprint

if TYPE_CHECKING:
    from memrl.data.ruler import RulerFiles


class RulerHotpotQA(QuestionFile):
    def __init__(self, files: "RulerFiles"):
        super().__init__("ruler_hotpotqa", "hotpotqa", files)
        self.version = f"{FORMAT}-{fingerprint(self.paths)}"

    def sample(self, length: int, index: int, seed: int) -> Sample:
        """Question number `index` of the file on `length` documents."""
        return self.documents.of_documents(self.question(index), length, seed)
