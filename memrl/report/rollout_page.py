"""Sample rollouts of a training run as a web page: where the evidence was, what was kept of it, and where it was lost."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from memrl.report.html import highlighted, memory_card, page
from memrl.scoring.evidence import Found, is_traceable, trace_answers
from memrl.scoring.rewards import verifier_scores
from memrl.utils.journal import read_records

LAST = 20  # a long run has hundreds of trajectories, and a page of all of them would be read by nobody
# What each line must have, and of which type; everything else may be missing.
_REQUIRED = {"step": int, "question": str, "turns": list}
_OPTIONAL = {"sample": str, "answers": list, "match": str, "scores": dict, "group_rewards": list}
_LEGEND = """
<p class="soft">Each box is a chunk. <span class="badge evidence">Orange frame</span>: the chunk holds a gold answer, word for
word. <span class="badge held">Green, +</span>: the memory after it holds one. <span class="badge lost">Red, x</span>: it held
one before and does not any more. The marks follow the answer's words, not the reasoning that leads to it. In the memories
<ins>green</ins> came in with the chunk and <del>red</del> was dropped.</p>
"""


def read_rollouts(path: str | Path, step: int | None = None, last: int = LAST) -> list[dict]:
    """The last lines of a rollouts.jsonl, of one step where one is given.

    Raises:
        ValueError: the file cannot be read, a line is not a rollout, or there is none to show; says where and what to do.
    """
    records = read_records(path)
    for number, record in records:
        _check(record, f"{path}, line {number}")
    if not records:
        raise ValueError(f"{path} holds no rollout; a run writes log.rollouts of them at each step")
    chosen = [record for _, record in records if step is None or record["step"] == step]
    if not chosen:
        steps = sorted({record["step"] for _, record in records})
        raise ValueError(f"{path} has no rollout of step {step}; its steps go from {steps[0]} to {steps[-1]}")
    return chosen[-last:]


def _check(record: dict, place: str) -> None:
    for name, kind in (_REQUIRED | _OPTIONAL).items():
        if name in _OPTIONAL and record.get(name) is None:
            continue
        if not isinstance(record.get(name), kind):
            raise ValueError(f"{place}: {name!r} must be a {kind.__name__}; is this the rollouts.jsonl of a run?")
    for turn in record["turns"]:
        if not isinstance(turn, dict) or not all(isinstance(turn.get(name), str) for name in ("kind", "response")):
            raise ValueError(f"{place}: each of 'turns' must have a 'kind' and a 'response', both text")
        if not isinstance(turn.get("prompt", ""), str):
            raise ValueError(f"{place}: the 'prompt' of a turn must be text")


def rollouts_page(records: Sequence[dict], title: str) -> str:
    """The page; `records` are lines of rollouts.jsonl (see `docs/metrics.md`)."""
    views = [_View(record, index) for index, record in enumerate(records, 1)]
    rows = ["<tr><th>step</th><th>reward</th><th>advantage</th><th>chunks, and what became of the answer</th></tr>"]
    rows += [view.index_row() for view in views]
    return page(
        f"memrl: {title}",
        [
            f"<h1>{escape(title)}</h1>",
            _LEGEND,
            f'<table class="index">{"".join(rows)}</table>',
            *(view.section() for view in views),
        ],
    )


class _View:
    """One trajectory on the page."""

    def __init__(self, record: dict, index: int):
        self.record, self.index = record, index
        self.answers = [str(answer) for answer in record.get("answers") or []]
        turns = record["turns"]
        self.memory_turns = [turn for turn in turns if turn["kind"] == "memory"]
        self.other_turns = [turn for turn in turns if turn["kind"] != "memory"]
        prompts = [turn.get("prompt", "") for turn in self.memory_turns]
        memories = [turn["response"] for turn in self.memory_turns]
        self.found = trace_answers(prompts, memories, record["question"].strip(), self.answers)
        response = self.other_turns[-1]["response"] if self.other_turns else ""
        self.verdict = verdict(self.found, response, self.answers, record.get("match", "any"))

    def index_row(self) -> str:
        question = f'<a href="#t{self.index}">{escape(_shortened(self.record["question"]))}</a>'
        cells = [escape(str(self.record["step"])), _number(self.record.get("reward")), _number(self.record.get("advantage"), "+")]
        cells.append(f'{question}{self.strip()}<span class="soft">{escape(self.verdict)}</span>')
        return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"

    def section(self) -> str:
        parts = [
            f'<h2 id="t{self.index}">{escape(self.record["question"])}</h2>',
            f'<p class="soft">{self._facts()}</p>',
            self._gold(),
            self.strip(),
            f"<p><b>{escape(_sentence(self.verdict))}</b></p>",
        ]
        if self.record.get("error"):
            parts.append(f'<div class="card error">The reward could not be worked out: {escape(str(self.record["error"]))}</div>')
        memory = ""
        for chunk, (turn, found) in enumerate(zip(self.memory_turns, self.found, strict=True)):
            heading = " ".join([f"<b>Chunk {chunk + 1} of {len(self.found)}</b>", *_turn_facts(turn), *_badges(found)])
            parts.append(memory_card(heading, memory, turn["response"], _prompt(turn, found), self._anchor(chunk)))
            memory = turn["response"]
        for turn in self.other_turns:
            name = "Answer" if turn["kind"] == "answer" else turn["kind"]
            text = f'<div class="text">{escape(turn["response"])}</div>'
            heading = " ".join([f"<b>{escape(name)}</b>", *_turn_facts(turn)])
            parts.append(f'<div class="card answer">{heading}{text}{_prompt(turn)}</div>')
        return "\n".join(parts)

    def strip(self) -> str:
        """All chunks as small boxes that lead to their cards."""
        boxes = []
        for chunk, found in enumerate(self.found):
            kinds, words = ["box"], [f"chunk {chunk + 1}", *_words(found)]
            kinds += ["evidence"] * bool(found.evidence) + ["held"] * found.held + ["lost"] * found.is_lost
            sign = "+" if found.held else "x" if found.is_lost else "&nbsp;"
            tip = escape(": ".join([words[0], ", ".join(words[1:])]) if words[1:] else words[0])
            boxes.append(f'<a class="{" ".join(kinds)}" href="#{self._anchor(chunk)}" title="{tip}">{sign}</a>')
        return f'<div class="strip">{"".join(boxes)}</div>'

    def _anchor(self, chunk: int) -> str:
        return f"t{self.index}c{chunk + 1}"

    def _facts(self) -> str:
        record, scores = self.record, self.record.get("scores") or {}
        facts = [f"{name} {record[name]}" for name in ("step", "sample", "group") if record.get(name) is not None]
        html = [escape(", ".join(facts)), f"reward {_number(record.get('reward'))}"]
        html.append(f"advantage {_number(record.get('advantage'), '+')}")
        if record.get("penalty"):
            html.append(f"overlong penalty {_number(record['penalty'])}")
        html += [f"{escape(str(name))} {_number(value)}" for name, value in scores.items()]
        if rewards := record.get("group_rewards"):
            own = record.get("rollout")
            shown = [f"<mark>{_number(r)}</mark>" if i == own else _number(r) for i, r in enumerate(rewards)]
            html.append(f"rewards of the group: {' '.join(shown)}")
        return "; ".join(html)

    def _gold(self) -> str:
        if not self.answers:
            return '<p class="soft">No gold answer is known.</p>'
        gold = " | ".join(escape(answer) for answer in self.answers)
        return f"<p>Gold answer{'s' * (len(self.answers) > 1)}: <mark>{gold}</mark></p>"


def verdict(found: Sequence[Found], response: str, answers: Sequence[str], match: str = "any") -> str:
    """What became of the gold answer, in one sentence without its capital and full stop."""
    if not answers:
        return "no gold answer is known"
    is_right = verifier_scores(response, answers, match)["lenient"] == 1.0
    if not any(map(is_traceable, answers)):
        return f"answered {'right' if is_right else 'wrong'}; the words of such an answer stand everywhere and are not followed"
    held = bool(found) and found[-1].held
    if is_right:
        return "answered right" if held or not found else "answered right, though the last memory does not hold the answer"
    if held:
        return "answered wrong, though the last memory holds the answer"
    if lost := [chunk for chunk, one in enumerate(found, 1) if one.is_lost]:
        return f"answered wrong: the memory held the answer and lost it at chunk {lost[-1]}"
    if seen := [str(chunk) for chunk, one in enumerate(found, 1) if one.evidence]:
        return f"answered wrong: the answer stood in chunk {', '.join(seen)} and was never noted"
    return "answered wrong: no chunk holds the gold answer word for word"


def _words(found: Found) -> list[str]:
    words = ["the answer stands in this chunk"] * bool(found.evidence)
    if found.is_lost:
        words.append("lost here")
    elif found.held and not found.held_before:
        words.append("the answer came in here" + ("" if found.evidence else ", though the chunk does not hold it"))
    elif found.held:
        words.append("the memory still holds it")
    elif found.is_missed:
        words.append("not noted")
    return words


def _badges(found: Found) -> list[str]:
    badges = []
    for index, word in enumerate(_words(found)):
        kind = "evidence" if found.evidence and index == 0 else "held" if found.held else "lost"
        badges.append(f'<span class="badge {kind}">{escape(word)}</span>')
    return badges


def _prompt(turn: dict, found: Found | None = None) -> str:
    if not turn.get("prompt"):
        return ""
    size = f", {turn['prompt_tokens']:,} tokens" if isinstance(turn.get("prompt_tokens"), int) else ""
    count = f", {len(found.evidence)} marked" if found is not None and found.evidence else ""
    text = highlighted(turn["prompt"], found.evidence if found is not None else [])
    summary = f'<summary class="soft">prompt{size}{count}</summary>'
    return f'<details>{summary}<div class="text soft">{text}</div></details>'


def _turn_facts(turn: dict) -> list[str]:
    facts = []
    if isinstance(turn.get("response_tokens"), int):
        facts.append(f'<span class="soft">{turn["response_tokens"]:,} response tokens</span>')
    if turn.get("finish_reason") == "length":
        facts.append('<span class="cut">cut off by the token cap</span>')
    return facts


def _number(value: object, sign: str = "") -> str:
    if isinstance(value, int | float):
        return f"{value:{sign if value else ''}.3g}"
    return "-" if value is None else escape(str(value))


def _shortened(text: str, length: int = 100) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
