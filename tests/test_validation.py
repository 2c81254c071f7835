"""Validation reads the same questions in the same way every time, whatever the ranks."""

from dataclasses import replace
from functools import partial

import pytest

from memrl.config import DataOptions, ValidationOptions
from memrl.engine import distributed
from memrl.llm import Decoding, LocalLLM
from memrl.model import Transformer
from memrl.sampler import Sampler
from memrl.training.inputs import make_source
from memrl.training.validation import validate_policy, validation_samples
from memrl.types import Sample
from tests.test_rollout import AGENT, ParityRewards
from tests.test_tokenizer import character_tokenizer

SAMPLES = [Sample(str(i), "who", "a document" * i, ("x",)) for i in range(5)]


@pytest.fixture
def llm(tiny_config, randomize):
    tokenizer = character_tokenizer()
    model = Transformer(replace(tiny_config, vocab_size=tokenizer.vocab_size)).eval()
    randomize(model, seed=4, std=0.15)
    return LocalLLM(Sampler(model), tokenizer, Decoding())


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr(distributed, "sum_over_ranks", lambda values: values)


def scores(record):
    return {name: value for name, value in record.items() if name != "seconds"}


def test_scores_are_means_over_all_readings_and_repeat_exactly(llm, alone):
    first = scores(validate_policy(llm, SAMPLES, AGENT, ParityRewards(), repeats=3, seed=1))
    assert first["n"] == 15 and first["strict"] == 0
    assert 0 < first["reward"] < first["reward_best"] <= 1
    assert scores(validate_policy(llm, SAMPLES, AGENT, ParityRewards(), repeats=3, seed=1)) == first


def test_the_ranks_parts_add_up_to_the_whole(llm, monkeypatch):
    sums = []
    monkeypatch.setattr(distributed, "sum_over_ranks", lambda values: sums.append(values) or values)
    validate_policy(llm, SAMPLES, AGENT, ParityRewards(), repeats=2, seed=1)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    for rank in range(2):
        monkeypatch.setattr(distributed, "rank", partial(int, rank))
        validate_policy(llm, SAMPLES, AGENT, ParityRewards(), repeats=2, seed=1)
    whole, *parts = sums
    assert sum(parts).tolist() == whole.tolist()


def test_the_miniatures_validation_documents_are_not_those_of_training():
    data, options = DataOptions(min_chunks=2, max_chunks=3), ValidationOptions(every=1, samples=20)
    samples = validation_samples(options, data, seed=0)
    assert len({sample.context for sample in samples}) == 20
    assert validation_samples(options, data, seed=0) == samples
    source = make_source(data, prompts_per_step=20, seed=0)
    drawn = {source.sample(step, index).context for step in range(20) for index in range(20)}
    assert not drawn & {sample.context for sample in samples}
