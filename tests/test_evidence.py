"""Where in a reading the gold answer stood: found by words alone, whatever the order of the prompt."""

import pytest

from memrl.prompts import load_prompts
from memrl.scoring.evidence import chunk_spans, find_answers, is_traceable, trace_answers

QUESTION = "Who directed Ed Wood, Tim Burton or Ed Wood?"
CHUNKS = ["Nothing of use here.", "The film was made by Tim Burton in 1994.", "Johnny Depp had the main part.", "The end."]
MEMORIES = ["No director so far.", "Tim Burton directed it.", "Tim Burton directed it.", "Johnny Depp played in it."]


def render(order: str, chunks=CHUNKS, memories=MEMORIES, question=QUESTION) -> list[str]:
    """The prompts as text, inside a chat template of some kind."""
    prompts = load_prompts(order)
    slots = zip([prompts.no_memory, *memories], chunks, strict=False)
    texts = [
        prompts.memory.strip().replace("{question}", question).replace("{memory}", memory).replace("{section}", chunk)
        for memory, chunk in slots
    ]
    return [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in texts]


@pytest.mark.parametrize("order", ["question_first", "section_first"])
def test_evidence_is_found_in_the_chunk_and_not_in_question_or_memory(order):
    prompts = render(order)
    found = trace_answers(prompts, MEMORIES, QUESTION, ["Tim Burton"])
    assert [bool(f.evidence) for f in found] == [False, True, False, False]
    ((start, end),) = found[1].evidence
    assert prompts[1][start:end] == "Tim Burton" and prompts[1][start - 8 : start] == "made by "
    assert [f.held for f in found] == [False, True, True, False]
    assert [f.is_lost for f in found] == [False, False, False, True]
    assert not any(f.is_missed for f in found)


@pytest.mark.parametrize("order", ["question_first", "section_first"])
def test_memory_that_is_quoted_from_the_chunk_does_not_hide_the_evidence(order):
    chunks = ["code felix sleepy fox", "code emma quiet panda", "code emma quiet panda", "the street rests"]
    memories = ["emma none", "emma quiet panda", "emma quiet panda", "emma quiet panda"]
    found = trace_answers(render(order, chunks, memories, "code emma"), memories, "code emma", ["emma quiet panda"])
    assert [len(f.evidence) for f in found] == [0, 1, 1, 0]


@pytest.mark.parametrize("order", ["question_first", "section_first", "miniature"])
def test_spans_hold_the_chunk_and_not_the_memory(order):
    prompts = render(order)
    spans = chunk_spans(prompts, MEMORIES)
    for prompt, (low, high), chunk, memory in zip(prompts, spans, CHUNKS, ["", *MEMORIES[:-1]], strict=True):
        # Characters that all chunks begin or end with (the full stop here) may be missing.
        assert chunk[:-1] in prompt[low:high]
        assert not memory or memory not in prompt[low:high]


@pytest.mark.parametrize("order", ["question_first", "section_first"])
@pytest.mark.parametrize(
    "memories",
    [
        ["", "", "", ""],
        ["Tim Burton", "Tim Burton", "Tim Burton", "Tim Burton"],
        ["  Tim Burton\n", "Tim", "", "Burton"],
        ["Nothing has been noted yet."] * 4,
        ["N", "No", "Not", "Noth"],
    ],
)
def test_odd_memories_do_not_mislead(order, memories):
    found = trace_answers(render(order, memories=memories), memories, QUESTION, ["Tim Burton"])
    assert [bool(f.evidence) for f in found] == [False, True, False, False]


def test_memory_that_the_prompt_shows_otherwise_is_left_out_by_its_length():
    # A memory cut within a character decodes differently beside other text; one such turn must not spoil the others.
    shown = ["Tim Burton.", "Tim Burton \N{EURO SIGN}", "Tim Burton directed it.", ""]
    prompts = render("question_first", memories=shown)
    memories = ["Tim Burton.", "Tim Burton \ufffd\ufffd", "Tim Burton directed it.", ""]
    found = trace_answers(prompts, memories, QUESTION, ["Tim Burton"])
    assert [bool(f.evidence) for f in found] == [False, True, False, False]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_short_readings(count):
    prompts = render("question_first")[:count]
    found = trace_answers(prompts, MEMORIES[:count], QUESTION, ["Tim Burton"])
    assert [(bool(f.evidence), f.held) for f in found] == [(False, False), (True, True)][:count]


def test_prompts_that_were_not_logged_leave_the_memories():
    found = trace_answers(["", "", "", ""], MEMORIES, QUESTION, ["Tim Burton"])
    assert [f.held for f in found] == [False, True, True, False] and not any(f.evidence for f in found)


def test_evidence_that_is_not_noted_is_missed():
    found = trace_answers(render("question_first", memories=["none"] * 4), ["none"] * 4, QUESTION, ["Tim Burton"])
    assert [f.is_missed for f in found] == [False, True, False, False]


@pytest.mark.parametrize(
    ("text", "answer", "hit"),
    [
        ("was TIM\n  burton's", "Tim Burton", "TIM\n  burton"),
        ("Beatles sang", "The Beatles", "Beatles"),
        ("art", "ar", None),
        ("in 1,462 days", "1,462", "1,462"),
        ("in 11,462 days", "1,462", None),
        ("a + b", "+", "+"),
        ("(?:x)+ here", "(?:x)+", "x"),
        ("\u6211\u7231\u5317\u4eac\u5929", "\u5317\u4eac", "\u5317\u4eac"),
        ("well, no", "no", None),
        ("anything", " ", None),
        ("snake_case", "snake", "snake"),
    ],
)
def test_answers_are_found_word_for_word(text, answer, hit):
    assert [text[start:end] for start, end in find_answers(text, [answer])] == ([] if hit is None else [hit])


def test_overlapping_answers_are_marked_once_and_in_order():
    text = "Burton, Tim Burton"
    assert find_answers(text, ["Burton", "Tim Burton"]) == [(0, 6), (8, 18)]


def test_words_that_stand_everywhere_are_not_followed():
    assert not is_traceable("Yes.") and not is_traceable(" no ") and not is_traceable("")
    assert is_traceable("Norway") and is_traceable("the no one")
