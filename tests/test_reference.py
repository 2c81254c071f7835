"""The reference is the frozen start: whatever has become of the replica, and wherever its weights wait."""

from pathlib import Path

import pytest
import torch

from memrl.config import ModelOptions, RLOptions
from memrl.model import PackedContext, TransformerConfig, load_model, save_model
from memrl.model.loader import from_scratch
from memrl.model.lora import add_adapters
from memrl.rl.packing import MicroBatch, TrainTurn, pack_turns
from memrl.rl.reference import BaseReference, make_reference
from memrl.types import Turn
from tests.workers.lora_step import fill_adapters

TEMPERATURE = 0.7


@pytest.fixture(params=["float32", "bfloat16"])
def start(request, tmp_path) -> Path:
    shape = TransformerConfig(97, 48, 80, 2, 4, 2, 12, tie_word_embeddings=True, initializer_range=0.2)
    save_model(from_scratch(shape, seed=1, dtype=request.param), tmp_path / "start")
    return tmp_path / "start"


@pytest.fixture
def batch() -> MicroBatch:
    turns = [Turn("memory", [1, 2, 3], [4, 5], [-4.0, -4.0], "stop"), Turn("answer", [9], [8, 7, 6], [-4.0] * 3, "stop")]
    return pack_turns([TrainTurn(turn, 1.0) for turn in turns], 100)[0]


def expected(start: Path, batch: MicroBatch) -> torch.Tensor:
    model = load_model(start)
    with torch.no_grad():
        return model(batch.ids, PackedContext(batch.seq_lens), batch.select, batch.targets, TEMPERATURE)[0]


def train(replica: torch.nn.Module) -> None:
    """Stands for `Engine.copy_weights_to(replica)` after some updates."""
    with torch.no_grad():
        for parameter in replica.parameters():
            parameter.add_(0.1)


def make(where: str, start: Path, replica: torch.nn.Module, kl_coef: float = 0.1, engine=None, lora_rank: int = 0):
    rl, model = RLOptions(kl_coef=kl_coef, reference=where), ModelOptions(lora_rank=lora_rank)
    return make_reference(rl, model, start, replica, engine, "cpu")


def test_without_a_penalty_there_is_no_reference(start):
    assert make("device", start, load_model(start), kl_coef=0.0) is None


@pytest.mark.parametrize("where", ["device", "cpu"])
@pytest.mark.parametrize("resumed", [False, True])
def test_reference_is_the_frozen_start_at_every_step(start, batch, where, resumed):
    replica = load_model(start).requires_grad_(False)
    if resumed:
        train(replica)
    reference = make(where, start, replica)
    for _ in range(3):
        with reference.ready():
            found = reference.logprobs(batch, PackedContext(batch.seq_lens), TEMPERATURE)
        assert torch.equal(found, expected(start, batch))
        assert found.dtype == torch.float32 and not found.requires_grad
        train(replica)


@pytest.mark.parametrize("where", ["device", "cpu"])
def test_replica_lends_its_memory_only_to_a_reference_that_waits_elsewhere(start, batch, where):
    replica = load_model(start).requires_grad_(False)
    reference = make(where, start, replica)
    train(replica)
    trained = [parameter.clone() for parameter in replica.parameters()]
    places = [parameter.data_ptr() for parameter in replica.parameters()]
    with reference.ready():
        reference.logprobs(batch, PackedContext(batch.seq_lens), TEMPERATURE)
        kept = all(torch.equal(a, b) for a, b in zip(replica.parameters(), trained, strict=True))
        assert kept == (where == "device")
        assert (reference.model is replica) == (where == "cpu")
    assert [parameter.data_ptr() for parameter in replica.parameters()] == places


def test_base_of_adapters_is_the_frozen_start_without_a_copy(start, batch):
    policy = load_model(start)
    add_adapters(policy, rank=3, alpha=6, seed=0)
    fill_adapters(policy)
    reference = BaseReference(policy)
    with reference.ready():
        found = reference.logprobs(batch, PackedContext(batch.seq_lens), TEMPERATURE)
    assert torch.equal(found, expected(start, batch)) and not found.requires_grad
    with torch.no_grad():
        context = PackedContext(batch.seq_lens)
        adapted = policy(batch.ids, context, batch.select, batch.targets, TEMPERATURE)[0]
    assert (adapted - found).abs().max() > 0.01


def test_adapters_ask_for_their_base_wherever_a_copy_would_wait(start):
    class Trained:
        module = load_model(start)

    for where in ("device", "cpu"):
        reference = make(where, start, load_model(start), engine=Trained, lora_rank=3)
        assert isinstance(reference, BaseReference) and reference.model is Trained.module
