"""Advantages of single turns: by hand, by brute force over all small groups, and by their properties."""

from itertools import combinations_with_replacement, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memrl.config import RLOptions
from memrl.rl.advantage import BASELINES, STD_EPS
from memrl.rl.health import turn_reward_warning
from memrl.rl.rollout import assign_advantages, has_signal
from memrl.rl.turn_advantage import RETURNS, mixed_advantage, turn_advantages, turn_places, turn_returns
from memrl.types import Group, Sample, Trajectory, Turn

Row = list[tuple[str, float]]  # kind and reward of each turn


def make_group(rows: list[Row], outcomes: list[float] | None = None, group_id: int = 0) -> Group:
    trajectories = [
        Trajectory([Turn(kind, [1], [2, 3], [-1.0, -1.0], "stop", reward=reward) for kind, reward in row], reward=outcome)
        for row, outcome in zip(rows, outcomes or [0.0] * len(rows), strict=True)
    ]
    return Group(group_id, Sample("s", "q", ""), trajectories)


def assigned(rows: list[Row], outcomes: list[float] | None = None, **options) -> list[list[float]]:
    """The advantages that training takes, by trajectory and turn."""
    group = make_group(rows, outcomes)
    trained = iter(assign_advantages([group], RLOptions(**options))[0])
    return [[next(trained).advantage for _ in trajectory.turns] for trajectory in group.trajectories]


# Closed forms


def test_returns_by_hand():
    assert turn_returns([3.0, 1.0, 2.0], "own", 0.5) == [3.0, 1.0, 2.0]
    assert turn_returns([3.0, 1.0, 2.0], "to_go", 0.5) == [3.0 + 0.5 + 0.5, 1.0 + 1.0, 2.0]
    assert turn_returns([3.0, 1.0, 2.0], "to_go", 0.0) == [3.0, 1.0, 2.0]
    assert turn_returns([3.0, 1.0, 2.0], "to_go") == [6.0, 3.0, 2.0]


def test_the_return_of_equal_rewards_is_the_geometric_sum():
    for discount, count in product((0.1, 0.5, 0.9), (1, 2, 7, 40)):
        expected = [(1 - discount ** (count - t)) / (1 - discount) for t in range(count)]
        assert turn_returns([1.0] * count, "to_go", discount) == pytest.approx(expected)


def test_an_unknown_return_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValueError, match="turn_return is 'all'; it must be one of own, to_go"):
        turn_returns([1.0], "all")


def test_the_baseline_is_of_the_same_turn_of_the_others_by_hand():
    # memory 0: 1, 3, 2, mean 2; memory 1: 5, 9, mean 7; answer 0: 0, 0, 6, mean 2; the check is the only one.
    rows = [
        [("memory", 1.0), ("memory", 5.0), ("answer", 0.0)],
        [("memory", 3.0), ("answer", 0.0)],
        [("memory", 2.0), ("check", 4.0), ("memory", 9.0), ("answer", 6.0)],
    ]
    assert assigned(rows, outcome_weight=0.0) == [[-1.0, -2.0, -2.0], [1.0, -2.0], [0.0, 0.0, 2.0, 4.0]]
    others = assigned(rows, outcome_weight=0.0, baseline="leave_one_out")
    assert others == [pytest.approx([-1.5, -4.0, -3.0]), pytest.approx([1.5, -3.0]), pytest.approx([0.0, 0.0, 4.0, 6.0])]


def test_two_trajectories_have_half_the_difference_each():
    for one, other in product((0.0, 1.0, 2.5, -3.0), repeat=2):
        rows = [[("memory", one), ("answer", 0.0)], [("memory", other), ("answer", 0.0)]]
        half = (one - other) / 2
        assert assigned(rows, outcome_weight=0.0) == [[half, 0.0], [-half, 0.0]]


@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5, 0.8])
def test_the_mix_of_outcome_and_turn_by_hand(alpha):
    rows = [[("memory", 2.0), ("answer", 0.0)], [("memory", 0.0), ("answer", 0.0)]]
    first, second = assigned(rows, [1.0, 0.0], outcome_weight=alpha)
    assert first == pytest.approx([alpha * 0.5 + (1 - alpha) * 1.0, alpha * 0.5])
    assert second == pytest.approx([-alpha * 0.5 - (1 - alpha) * 1.0, -alpha * 0.5])
    final, _ = assigned(rows, [1.0, 0.0], outcome_weight=alpha, credit="final_only")
    assert final == pytest.approx([(1 - alpha) * 1.0, alpha * 0.5]), "credit shares out the outcome's part alone"


# Enumeration: all groups of two trajectories, and of three in any order, of one or two turns with rewards 0 or 1


