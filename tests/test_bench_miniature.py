"""The bench in the miniature's language: its sentences, lengths, gaps and orders; an oracle solves it, chance does not."""

import random
from collections import Counter
from itertools import product

import pytest

from memrl.config import DataOptions, ValidationOptions
from memrl.data import needle
from memrl.data.bench import TASKS
from memrl.data.bench.answers import chance, chance_answer, oracle_answer
from memrl.data.bench.miniature import WORDS, build_tokenizer, is_spoken, make_bench_sample, read_facts, sentence
from memrl.data.bench.stories import GAPS, ORDERS, Fact, vary
from memrl.data.generated import GENERATORS, check_tasks
from memrl.data.training_source import NeedleSource
from memrl.scoring.verify import strict_match
from memrl.tokenizer import Tokenizer
from memrl.training.validation import validation_samples


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(build_tokenizer())


def right(sample) -> float:
    return strict_match(oracle_answer(sample.question, sample.context), sample.answers, sample.match)


def words_of(sample) -> list[str]:
    """The document's sentences."""
    words = sample.context.split()
    return [" ".join(words[place : place + 5]) for place in range(0, len(words), 5)]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("num_chunks", [1, 2, 5, 24])
def test_an_oracle_solves_every_document_from_its_text(task, num_chunks):
    for seed in range(60):
        sample = make_bench_sample(task, num_chunks, seed)
        assert sample == make_bench_sample(task, num_chunks, seed)
        assert right(sample) == 1, sample


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("gap", GAPS)
def test_two_facts_stand_as_far_apart_and_in_the_order_that_is_asked_for(order, gap):
    for seed in range(12):
        sample = make_bench_sample("two_hop", 130, seed, order=order, gap=gap)
        first, second = sample.metadata["evidence_chunks"]
        assert second - first == gap and sample.metadata["variation"] == {"order": order, "gap": gap, "needed": 2}
        kinds = [text.split()[0] for text in sample.metadata["evidence"]]
        assert kinds == (["link", "code"] if order == "forward" else ["code", "link"])
        assert right(sample) == 1


@pytest.mark.parametrize("task", TASKS)
def test_documents_have_exact_lengths_in_known_words_and_say_where_the_evidence_stands(task, tokenizer):
    for num_chunks, seed in product((1, 3, 40), range(10)):
        sample = make_bench_sample(task, num_chunks, seed)
        ids = tokenizer.encode(sample.context)
        assert len(ids) == 25 * num_chunks and tokenizer.hf.unk_token_id not in ids
        assert all(0 < len(tokenizer.encode(answer)) <= 3 for answer in sample.answers)
        assert len(tokenizer.encode(f"\\boxed{{ {' '.join(sample.answers)} }}")) + 1 <= 8  # with the end
        assert len(tokenizer.encode(sample.question)) == 2
        metadata, sentences = sample.metadata, words_of(sample)
        assert metadata["task"] == f"bench_{task}" and metadata["num_chunks"] == num_chunks
        assert len(metadata["evidence"]) == metadata["variation"]["needed"]
        assert metadata["depths"] == sorted(metadata["depths"])
        for depth, text, chunk in zip(metadata["depths"], metadata["evidence"], metadata["evidence_chunks"], strict=True):
            begin = round(depth * len(sample.context))
            assert sample.context[begin:].startswith(text) and len(sample.context[:begin].split()) // 25 == chunk
            assert text in sentences
        assert all(word in sample.context for text in metadata["evidence"] for word in text.split())


def test_the_number_of_facts_is_what_is_asked_for_and_by_default_more_than_a_small_memory_takes():
    for task in TASKS:
        for others in (4, 11, 30):
            sample = make_bench_sample(task, 10, 3, others=others)
            assert len(read_facts(sample.context)) == others + sample.metadata["variation"]["needed"]
        # Three words a fact, a memory of six tokens: by default a document of 8 chunks holds at least five memories full.
        assert len(read_facts(make_bench_sample(task, 8, 0).context)) >= 10
    for task in ("update", "listing", "counting"):
        for needed in range(1, 7):
            sample = make_bench_sample(task, 10, 3, needed=needed)
            assert sample.metadata["variation"]["needed"] == needed == len(set(sample.metadata["evidence_chunks"]))
            assert right(sample) == 1


