"""The gated agent: the gates' forms, kept memories, the early stop."""

import pytest

from memrl.agents import AgentConfig
from memrl.agents.gated import Options, gated_agent, read_gates
from memrl.prompts import Prompts
from memrl.types import Sample
from tests.agent_script import kinds, memories, prompts_of, run_agent
from tests.test_tokenizer import character_tokenizer

TEXTS = {"gated": "Q={question};M={memory};S={section};"}
PROMPTS = Prompts(answer="Q={question};M={memory};A", no_memory="nothing", texts=TEXTS)
CONFIG = AgentConfig(PROMPTS, chunk_tokens=10, memory_tokens=80, answer_tokens=5, question_tokens=20, options=Options())
WORDS = AgentConfig(PROMPTS, chunk_tokens=10, memory_tokens=30, answer_tokens=5, question_tokens=20, options=Options(tags=False))
DOCUMENT = "section 0 section 1 section 2 section 3 "


@pytest.fixture(scope="module")
def tokenizer():
    return character_tokenizer()


def tags(memory: str | None = None, stop: bool = False) -> str:
    check = "<check>no</check>" if memory is None else f"<check>yes</check>\n<update> {memory} </update>\n"
    return f"{check}<next>{'end' if stop else 'continue'}</next>"


def read(tokenizer, script, document=DOCUMENT, config=CONFIG):
    """`script`: the responses to the memory turns in order, then the answer's."""
    queue = list(script)
    trajectory = run_agent(gated_agent, tokenizer, Sample("s", "why?", document), config, lambda prompt: queue.pop(0))
    assert not queue
    return trajectory


def test_a_section_without_news_leaves_the_memory_as_it_is(tokenizer):
    script = [tags(), tags("one"), tags(), tags("two"), "42"]
    trajectory = read(tokenizer, script)
    assert kinds(trajectory) == ["memory"] * 4 + ["answer"]
    shown = [("nothing", 0), ("nothing", 1), ("one", 2), ("one", 3)]
    expected = [f"Q=why?;M={memory};S=section {index} ;" for memory, index in shown]
    assert prompts_of(tokenizer, trajectory) == [*expected, "Q=why?;M=two;A"]
    assert memories(trajectory.turns) == ["nothing", "one", "one", "two", None]
    assert (trajectory.response, trajectory.memory) == ("42", "two")
    assert trajectory.scores == {"sections_read": 4, "read_share": 1, "update_share": 0.5, "well_formed": 1}


def test_the_open_exit_gate_leaves_the_rest_unread_after_its_own_update(tokenizer):
    trajectory = read(tokenizer, [tags(), tags("one", stop=True), "42"])
    assert kinds(trajectory) == ["memory", "memory", "answer"]
    assert prompts_of(tokenizer, trajectory)[-1] == "Q=why?;M=one;A"
    assert trajectory.scores == {"sections_read": 2, "read_share": 0.5, "update_share": 0.5, "well_formed": 1}


def test_with_the_exit_gate_off_every_section_is_read(tokenizer):
    config = AgentConfig(PROMPTS, 10, 80, 5, 20, options=Options(exit_gate=False))
    trajectory = read(tokenizer, [tags("one", stop=True), tags(stop=True), tags(), tags("two"), "42"], config=config)
    assert trajectory.scores["sections_read"] == 4 and trajectory.memory == "two"


def test_bare_words_for_a_small_vocabulary(tokenizer):
    trajectory = read(tokenizer, ["keep", "emma bear", "keep stop", "bear"], config=WORDS)
    assert memories(trajectory.turns) == ["nothing", "emma bear", "emma bear", None]
    assert trajectory.scores == {"sections_read": 3, "read_share": 0.75, "update_share": 1 / 3, "well_formed": 1}
    assert prompts_of(tokenizer, read(tokenizer, ["emma bear stop", "bear"], config=WORDS))[-1] == "Q=why?;M=emma bear;A"


@pytest.mark.parametrize("context", ["", " \n "])
def test_an_empty_document_goes_straight_to_the_answer(tokenizer, context):
    trajectory = read(tokenizer, ["7"], context)
    assert prompts_of(tokenizer, trajectory) == ["Q=why?;M=nothing;A"]
    assert trajectory.scores == {"sections_read": 0, "read_share": 0, "update_share": 0, "well_formed": 0}


def test_a_document_of_one_section(tokenizer):
    trajectory = read(tokenizer, [tags("all", stop=True), "7"], "short")
    assert prompts_of(tokenizer, trajectory) == ["Q=why?;M=nothing;S=short;", "Q=why?;M=all;A"]


@pytest.mark.parametrize(
    ("text", "memory", "stop", "well_formed"),
    [
        ("<check>yes</check><update>one</update><next>continue</next>", "one", False, True),
        ("<check>no</check><next>end</next>", None, True, True),
        ("<think>hm</think> <CHECK> Yes. </CHECK>\n<update>\none\ntwo\n</update>\n<next>END</next> bye", "one\ntwo", True, True),
        ("<check>no</check><update>one</update><next>end</next>", None, True, True),  # the paper's form writes it and drops it
        ("<update>one</update><next>end</next>", "one", True, False),
        ("<check>yes</check><update> </update><next>end</next>", None, True, False),
        ("<check>yes</check><next>continue</next>", None, False, False),
        ("<check>yes</check><update>one", None, False, False),  # cut
        ("<check>yes</check><update>one</update>", "one", False, False),
        ("<check>maybe</check><update>one</update><next>stop</next>", "one", False, False),
        ("<update>draft</update><check>yes</check><update>final</update><next>continue</next>", "final", False, True),
        ("<check>yes</check><update><update>one</update><next>continue</next>", "one", False, True),
        ("emma bear", None, False, False),
        ("", None, False, False),
    ],
)
def test_tags_and_what_a_broken_form_does(text, memory, stop, well_formed):
    gates = read_gates(text)
    found = None if gates.update is None else text[gates.update.start : gates.update.end].strip()
    assert (found, gates.stop, gates.well_formed) == (memory, stop, well_formed)


@pytest.mark.parametrize(
    ("text", "memory", "stop", "well_formed"),
    [
        ("emma bear", "emma bear", False, True),
        ("emma bear stop", "emma bear", True, True),
        ("keep", None, False, True),
        ("keep stop", None, True, True),
        ("stop", None, True, False),
        ("", None, False, False),
        ("keep emma", "keep emma", False, False),
        ("emma stop bear", "emma stop bear", False, False),
        ("nonstop", "nonstop", False, True),
    ],
)
def test_words_and_what_a_broken_form_does(text, memory, stop, well_formed):
    gates = read_gates(text, tags=False)
    found = None if gates.update is None else text[gates.update.start : gates.update.end]
    assert (found, gates.stop, gates.well_formed) == (memory, stop, well_formed)


def test_a_response_that_reached_its_cap_keeps_the_memory(tokenizer):
    config = AgentConfig(PROMPTS, 10, 40, 5, 20, options=Options())
    trajectory = read(tokenizer, [tags("one"), tags("much too long"), tags(), tags(), "42"], config=config)
    assert trajectory.turns[0].finish_reason == "length" and trajectory.memory == "nothing"
    assert trajectory.scores["well_formed"] == 0.5
