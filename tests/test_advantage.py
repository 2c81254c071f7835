"""Group-relative advantages, by hand and against numpy."""

import numpy as np
import pytest
import torch

from memrl.config import RLOptions
from memrl.rl.advantage import BASELINES, STD_EPS, credit_shares, group_advantages
from memrl.rl.rollout import assign_advantages
from memrl.types import Group, Sample, Trajectory, Turn


def trajectory(reward: float, num_memory_turns: int) -> Trajectory:
    kinds = ["memory"] * num_memory_turns + ["answer"]
    turns = [Turn(kind, [1, 2], [3], [-0.5], "stop") for kind in kinds]
    return Trajectory(turns=turns, reward=reward)


def test_rewards_minus_the_groups_mean_by_hand():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.25])
    groups = torch.tensor([5, 5, 5, 2, 2, 2, 2])
    expected = torch.tensor([2 / 3, -1 / 3, -1 / 3, 0.4375, 0.4375, -0.5625, -0.3125])
    torch.testing.assert_close(group_advantages(rewards, groups), expected, atol=1e-7, rtol=0)


@pytest.mark.parametrize("normalize_std", [False, True])
def test_random_groups_of_unequal_size_equal_numpy(normalize_std):
    rng = np.random.default_rng(0)
    ids = np.repeat([-(2**62), -7, 0, 3, 2**62 + 1], [2, 3, 9, 16, 31])
    rng.shuffle(ids)
    rewards = rng.normal(size=len(ids))
    expected = np.empty(len(ids))
    for group in np.unique(ids):
        mine = rewards[ids == group]
        expected[ids == group] = mine - mine.mean()
        if normalize_std:
            expected[ids == group] /= mine.std(ddof=1) + STD_EPS
    got = group_advantages(torch.tensor(rewards), torch.tensor(ids), normalize_std)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), expected, atol=2e-6)


def test_standard_deviation_is_off_by_default():
    rewards, groups = torch.tensor([4.0, 0.0]), torch.tensor([0, 0])
    assert group_advantages(rewards, groups).tolist() == [2.0, -2.0]
    normalised = 2 / (np.sqrt(8) + 1e-6)
    got = group_advantages(rewards, groups, normalize_std=True)
    torch.testing.assert_close(got, torch.tensor([normalised, -normalised], dtype=torch.float32))


@pytest.mark.parametrize("normalize_std", [False, True])
def test_permuting_the_rows_permutes_the_advantages(normalize_std):
    rewards = torch.tensor([0.3, 0.9, 0.1, 0.0, 1.0, 0.7, 0.2, 0.2])
    groups = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1])
    advantages = group_advantages(rewards, groups, normalize_std)
    for seed in range(5):
        order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
        permuted = group_advantages(rewards[order], groups[order], normalize_std)
        torch.testing.assert_close(permuted, advantages[order], atol=1e-6, rtol=0)


def test_the_names_of_groups_do_not_matter():
    rewards = torch.tensor([0.3, 0.9, 0.1, 0.0])
    expected = group_advantages(rewards, torch.tensor([0, 1, 0, 1]))
    assert torch.equal(group_advantages(rewards, torch.tensor([2**62, -5, 2**62, -5])), expected)


@pytest.mark.parametrize("normalize_std", [False, True])
@pytest.mark.parametrize(("reward", "size"), [(0.1, 3), (0.7, 7), (1 / 3, 11), (1e6 + 0.1, 13), (0.0, 2), (1.0, 16)])
def test_equal_rewards_give_exact_zeros(normalize_std, reward, size):
    # In fp32 a mean of equal numbers may miss them, and an error divided by std + 1e-6 would be a large one.
    rewards = torch.tensor([reward] * size + [0.0, 1.0])
    groups = torch.tensor([4] * size + [1, 1])
    advantages = group_advantages(rewards, groups, normalize_std)
    assert advantages[:size].tolist() == [0.0] * size
    assert (advantages[size:] != 0).all()


def test_a_single_group_sums_to_zero():
    rewards = torch.rand(16, generator=torch.Generator().manual_seed(0))
    assert abs(float(group_advantages(rewards, torch.zeros(16).long()).sum())) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_any_reward_dtype_gives_fp32_and_leaves_the_rewards_alone(dtype):
    rewards = torch.tensor([1.0, 0.0], dtype=dtype)
    advantages = group_advantages(rewards, torch.tensor([0, 0]), normalize_std=True)
    assert advantages.dtype == torch.float32
    assert rewards.tolist() == [1.0, 0.0]
    assert rewards.dtype == dtype


@pytest.mark.parametrize("normalize_std", [False, True])
def test_the_number_of_turns_does_not_change_a_baseline(normalize_std):
    def advantages(turn_counts: list[int]) -> list[list[float]]:
        rewards = [1.0, 0.0, 0.0, 0.0]
        group = Group(0, Sample("s", "q", ""), [trajectory(r, n) for r, n in zip(rewards, turn_counts, strict=True)])

        turns = assign_advantages([group], RLOptions(normalize_std=normalize_std))[0]
        assert len(turns) == sum(turn_counts) + 4
        rows, start = [], 0
        for count in turn_counts:
            rows.append([turn.advantage for turn in turns[start : start + count + 1]])
            start += count + 1
        return rows

    expected = [row[0] for row in advantages([0, 0, 0, 0])]
    if not normalize_std:
        assert expected == [0.75, -0.25, -0.25, -0.25]
    for counts in ([7, 0, 1, 2], [0, 50, 50, 50], [3, 3, 3, 3]):
        for row, value, count in zip(advantages(counts), expected, counts, strict=True):
            assert row == [value] * (count + 1)


