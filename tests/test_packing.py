"""Turns to micro-batches: nothing lost, nothing twice, never too large, one gradient however it is cut."""

import math
import random
from collections import Counter
from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memrl.model import PackedContext, logits_of
from memrl.rl.packing import TrainTurn, balanced_partition, empty_micro_batch, pack_turns
from memrl.types import Turn
from tests.test_loss import loss_of


def make_turns(sizes):
    """Turns of the given (prompt, response) sizes; no id, logprob or advantage occurs twice."""
    numbers = count(1)
    turns = []
    for prompt_len, response_len in sizes:
        prompt = [next(numbers) for _ in range(prompt_len)]
        response = [next(numbers) for _ in range(response_len)]
        turn = Turn("memory", prompt, response, [-float(i) for i in response], "stop")
        turns.append(TrainTurn(turn, advantage=float(len(turns)) - 2.5))
    return turns


def random_train_turns(num_turns, seed, vocab_size=512):
    rng = random.Random(seed)
    turns = []
    for _ in range(num_turns):
        prompt = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 30))]
        response = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 20))]
        logprobs = [rng.uniform(-8, -5) for _ in response]
        turns.append(TrainTurn(Turn("memory", prompt, response, logprobs, "stop"), rng.choice([-1.0, -0.25, 0.75])))
    return turns


def test_the_docstrings_example():
    a, b, c, d, e, f = range(10, 16)
    turns = [
        TrainTurn(Turn("memory", [a, b], [c, d], [-0.1, -0.2], "stop"), 0.5),
        TrainTurn(Turn("answer", [e], [f], [-0.3], "stop"), -1.0),
    ]
    (batch,) = pack_turns(turns, 4)
    # The shorter turn comes first.
    assert batch.ids.tolist() == [e, a, b, c]
    assert batch.seq_lens == [1, 3]
    assert batch.select.tolist() == [0, 2, 3]
    assert batch.targets.tolist() == [f, c, d]
    torch.testing.assert_close(batch.old_logprobs, torch.tensor([-0.3, -0.1, -0.2]), atol=0, rtol=0)
    assert batch.advantages.tolist() == [-1.0, 0.5, 0.5]
    assert batch.turn_index.tolist() == [0, 1, 1]
    assert batch.num_tokens == 3
    dtypes = [
        batch.ids.dtype,
        batch.select.dtype,
        batch.targets.dtype,
        batch.old_logprobs.dtype,
        batch.advantages.dtype,
    ]
    assert dtypes == [torch.int64] * 3 + [torch.float32] * 2


def test_any_packing_keeps_every_token_once_within_the_bound():
    sizes = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), max_size=25)

    @settings(max_examples=150, deadline=None, derandomize=True, database=None)
    @given(sizes=sizes, slack=st.integers(0, 60))
    def check(sizes, slack):
        turns = make_turns(sizes)
        inputs = [prompt + response - 1 for prompt, response in sizes]
        bound = max(inputs, default=1) + slack
        batches = pack_turns(turns, bound)
        expected = Counter(
            (i, logprob, item.advantage)
            for item in turns
            for i, logprob in zip(item.turn.response_ids, item.turn.response_logprobs, strict=True)
        )
        got = Counter()
        fed = Counter()
        for batch in batches:
            assert 0 < len(batch.ids) == sum(batch.seq_lens) <= bound
            assert batch.seq_lens == sorted(batch.seq_lens)
            columns = (batch.targets, batch.old_logprobs, batch.advantages)
            got.update(zip(*(column.tolist() for column in columns), strict=True))
            fed.update(batch.ids.tolist())
            starts = {0, *torch.tensor(batch.seq_lens).cumsum(0).tolist()}
            for position, target in zip(batch.select.tolist(), batch.targets.tolist(), strict=True):
                # Ids count up along a turn, so a target's predictor is the number before it.
                assert batch.ids[position] == target - 1
                assert position + 1 in starts or batch.ids[position + 1] == target
        assert got == expected
        assert fed == Counter(i for item in turns for i in (item.turn.prompt_ids + item.turn.response_ids)[:-1])
        # First-fit never leaves two micro-batches that would fit into one.
        assert len(batches) <= max(1, math.ceil(2 * sum(inputs) / bound)) or not sizes

    check()


def test_first_fit_decreasing_finds_the_obvious_packing():
    turns = make_turns([(5, 1), (3, 1), (5, 1), (2, 1), (3, 1), (2, 1)])
    batches = pack_turns(turns, 10)
    assert [batch.seq_lens for batch in batches] == [[5, 5], [2, 2, 3, 3]]


def test_turns_that_fill_the_bound_exactly_are_packed():
    assert len(pack_turns(make_turns([(7, 4)]), 10)) == 1
    assert len(pack_turns(make_turns([(3, 3), (3, 3)]), 10)) == 1
    assert len(pack_turns(make_turns([(3, 3), (3, 3)]), 9)) == 2


def test_a_turn_above_the_bound_is_an_error_with_both_sizes():
    with pytest.raises(ValueError, match=r"turn of 11 tokens .* rl\.micro_batch_tokens = 10"):
        pack_turns(make_turns([(2, 2), (8, 4)]), 10)