TRAJECTORIES: list[Row] = [
    list(zip(kinds, rewards, strict=True))
    for count in (1, 2)
    for kinds in product(("memory", "answer"), repeat=count)
    for rewards in product((0.0, 1.0), repeat=count)
]
GROUPS = [*product(TRAJECTORIES, repeat=2), *combinations_with_replacement(TRAJECTORIES, 3)]


def by_brute_force(rows: list[Row], turn_return: str, discount: float, normalize_std: bool, baseline: str) -> list[list[float]]:
    def return_of(row: Row, t: int) -> float:
        return row[t][1] if turn_return == "own" else sum(discount ** (k - t) * row[k][1] for k in range(t, len(row)))

    def same_turn(row: Row, kind: str, number: int) -> list[int]:
        return [t for t in range(len(row)) if row[t][0] == kind and sum(k == kind for k, _ in row[:t]) == number]

    result = []
    for i, row in enumerate(rows):
        result.append([])
        for t, (kind, _) in enumerate(row):
            number = sum(k == kind for k, _ in row[:t])
            others = [return_of(rows[j], u) for j in range(len(rows)) if j != i for u in same_turn(rows[j], kind, number)]
            mine = return_of(row, t)
            everyone = [mine, *others]
            average = sum(everyone) / len(everyone)
            if not others:
                result[-1].append(0.0)
                continue
            value = mine - (average if baseline == "mean" else sum(others) / len(others))
            if normalize_std:
                variance = sum((x - average) ** 2 for x in everyone) / (len(everyone) - 1)
                value /= variance**0.5 + STD_EPS
            result[-1].append(value)
    return result


@pytest.mark.parametrize("turn_return", RETURNS)
def test_all_small_groups_equal_brute_force(turn_return):
    assert len(GROUPS) == 20**2 + 1540
    options = list(product((False, True), BASELINES))
    for number, rows in enumerate(GROUPS):
        normalize_std, baseline = options[number % 4] if len(rows) == 3 else options[number // 20 % 4]
        places = [turn_places([kind for kind, _ in row]) for row in rows]
        returns = [turn_returns([reward for _, reward in row], turn_return, 0.5) for row in rows]
        found = turn_advantages(places, returns, normalize_std, baseline)
        expected = by_brute_force(list(rows), turn_return, 0.5, normalize_std, baseline)
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, abs=1e-5), (rows, normalize_std, baseline)


def test_all_small_groups_reach_training_as_brute_force_says():
    for number, rows in enumerate(GROUPS[::7]):
        outcomes = [float(number >> i & 1) for i in range(len(rows))]
        found = assigned(list(rows), outcomes, outcome_weight=0.25, turn_return="to_go", turn_discount=0.5)
        own = by_brute_force(list(rows), "to_go", 0.5, False, "mean")
        average = sum(outcomes) / len(outcomes)
        for one, outcome, row in zip(found, outcomes, own, strict=True):
            assert one == pytest.approx([mixed_advantage(outcome - average, value, 0.25) for value in row], abs=1e-6)


# Properties

NUMBERS = st.floats(-1e3, 1e3, width=32)
ROWS = st.lists(
    st.lists(st.tuples(st.sampled_from(["memory", "check", "answer"]), NUMBERS), min_size=1, max_size=5), min_size=2, max_size=5
)
OPTIONS = st.fixed_dictionaries(
    {
        "turn_return": st.sampled_from(RETURNS),
        "turn_discount": st.sampled_from([0.0, 0.5, 1.0]),
        "normalize_std": st.booleans(),
        "baseline": st.sampled_from(BASELINES),
    }
)


@settings(max_examples=60, deadline=None)
@given(ROWS, OPTIONS)
def test_the_advantages_at_a_place_add_up_to_zero(rows, options):
    sums: dict[tuple[str, int], float] = {}
    for row, values in zip(rows, assigned(rows, outcome_weight=0.0, **options), strict=True):
        for place, value in zip(turn_places([kind for kind, _ in row]), values, strict=True):
            sums[place] = sums.get(place, 0.0) + value
    assert all(abs(total) < 1e-2 for total in sums.values()), sums


@settings(max_examples=60, deadline=None)
@given(ROWS, OPTIONS, st.randoms(use_true_random=False))
def test_the_order_of_trajectories_does_not_matter(rows, options, rng):
    order = list(range(len(rows)))
    rng.shuffle(order)
    outcomes = [float(i) for i in range(len(rows))]
    before = assigned(rows, outcomes, outcome_weight=0.5, **options)
    after = assigned([rows[i] for i in order], [outcomes[i] for i in order], outcome_weight=0.5, **options)
    for place, i in enumerate(order):
        assert after[place] == pytest.approx(before[i], rel=1e-4, abs=5e-3)


