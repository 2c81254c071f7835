r"""Ask questions without their documents, several times each, and decide which of them to drop.

A question that a model answers without the document teaches nothing about reading and inflates every score.

The scored responses go to a file beside the new data set, `NAME.answers.jsonl`, one line per question as it is finished; its
first line holds the settings that they depend on. A kill loses only the questions being asked at that moment; the same command
asks what is missing. Which questions are dropped is decided from that file alone, so another criterion asks nothing again.

DEPARTS from the MemAgent code (filter.py, filter2.py): the right answer has to occur in the response word for word, so that a
gold "no" is not found in "not mentioned"; all gold answers count; number of samples, criterion and model are settings.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from memrl.scoring.scores import score_response
from memrl.utils.journal import Journal, first_difference
from memrl.utils.seeds import stable_id

if TYPE_CHECKING:
    from memrl.data.custom import Samples
    from memrl.llm import LLM
    from memrl.types import Sample

QUESTION_ALONE = r"""Answer the question from what you know; if you are not sure, give your best guess. Put the bare answer into
\boxed{}.

<question>
{question}
</question>

Your answer:"""
CRITERIA = ("strict", "lenient", "either")
MOST_FAILURES = 50  # failed questions in a row; more than single questions is wrong then

Answers = dict[str, Any]


@dataclass(frozen=True)
class Rule:
    """When a question is dropped.

    Attributes:
        criterion: what makes a response right: the strict verifier, the lenient one, or either of them.
        drop_when: "any" response is right, or "all" are.
    """

    criterion: str = "either"
    drop_when: str = "any"

    def drops(self, answers: Answers) -> bool:
        """Whether a question with these answers, a line of the `AnswersFile`, is dropped."""
        names = ("strict", "lenient") if self.criterion == "either" else (self.criterion,)
        right = [any(scores) for scores in zip(*(answers[name] for name in names), strict=True)]
        return any(right) if self.drop_when == "any" else all(right)


class AnswersFile(Journal):
    """The answers so far, kept in a file.

    A line is an object with id, question, answers and match of the sample; responses, a list of texts; strict and lenient, lists
    of their scores; and error, null or why there are no responses. Of two lines with the same id, the later one counts.
    """

    def __init__(self, path: str | os.PathLike[str], settings: dict[str, Any]):
        """
        Args:
            settings: JSON-able; everything that responses depend on besides the question.

        Raises:
            ValueError: the file is another command's, was made with other settings, is damaged, or another process is writing it.
        """
        super().__init__(path, f"{path}: another process is writing it; wait for that, or choose another name")
        self.lines: dict[str, Answers] = {}
        try:
            self._resume(json.loads(json.dumps(settings)))
        except BaseException:
            self.close()
            raise

    def answers(self, sample: Sample) -> Answers | None:
        """The line of this sample; None if there is none, if the question failed, or if the sample was another one."""
        line, about = self.lines.get(sample.id), _about(sample)
        return line if line is not None and not line["error"] and line | about == line else None

    def add(self, line: Answers) -> None:
        """Append a line; it survives a kill of this process from here on."""
        self.append(line)
        self.lines[line["id"]] = line

    def _resume(self, settings: dict[str, Any]) -> None:
        self.check_own(b'{"settings": ')
        if sum(1 for _ in self.read_lines()) < 2:  # without answers, new settings may replace the old ones
            self.truncate()
            self.append({"settings": settings})
            return
        records = self.read("delete it, or the file to start over", _check_line)
        if difference := first_difference(next(records).get("settings", {}), settings):
            problem = f"was made with other settings ({difference})"
            raise ValueError(f"{self.path}: {problem}; delete it, or choose another name for the output")
        self.lines = {line["id"]: line for line in records}


def _check_line(line: dict[str, Any]) -> object:
    return dict.keys(line["settings"]) if "settings" in line else (line["id"], line["error"], line["strict"], line["lenient"])


@dataclass(frozen=True)
class Outcome:
    """Which questions are kept, in the order of the data set, up to the last one that is kept.

    Attributes:
        kept: indices of the samples that are kept.
        dropped: number of samples that are not.
        right: for each criterion, the number of questions that it would drop.
        failed: number of questions without a response; they count as kept.
        error: error message of the first failed question.
    """

    kept: list[int]
    dropped: int
    right: dict[str, int]
    failed: int
    error: str


def ask_questions(
    llm: LLM,
    samples: Iterable[Sample],
    answered: AnswersFile,
    rule: Rule,
    *,
    num_samples: int,
    max_new_tokens: int,
    seed: int,
    keep: int | None = None,
    on_question: Callable[[Answers], None] | None = None,
) -> None:
    """Ask the questions without answers, in order, until all are asked or `keep` questions are known to be kept.

    The responses to a question are a function of the model, the seed and the question's id, whatever else is in its batch (up to
    rounding, and if a server honours seeds).

    Raises:
        ValueError: MOST_FAILURES questions in a row failed.
    """
    failures, kept = 0, 0

    async def ask(sample: Sample) -> None:
        nonlocal failures, kept
        line = await _ask(llm, sample, num_samples, max_new_tokens, seed)
        answered.add(line)
        failures = failures + 1 if line["error"] else 0
        kept += not line["error"] and not rule.drops(line)
        if on_question is not None:
            on_question(line)
        if failures >= MOST_FAILURES:
            raise ValueError(f"{failures} questions in a row failed, the last one with: {line['error']}")

    def missing() -> Iterator[Coroutine[Any, Any, None]]:
        nonlocal kept
        for sample in samples:
            if keep is not None and kept >= keep:  # the questions being asked come before this one
                return
            line = answered.answers(sample)
            if line is None:
                yield ask(sample)
            else:
                kept += not rule.drops(line)

    llm.run(missing(), concurrency=llm.concurrency)


def is_answered(samples: Iterable[Sample], answered: AnswersFile, rule: Rule, keep: int | None = None) -> bool:
    """Whether all questions have answers, up to the `keep`-th one that is kept."""
    kept = 0
    for sample in samples:
        if kept == keep:
            break
        if (line := answered.answers(sample)) is None:
            return False
        kept += not rule.drops(line)
    return True


async def _ask(llm: LLM, sample: Sample, num_samples: int, max_new_tokens: int, seed: int) -> Answers:
    responses, error = [], None
    try:
        for number in range(num_samples):
            session = llm.session(seed, stable_id(sample.id), number)
            prompt = session.render(QUESTION_ALONE, question=session.encode(sample.question.strip()))
            responses.append((await session.chat(prompt, kind="answer", max_new_tokens=max_new_tokens)).text)
    except Exception as problem:  # the error is this question's result; the others go on
        responses, error = [], f"{type(problem).__name__}: {' '.join(str(problem).split())}"
    scores = [score_response(response, sample.answers, sample.match) for response in responses]
    marks = {name: [score[name] for score in scores] for name in ("strict", "lenient")}
    return {**_about(sample), "responses": responses, **marks, "error": error}


def decide(ids: Iterable[str], answered: AnswersFile, rule: Rule, keep: int | None = None) -> Outcome:
    """Decide which questions are kept; the file must have a line of each id up to the `keep`-th one that is kept."""
    kept, dropped, failed, error = [], 0, 0, ""
    right: dict[str, int] = dict.fromkeys(CRITERIA, 0)
    for index, sample_id in enumerate(ids):
        if len(kept) == keep:
            break
        line = answered.lines[sample_id]
        if line["error"]:
            failed, error = failed + 1, error or f"{sample_id}: {line['error']}"
        else:
            for criterion in CRITERIA:
                right[criterion] += Rule(criterion, rule.drop_when).drops(line)
        if not line["error"] and rule.drops(line):
            dropped += 1
        else:
            kept.append(index)
    return Outcome(kept, dropped, right, failed, error)


def first(samples: Samples, limit: int | None) -> Iterator[Sample]:
    """The first `limit` samples (None: all), read one at a time because documents may be long."""
    return islice(samples, limit)


def _about(sample: Sample) -> dict[str, Any]:
    return {"id": sample.id, "question": sample.question, "answers": list(sample.answers), "match": sample.match}


class Characters:
    """A tokenizer whose ids are code points, for a server that takes and returns text."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))
