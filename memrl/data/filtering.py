r"""Which questions does a model answer without the document? They teach nothing about reading, and inflate every score.

Each question is asked alone, several times, and the responses are scored. They go into a journal beside the data set that is
made, `NAME.answers.jsonl`, a line per question as it is finished; its first line says what they depend on. A kill loses the
questions that were being asked at that moment, and the same command asks what is missing. Which of the questions are dropped is
decided from the journal alone, so another criterion costs no second asking.

DEPARTS from the MemAgent code (filter.py, filter2.py): the right answer has to stand in the response word for word, so that a
gold "no" is not found in "not mentioned"; all gold answers count; number of samples, criterion and model are settings.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memrl.scoring.scores import score_response
from memrl.utils.seeds import stable_id

if TYPE_CHECKING:
    from memrl.data.custom import Samples
    from memrl.endpoint import RemoteLLM
    from memrl.llm import LocalLLM
    from memrl.types import Sample

QUESTION_ALONE = r"""Answer the question from what you know; if you are not sure, give your best guess. Put the bare answer into
\boxed{}.

<question>
{question}
</question>

Your answer:"""
CRITERIA = ("strict", "lenient", "either")
MOST_FAILURES = 50  # questions in a row that bring nothing: something is wrong with more than these questions

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
        """Whether a question with these answers (a line of the journal) goes."""
        names = ("strict", "lenient") if self.criterion == "either" else (self.criterion,)
        right = [any(scores) for scores in zip(*(answers[name] for name in names), strict=True)]
        return any(right) if self.drop_when == "any" else all(right)


class Journal:
    """The answers so far, and the file that they are kept in; a context manager.

    A line is an object with id, question, answers and match of the sample; responses, a list of texts; strict and lenient, lists
    of their scores; and error, null or why there are no responses. Of two lines about one question the later one counts.
    """

    def __init__(self, path: str | os.PathLike[str], settings: dict[str, Any]):
        """
        Args:
            settings: JSON-able; all that responses depend on beside the question.

        Raises:
            ValueError: the file was made with other settings, is damaged, or another process is writing it.
        """
        self.path = Path(path)
        self.lines: dict[str, Answers] = {}
        self._file = open(self.path, "a+b")
        try:
            self._lock()
            self._take_up({"settings": json.loads(json.dumps(settings))})
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def answers(self, sample: Sample) -> Answers | None:
        """The line about this sample, unless the question failed, or was another one then."""
        line, about = self.lines.get(sample.id), _about(sample)
        return line if line is not None and not line["error"] and line | about == line else None

    def add(self, line: Answers) -> None:
        """Append a line. It has left this process on return: a kill can tear only the line being written."""
        self._write(line)
        self.lines[line["id"]] = line

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row).encode("ascii") + b"\n")
        self._file.flush()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"{self.path}: another process is writing it; wait for that, or choose another name") from None

    def _take_up(self, header: dict[str, Any]) -> None:
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        self._file.truncate(whole)  # a kill tore the last line: its question is asked again
        if content.count(b"\n") < 2:  # settings that brought no answer bind nobody
            self._file.truncate(0)
            self._write(header)
            return
        for number, text in enumerate(content[:whole].splitlines(), start=1):
            try:
                line = json.loads(text)
                if number == 1:
                    self._check_settings(line["settings"], header["settings"])
                else:
                    line["error"], line["strict"], line["lenient"]  # a line without them is none of ours
                    self.lines[line["id"]] = line
            except (KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError):
                raise ValueError(f"{self.path}: line {number} is damaged; delete it, or the file to begin anew") from None

    def _check_settings(self, old: dict[str, Any], new: dict[str, Any]) -> None:
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name):
                difference = f"{name} {json.dumps(old.get(name))[:60]} instead of {json.dumps(new.get(name))[:60]}"
                raise ValueError(
                    f"{self.path}: was made otherwise ({difference}); delete it, or choose another name for the output"
                )


@dataclass(frozen=True)
class Outcome:
    """What came of the questions, in the order of the data set, up to the last one that is kept.

    Attributes:
        kept: indices of the samples that stay.
        dropped: how many do not.
        right: for each criterion how many of the questions it would drop.
        failed: how many brought no response; they count as kept.
        error: of the first of those.
    """

    kept: list[int]
    dropped: int
    right: dict[str, int]
    failed: int
    error: str


def ask_questions(
    llm: LocalLLM | RemoteLLM,
    samples: Iterable[Sample],
    journal: Journal,
    rule: Rule,
    *,
    num_samples: int,
    max_new_tokens: int,
    seed: int,
    keep: int | None = None,
    on_question: Callable[[Answers], None] | None = None,
) -> None:
    """Ask what the journal has no answers to, in order, until all is asked or `keep` questions are known to stay.

    The responses to a question are a function of the model, the seed and the question's id: what shares its batch does not change
    them (up to rounding, and as far as a server honours seeds).

    Raises:
        ValueError: MOST_FAILURES questions in a row brought no response.
    """
    failures, staying = 0, 0

    async def ask(sample: Sample) -> None:
        nonlocal failures, staying
        line = await _ask(llm, sample, num_samples, max_new_tokens, seed)
        journal.add(line)
        failures = failures + 1 if line["error"] else 0
        staying += not line["error"] and not rule.drops(line)
        if on_question is not None:
            on_question(line)
        if failures >= MOST_FAILURES:
            raise ValueError(f"{failures} questions in a row failed, the last one with: {line['error']}")

    def missing() -> Iterator[Coroutine[Any, Any, None]]:
        nonlocal staying
        for sample in samples:
            if keep is not None and staying >= keep:  # all that are being asked come before this one
                return
            line = journal.answers(sample)
            if line is None:
                yield ask(sample)
            else:
                staying += not rule.drops(line)

    llm.run(missing(), concurrency=llm.concurrency)


def is_answered(samples: Iterable[Sample], journal: Journal, rule: Rule, keep: int | None = None) -> bool:
    """Whether nothing is left to ask."""
    staying = 0
    for sample in samples:
        if staying == keep:
            break
        if (line := journal.answers(sample)) is None:
            return False
        staying += not rule.drops(line)
    return True


async def _ask(llm: LocalLLM | RemoteLLM, sample: Sample, num_samples: int, max_new_tokens: int, seed: int) -> Answers:
    responses, error = [], None
    try:
        for number in range(num_samples):
            session = llm.session(seed, stable_id(sample.id), number)
            prompt = session.render(QUESTION_ALONE, question=session.encode(sample.question.strip()))
            responses.append((await session.chat(prompt, kind="answer", max_new_tokens=max_new_tokens)).text)
    except Exception as problem:  # whatever went wrong with this question is its result; the others go on
        responses, error = [], f"{type(problem).__name__}: {' '.join(str(problem).split())}"
    scores = [score_response(response, sample.answers, sample.match) for response in responses]
    marks = {name: [score[name] for score in scores] for name in ("strict", "lenient")}
    return {**_about(sample), "responses": responses, **marks, "error": error}


def decide(ids: Iterable[str], journal: Journal, rule: Rule, keep: int | None = None) -> Outcome:
    """Who stays, by the journal alone, in which every id up to the `keep`-th that stays has to be."""
    kept, dropped, failed, error = [], 0, 0, ""
    right = dict.fromkeys(CRITERIA, 0)
    for index, sample_id in enumerate(ids):
        if len(kept) == keep:
            break
        line = journal.lines[sample_id]
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
    """The samples up to `limit`, one at a time: documents may be long."""
    return (samples[index] for index in range(len(samples) if limit is None else min(limit, len(samples))))


def _about(sample: Sample) -> dict[str, Any]:
    return {"id": sample.id, "question": sample.question, "answers": list(sample.answers), "match": sample.match}


class Characters:
    """A tokenizer whose ids are code points: a question that goes to a server and its response are text all the way."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))