@settings(max_examples=60, deadline=None)
@given(ROWS, OPTIONS, st.sampled_from(["broadcast", "final_only", "split"]))
def test_weight_1_gives_the_outcomes_advantages_bit_for_bit(rows, options, credit):
    outcomes = [float(i % 3) for i in range(len(rows))]
    plain = {name: options[name] for name in ("normalize_std", "baseline")}
    silent = [[(kind, 0.0) for kind, _ in row] for row in rows]
    assert assigned(rows, outcomes, credit=credit, **options) == assigned(silent, outcomes, credit=credit, **plain)


@settings(max_examples=60, deadline=None)
@given(ROWS, OPTIONS, NUMBERS)
def test_equal_rewards_of_a_turn_give_it_exactly_zero(rows, options, reward):
    equal = [[(kind, reward) for kind, _ in row] for row in rows]
    values = assigned(equal, outcome_weight=0.0, **options | {"turn_return": "own"})
    assert all(value == 0.0 for row in values for value in row)


def test_weight_1_computes_nothing_of_the_turns(monkeypatch):
    monkeypatch.setattr("memrl.rl.rollout.turn_advantages", None)
    assert assigned([[("answer", 5.0)], [("answer", 1.0)]], [1.0, 0.0]) == [[0.5], [-0.5]]


# Signal: whether a group is trained on


def test_equal_outcomes_with_different_turn_rewards_are_a_signal_if_these_count():
    group = make_group([[("memory", 1.0), ("answer", 0.0)], [("memory", 0.0), ("answer", 0.0)]])
    assert not has_signal(group, RLOptions())
    assert has_signal(group, RLOptions(outcome_weight=0.9))
    kept = assign_advantages([group], RLOptions(outcome_weight=0.9, drop_flat_groups=True))
    assert [len(kept[0]), assign_advantages([group], RLOptions(drop_flat_groups=True))[0]] == [4, []]


def test_different_outcomes_are_no_signal_if_only_turns_count():
    group = make_group([[("answer", 1.0)], [("answer", 1.0)]], [0.0, 1.0])
    assert has_signal(group, RLOptions(outcome_weight=0.1)) and not has_signal(group, RLOptions(outcome_weight=0.0))
    assert [item.advantage for item in assign_advantages([group], RLOptions(outcome_weight=0.0))[0]] == [0.0, 0.0]


def test_a_turn_that_no_other_trajectory_has_is_no_signal_but_its_return_is():
    group = make_group([[("memory", 1.0), ("answer", 0.0)], [("answer", 0.0)]])
    assert not has_signal(group, RLOptions(outcome_weight=0.5))
    late = make_group([[("answer", 0.0), ("check", 1.0)], [("answer", 0.0)]])
    assert not has_signal(late, RLOptions(outcome_weight=0.5))
    assert has_signal(late, RLOptions(outcome_weight=0.5, turn_return="to_go"))


def test_trajectories_without_a_reward_are_in_no_turns_baseline():
    group = make_group([[("memory", 1.0)], [("memory", 3.0)], [("memory", 100.0)]])
    group.trajectories[2].left_out = True
    turns = assign_advantages([group], RLOptions(outcome_weight=0.0))[0]
    assert [item.advantage for item in turns] == [-1.0, 1.0]
    assert group.trajectories[2].turns[0].advantage == 0.0


def test_groups_do_not_mix_and_their_order_does_not_matter():
    rows = [[[("memory", 4.0)], [("memory", 0.0)]], [[("memory", 10.0)], [("memory", 8.0)]]]
    for order in ((0, 1), (1, 0)):
        groups = [make_group(rows[i], group_id=i) for i in order]
        turns = assign_advantages(groups, RLOptions(outcome_weight=0.0))
        assert {i: [item.advantage for item in turns[i]] for i in turns} == {0: [2.0, -2.0], 1: [1.0, -1.0]}


def test_rewards_of_turns_that_have_no_effect_and_ones_that_are_missing_are_said():
    rewarded, silent = make_group([[("answer", 1.0)], [("answer", 0.0)]]), make_group([[("answer", 0.0)], [("answer", 0.0)]])
    assert "have no effect on training" in (turn_reward_warning([silent, rewarded], RLOptions()) or "")
    assert "no turn has a reward of its own" in (turn_reward_warning([silent], RLOptions(outcome_weight=0.5)) or "")
    assert turn_reward_warning([silent], RLOptions()) is None
    assert turn_reward_warning([rewarded], RLOptions(outcome_weight=0.5)) is None


def test_the_trajectorys_advantage_stays_the_outcomes():
    group = make_group([[("memory", 4.0)], [("memory", 0.0)]], [1.0, 0.0])
    assign_advantages([group], RLOptions(outcome_weight=0.5))
    assert [(t.advantage, t.turns[0].advantage) for t in group.trajectories] == [(0.5, 1.25), (-0.5, -1.25)]
