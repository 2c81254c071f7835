"""Which question a step reads: a function of its place, in rounds of dynamic sampling too."""

import json
from collections import Counter

import pytest

from memrl.config import DataOptions
from memrl.data.source import FileSource, NeedleSource


@pytest.fixture
def path(tmp_path):
    lines = [{"id": str(i), "question": "?", "context": "", "answers": ["a"]} for i in range(10)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "data.jsonl"


def ids(source, steps, round_number=0):
    return [source.sample(step, index, round_number).id for step in range(steps) for index in range(4)]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("round_number", [0, 1, 2, 5])
def test_every_round_is_a_pass_over_the_whole_file(path, shuffle, round_number):
    source = FileSource(path, prompts_per_step=4, shuffle=shuffle, seed=3)
    assert set(Counter(ids(source, 5, round_number)).values()) == {2}  # 20 samples are two epochs of 10


@pytest.mark.parametrize("shuffle", [True, False])
def test_rounds_are_in_orders_of_their_own(path, shuffle):
    source = FileSource(path, prompts_per_step=4, shuffle=shuffle, seed=3)
    orders = [tuple(ids(source, 3, round_number)) for round_number in range(5)]
    assert len(set(orders)) == 5
    assert [tuple(ids(source, 3, number)) for number in reversed(range(5))] == orders[::-1]


def test_without_shuffling_the_first_round_is_the_files_order(path):
    source = FileSource(path, prompts_per_step=4, shuffle=False, seed=3)
    assert ids(source, 3) == [str(i % 10) for i in range(12)]


def test_generated_documents_differ_by_round_and_keep_the_steps_length():
    source = NeedleSource(DataOptions(min_chunks=2, max_chunks=9), seed=3)
    samples = [source.sample(4, 1, round_number) for round_number in range(4)]
    assert len({sample.context for sample in samples}) == 4
    assert len({len(sample.context.split(" . ")) // 5 for sample in samples}) == 1
