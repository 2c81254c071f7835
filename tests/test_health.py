"""What a run says when rewards fail, groups have no signal, computations disagree, or weights are not finite."""

import math
from dataclasses import replace

import pytest
import torch

from memrl.agents import AgentConfig
from memrl.config import RewardOptions, RLOptions
from memrl.engine import distributed
from memrl.prompts import Prompts
from memrl.rl.aggregation import AGGREGATIONS
from memrl.rl.health import RunError, StepWatch, first_not_finite, first_update_warnings, on_all_ranks
from memrl.rl.metrics import rollout_metrics
from memrl.rl.rollout import StepGroups, assign_advantages, has_signal
from memrl.rl.update import prepare_update, split_groups
from memrl.training.rollout_log import rollout_records
from memrl.types import Group, Sample, Trajectory, Turn

AGENT = AgentConfig(Prompts(memory="m", answer="a", no_memory="-"), 8, 6, 4, 20)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setattr(distributed, "gather_lists", lambda items: items)
    monkeypatch.setattr(distributed, "sum_over_ranks", lambda values: values)
    monkeypatch.setattr(distributed, "max_over_ranks", lambda value: value)


def group(group_id, rewards, tokens=1):
    """None is a reward that failed."""
    trajectories = []
    for reward in rewards:
        turns = [Turn(kind, [1], [2] * tokens, [-1.0] * tokens, "stop") for kind in ("memory", "answer")]
        failed = {"left_out": True, "error": f"no {group_id}"} if reward is None else {}
        scores = {"strict": float(reward == 1), "lenient": 0.0}
        trajectories.append(Trajectory(turns, reward=reward or 0.0, scores=scores, **failed))
    return Group(group_id, Sample(f"s{group_id}", "q", ""), trajectories)


def assign(groups, **options):
    return assign_advantages(groups, RLOptions(**options))


# --- Rewards that failed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "advantages"),
    [
        ({}, [2 / 3, -1 / 3, -1 / 3]),
        ({"baseline": "leave_one_out"}, [1.0, -0.5, -0.5]),
        ({"normalize_std": True}, [2 / 3 * 3**0.5, -(3**0.5) / 3, -(3**0.5) / 3]),
    ],
)
def test_a_trajectory_whose_reward_failed_is_in_no_baseline_and_has_no_turns(options, advantages):
    """The group of the other three alone: mean 1/3, unbiased standard deviation 1/sqrt(3)."""
    compared = group(0, [1.0, None, 0.0, 0.0])
    turns = assign([compared], **options)[0]
    assert [t.advantage for t in compared.trajectories] == pytest.approx([advantages[0], 0.0, *advantages[1:]], abs=1e-5)
    assert [item.advantage for item in turns] == pytest.approx([a for a in advantages for _ in range(2)], abs=1e-5)
    own = {id(turn) for turn in compared.trajectories[1].turns}
    assert not own & {id(item.turn) for item in turns}


@pytest.mark.parametrize("rewards", [[1.0, None, None], [None, None, None]])
def test_a_group_with_fewer_than_two_rewards_is_left_out(rewards):
    lone, other = group(0, rewards), group(1, [1.0, 0.0])
    turns = assign([lone, other])
    assert turns[0] == [] and len(turns[1]) == 4
    assert {t.advantage for t in lone.trajectories} == {0.0} and not has_signal(lone, RLOptions())
    assert assign([lone]) == {0: []}


def test_a_failed_reward_is_no_signal():
    assert not has_signal(group(0, [1.0, None, 1.0]), RLOptions()) and has_signal(group(0, [1.0, None, 0.0]), RLOptions())


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_denominators_are_those_of_a_batch_without_the_failed_trajectories(aggregation):
    rl = RLOptions(aggregation=aggregation)

    def weights(groups):
        turns = [turn for own in assign(groups).values() for turn in own]
        update = prepare_update(turns, rl)
        return [turn.weight for turn in turns], update.num_tokens, update.num_turns

    with_failures = [group(0, [1.0, None, 0.0], 3), group(1, [None, 1.0, 0.0], 2), group(2, [None, 1.0], 5)]
    assert weights(with_failures) == weights([group(0, [1.0, 0.0], 3), group(1, [1.0, 0.0], 2)])


def metrics_of(groups):
    return rollout_metrics(StepGroups(groups, []), RLOptions(), RewardOptions())


def test_means_are_over_the_rewards_that_were_had_and_failures_are_counted():
    groups = [group(0, [1.0, None, 0.0]), group(1, [1.0, None])]
    metrics = metrics_of(groups)
    assert metrics["reward/mean"] == pytest.approx(2 / 3) and metrics["reward/errors"] == 2
    assert metrics["reward/strict"] == pytest.approx(2 / 5) and metrics["reward/signal"] == 1 / 2
    nothing = metrics_of([group(0, [None, None])])
    assert nothing["reward/mean"] != nothing["reward/mean"], "a mean of nothing is no number"