def remembers(sample, room: int) -> bool:
    """Whether a reader answers two_hop that keeps what it knows to need, and besides that the last `room` codes."""
    asked, target, memory, answer = sample.question.split()[1], None, {}, None
    for fact in read_facts(sample.context):
        if (fact.kind, fact.name) == ("link", asked):
            target = fact.values[0]
            answer = memory.get(target)
        elif fact.kind == "code" and fact.name == target:
            answer = fact.values
        elif fact.kind == "code" and target is None:
            memory.pop(fact.name, None)
            memory[fact.name] = fact.values
            memory = dict(list(memory.items())[-room:]) if room else {}
    return answer is not None and sample.answers == (" ".join((target, *answer)),)


@pytest.mark.parametrize(
    ("order", "gap", "shares"),  # with room for 0, 1, 4 and 24 codes; docs/bench.md has this table
    [
        ("forward", 0, (1, 1, 1, 1)),
        ("forward", 32, (1, 1, 1, 1)),
        ("reversed", 0, (0, 0.895, 1, 1)),
        ("reversed", 1, (0, 0.525, 1, 1)),
        ("reversed", 2, (0, 0.21, 0.965, 1)),
        ("reversed", 4, (0, 0.05, 0.75, 1)),
        ("reversed", 8, (0, 0.005, 0.145, 1)),
        ("reversed", 16, (0, 0, 0, 1)),
    ],
)
def test_only_the_reversed_order_needs_room_for_more_the_wider_the_gap(order, gap, shares):
    samples = [make_bench_sample("two_hop", 48, seed, order=order, gap=gap) for seed in range(200)]
    assert tuple(sum(remembers(sample, room) for sample in samples) / 200 for room in (0, 1, 4, 24)) == shares


def test_lookalikes_stand_in_every_document_and_are_not_the_answer():
    for seed in range(40):
        sample = make_bench_sample("distractors", 2, seed)
        name, *code = sample.answers[0].split()
        facts = read_facts(sample.context)
        for kind in ("rumour", "plan", "not"):
            assert [fact.values for fact in facts if (fact.kind, fact.name) == (kind, name)] not in ([], [tuple(code)])
        assert any(fact.name != name and (fact.kind, fact.values) == ("code", tuple(code)) for fact in facts)


def test_last_value_wins_and_the_codes_differ():
    for seed in range(40):
        sample = make_bench_sample("update", 6, seed)
        codes = [text.split()[1:4] for text in sample.metadata["evidence"]]
        assert sample.answers == (" ".join(codes[-1]),) and len(set(map(tuple, codes))) == len(codes) >= 2


def test_sentences_are_read_as_they_are_written():
    facts = [
        Fact("code", "alice", ("red", "fox")),
        Fact("rumour", "alice", ("red", "owl")),
        Fact("plan", "alice", ("grey", "fox")),
        Fact("not", "bruno", ("red", "fox")),
        Fact("link", "alice", ("bruno",)),
        Fact("pet", "alice", ("fox",)),
        Fact("visit", "alice", ("market",)),
    ]
    text = " the wind moves slowly . ".join(map(sentence, facts))
    assert read_facts(text) == facts
    assert oracle_answer("code alice", text) == "\\boxed{alice red fox}"
    assert oracle_answer("pet alice", text) == "\\boxed{fox}" and oracle_answer("visit alice", text) == "\\boxed{alice one}"
    for question in ("link alice", "code bruno", "pet bruno"):  # bruno has no code
        with pytest.raises(ValueError, match="does not answer"):
            oracle_answer(question, text)
    with pytest.raises(ValueError, match="no question of the bench"):
        oracle_answer("who is alice?", text)


@pytest.mark.parametrize("task", TASKS)
def test_answers_cannot_be_guessed_without_reading(task):
    """Draws agree with the closed form, and no fixed answer to a question does better than its share allows."""
    rng, hits, times = random.Random(0), 0, 6000
    samples = [make_bench_sample(task, 8, seed) for seed in range(1500)]
    for number in range(times):
        sample = samples[number % len(samples)]
        hits += strict_match(chance_answer(sample.question, rng), sample.answers, sample.match)
    expected = chance(task)
    assert abs(hits / times - expected) < 4 * (expected * (1 - expected) / times) ** 0.5 + 1e-3
    # What stands behind the name: the most frequent one of 1,500 documents.
    bare = [" ".join(sorted(sample.answers)).replace(sample.question.split()[1], "") for sample in samples]
    most = Counter(bare).most_common(1)[0][1] / len(samples)
    assert most < (0.21 if task == "counting" else 0.01)


