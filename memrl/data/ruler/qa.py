"""RULER's question answering (Hsieh et al. 2024, arXiv 2404.06654): qa_1 from SQuAD, qa_2 from HotpotQA, at a number of tokens.

As in RULER's own generator the questions come in the file's order, the paragraphs that belong to a question (SQuAD: the rest of
the article) go in first, SQuAD's stand without titles and HotpotQA's below them, and the answer has 32 tokens.

DEPARTS from the MemAgent code: all gold answers count, not the first alone, and the order of the paragraphs is each sample's own.
"""

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

from memrl.data.corpora import read_pool, read_source
from memrl.data.documents import LongDocuments
from memrl.data.paragraphs import Pool, Question
from memrl.data.ruler.task import RESERVE
from memrl.tokenizer import Tokenizer
from memrl.types import Sample
from memrl.utils.files import fingerprint

if TYPE_CHECKING:
    from memrl.data.ruler import RulerFiles

FORMAT = "1"  # raised whenever the same arguments come to mean another sample
KINDS = {"qa_1": "squad", "qa_2": "hotpotqa"}


class QaGenerator:
    """
    Attributes:
        name: "qa_1" or "qa_2".
        answer_tokens: the budget of the answer, which the length includes.
        num_questions: how many there are in the file; indices are below it.
        version: changes when the same arguments to `sample` mean another sample.
    """

    answer_tokens = 32

    def __init__(self, name: str, tokenizer: Tokenizer, files: "RulerFiles"):
        """
        Raises:
            ValueError: no file is given for the task, or one cannot be read.
        """
        kind = KINDS[name]
        path = getattr(files, kind)
        if path is None:
            raise ValueError(f"{name} asks the questions of a published file; give --{kind} FILE")
        self.name, self._tokenizer = name, tokenizer
        source = read_source(path, kind)
        self._questions = source.questions
        self.num_questions = len(source.questions)
        pool = Pool([*source.paragraphs, *read_pool(files.pool)])
        self._documents = LongDocuments(pool, tokenizer, files.repeat, titles=name == "qa_2")
        # The tokenizer decides how many paragraphs make a length; how it splits one of them tells it from others.
        splits = repr((tokenizer.vocab_size, tokenizer.encode(pool.paragraphs[0].text), RESERVE))
        self.version = f"{FORMAT}-{fingerprint([path, *files.pool])}-{hashlib.sha256(splits.encode()).hexdigest()[:8]}"

    def check(self, length: int) -> None:
        """Tell before any sample is made that a length cannot be reached; paragraphs are counted as far as the length needs.

        Raises:
            ValueError: all paragraphs together do not fill the length, and they may not repeat.
        """
        if self._documents.repeat == "report":
            return
        needed = length - length // 100 - self._others(self._questions[0])
        found = self._documents.pool_tokens(enough=needed)
        if found < needed:
            problem = f"a length of {length} needs paragraphs of {needed} tokens, and all that there are have {found}"
            raise ValueError(f"{self.name}: {problem}; give a shorter length, more paragraphs (--pool), or --repeat report")

    def _others(self, question: Question) -> int:
        """Tokens that are kept for question, answer and prompt."""
        return len(self._tokenizer.encode(question.question)) + self.answer_tokens + RESERVE

    def sample(self, length: int, index: int, seed: int) -> Sample:
        """The question number `index` of the file, a pure function of the arguments.

        Args:
            length: tokens(context) + tokens(question) + `answer_tokens` + RESERVE is at most this, and at least 99% of it where
                the paragraphs allow it; from 4,096 on those of the published files do.

        Raises:
            ValueError: no such question, a length that does not hold its gold paragraphs, or one that all paragraphs do not fill.
        """
        if not 0 <= index < self.num_questions:
            raise ValueError(f"{self.name}: there is no question {index}; the file has {self.num_questions}, counted from 0")
        question = self._questions[index]
        others = self._others(question)
        try:
            sample = self._documents.of_tokens(question, length - others, seed, slack=length // 100)
        except ValueError as error:
            problem = f"a length of {length} has {others} tokens for question, answer and prompt, so {error}"
            raise ValueError(f"{self.name}: {problem}") from None
        metadata = dict(sample.metadata)
        context = metadata.pop("num_tokens")
        asked = others - self.answer_tokens - RESERVE
        tokens = {"context": context, "question": asked, "answer_budget": self.answer_tokens, "reserve": RESERVE}
        metadata = {"task": self.name, "length": length, "question_id": question.id, "tokens": tokens, **metadata}
        return replace(sample, id=f"{self.name}-{length}-{seed}-{index}", metadata=metadata)
