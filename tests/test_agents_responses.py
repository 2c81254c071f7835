"""Parts of a response by their sampled ids, groups of evidence, and calls that wait together."""

import asyncio

import pytest

from memrl.agents.responses import Span, find_tag, in_groups, joined, part_ids, tag_word, together
from memrl.llm import Decoding, LocalLLM
from memrl.tokenizer import load_tokenizer
from memrl.types import Turn
from tests.test_agent import ScriptedSampler
from tests.test_tokenizer import character_tokenizer


def session(tokenizer):
    return LocalLLM(ScriptedSampler(None), tokenizer, Decoding()).session(0)


def turn(tokenizer, ids: list[int]) -> Turn:
    return Turn("memory", [], [*ids, tokenizer.hf.eos_token_id], [], "stop")


def test_a_part_keeps_the_sampled_ids_where_encoding_its_text_would_not():
    tokenizer = character_tokenizer()
    [ab] = tokenizer.hf.convert_tokens_to_ids(["ab"])  # no text is encoded to it
    ids = [*tokenizer.encode("<update> x"), ab, *tokenizer.encode("c\n</update>")]
    llm = session(tokenizer)
    span = find_tag(llm.decode(ids), "update")
    assert part_ids(llm, turn(tokenizer, ids), span) == [*tokenizer.encode("x"), ab, *tokenizer.encode("c")]


@pytest.mark.parametrize("joint", ["e>x", "c<"], ids=["over_its_begin", "over_its_end"])
def test_a_token_over_an_end_of_the_part_makes_it_encoded_again(joint):
    tokenizer = character_tokenizer((joint,))
    [one] = tokenizer.hf.convert_tokens_to_ids([joint])
    head, tail = "<update>xabc</update>".split(joint)
    ids = [*tokenizer.encode(head), one, *tokenizer.encode(tail)]
    llm = session(tokenizer)
    assert part_ids(llm, turn(tokenizer, ids), find_tag(llm.decode(ids), "update")) == tokenizer.encode("xabc")


def test_a_part_that_is_encoded_again_is_never_longer_than_the_response():
    tokenizer = character_tokenizer(("b<wide",))
    [wide] = tokenizer.hf.convert_tokens_to_ids(["b<wide"])
    llm = session(tokenizer)
    assert part_ids(llm, turn(tokenizer, [*tokenizer.encode("a"), wide]), Span(0, 4)) == tokenizer.encode("ab")


def test_parts_of_a_real_tokenizers_text(shared_data):
    folder = shared_data / "tokenizer" / "qwen2.5-instruct"
    if not folder.is_dir():
        pytest.skip(f"no tokenizer at {folder}")
    tokenizer = load_tokenizer(folder)
    llm = session(tokenizer)
    for memory in ("Natasha marries Pierre.", "two\nlines: 1812", "\u4e1c\u4eac \U0001f642 caf\u00e9", "x"):
        ids = tokenizer.encode(f"<check>yes</check>\n<update>\n{memory}\n</update>\n<next>continue</next>")
        part = part_ids(llm, turn(tokenizer, ids), find_tag(llm.decode(ids), "update"))
        assert llm.decode(part).strip() == memory
        assert any(ids[start : start + len(part)] == part for start in range(len(ids)))  # the sampled ones


def test_tags():
    text = "<Update>draft</Update> <update>\nfinal\n</update>"
    span = find_tag(text, "update")
    assert span is not None and text[span.start : span.end] == "\nfinal\n"
    assert find_tag("<update>open", "update") is None and find_tag("closed</update>", "update") is None
    assert tag_word("<next> END. </next>", "next") == "end" and tag_word("end", "next") == ""


def test_groups_hold_what_fits_and_at_least_so_many_pieces_as_asked_for():
    pieces = [[1] * 3, [2] * 3, [3] * 3, [4] * 9]
    assert in_groups(pieces, 7, [0]) == [pieces[:2], pieces[2:3], pieces[3:]]
    assert in_groups(pieces, 6, [0]) == [[piece] for piece in pieces]  # the separator counts
    assert in_groups(pieces, 7, [0], least=2) == [pieces[:2], pieces[2:]]
    assert in_groups(pieces[:3], 1, [0], least=2) == [pieces[:2], pieces[2:3]]
    assert in_groups([], 7, [0]) == []
    assert (
        joined([], [0]) == [] and joined(pieces[:2], [0]) == [1, 1, 1, 0, 2, 2, 2] and joined(pieces[:2], []) == [1] * 3 + [2] * 3
    )


def test_results_are_in_order_and_a_failure_cancels_the_rest():
    ended = []

    async def call(number: int, wait: float) -> int:
        try:
            await asyncio.sleep(wait)
        finally:
            ended.append(number)
        if number == 2:
            raise ValueError("two")
        return number

    assert asyncio.run(together([call(0, 0.02), call(1, 0.01)])) == [0, 1] and ended == [1, 0]

    async def failing() -> list[int]:
        with pytest.raises(ValueError, match="two"):
            await together([call(1, 60), call(2, 0), call(3, 60)])
        await asyncio.sleep(0)
        return sorted(ended[2:])

    assert asyncio.run(failing()) == [1, 2, 3]
