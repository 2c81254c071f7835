"""The retrieval agent: BM25 against its formula, needles at every depth, the token budget, the order of passages and of work."""

import asyncio
import itertools
import math
import random
import sys
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memrl.agents import AgentConfig, RetrievalConfig, retrieval_agent
from memrl.agents.retrieval import (
    bm25_scores,
    choose_passages,
    paragraph_passages,
    paragraph_starts,
    passage_spans,
    split_words,
)
from memrl.llm import Decoding, LocalLLM
from memrl.model import Transformer
from memrl.prompts import Prompts
from memrl.sampler import Sampler
from memrl.types import Sample
from tests.test_agent import ScriptedSampler
from tests.tiny_folder import make_tokenizer

PROMPTS = Prompts(memory="Q {question} M {memory} S {section}", answer="A Q {question} M {memory}", no_memory="none",
                  document="D {section} Q {question}")  # fmt: skip
AGENT = AgentConfig(PROMPTS, answer_tokens=3, question_tokens=8)
FILLER = [f"w{number}" for number in range(300)]
K1, B = 1.5, 0.75
NEEDLE = ["the", "number", "for", "fox", "is", "4711"]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer([*FILLER, *NEEDLE, *"DQ?!", "what", "yes"])


@pytest.fixture
def ask(tokenizer):
    """ask(words of the document, question, tokens=..., ...) -> the words shown, and the trajectory."""

    def ask(words, question="what number for fox", agent=AGENT, **config):
        sampler = ScriptedSampler(lambda request: tokenizer.encode("yes"))
        llm = LocalLLM(sampler, tokenizer, Decoding())
        sample = Sample("s", question, " ".join(words))
        [trajectory] = llm.run([retrieval_agent(llm.session(0), sample, RetrievalConfig(agent, **config))])
        prompt = tokenizer.hf.decode(trajectory.turns[0].prompt_ids).split()
        begin, end = prompt.index("D"), len(prompt) - 1 - prompt[::-1].index("Q")
        assert prompt[end + 1 : end + 1 + len(question.split())] == question.split()
        return prompt[begin + 1 : end], trajectory

    return ask


def filler(count, seed=0):
    return random.Random(seed).choices(FILLER, k=count)


# BM25


def test_scores_equal_the_formula_by_hand():
    texts = [
        "the red fox and the other red fox",
        "a fox",
        "nothing to see here, nothing at all to see",
        "red, red, RED and red again",
        "the",
    ]
    question = "red fox, Fox? unseen"
    words = [split_words(text) for text in texts]
    mean = sum(map(len, words)) / 5

    def by_hand(passage):
        total = 0.0
        for word in ("red", "fox", "unseen"):  # each of the question's words once
            holding = sum(word in other for other in words)
            idf = math.log(1 + (5 - holding + 0.5) / (holding + 0.5))
            tf = passage.count(word)
            total += idf * tf / (tf + K1 * (1 - B + B * len(passage) / mean))
        return total

    numbers = {word: n for n, word in enumerate(dict.fromkeys(split_words(question)), start=1)}
    scores = bm25_scores([[numbers.get(word, 0) for word in passage] for passage in words], len(numbers))
    assert scores.tolist() == pytest.approx([by_hand(passage) for passage in words], rel=1e-6)
    assert scores[0] > scores[3] > 0 == scores[2] == scores[4]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 4), max_size=12), min_size=1, max_size=20))
def test_scores_equal_the_library_with_all_words_in_its_index(passages):
    import bm25s

    scores = bm25_scores(passages, 4)
    if not any(word for passage in passages for word in passage):
        assert scores.tolist() == [0] * len(passages)
        return
    whole = bm25s.BM25(k1=K1, b=B, method="lucene")
    # The other words, one number to us, are different words to the library.
    texts = [[f"{word}" if word else f"o{place}" for place, word in enumerate(passage)] for passage in passages]
    whole.index(texts, show_progress=False)
    theirs = whole.get_scores([word for word in "1234" if any(word in text for text in texts)])
    assert scores.tolist() == pytest.approx(theirs.tolist(), rel=1e-5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Hello, World_2!", ["hello", "world", "2"]),
        ("Stra\u00dfe STRASSE", ["strasse", "strasse"]),
        ("\u6771\u4eac\u306f abc\u4eac", ["\u6771", "\u4eac", "\u306f", "abc", "\u4eac"]),
        ("\u041c\u043e\u0441\u043a\u0432\u0430 1812", ["\u043c\u043e\u0441\u043a\u0432\u0430", "1812"]),
        (" ?! _ ", []),
    ],
)
def test_words_are_runs_of_letters_and_digits_in_any_case(text, words):
    assert split_words(text) == words


