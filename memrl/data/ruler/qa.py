"""RULER's question answering (Hsieh et al. 2024, arXiv 2404.06654): qa_1 from SQuAD, qa_2 from HotpotQA, at a number of tokens.

As in RULER's own generator, the questions come in the file's order, the paragraphs that belong to a question (SQuAD: the rest of
the article) are used first, HotpotQA's paragraphs have titles and SQuAD's have none, and the answer has 32 tokens.

DEPARTS from the MemAgent code: all gold answers count, not only the first, and each sample has its own order of paragraphs.
"""

import hashlib
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from memrl.data.corpora import read_pool, read_source
from memrl.data.documents import LongDocuments
from memrl.data.paragraphs import Pool, Question
from memrl.data.ruler.task import RESERVE, RulerTask
from memrl.tokenizer import Tokenizer
from memrl.types import Sample
from memrl.utils.files import fingerprint

if TYPE_CHECKING:
    from memrl.data.ruler import RulerFiles

FORMAT = "1"  # raised when the same arguments give another sample
KINDS = {"qa_1": "squad", "qa_2": "hotpotqa"}


class QuestionFile(RulerTask):
    """The questions of a published file, and long documents from its paragraphs and from a pool."""

    answer_tokens = 32

    def __init__(self, name: str, kind: str, files: "RulerFiles", tokenizer: Tokenizer | None = None, titles: bool = True):
        """
        Raises:
            ValueError: no file of this kind is given, or one cannot be read.
        """
        path: str | None = getattr(files, kind)
        if path is None:
            raise ValueError(f"{name} asks the questions of a published file; give --{kind} FILE")
        source = read_source(path, kind)
        self.name, self.paths = name, [path, *files.pool]
        self.questions = source.questions
        if source.left_out and os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"{path}: {len(source.questions)} questions; {source.left_out}", file=sys.stderr)
        self.documents = LongDocuments(Pool([*source.paragraphs, *read_pool(files.pool)]), tokenizer, files.repeat, titles)

    @property
    def num_questions(self) -> int:
        return len(self.questions)

    def question(self, index: int) -> Question:
        if not 0 <= index < self.num_questions:
            raise ValueError(f"{self.name}: there is no question {index}; the file has {self.num_questions}, counted from 0")
        return self.questions[index]


class QaGenerator(QuestionFile):
    """qa_1 or qa_2."""

    def __init__(self, name: str, tokenizer: Tokenizer, files: "RulerFiles"):
        super().__init__(name, KINDS[name], files, tokenizer, titles=name == "qa_2")
        self._tokenizer = tokenizer
        # The number of paragraphs of a length depends on the tokenizer; its tokens of one paragraph identify it.
        splits = repr((tokenizer.vocab_size, tokenizer.encode(self.documents.pool.paragraphs[0].text), RESERVE))
        self.version = f"{FORMAT}-{fingerprint(self.paths)}-{hashlib.sha256(splits.encode()).hexdigest()[:8]}"

    def check(self, length: int) -> None:
        """Raise ValueError if all paragraphs do not fill the length and may not repeat; counts only as many as it needs."""
        if self.documents.repeat == "report":
            return
        needed = length - length // 100 - self._others(self.questions[0])
        found = self.documents.pool_tokens(enough=needed)
        if found < needed:
            problem = f"a length of {length} needs paragraphs of {needed} tokens, and all paragraphs together have {found}"
            raise ValueError(f"{self.name}: {problem}; give a shorter length, more paragraphs (--pool), or --repeat report")

    def _others(self, question: Question) -> int:
        """Tokens reserved for question, answer and prompt."""
        return len(self._tokenizer.encode(question.question)) + self.answer_tokens + RESERVE

    def sample(self, length: int, index: int, seed: int) -> Sample:
        question = self.question(index)
        others = self._others(question)
        try:
            sample = self.documents.of_tokens(question, length - others, seed, slack=length // 100)
        except ValueError as error:
            problem = f"a length of {length} has {others} tokens for question, answer and prompt, so {error}"
            raise ValueError(f"{self.name}: {problem}") from None
        metadata = dict(sample.metadata)
        context = metadata.pop("num_tokens")
        asked = others - self.answer_tokens - RESERVE
        tokens = {"context": context, "question": asked, "answer_budget": self.answer_tokens, "reserve": RESERVE}
        metadata = {"task": self.name, "length": length, "question_id": question.id, "tokens": tokens, **metadata}
        return replace(sample, id=f"{self.name}-{length}-{seed}-{index}", metadata=metadata)