def test_the_ranks_sums_are_those_of_one_rank(monkeypatch):
    groups = [group(0, [1.0, None, 0.0]), group(1, [1.0, None, None])]
    sums = []
    monkeypatch.setattr(distributed, "sum_over_ranks", lambda values: sums.append(values) or values)
    for part in (groups, groups[:1], groups[1:]):
        metrics_of(part)
    assert (sums[1] + sums[2]).tolist() == sums[0].tolist()


def test_the_log_shows_no_reward_where_there_was_none_and_puts_it_last():
    class NoTokenizer:
        def decode(self, ids):
            return ""

    records = list(rollout_records(1, [group(0, [0.0, None, 1.0, None, 0.5])], 9, NoTokenizer(), RLOptions()))
    assert [record["reward"] for record in records] == [1.0, 0.0, 0.5, None, None]
    assert records[0]["group_rewards"] == [0.0, None, 1.0, None, 0.5] and records[-1]["error"] == "no 0"


def watch(max_failed=3, flat_steps=0):
    return StepWatch(RewardOptions(max_failed_steps=max_failed), RLOptions(prompts_per_step=2, group_size=2), flat_steps)


def step(errors=0, signal=1.0, replaced=0, **scores):
    metrics = {"reward/errors": errors, "reward/signal": signal, "reward/replaced_groups": replaced, "reward/mean": 0.0}
    return metrics | {"reward/strict": 0.0, "reward/lenient": 0.0} | {f"reward/{name}": value for name, value in scores.items()}


def test_a_run_whose_rewards_all_fail_ends_with_the_last_reason():
    run, failed = watch(), [group(7, [None, None])]
    for errors in (4, 4, 3, 4, 4):  # three steps, but not in a row
        run.check(step(errors, 0.0), failed)
    with pytest.raises(
        RunError, match=r"all rewards failed in 3 steps in a row \(reward.max_failed_steps\), the last with no 7;"
    ):
        run.check(step(4, 0.0), failed)


def test_replaced_groups_count_among_those_that_failed():
    run = watch(max_failed=1)
    run.check(step(4, 0.0, replaced=1), [])
    with pytest.raises(RunError):
        run.check(step(6, 0.0, replaced=1), [group(0, [None])])


def test_the_end_can_be_turned_off():
    run = watch(max_failed=0)
    assert {run.check(step(4, 0.0), []) for _ in range(10)} == {None}


def test_the_reason_comes_from_the_rank_that_has_one(monkeypatch):
    monkeypatch.setattr(distributed, "gather_lists", lambda items: [*items, "from rank 1"])
    with pytest.raises(RunError, match="from rank 1"):
        watch(max_failed=1).check(step(4, 0.0), [])


# --- Groups without signal --------------------------------------------------------------------------------------


def test_steps_without_signal_are_said_once_and_then_rarely():
    run = watch(flat_steps=3)
    said = [run.check(step(signal=0.0), []) is not None for _ in range(24)]
    assert [number for number, is_said in enumerate(said, 1) if is_said] == [3, 6, 12, 24]
    assert run.check(step(signal=0.1), []) is None
    assert [run.check(step(signal=0.0), []) is not None for _ in range(3)] == [False, False, True]
    assert not any(watch(flat_steps=0).check(step(signal=0.0), []) for _ in range(5))


@pytest.mark.parametrize(
    ("metrics", "advice"),
    [
        (step(signal=0.0, strict=1.0), "take harder questions"),
        (step(signal=0.0, lenient=0.5), "not in a box: check the answer prompt"),
        (step(signal=0.0), "try easier questions, a larger rl.group_size, rl.dynamic_rounds"),
        (step(2, 0.0), "2 rewards failed"),
    ],
)
def test_what_to_try_follows_from_the_scores(metrics, advice):
    warning = watch(flat_steps=1).check(metrics, [])
    assert warning.startswith("no group had a signal in the last 1 steps") and advice in warning and "\n" not in warning


# --- Fewer informative groups -----------------------------------------------------------------------------------


def sizes(parts):
    return [len({turn.group_id for turn in part}) for part in parts]


def test_left_out_groups_make_fewer_optimizer_steps_not_smaller_ones():
    groups = [group(i, [1.0, 0.0] if i < 5 else [1.0, 1.0]) for i in range(16)]
    assert sizes(split_groups(assign(groups), 8)) == [2] * 8
    assert sizes(split_groups(assign(groups, drop_flat_groups=True), 8)) == [3, 2]
    assert sizes(split_groups(assign(groups[4:], drop_flat_groups=True), 8)) == [1]
    assert sizes(split_groups(assign(groups[5:], drop_flat_groups=True), 8)) == [0]