# Passages and budget


@given(st.integers(1, 400), st.integers(1, 60))
def test_passages_cover_the_document_and_share_a_quarter_with_their_neighbours(document, size):
    spans = passage_spans(document, size)
    assert spans[0].start == 0 and spans[-1].stop == document
    assert all(len(span) == size for span in spans[:-1]) and 0 < len(spans[-1]) <= size
    for one, other in itertools.pairwise(spans):
        assert one.stop - other.start == size // 4 and other.stop > one.stop
    for one, other in zip(spans, spans[2:], strict=False):
        assert one.stop <= other.start


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 20), st.integers(0, 200), st.data())
def test_the_highest_passages_are_taken_until_the_budget_is_spent(scores, size, room, data):
    shared = size // 4
    last = data.draw(st.integers(shared + 1, size))
    spans = passage_spans((len(scores) - 1) * (size - shared) + last, size)
    assert len(spans) == len(scores)
    chosen = choose_passages(scores, spans, room)
    assert chosen == sorted(set(chosen))

    def shown(places):
        return len({token for place in places for token in spans[place]})

    assert shown(chosen) <= room
    ranked = sorted(range(len(scores)), key=lambda place: (-scores[place], place))
    assert set(chosen) == set(ranked[: len(chosen)])
    if len(chosen) < len(scores):
        assert shown(ranked[: len(chosen) + 1]) > room


