"""Which question a step reads: a function of its place, in rounds of dynamic sampling too."""

from collections import Counter

import pytest

from memrl.config import DataOptions, ValidationOptions
from memrl.data import write_samples
from memrl.data.training_source import FileSource, NeedleSource
from memrl.training.validation import validation_samples
from memrl.types import Sample


@pytest.fixture(params=[".jsonl", ".parquet"])
def path(request, tmp_path):
    path = tmp_path / f"data{request.param}"
    write_samples(path, lambda i: Sample(str(i), "?", "", ("a",)), 10, {}, "test")
    return path


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


@pytest.mark.parametrize("round_number", [0, 3])
def test_shuffling_orders_every_epoch_and_every_seed_anew(path, round_number):
    first, second = (FileSource(path, prompts_per_step=4, shuffle=True, seed=seed) for seed in (3, 4))
    epochs = [
        tuple(ids(source, 10, round_number)[begin : begin + 10]) for source in (first, second) for begin in range(0, 40, 10)
    ]
    assert len(set(epochs)) == 8
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)


def test_generated_documents_differ_by_round_and_keep_the_steps_length():
    source = NeedleSource(DataOptions(min_chunks=2, max_chunks=9), seed=3)
    samples = [source.sample(4, 1, round_number) for round_number in range(4)]
    assert len({sample.context for sample in samples}) == 4
    assert len({len(sample.context.split(" . ")) // 5 for sample in samples}) == 1


def test_validation_reads_the_first_samples_of_either_kind_of_file(path):
    options = ValidationOptions(every=1, path=str(path), samples=4)
    assert [sample.id for sample in validation_samples(options, DataOptions(), seed=0)] == ["0", "1", "2", "3"]


def test_a_file_of_training_and_validation_is_checked_once(path, monkeypatch):
    from memrl.training.inputs import make_source

    data, options = DataOptions(path=str(path)), ValidationOptions(every=1, path=str(path), samples=3)
    training = make_source(data, prompts_per_step=4, seed=0).samples
    path.rename(path.with_name("elsewhere"))  # so that opening it again would fail
    row = {"question": "?", "context": "", "answers": ["Ed"]}
    monkeypatch.setattr(type(training), "_read", lambda self, index: (row, path.parent))
    assert [sample.id for sample in validation_samples(options, data, 0, training)] == ["0", "1", "2"]


def test_the_lengths_of_questions_are_checked_without_reading_a_document(path, monkeypatch):
    from memrl.agents import AgentConfig
    from memrl.data.needle import build_tokenizer
    from memrl.prompts import load_prompts
    from memrl.tokenizer import Tokenizer
    from memrl.training.inputs import check_questions, make_source

    samples = make_source(DataOptions(path=str(path)), prompts_per_step=4, seed=0).samples
    tokenizer = Tokenizer(build_tokenizer())
    monkeypatch.setattr(type(samples), "_read", lambda self, index: pytest.fail("a document was read"))
    agent = AgentConfig(load_prompts("miniature"), 25, 6, 8, 4)
    check_questions(str(path), samples, tokenizer, agent)
    samples.questions[7] = "code " * 9
    with pytest.raises(ValueError, match=f"{path.name}: sample 7: the question has 9 tokens"):
        check_questions(str(path), samples, tokenizer, agent)