def test_no_turns_give_no_micro_batches():
    assert pack_turns([], 100) == []


def test_packing_leaves_the_turns_alone():
    turns = make_turns([(3, 2), (1, 1), (6, 4)])
    before = [(item, list(item.turn.prompt_ids), list(item.turn.response_ids)) for item in turns]
    pack_turns(turns, 20)
    assert [(item, item.turn.prompt_ids, item.turn.response_ids) for item in turns] == before


def test_moving_a_micro_batch_keeps_everything():
    (batch,) = pack_turns(make_turns([(3, 2), (1, 1)]), 20)
    moved = batch.to("meta")
    assert moved.seq_lens == batch.seq_lens
    for name in ("ids", "select", "targets", "turn_index", "old_logprobs", "advantages", "weights"):
        assert getattr(moved, name).device.type == "meta"
        assert getattr(batch, name).device.type == "cpu"


# Through the model


def forward(model, batch, temperature=1.0):
    return model(batch.ids, PackedContext(batch.seq_lens), batch.select, batch.targets, temperature)[0]


@pytest.mark.parametrize("bound", [50, 120, 10_000])
def test_packed_logprobs_equal_one_forward_per_turn(tiny_model, bound):
    turns = random_train_turns(12, seed=0)
    expected = {}
    for item in turns:
        ids = item.turn.prompt_ids + item.turn.response_ids
        rows = logits_of(tiny_model, ids).log_softmax(-1)[len(item.turn.prompt_ids) - 1 : -1]
        for token, old, row in zip(item.turn.response_ids, item.turn.response_logprobs, rows, strict=True):
            expected[token, round(old, 4)] = float(row[token])
    found = 0
    for batch in pack_turns(turns, bound):
        with torch.no_grad():
            logprobs = forward(tiny_model, batch)
        for token, old, got in zip(*(x.tolist() for x in (batch.targets, batch.old_logprobs, logprobs)), strict=True):
            assert got == pytest.approx(expected[token, round(old, 4)], abs=1e-5)
            found += 1
    assert found == len(expected) == sum(len(item.turn.response_ids) for item in turns)


def gradient(model, batches, num_tokens, reference):
    model.zero_grad()
    for batch in batches:
        with torch.no_grad():
            ref_logprobs = forward(reference, batch)
        loss, _ = loss_of(
            forward(model, batch),
            batch.old_logprobs,
            batch.advantages,
            ref_logprobs,
            num_tokens=num_tokens,
            kl_coef=0.1,
        )
        loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).double()


def test_the_gradient_does_not_depend_on_the_cut(tiny_model, tiny_config, randomize):
    from memrl.model import Transformer

    reference = Transformer(tiny_config)
    randomize(reference, seed=9)
    turns = random_train_turns(24, seed=1)
    num_tokens = sum(len(item.turn.response_ids) for item in turns)
    whole = gradient(tiny_model, pack_turns(turns, 10_000), num_tokens, reference)
    assert whole.norm() > 0.01
    shuffled = list(turns)
    random.Random(0).shuffle(shuffled)
    cuts = {
        "tight bound": pack_turns(turns, 50),
        "middling bound": pack_turns(turns, 111),
        "shuffled": pack_turns(shuffled, 111),
        "a micro-batch per turn": [batch for item in turns for batch in pack_turns([item], 50)],
        "two ranks of unequal load": pack_turns(turns[:5], 70) + pack_turns(turns[5:], 200),
        "a rank with nothing to do": [*pack_turns(turns, 90), empty_micro_batch(), empty_micro_batch()],
    }
    assert len({len(batches) for batches in cuts.values()}) >= 4
    for name, batches in cuts.items():
        got = gradient(tiny_model, batches, num_tokens, reference)
        assert float((got - whole).norm() / whole.norm()) < 1e-6, name


def test_an_empty_micro_batch_runs_through_the_model_with_zero_gradient(tiny_model):
    batch = empty_micro_batch()
    logprobs = forward(tiny_model, batch)
    assert logprobs.shape == (0,)
    loss, _ = loss_of(logprobs, batch.old_logprobs, batch.advantages, num_tokens=10)
    loss.backward()
    for parameter in tiny_model.parameters():
        assert parameter.grad is not None  # every weight takes part, as ZeRO-3's collectives need
        assert not parameter.grad.any()


@given(st.lists(st.integers(1, 8000), max_size=200), st.integers(1, 32))
@settings(max_examples=100, deadline=None)
def test_shares_are_as_equal_as_the_largest_item_allows(sizes, num_parts):
    parts = balanced_partition(sizes, num_parts)
    assert len(parts) == len(sizes)
    loads = [0] * num_parts
    for size, part in zip(sizes, parts, strict=True):
        loads[part] += size
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_one_optimizer_step_of_a_large_run_keeps_all_ranks_busy():
    # 8 groups of 16 trajectories of 8 turns, as one of 16 updates of the 7B configuration, on its 32 ranks.
    sizes = [8000 if turn < 7 else 1500 for _ in range(8 * 16) for turn in range(8)]
    loads = [0] * 32
    for size, part in zip(sizes, balanced_partition(sizes, 32), strict=True):
        loads[part] += size
    assert max(loads) <= 1.05 * sum(sizes) / 32