def test_denominator_all_keeps_the_steps_and_counts_the_groups_without_signal():
    groups = [group(i, [1.0, 0.0] if i < 2 else [1.0, 1.0]) for i in range(4)]
    options = {"drop_flat_groups": True, "denominator": "all"}
    parts = split_groups(assign(groups, **options), 2)
    assert sizes(parts) == [2, 2]
    rl = RLOptions(**options)
    whole = [turn for part in parts for turn in part]
    update = prepare_update(whole, rl)
    assert {turn.weight for turn in whole} == {1 / 16} and (update.num_tokens, update.num_turns) == (8, 8)
    assert sum(batch.num_tokens for batch in update.batches) == 8, "they are counted, not computed"
    kept = [turn for own in assign(groups, drop_flat_groups=True).values() for turn in own]
    prepare_update(kept, RLOptions(drop_flat_groups=True))
    assert {turn.weight for turn in kept} == {1 / 8}
    flat_only = assign(groups[2:], **options)
    assert prepare_update([turn for own in flat_only.values() for turn in own], rl) is None


# --- Computations that disagree, weights, files -----------------------------------------------------------------

FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("update", "dtype", "options", "is_start", "said"),
    [
        ({"logprob_diff": 1e-5, "kl": 0.0}, FP32, {}, True, []),
        ({"logprob_diff": 0.05, "kl": 1e-3}, BF16, {}, True, []),
        ({"logprob_diff": 0.05, "kl": 0.0}, FP32, {}, True, ["sampler"]),
        ({"logprob_diff": 0.2, "kl": 0.0}, BF16, {}, False, ["sampler"]),
        ({"logprob_diff": float("nan")}, FP32, {}, False, ["sampler"]),
        ({"logprob_diff": 0.0, "kl": 1e-3}, FP32, {}, True, ["reference"]),
        ({"logprob_diff": 0.0, "kl": 1e-3}, FP32, {}, False, []),
        ({"logprob_diff": 0.0, "kl": -1e-3}, FP32, {"kl_estimator": "k1"}, True, []),
        ({"logprob_diff": 0.0, "kl": -0.1}, FP32, {"kl_estimator": "k1"}, True, ["reference"]),
        ({"logprob_diff": 1.0, "kl": 1.0}, FP32, {}, True, ["sampler", "reference"]),
    ],
)
def test_a_first_update_that_computes_other_weights_is_said(update, dtype, options, is_start, said):
    warnings = first_update_warnings(update, dtype, RLOptions(**options), 1.0, is_start)
    assert len(warnings) == len(said) and all(word in line for word, line in zip(said, warnings, strict=True))


def test_a_low_temperature_scales_the_bound():
    assert first_update_warnings({"logprob_diff": 0.05}, FP32, RLOptions(), 0.1, False) == []
    assert len(first_update_warnings({"logprob_diff": 0.05}, FP32, RLOptions(), 2.0, False)) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_one_weight_that_is_not_finite_is_found(tiny_model, value, dtype):
    model = tiny_model.to(dtype)
    assert first_not_finite(model) is None
    name, parameter = list(model.named_parameters())[-2]
    with torch.no_grad():
        parameter.view(-1)[3] = value
    assert first_not_finite(model) == name


def test_what_one_rank_cannot_read_ends_the_run_on_all(monkeypatch):
    def broken():
        raise ValueError("data.jsonl: has changed")

    assert on_all_ranks(lambda: 3) == 3
    with pytest.raises(RunError, match=r"^data.jsonl: has changed; put this right, and the same command resumes"):
        on_all_ranks(broken)
    monkeypatch.setattr(distributed, "gather_lists", lambda items: [*items, "rank 1 failed"])
    with pytest.raises(RunError, match="rank 1 failed"):
        on_all_ranks(lambda: 3)
    with pytest.raises(ZeroDivisionError):
        on_all_ranks(lambda: 1 / 0)


def test_groups_are_not_changed_by_the_checks():
    one = group(0, [1.0, None])
    before = replace(one.trajectories[0])
    has_signal(one, RLOptions())
    assert one.trajectories[0] == before


def test_kinds_that_only_other_ranks_have_are_metrics_on_every_rank(monkeypatch):
    monkeypatch.setattr(distributed, "gather_lists", lambda items: [*items, "check"])
    found = metrics_of([group(0, [1.0, 0.0])])
    kinds = [name.removeprefix("rollout/truncated_") for name in found if name.startswith("rollout/truncated_")]
    assert kinds == ["memory", "answer", "check"] and math.isnan(found["rollout/check_tokens"])
