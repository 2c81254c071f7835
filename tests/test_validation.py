"""Validation reads the same questions in the same way every time, whatever the ranks."""

import math
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
    monkeypatch.setattr(distributed, "gather_lists", lambda items: items)


def scores(record):
    return {name: value for name, value in record.items() if name != "seconds"}


def test_scores_are_means_over_all_readings_and_repeat_exactly(llm, alone):
    first = scores(validate_policy(llm, SAMPLES, AGENT, ParityRewards(), repeats=3, seed=1))
    assert first["n"] == 15 and first["strict"] == 0
    assert 0 < first["reward"] < first["reward_best"] <= 1
    assert scores(validate_policy(llm, SAMPLES, AGENT, ParityRewards(), repeats=3, seed=1)) == first


class FailingRewards(ParityRewards):
    """The rewards of some samples cannot be had."""

    def __init__(self, failing, left_out):
        self.failing, self.left_out = failing, left_out

    async def score(self, trajectory, sample):
        await super().score(trajectory, sample)
        if sample.id in self.failing:
            trajectory.reward, trajectory.error, trajectory.left_out = 0.0, "no reward", self.left_out


@pytest.mark.parametrize(("left_out", "count"), [(True, 9), (False, 15)])
def test_failed_rewards_are_counted_and_are_no_zeros_unless_they_are_to_be(llm, alone, left_out, count):
    plain = validate_policy(llm, SAMPLES[2:], AGENT, ParityRewards(), repeats=3, seed=1)
    record = validate_policy(llm, SAMPLES, AGENT, FailingRewards({"0", "1"}, left_out), repeats=3, seed=1)
    assert (plain["errors"], record["errors"], record["n"]) == (0, 6, 15)
    assert 0 < record["reward"] * count == pytest.approx(round(record["reward"] * count)) and 0 < record["reward_best"] <= 1
    best = record["reward_best"] * (3 if left_out else 5)  # the samples that have a reward
    assert 0 < best == pytest.approx(round(best))
    everything = validate_policy(llm, SAMPLES, AGENT, FailingRewards(set("01234"), left_out), repeats=1, seed=1)
    assert math.isnan(everything["reward"]) == left_out and everything["errors"] == 5
    assert everything["reward"] != 0 or not left_out


def test_the_ranks_parts_add_up_to_the_whole(llm, monkeypatch):
    sums = []
    monkeypatch.setattr(distributed, "gather_lists", lambda items: items)
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