@pytest.mark.parametrize(
    ("pieces", "starts"),
    [
        (["One", ".", "\n\n", "Two", " b", "\n", "c"], [3]),
        (["One", ".\n\n", "Two", ".\n", "\n", "Three"], [2, 5]),
        (["One", "\n", " ", "\n", "Two", ".\n", "three"], [4]),
        (["One", ".", "\n\nTwo", "\r\n", "\r\n", "Three"], [2, 5]),
        (["One", "\n", "\n\n\n", "\n", "Two"], [4]),
        (["One", "\n\n"], []),
        ([], []),
    ],
)
def test_a_paragraph_begins_with_the_first_visible_token_after_a_blank_line(pieces, starts):
    numbers = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    texts, ids = list(numbers), [numbers[piece] for piece in pieces]
    for size in (1, 2, 100):  # the document piece by piece
        find = paragraph_starts(lambda some: "".join(texts[number] for number in some))
        found = [begin + place for begin in range(0, len(ids), size) for place in find(ids[begin : begin + size])]
        assert found == starts


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(4, 30))
def test_passages_are_paragraphs_and_cover_the_document(lengths, size):
    edges = list(itertools.accumulate(lengths))
    spans = paragraph_passages(edges[:-1], edges[-1], size)
    assert spans[0].start == 0 and spans[-1].stop == edges[-1] and all(0 < len(span) <= size for span in spans)
    for one, other in itertools.pairwise(spans):
        assert one.start < other.start <= one.stop < other.stop
        if other.start < one.stop:
            assert one.stop - other.start == size // 4, "only within a long paragraph"
        else:
            assert one.stop in edges, "a passage ends where a paragraph ends"
    if all(size // 4 <= length <= size for length in lengths):
        assert [span.stop for span in spans] == edges


def test_the_agent_shows_whole_paragraphs(tokenizer, monkeypatch):
    line_end = tokenizer.encode("?")  # one token, shown as a blank line
    monkeypatch.setattr(tokenizer, "decode", partial(decode_with_line_ends, tokenizer.decode, line_end))
    llm = LocalLLM(ScriptedSampler(lambda request: tokenizer.encode("yes")), tokenizer, Decoding())
    for depth in range(16):
        wanted = [*filler(7), *NEEDLE, *filler(3)]
        words = [*filler(100 + depth), "?", *wanted, "?", *filler(100)]
        sample = Sample("s", "what number", " ".join(words))
        [trajectory] = llm.run([retrieval_agent(llm.session(0), sample, RetrievalConfig(AGENT, 17, 17))])
        shown = tokenizer.hf.decode(trajectory.turns[0].prompt_ids).split()
        assert " ".join([*wanted, "?"]) in " ".join(shown), depth


def decode_with_line_ends(decode, line_end, ids):
    return "\n\n" if list(ids) == line_end else decode(ids)


def test_a_needle_is_found_among_ten_thousand_passages(ask):
    size = 16
    words = filler(10_000 * (size - size // 4))
    assert len(passage_spans(len(words), size)) >= 9_999
    for depth in (0, 70_001, len(words)):
        section, trajectory = ask([*words[:depth], *NEEDLE, *words[depth:]], tokens=160, passage_tokens=size)
        assert " ".join(NEEDLE) in " ".join(section)
        assert len(section) <= 160 and trajectory.scores == {"cut_tokens": len(words) + len(NEEDLE) - len(section)}


def test_a_sentence_across_a_border_is_shown_whole(ask):
    size = 4 * len(NEEDLE)
    for depth in range(3 * size):
        words = filler(300, seed=depth)
        section, _ = ask([*words[:depth], *NEEDLE, *words[depth:]], tokens=2 * size, passage_tokens=size)
        assert " ".join(NEEDLE) in " ".join(section)


def test_passages_stand_in_the_order_of_the_document_each_token_once(ask):
    words = [f"w{n % 300}" for n in range(300)]
    for place, word in ((250, "fox"), (110, "number"), (108, "fox"), (20, "for"), (111, "fox")):
        words[place] = word
    section, _ = ask(words, tokens=60, passage_tokens=12)
    places = [words.index(word) for word in section if word.startswith("w")]
    assert places == sorted(set(places)) and len(section) <= 60
    known = [word for word in section if not word.startswith("w")]
    assert known == ["for", "fox", "number", "fox", "fox"]
    assert places[0] < 20 < 108 < 250 < places[-1]


@pytest.mark.parametrize("question", ["what is yes", "? !"])
def test_a_question_without_a_known_word_takes_the_head_of_the_document(ask, tokenizer, question):
    words = filler(500)
    section, trajectory = ask(words, question, tokens=100, passage_tokens=20)
    spent = 20 + 5 * 15  # six passages, each but the first beginning in the one before
    assert section == words[:spent] and trajectory.scores["cut_tokens"] == 500 - spent


def test_a_word_said_twice_in_the_question_counts_once(ask):
    words = filler(600)
    words[100], words[300], words[500] = "number", "fox", "fox"
    once, _ = ask(words, "fox number", tokens=40, passage_tokens=20)
    assert ask(words, "number fox number number", tokens=40, passage_tokens=20)[0] == once and "number" in once


def test_of_equal_passages_the_earlier_is_shown(ask):
    words = filler(400)
    for depth in (50, 150, 250, 350):
        words[depth - 10 : depth + 10] = ["w1"] * 10 + ["fox"] + ["w1"] * 9
    section, _ = ask(words, "fox", tokens=16, passage_tokens=16)
    assert section == words[36:52]  # and [48:64] holds the first of the four foxes too
    assert ask(words, "fox", tokens=16, passage_tokens=16)[0] == section


@pytest.mark.parametrize("size", [1, 99, 100])
def test_a_document_within_the_budget_is_shown_as_it_is(ask, monkeypatch, size):
    monkeypatch.setitem(sys.modules, "bm25s", None)  # and nothing is ranked
    words = filler(size)
    section, trajectory = ask(words, tokens=100, passage_tokens=20)
    assert section == words and trajectory.scores == {"cut_tokens": 0}


def test_an_empty_document_is_asked_about_all_the_same(ask):
    section, trajectory = ask([" "])
    assert section == [] and trajectory.response == "yes" and trajectory.memory == ""


def test_a_missing_package_is_told_in_one_line(ask, monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(ValueError, match="the method retrieval needs the package bm25s; pip install bm25s"):
        ask([*filler(200), "fox"], tokens=100, passage_tokens=20)


@settings(max_examples=60, deadline=None)
@given(window=st.integers(10, 90), tokens=st.integers(10, 60), size=st.integers(1, 30), document=st.integers(0, 120))
def test_neither_budget_nor_window_is_exceeded(tokenizer, window, tokens, size, document):
    llm = LocalLLM(ScriptedSampler(lambda request: tokenizer.encode("yes yes yes yes")), tokenizer, Decoding())
    sample = Sample("s", "what number", " ".join(filler(document)))
    config = RetrievalConfig(AGENT, tokens, size, window)
    words = len(llm.session(0).render(PROMPTS.document, question=tokenizer.encode(sample.question), section=[]))
    room = min(tokens, window - words - 3)
    if room < 0 or (document > room and room < size):
        with pytest.raises(ValueError, match=r"take .* the window has|has no room for a passage"):
            llm.run([retrieval_agent(llm.session(0), sample, config)])
        return
    [trajectory] = llm.run([retrieval_agent(llm.session(0), sample, config)])
    [turn] = trajectory.turns
    assert turn.num_tokens <= window and len(turn.response_ids) == 3
    assert len(turn.prompt_ids) - words == document - trajectory.scores["cut_tokens"] <= tokens


# One document at a time


def test_one_document_is_ranked_at_a_time_and_the_others_go_on_meanwhile(tokenizer):
    events = []

    class Sampling(ScriptedSampler):
        def submit(self, request):
            events.append("request")
            super().submit(request)

    llm = LocalLLM(Sampling(lambda request: tokenizer.encode("yes")), tokenizer, Decoding())
    tokenize = llm.encode
    llm.encode = lambda text: (events.append("document") if len(text) > 100 else None, tokenize(text))[1]
    config = RetrievalConfig(AGENT, tokens=60, passage_tokens=12)
    samples = [Sample(f"s{n}", "what number", " ".join(filler(9 * 600, n))) for n in range(3)]

    async def drive():
        agents = [asyncio.ensure_future(retrieval_agent(llm.session(n), sample, config)) for n, sample in enumerate(samples)]
        while not all(agent.done() for agent in agents):
            await asyncio.sleep(0)
            events.append("step")
            for request in llm.sampler.step() if llm.sampler.has_work else ():
                request.tag.set_result(request)
        return [agent.result().response for agent in agents]

    for _ in range(2):  # every run has an event loop of its own
        events.clear()
        assert asyncio.run(drive()) == ["yes"] * 3
        assert [event for event in events if event != "step"] == ["document", "request"] * 3
        for place in (place for place, event in enumerate(events) if event == "request"):
            assert events[place - 3 : place] == ["step"] * 3  # 600 passages, 256 at a time


def test_a_reading_that_fails_does_not_stop_the_others(tokenizer):
    llm = LocalLLM(ScriptedSampler(lambda request: tokenizer.encode("yes")), tokenizer, Decoding())
    text = " ".join(filler(500))

    async def guarded(index, window):
        try:
            config = RetrievalConfig(AGENT, 100, 20, window)
            return (await retrieval_agent(llm.session(index), Sample("s", "what", text), config)).response
        except ValueError as error:
            return str(error)[:12]

    assert llm.run([guarded(n, window) for n, window in enumerate((90, 15, 90))]) == ["yes", "besides ques", "yes"]


def test_a_tiny_model_answers_from_the_passages(tokenizer, tiny_config, randomize):
    model = Transformer(replace(tiny_config, vocab_size=tokenizer.vocab_size)).eval()
    randomize(model, seed=2, std=0.2)
    llm = LocalLLM(Sampler(model, tokenizer, max_rows=4), tokenizer, Decoding(temperature=1.0))
    samples = [Sample(f"s{n}", "what number", " ".join([*filler(80 * n, n), *NEEDLE])) for n in range(4)]
    config = RetrievalConfig(AGENT, 60, 24, window=100)

    def run(chosen):
        return llm.run([retrieval_agent(llm.session(3, index), samples[index], config) for index in chosen])

    together = run(range(4))
    assert [t.turns[0].response_ids for t in together] == [run([index])[0].turns[0].response_ids for index in range(4)]
    assert all("4711" in tokenizer.decode(t.turns[0].prompt_ids) for t in together)
    assert all(t.turns[0].num_tokens <= 100 for t in together)