def test_a_group_of_one_is_an_error_that_names_it():
    with pytest.raises(ValueError, match=r"group 9 has one trajectory.*rl\.group_size"):
        group_advantages(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([3, 3, 9]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_not_finite_is_an_error_that_names_the_trajectory(bad):
    with pytest.raises(ValueError, match=r"finite; trajectory 2 "):
        group_advantages(torch.tensor([1.0, 0.0, bad, bad]), torch.tensor([0, 0, 1, 1]))


@pytest.mark.parametrize(("rewards", "groups"), [([3], [4]), ([2, 2], [2, 2]), ([2, 1], [2])])
def test_shapes_that_do_not_fit_are_an_error(rewards, groups):
    with pytest.raises(ValueError, match="must be equal and flat"):
        group_advantages(torch.zeros(rewards), torch.zeros(groups).long())


@pytest.mark.parametrize("normalize_std", [False, True])
def test_leave_one_out_compares_with_the_mean_of_the_others(normalize_std):
    rng = np.random.default_rng(1)
    ids = np.repeat([4, -9, 2], [2, 5, 11])
    rng.shuffle(ids)
    rewards = rng.normal(size=len(ids))
    expected = np.empty(len(ids))
    for i, reward in enumerate(rewards):
        others = [rewards[j] for j in range(len(ids)) if ids[j] == ids[i] and j != i]
        expected[i] = reward - np.mean(others)
        if normalize_std:
            expected[i] /= np.std([reward, *others], ddof=1) + STD_EPS
    got = group_advantages(torch.tensor(rewards), torch.tensor(ids), normalize_std, baseline="leave_one_out")
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), expected, atol=3e-6)


def test_leave_one_out_by_hand():
    rewards, groups = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0]), torch.tensor([8, 8, 3, 3, 3])
    got = group_advantages(rewards, groups, baseline="leave_one_out")
    torch.testing.assert_close(got, torch.tensor([1.0, -1.0, 1.0, -0.5, -0.5]), atol=1e-6, rtol=0)


def test_leave_one_out_of_equal_rewards_gives_exact_zeros():
    rewards = torch.tensor([0.1] * 7 + [0.0, 1.0])
    for normalize_std in (False, True):
        got = group_advantages(rewards, torch.tensor([4] * 7 + [1, 1]), normalize_std, baseline="leave_one_out")
        assert got[:7].tolist() == [0.0] * 7


@pytest.mark.parametrize("baseline", BASELINES)
def test_rewards_are_compared_within_their_own_group_alone(baseline):
    rewards, groups = torch.tensor([1.0, 0.0, 0.5, 0.25]), torch.tensor([0, 0, 1, 1])
    apart = torch.cat([group_advantages(rewards[half], groups[half], baseline=baseline) for half in (slice(2), slice(2, 4))])
    assert torch.equal(group_advantages(rewards, groups, baseline=baseline), apart)


def test_an_unknown_baseline_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValueError, match="baseline is 'median'; it must be one of mean, leave_one_out"):
        group_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), baseline="median")


@pytest.mark.parametrize(
    ("credit", "one", "four"),
    [
        ("broadcast", [1.0], [1.0, 1.0, 1.0, 1.0]),
        ("final_only", [1.0], [0.0, 0.0, 0.0, 1.0]),
        ("split", [1.0], [0.25, 0.25, 0.25, 0.25]),
    ],
)
def test_credit_shares_by_hand(credit, one, four):
    assert credit_shares(1, credit) == one
    assert credit_shares(4, credit) == four


@pytest.mark.parametrize("num_turns", [1, 2, 3, 7, 1000])
def test_the_number_of_turns_moves_no_share_but_that_of_split(num_turns):
    broadcast, final_only, split = (credit_shares(num_turns, credit) for credit in ("broadcast", "final_only", "split"))
    assert set(broadcast) == {1.0}
    assert sum(final_only) == final_only[-1] == 1.0
    assert sum(split) == pytest.approx(1.0, rel=1e-12)
    assert len(broadcast) == len(final_only) == len(split) == num_turns


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("credit", ["broadcast", "final_only"])
def test_the_number_of_turns_moves_no_baseline(credit, baseline):
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 0.5]), torch.zeros(4).long()
    advantages = group_advantages(rewards, groups, baseline=baseline)
    for counts in ([1, 1, 1, 1], [9, 1, 1, 1], [1, 40, 3, 2]):
        shares = [credit_shares(count, credit) for count in counts]
        last = torch.tensor([float(a) * turns[-1] for a, turns in zip(advantages, shares, strict=True)])
        assert torch.equal(rewards - last, rewards - advantages)
    # Were baselines taken over turns instead, one more turn would move everyone's.
    over_turns = group_advantages(rewards.repeat_interleave(torch.tensor([9, 1, 1, 1])), torch.zeros(12).long())
    assert not torch.allclose(over_turns[-1], advantages[-1], atol=0.1)


def test_credit_of_no_turns_or_of_an_unknown_kind_is_an_error():
    with pytest.raises(ValueError, match="0 turns; it must have at least 1"):
        credit_shares(0, "split")
    with pytest.raises(ValueError, match="credit is 'discounted'; it must be one of broadcast, final_only, split"):
        credit_shares(3, "discounted")
