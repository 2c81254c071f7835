"""The map-reduce agent: notes on sections alone, and combining them level by level."""

import pytest

from memrl.agents import AgentConfig
from memrl.agents.map_reduce import Options, map_reduce_agent
from memrl.prompts import Prompts
from memrl.types import Sample
from tests.agent_script import InOrder, kinds, prompts_of, run_agent
from tests.test_agent import ScriptedSampler
from tests.test_tokenizer import character_tokenizer

PROMPTS = Prompts(
    answer="Q={question};M={memory};A",
    no_memory="empty",
    texts={"map": "Q={question};S={section};", "reduce": "Q={question};N={notes};", "nothing": "none"},
)
CONFIG = AgentConfig(
    PROMPTS, chunk_tokens=10, memory_tokens=12, answer_tokens=5, question_tokens=20, options=Options(between="|")
)


@pytest.fixture(scope="module")
def tokenizer():
    return character_tokenizer()


def read(tokenizer, num_sections, respond=None, config=CONFIG, sampler=ScriptedSampler):
    """Section i is noted as ni; a combination of notes is "(notes)", shortened to its first and last number; the answer is 42."""

    def default(prompt: str) -> str:
        if prompt.endswith(";A"):
            return "42"
        if ";S=" in prompt:
            return f"n{prompt.rstrip('; ')[-1]}"
        notes = prompt.split(";N=")[1].rstrip(";")
        digits = [letter for letter in notes if letter.isdigit()]
        return f"{digits[0]}-{digits[-1]}"

    document = "".join(f"section {index} " for index in range(num_sections))
    return run_agent(map_reduce_agent, tokenizer, Sample("s", "why?", document), config, respond or default, sampler)


@pytest.mark.parametrize("sampler", [ScriptedSampler, InOrder], ids=["latest_first", "in_order"])
def test_notes_are_combined_in_document_order_level_by_level(tokenizer, sampler):
    trajectory = read(tokenizer, 7, sampler=sampler)
    assert kinds(trajectory) == ["map"] * 7 + ["reduce"] * 3 + ["answer"]
    assert prompts_of(tokenizer, trajectory) == [
        *(f"Q=why?;S=section {index} ;" for index in range(7)),
        "Q=why?;N=n0|n1|n2;",
        "Q=why?;N=n3|n4|n5;",  # the seventh note stays as it is
        "Q=why?;N=0-2|3-5|n6;",
        "Q=why?;M=0-6;A",
    ]
    assert [turn.memory for turn in trajectory.turns] == [None] * 9 + ["0-6", None]
    assert (trajectory.response, trajectory.memory) == ("42", "0-6")
    assert trajectory.scores == {"sections_read": 7, "notes": 7, "levels": 2}


def test_two_notes_are_combined_even_if_they_do_not_fit(tokenizer):
    trajectory = read(tokenizer, 4, lambda prompt: "x" * 9 if ";A" not in prompt else "42")
    assert kinds(trajectory) == ["map"] * 4 + ["reduce"] * 3 + ["answer"]
    assert prompts_of(tokenizer, trajectory)[4] == f"Q=why?;N={'x' * 9}|{'x' * 9};"


def test_notes_that_say_nothing_are_dropped(tokenizer):
    words = {"0": "None.", "1": "one", "2": "", "3": " none ", "4": "four"}

    def respond(prompt: str) -> str:
        return words[prompt.rstrip("; ")[-1]] if ";S=" in prompt else "both" if ";N=" in prompt else "42"

    trajectory = read(tokenizer, 5, respond)
    assert prompts_of(tokenizer, trajectory)[5:] == ["Q=why?;N=one|four;", "Q=why?;M=both;A"]
    assert trajectory.scores == {"sections_read": 5, "notes": 2, "levels": 1}


def test_nothing_found_leaves_the_empty_memory(tokenizer):
    trajectory = read(tokenizer, 3, lambda prompt: "none")
    assert kinds(trajectory) == ["map"] * 3 + ["answer"]
    assert trajectory.memory == "empty" and [turn.memory for turn in trajectory.turns] == [None, None, "empty", None]
    assert trajectory.scores == {"sections_read": 3, "notes": 0, "levels": 0}


def test_an_empty_document_goes_straight_to_the_answer(tokenizer):
    trajectory = read(tokenizer, 0)
    assert prompts_of(tokenizer, trajectory) == ["Q=why?;M=empty;A"]


def test_a_document_of_one_section_has_nothing_to_combine(tokenizer):
    trajectory = read(tokenizer, 1)
    assert kinds(trajectory) == ["map", "answer"]
    assert [turn.memory for turn in trajectory.turns] == ["n0", None] and trajectory.memory == "n0"


def test_a_note_is_cut_to_the_memorys_cap(tokenizer):
    trajectory = read(tokenizer, 1, lambda prompt: "x" * 40)
    assert trajectory.memory == "x" * 12 and trajectory.turns[0].finish_reason == "length"
