"""The bench in English: exact numbers of tokens, gaps and orders; an oracle solves it, chance does not."""

import random
from itertools import product

import pytest

from memrl.data.bench import ENGLISH, TASKS
from memrl.data.bench.answers import chance, chance_answer, oracle_answer
from memrl.data.bench.english import EnglishTask, read_facts, read_question, sentence
from memrl.data.bench.stories import ORDERS, Fact
from memrl.data.ruler.task import RESERVE
from memrl.scoring.verify import strict_match
from tests.test_ruler import make_essay, qwen, tokenizer  # noqa: F401 (fixtures)


class Words:
    """Quick, and not the tokenizer that the documents have been tried with."""

    vocab_size = 7

    def encode(self, text):
        return text.split()


def right(sample) -> float:
    return strict_match(oracle_answer(sample.question, sample.context), sample.answers, sample.match)


@pytest.mark.parametrize("kind", ["tokenizer", "qwen"])
@pytest.mark.parametrize(("name", "task"), ENGLISH.items())
def test_documents_fill_their_tokens_and_an_oracle_solves_them(name, task, kind, request):
    tokenizer = request.getfixturevalue(kind)  # noqa: F811
    made = EnglishTask(name, task, tokenizer, chunk_tokens=500)
    for length, index in product((1000, 4096), range(8)):
        sample = made.sample(length, index, 0)
        assert right(sample) == 1, sample
        context, question = (len(tokenizer.encode(text)) for text in (sample.context, sample.question))
        assert 0.97 * length <= context + question + made.answer_tokens + RESERVE <= length
        metadata = sample.metadata
        assert metadata["tokens"]["context"] == context and metadata["task"] == name
        assert len(metadata["evidence"]) == len(metadata["depths"]) == metadata["variation"]["needed"]
        for depth, text in zip(metadata["depths"], metadata["evidence"], strict=True):
            assert sample.context[round(depth * len(sample.context)) :].startswith(text)
        assert metadata["depths"] == sorted(metadata["depths"])
        assert len(read_facts(sample.context)) == metadata["others"] + metadata["variation"]["needed"]
    assert sample == made.sample(4096, 7, 0) != made.sample(4096, 7, 1)


def test_every_task_is_solved_over_many_documents():
    for name, task in ENGLISH.items():
        made = EnglishTask(name, task, Words(), chunk_tokens=200)
        assert all(right(made.sample(2000, index, seed)) == 1 for index, seed in product(range(40), range(2)))


def test_two_facts_stand_as_far_apart_and_in_the_order_of_their_variation(tokenizer):  # noqa: F811
    """The gap in the chunks that the agent reads, whose borders are found from the tokens."""
    made, exact, seen = EnglishTask("bench_two_hop_english", "two_hop", tokenizer, chunk_tokens=200), 0, set()
    for index in range(48):
        sample = made.sample(4000, index, 0)
        varied = sample.metadata["variation"]
        places = [round(depth * len(sample.context)) for depth in sample.metadata["depths"]]
        first, second = (len(tokenizer.encode(sample.context[:place])) // 200 for place in places)
        exact += second - first == varied["gap"]
        assert abs(second - first - varied["gap"]) <= 1
        assert read_facts(sample.metadata["evidence"][0])[0].kind == ("link" if varied["order"] == "forward" else "code")
        seen.add((varied["order"], varied["gap"]))
    assert exact >= 40  # with Qwen2.5's tokenizer, whose facts are shorter, all 48
    assert seen == set(product(ORDERS, (0, 1, 2, 4, 8, 16)))


def test_the_users_text_takes_the_place_of_the_noise(tmp_path):
    (tmp_path / "essay.txt").write_text(make_essay(400))
    made = EnglishTask("bench_update_english", "update", Words(), 500, str(tmp_path))
    sample = made.sample(2000, 0, 0)
    assert right(sample) == 1
    bare = sample.context
    for fact in read_facts(bare):
        bare = bare.replace(f"{sentence(fact)} ", "").removesuffix(f" {sentence(fact)}")
    assert " ".join(bare.split()[:100]) in f"{make_essay(400)} {make_essay(400)}"
    versions = {EnglishTask("x", "update", Words(), size, path).version for size in (5, 6) for path in (None, str(tmp_path))}
    assert len(versions) == 4


def test_by_default_documents_hold_more_facts_than_a_memory_takes(tokenizer):  # noqa: F811
    sample = EnglishTask("bench_update_english", "update", tokenizer, 5000).sample(8192, 0, 0)
    tokens = sum(len(tokenizer.encode(sentence(fact))) for fact in read_facts(sample.context))
    assert sample.metadata["others"] == 8192 // 64 and tokens > 1024
    few = EnglishTask("bench_update_english", "update", tokenizer, 5000, tokens_per_fact=1000)
    assert (
        few.sample(8192, 0, 0).metadata["others"] == 8
        and few.version != EnglishTask("bench_update_english", "update", tokenizer, 5000).version
    )


def test_sentences_are_read_as_they_are_written():
    facts = [
        Fact("code", "Alice Hill", ("red", "fox")),
        Fact("rumour", "Alice Hill", ("red", "owl")),
        Fact("plan", "Alice Hill", ("grey", "fox")),
        Fact("not", "Bruno Wood", ("red", "fox")),
        Fact("link", "Alice Hill", ("Bruno Wood",)),
        Fact("pet", "Alice Hill", ("fox",)),
        Fact("visit", "Alice Hill", ("market",)),
    ]
    assert read_facts(" The rain comes down. ".join(map(sentence, facts))) == facts
    assert read_question("What is the code that Alice Hill uses? Answer with the code alone.") == ("link", "Alice Hill")
    assert read_question("code alice") is None


@pytest.mark.parametrize("task", TASKS)
def test_answers_cannot_be_guessed_without_reading(task):
    made, rng, hits, times = EnglishTask("x", task, Words(), 100), random.Random(0), 0, 4000
    samples = [made.sample(800, index, 0) for index in range(120)]
    for number in range(times):
        sample = samples[number % len(samples)]
        hits += strict_match(chance_answer(sample.question, rng), sample.answers, sample.match)
    expected = chance(task, "english")
    assert abs(hits / times - expected) < 4 * (expected * (1 - expected) / times) ** 0.5 + 1e-3


def test_a_length_that_is_too_short_is_refused_with_one_that_is_enough(tokenizer):  # noqa: F811
    made = EnglishTask("bench_listing_english", "listing", tokenizer, 5000)
    with pytest.raises(ValueError, match="bench_listing_english: a length of 250 tokens is too short; give"):
        made.sample(250, 0, 0)
