"""The gated agent (GRU-Mem, arXiv 2602.10560): keep the memory where a section has no news, stop when the answer is known.

With the question Q, section C_t and memory M_t, a memory turn gives the update gate U_t, the new memory and the exit gate E_t
(equation 7):

    U_t, M'_t, E_t = model(Q, C_t, M_{t-1})        M_t = M'_t if U_t else M_{t-1}        stop reading after t if E_t

The form of a response is the paper's, `<check>yes</check><update>M'_t</update><next>continue</next>` or
`<check>no</check><next>end</next>`. With the option `tags` false it is the new memory or the word `keep`, and then the word
`stop` if the answer is known. A broken form loses nothing: without a new memory the old one is kept, without a readable exit
gate reading goes on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from memrl.agents.agent_config import AgentConfig, encode_document, encode_question
from memrl.agents.responses import Span, find_tag, part_ids, response_text, tag_word
from memrl.types import Sample, Trajectory

if TYPE_CHECKING:
    from memrl.llm import Session

PROMPTS = {"gated": {"question", "memory", "section"}, "answer": {"question", "memory"}, "no_memory": set()}
_WORDS = re.compile(r"\s*(?P<body>.*?)\s*(?P<stop>(?<!\S)stop)?\s*", re.DOTALL)


@dataclass(frozen=True)
class Options:
    """Settings of the gated agent."""

    exit_gate: bool = True
    """Stop reading when the exit gate opens; false reads every section."""
    tags: bool = True
    """Gates as tags, the paper's form; false: as bare words, for a small vocabulary."""


class Gates(NamedTuple):
    """What a memory turn decides.

    Attributes:
        update: where the response's text has the new memory; None keeps the memory.
        stop: whether the exit gate is open.
        well_formed: whether the response has the form that is asked for.
    """

    update: Span | None
    stop: bool
    well_formed: bool


async def gated_agent(llm: Session, sample: Sample, config: AgentConfig) -> Trajectory:
    """Read `sample.context` until the answer is known, and answer `sample.question` from the memory.

    A document of K sections takes 1 to K memory turns and one answer turn. Scores: `sections_read`; shares of the sections that
    were read (`read_share`), of the turns that changed the memory (`update_share`) and of the turns in good form (`well_formed`).

    Raises:
        ValueError: the question is empty or longer than its limit, or the tokenizer fails on the document.
    """
    prompts, options = config.prompts, config.options
    question = encode_question(llm.encode, sample.question, config)
    document = encode_document(llm.encode, sample)
    memory = llm.encode(prompts.no_memory)
    starts = range(0, len(document), config.chunk_tokens)
    turns, gates = [], []
    for start in starts:
        section = document[start : start + config.chunk_tokens]
        prompt = llm.render(prompts.texts["gated"], question=question, memory=memory, section=section)
        turn = await llm.chat(prompt, kind="memory", max_new_tokens=config.memory_tokens)
        gate = read_gates(response_text(llm, turn), options.tags)
        if gate.update is not None:
            memory = part_ids(llm, turn, gate.update)
        turns.append(turn)
        gates.append(gate)
        llm.remember(turn, memory)
        if gate.stop and options.exit_gate:
            break
    prompt = llm.render(prompts.answer, question=question, memory=memory)
    answer = await llm.chat(prompt, kind="answer", max_new_tokens=config.answer_tokens)
    scores = {
        "sections_read": float(len(turns)),
        "read_share": len(turns) / max(len(starts), 1),
        "update_share": sum(gate.update is not None for gate in gates) / max(len(turns), 1),
        "well_formed": sum(gate.well_formed for gate in gates) / max(len(turns), 1),
    }
    return Trajectory([*turns, answer], response=answer.text, memory=llm.decode(memory), scores=scores)


def read_gates(text: str, tags: bool = True) -> Gates:
    """The gates in a memory turn's text.

    >>> read_gates("<check>yes</check><update>emma: bear</update><next>continue</next>")
    Gates(update=Span(start=26, end=36), stop=False, well_formed=True)
    >>> read_gates("keep stop", tags=False)
    Gates(update=None, stop=True, well_formed=True)
    """
    if not tags:
        match = _WORDS.fullmatch(text)
        assert match is not None, "the pattern matches any text"
        keeps = match["body"] in ("", "keep")
        bare = bool(match["body"]) and (keeps or not {"keep", "stop"} & set(match["body"].split()))
        return Gates(None if keeps else Span(*match.span("body")), match["stop"] is not None, bare)
    check, after = tag_word(text, "check"), tag_word(text, "next")
    update = find_tag(text, "update")
    if update is not None and (check == "no" or not text[update.start : update.end].strip()):
        update = None
    well_formed = after in ("continue", "end") and (check == "no" or (check == "yes" and update is not None))
    return Gates(update, after == "end", well_formed)


def longest_turn(sizes: Mapping[str, int], config: AgentConfig, section: int, question: int) -> int:
    """As `memrl.agents.memory.longest_turn`."""
    memory = max(config.memory_tokens, sizes["no_memory"])
    return question + memory + max(sizes["gated"] + section + config.memory_tokens, sizes["answer"] + config.answer_tokens)
