"""The one-shot agent: which part of the document is shown, and that the window is never exceeded."""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memrl.agents import AgentConfig, OneShotConfig, one_shot_agent
from memrl.agents.one_shot import cut_middle, document_prompt
from memrl.llm import Decoding, LocalLLM
from memrl.model import Transformer
from memrl.prompts import Prompts, load_prompts
from memrl.sampler import Sampler
from memrl.types import Sample
from tests.test_agent import ScriptedSampler, in_chat, saying, shown
from tests.test_tokenizer import character_tokenizer

PROMPTS = Prompts(
    memory="Q={question};M={memory};S={section};",
    answer="Q={question};M={memory};",
    no_memory="nothing",
    document="D={section};Q={question};",
)
AGENT = AgentConfig(PROMPTS, chunk_tokens=10, memory_tokens=7, answer_tokens=5, question_tokens=20)
TOKENIZER = character_tokenizer()  # a token per character
WORDS = len(TOKENIZER.encode_template(in_chat("D=;Q=;")))


def ask(document, question="why?", window=1000, agent=AGENT, respond=None, system=None):
    """The trajectory, and the sampler that received its request."""
    sampler = ScriptedSampler(respond or saying(TOKENIZER, "42"))
    llm = LocalLLM(sampler, TOKENIZER, Decoding(), system)
    return llm.run([one_shot_agent(llm.session(0), Sample("s", question, document), OneShotConfig(agent, window))])[0], sampler


def prompt_of(trajectory):
    return shown(TOKENIZER, trajectory.turns[0])


def section_of(trajectory, question="why?"):
    head, tail = in_chat(f"D=#;Q={question};").split("#")
    prompt = prompt_of(trajectory)
    assert prompt.startswith(head) and prompt.endswith(tail)
    return prompt[len(head) : len(prompt) - len(tail)]


def test_a_document_that_fits_stands_in_the_prompt_untouched():
    trajectory, sampler = ask("The quick brown fox ", " why? ")
    assert prompt_of(trajectory) == in_chat("D=The quick brown fox ;Q= why? ;")
    assert [turn.kind for turn in trajectory.turns] == ["answer"]
    assert (trajectory.response, trajectory.memory, trajectory.scores) == ("42", "", {"cut_tokens": 0})
    [request] = sampler.requests
    assert request.prompt_ids == trajectory.turns[0].prompt_ids and request.params.max_new_tokens == 5


@pytest.mark.parametrize(
    ("room", "expected"),
    [(10, "0123456789"), (11, "0123456789"), (9, "012346789"), (8, "01236789"), (3, "019"), (2, "09"), (1, "0")],
)
def test_the_middle_is_cut_and_equal_halves_of_head_and_tail_remain(room, expected):
    trajectory, _ = ask("0123456789", window=WORDS + len("why?") + room + AGENT.answer_tokens)
    assert section_of(trajectory) == expected
    assert trajectory.scores == {"cut_tokens": 10 - len(expected)}


@settings(max_examples=300, deadline=None)
@given(
    document=st.integers(0, 90),
    question=st.integers(1, 20),
    answer=st.integers(1, 30),
    spare=st.integers(0, 100),
)
@example(document=40, question=4, answer=5, spare=39)
@example(document=40, question=4, answer=5, spare=40)
@example(document=40, question=4, answer=5, spare=41)
def test_prompt_and_answer_never_exceed_the_window(document, question, answer, spare):
    text = "".join(chr(48 + place % 70) for place in range(document))
    window = WORDS + question + answer + spare
    agent = replace(AGENT, answer_tokens=answer)
    if document and not spare:
        with pytest.raises(ValueError, match=f"the window of {window} tokens has no room for a token of the document"):
            ask(text, "q" * question, window, agent)
        return
    trajectory, _ = ask(text, "q" * question, window, agent, respond=lambda request: TOKENIZER.encode("x" * 99))
    [turn] = trajectory.turns
    assert len(turn.response_ids) == answer and turn.num_tokens <= window
    section = section_of(trajectory, "q" * question)
    if document <= spare:
        assert section == text and trajectory.scores["cut_tokens"] == 0
    else:
        assert turn.num_tokens == window  # no place is given away
        tail = spare // 2
        assert section == text[: spare - tail] + text[document - tail :]
        assert trajectory.scores["cut_tokens"] == document - spare


def test_nothing_of_the_tail_is_kept_where_there_is_room_for_nothing():
    assert cut_middle([1, 2, 3], 0) == [] and cut_middle([1, 2, 3], 1) == [1] and cut_middle([], 0) == []


@pytest.mark.parametrize("context", ["", " \n "])
def test_an_empty_document_needs_no_room(context):
    trajectory, _ = ask(context, window=WORDS + len("why?") + AGENT.answer_tokens)
    assert prompt_of(trajectory) == in_chat("D=;Q=why?;")


def test_a_window_too_small_for_question_and_answer_is_refused():
    taken = WORDS + len("why?") + AGENT.answer_tokens
    with pytest.raises(ValueError, match=rf"take {taken} tokens, but the window has {taken - 1}; lower agent.answer_tokens"):
        ask("", window=taken - 1)


def test_the_system_message_takes_room_too():
    plain, _ = ask("x" * 100, window=100)
    system, _ = ask("x" * 100, window=100, system="Be brief.")
    more = TOKENIZER.encode_template("<|im_start|>system\nBe brief.<|im_end|>\n")
    assert system.scores["cut_tokens"] - plain.scores["cut_tokens"] == len(more)


@pytest.mark.parametrize(("question", "message"), [(" ", "the question is empty"), ("q" * 21, "21 tokens, and the cap is 20")])
def test_the_question_is_checked_as_the_memory_agent_checks_it(question, message):
    with pytest.raises(ValueError, match=message):
        ask("text", question)


def test_a_prompt_file_without_a_document_prompt_gets_the_default_one():
    default = load_prompts("question_first").document
    assert default and document_prompt(replace(PROMPTS, document=None)) == default
    trajectory, _ = ask("The fox", agent=replace(AGENT, prompts=replace(PROMPTS, document=None)), window=5000)
    assert "<text>\nThe fox\n</text>" in prompt_of(trajectory) and "<question>\nwhy?\n</question>" in prompt_of(trajectory)
    assert "D=The fox" in prompt_of(ask("The fox")[0])


def test_an_answer_through_a_tiny_model_does_not_depend_on_what_else_is_asked(tiny_config, randomize):
    model = Transformer(replace(tiny_config, vocab_size=TOKENIZER.vocab_size)).eval()
    randomize(model, seed=2, std=0.2)
    llm = LocalLLM(Sampler(model, TOKENIZER, max_rows=4), TOKENIZER, Decoding(temperature=1.0))
    samples = [Sample(f"s{size}", "why?", "abc " * size) for size in (0, 3, 9, 40)]
    config = OneShotConfig(AGENT, 90)

    def run(chosen):
        return llm.run([one_shot_agent(llm.session(7, index), samples[index], config) for index in chosen])

    together = run(range(4))
    assert [t.turns[0].response_ids for t in together] == [run([index])[0].turns[0].response_ids for index in range(4)]
    assert len({t.response for t in together}) > 1
    assert [t.scores["cut_tokens"] > 0 for t in together] == [False, False, False, True]
    assert all(turn.num_tokens <= 90 for t in together for turn in t.turns)
    assert torch.isfinite(torch.tensor(together[3].turns[0].response_logprobs)).all()