def test_variations_go_through_all_orders_gaps_and_counts():
    found = Counter((v.order, v.gap) for v in (vary("two_hop", number, 200) for number in range(180)))
    assert set(found) == set(product(ORDERS, GAPS)) and set(found.values()) == {10}
    assert {vary("two_hop", number, 5).gap for number in range(50)} == {0, 1, 2, 4}
    assert Counter(vary("counting", number, 5).needed for number in range(60)) == dict.fromkeys(range(1, 7), 10)
    assert {vary("counting", number, 1, most_needed=4).needed for number in range(60)} == {1, 2, 3, 4}
    drawn = Counter(make_bench_sample("two_hop", 3, seed).metadata["variation"]["gap"] for seed in range(600))
    assert set(drawn) == {0, 1, 2} and min(drawn.values()) > 150


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("three_hop", 4, 0), "no task 'three_hop'; there are two_hop, update, listing, distractors, counting"),
        (("two_hop", 0, 0), "0 chunks .* is empty"),
        (("two_hop", 4, 0, {"gap": 4}), "a gap of 4 does not fit into 4 chunks"),
        (("two_hop", 4, 0, {"order": "back"}), "order is 'back'; it must be forward or reversed"),
        (("update", 4, 0, {"gap": 1}), "update has no order and no gap"),
        (("two_hop", 4, 0, {"needed": 3}), "needed is 3"),
        (("listing", 4, 0, {"needed": 7}), "needed is 7; update, listing and counting take 1 to 6"),
        (("distractors", 4, 0, {"others": 3}), "others is 3; a document of 20 sentences has room for at least 4 and at most 19"),
        (("update", 1, 0, {"needed": 6}), "6 facts do not fit into a document of 5 sentences"),
    ],
)
def test_impossible_documents_are_refused(arguments, message):
    *arguments, options = (*arguments, {}) if len(arguments) == 3 else arguments
    with pytest.raises(ValueError, match=message):
        make_bench_sample(*arguments, **options)


def test_the_vocabulary_extends_that_of_the_miniature(tokenizer):
    plain = Tokenizer(needle.build_tokenizer())
    assert WORDS[: len(needle.WORDS)] == needle.WORDS and len(set(WORDS)) == len(WORDS) == len(needle.WORDS) + 13
    text = " ".join(needle.WORDS)
    assert plain.encode(text) == tokenizer.encode(text)
    assert is_spoken(tokenizer)
    with pytest.raises(ValueError, match="only the words of the task needle"):
        is_spoken(plain)
    check_tasks([name for name in GENERATORS if name != "arithmetic"], tokenizer)
    check_tasks(["needle", "bench_update"], plain)
    with pytest.raises(ValueError, match=r"data\.tasks holds bench_counting, but the model's vocabulary lacks the word 'visit'"):
        check_tasks(["needle", "bench_counting"], plain)


def test_tasks_take_turns_in_training_and_validation():
    tasks = ["bench_two_hop_reversed", "needle", "bench_listing"]
    data = DataOptions(min_chunks=3, max_chunks=3, tasks=tasks)
    names = ["bench_two_hop", None, "bench_listing"] * 2
    source = NeedleSource(data, seed=1)
    samples = [source.sample(4, index) for index in range(6)]
    assert [sample.metadata.get("task") for sample in samples] == names
    assert samples[0].metadata["variation"]["order"] == "reversed" != samples[0].context != source.sample(4, 0, 1).context
    checked = validation_samples(ValidationOptions(samples=6), data, 1)
    assert [sample.metadata.get("task") for sample in checked] == names
    plain = NeedleSource(DataOptions(min_chunks=3, max_chunks=3), seed=1)
    assert plain.sample(4, 1) == samples[1]  # the default draws the documents that it drew before there were tasks


@pytest.mark.usefixtures("no_signals")
def test_unknown_tasks_end_a_run_before_it_begins(tmp_path, capsys, tokenizer):
    from memrl.__main__ import main

    with pytest.raises(SystemExit) as stop:
        main(["train", "--run_dir", str(tmp_path / "run"), "--data.tasks", "[bench]"])
    assert stop.value.code == 2
    assert "data.tasks holds 'bench'; give one or more of needle, arithmetic, bench_two_hop" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match=r"data\.tasks is empty"):
        check_tasks([], tokenizer)
