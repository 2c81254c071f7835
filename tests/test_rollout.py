"""Trajectories from a tiny model, and who gets which advantage."""

from dataclasses import replace

import pytest

from memrl.agents import AgentConfig
from memrl.config import RLOptions
from memrl.llm import Decoding, LocalLLM
from memrl.model import Transformer
from memrl.prompts import Prompts
from memrl.rl.rollout import assign_advantages, collect_groups, collect_step
from memrl.sampler import Sampler
from memrl.scoring.scores import verifier_scores
from memrl.types import Group, Sample, Trajectory, Turn
from tests.test_tokenizer import character_tokenizer

PROMPTS = Prompts(memory="Q{question}M{memory}S{section}", answer="Q{question}M{memory}", no_memory="-")
AGENT = AgentConfig(PROMPTS, chunk_tokens=8, memory_tokens=6, answer_tokens=4, question_tokens=20)
SAMPLES = {
    0: Sample("a", "who", "a document of some length", ("x",)),
    1: Sample("b", "where", "short", ("y",)),
    2: Sample("c", "who", "a document of some length", ("x",)),  # equal to group 0 in every word
    7: Sample("d", "when", "", ("z",)),
}


class StrictRewards:
    """The strict verifier, without processes."""

    async def score(self, trajectory, sample):
        trajectory.scores = verifier_scores(trajectory.response, sample.answers, sample.match)
        trajectory.reward = trajectory.scores["strict"]


class ParityRewards(StrictRewards):
    """Something that a random model's trajectories differ in: whether the answer's ids sum to an even number."""

    async def score(self, trajectory, sample):
        await super().score(trajectory, sample)
        trajectory.reward = float(sum(trajectory.turns[-1].response_ids) % 2 == 0 or sample.id == "never")


@pytest.fixture(scope="module")
def tokenizer():
    return character_tokenizer()


@pytest.fixture
def make_llm(tiny_config, randomize, tokenizer):
    model = Transformer(replace(tiny_config, vocab_size=tokenizer.vocab_size)).eval()
    randomize(model, seed=4, std=0.15)
    return lambda **options: LocalLLM(Sampler(model, **options), tokenizer, Decoding())


def collect(llm, samples=SAMPLES, seed=3, step=5, group_size=3):
    return collect_groups(llm, samples, AGENT, StrictRewards(), group_size=group_size, seed=seed, step=step)


def by_group(groups):
    """Prompt and response ids of every turn, by group id."""
    return {
        group.id: [[(turn.prompt_ids, turn.response_ids) for turn in t.turns] for t in group.trajectories] for group in groups
    }


def logprobs_of(groups):
    return [lp for group in groups for t in group.trajectories for turn in t.turns for lp in turn.response_logprobs]


def finished_group(group_id, rewards, num_memory_turns=2):
    kinds = ["memory"] * num_memory_turns + ["answer"]
    caps = {"memory": 6, "answer": 4}
    turns = [Turn(kind, [1], [2], [-1.0], "stop", max_new_tokens=caps[kind]) for kind in kinds]
    return Group(group_id, Sample("s", "q", ""), [Trajectory([replace(t) for t in turns], reward=r) for r in rewards])


def assign(groups, **options):
    return assign_advantages(groups, RLOptions(**options))


# Collecting


def test_every_sample_gets_its_trajectories_under_its_own_id(make_llm):
    groups = collect(make_llm())
    assert [group.id for group in groups] == [0, 1, 2, 7]
    for group in groups:
        assert group.sample is SAMPLES[group.id]
        assert len(group.trajectories) == 3
        num_chunks = -(-len(group.sample.context) // 8)
        assert {len(t.turns) for t in group.trajectories} == {num_chunks + 1}
        for t in group.trajectories:
            assert set(t.scores) == {"strict", "lenient"}


def test_rollouts_of_a_group_differ_and_so_do_equal_samples(make_llm):
    groups = by_group(collect(make_llm()))
    readings = [str(trajectory) for group in groups.values() for trajectory in group]
    assert len(set(readings)) == len(readings) == 12


@pytest.mark.parametrize("options", [{}, {"max_rows": 2}, {"max_rows": 5, "max_step_tokens": 60}], ids=str)
def test_trajectories_do_not_depend_on_order_ranks_or_batch(make_llm, options):
    whole = collect(make_llm())
    backwards = collect(make_llm(**options), dict(reversed(SAMPLES.items())))
    assert by_group(backwards) == by_group(whole)
    ranks = [{i: SAMPLES[i] for i in keys} for keys in ((0, 2), (1, 7))]
    split = [group for samples in ranks for group in collect(make_llm(**options), samples)]
    assert by_group(split) == by_group(whole)
    split.sort(key=lambda group: group.id)
    assert logprobs_of(split) == pytest.approx(logprobs_of(whole), abs=1e-5)


def test_a_larger_group_begins_with_the_smaller_one(make_llm):
    small, large = by_group(collect(make_llm(), group_size=2)), by_group(collect(make_llm(), group_size=4))
    assert {group_id: trajectories[:2] for group_id, trajectories in large.items()} == small


@pytest.mark.parametrize("other", [{"seed": 4}, {"step": 6}])
def test_another_seed_or_step_gives_other_trajectories(make_llm, other):
    first, second = by_group(collect(make_llm())), by_group(collect(make_llm(), **other))
    assert all(a != b for i in SAMPLES for a, b in zip(first[i], second[i], strict=True))


def test_the_same_step_again_gives_the_same_trajectories(make_llm):
    llm = make_llm()
    assert by_group(collect(llm)) == by_group(collect(llm))


def test_a_rank_without_samples_collects_nothing(make_llm):
    assert collect(make_llm(), {}) == []


# Dynamic sampling


class Questions:
    """Those of index 1 have no signal before the second round, those of index 2 never."""

    def sample(self, step, index, round_number=0):
        flat = index == 2 or (index == 1 and round_number < 2)
        return Sample("never" if flat else f"{step} {index} {round_number}", "who", "a document", ("x",))


def collect_dynamically(llm, rounds, indices=range(4)):
    rl = RLOptions(prompts_per_step=4, group_size=12, dynamic_rounds=rounds)
    return collect_step(llm, Questions(), AGENT, ParityRewards(), rl, seed=3, step=5, question_indices=indices)


def test_groups_without_signal_give_their_place_to_fresh_questions(make_llm):
    collected = collect_dynamically(make_llm(), rounds=3)
    assert [group.id for group in collected.kept] == [0, 1, 2, 3]
    assert [group.sample.id for group in collected.kept] == ["5 0 0", "5 1 2", "never", "5 3 0"]
    assert [group.id for group in collected.replaced] == [1, 2, 1, 2, 2]
    draws = [str(by_group([group])) for group in collected.kept + collected.replaced]
    assert len(set(draws)) == len(draws)  # a replacement draws its own numbers


def test_without_rounds_nothing_is_replaced_and_every_group_is_the_first_drawn(make_llm):
    once, dynamic = collect_dynamically(make_llm(), rounds=0), collect_dynamically(make_llm(), rounds=3)
    assert once.replaced == []
    assert by_group(once.kept[::3]) == by_group(dynamic.kept[::3])


def test_replacements_do_not_depend_on_the_ranks(make_llm):
    whole = collect_dynamically(make_llm(), rounds=2)
    even, odd = (collect_dynamically(make_llm(), 2, indices).kept for indices in ([0, 2], [1, 3]))
    assert by_group(sorted(even + odd, key=lambda group: group.id)) == by_group(whole.kept)


def test_what_stays_without_signal_after_the_last_round_is_left_out():
    groups = [finished_group(0, [1.0, 1.0]), finished_group(1, [1.0, 0.0])]
    turns = assign(groups, dynamic_rounds=1)
    assert {group_id: len(items) for group_id, items in turns.items()} == {0: 0, 1: 6}


# Advantages


def test_an_advantage_falls_on_every_turn_of_its_trajectory():
    turns = assign([finished_group(4, [1.0, 0.0]), finished_group(2, [0.0, 0.0, 3.0])])
    assert list(turns) == [4, 2]
    assert [item.advantage for item in turns[4]] == [0.5] * 3 + [-0.5] * 3
    assert [item.advantage for item in turns[2]] == [-1.0] * 6 + [2.0] * 3


def test_training_turns_are_the_trajectories_own_turns_in_order():
    group = finished_group(0, [1.0, 0.0])
    expected = [turn for trajectory in group.trajectories for turn in trajectory.turns]
    assert [id(item.turn) for item in assign([group])[0]] == [id(turn) for turn in expected]


def test_final_only_credit_leaves_memory_turns_at_zero():
    turns = assign([finished_group(0, [1.0, 0.0])], credit="final_only")[0]
    assert [item.turn.kind for item in turns] == ["memory", "memory", "answer"] * 2
    assert [item.advantage for item in turns] == [0.0, 0.0, 0.5, 0.0, 0.0, -0.5]


def test_split_credit_divides_the_advantage_over_the_turns():
    turns = assign([finished_group(0, [1.0, 0.0])], credit="split")[0]
    assert [item.advantage for item in turns] == pytest.approx([0.5 / 3] * 3 + [-0.5 / 3] * 3)


def test_the_other_rollouts_can_be_the_baseline():
    turns = assign([finished_group(0, [3.0, 0.0, 0.0], 0)], baseline="leave_one_out")[0]
    assert [item.advantage for item in turns] == [3.0, -1.5, -1.5]


def test_every_turn_knows_its_group_and_its_trajectory():
    turns = assign([finished_group(4, [1.0, 0.0], 1), finished_group(2, [0.0, 1.0], 1)])
    assert [item.group_id for item in turns[4] + turns[2]] == [4] * 4 + [2] * 4
    assert [item.trajectory_id for item in turns[4] + turns[2]] == [0, 0, 1, 1, 2, 2, 3, 3]


# Overlong turns; the agent's caps are 6 tokens of memory and 4 of answer


def overlong_group():
    group = finished_group(0, [1.0, 1.0], 2)
    cut = group.trajectories[0].turns[1]
    cut.response_ids, cut.response_logprobs, cut.finish_reason = [2] * 6, [-1.0] * 6, "length"
    return group


def test_a_memory_at_its_cap_costs_reward_where_there_is_a_buffer():
    group = overlong_group()
    turns = assign([group], overlong_buffers={"memory": 2}, overlong_penalty=0.4)[0]
    assert [t.penalty for t in group.trajectories] == pytest.approx([-0.2, 0.0])  # one of two memory turns
    assert [t.advantage for t in group.trajectories] == pytest.approx([-0.1, 0.1])
    assert [t.reward for t in group.trajectories] == [1.0, 1.0]
    assert {item.advantage for item in turns[:3]} == {turns[0].advantage}
    assert {item.advantage for item in assign([overlong_group()])[0]} == {0.0}


def test_a_group_has_signal_by_its_rewards_before_any_penalty():
    options = {"overlong_buffers": {"memory": 2}, "overlong_penalty": 0.4}
    assert assign([overlong_group()], drop_flat_groups=True, **options)[0] == []


@pytest.mark.parametrize(("kinds", "left"), [([], 6), (["memory"], 5), (["answer"], 6), (["all"], 5)])
def test_turns_that_their_cap_ended_can_be_left_out_by_kind(kinds, left):
    turns = assign([overlong_group()], overlong_filter=kinds)[0]
    assert len(turns) == left
    assert left == 6 or all(item.turn.finish_reason == "stop" for item in turns)


def test_normalize_std_reaches_the_advantages():
    turns = assign([finished_group(0, [4.0, 0.0], 0)], normalize_std=True)[0]
    assert [item.advantage for item in turns] == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-5)


def test_flat_groups_are_kept_unless_they_are_to_be_dropped():
    groups = [
        finished_group(0, [1.0, 1.0, 1.0]),
        finished_group(1, [1.0, 0.0, 1.0]),
        finished_group(2, [0.1, 0.1, 0.1]),
    ]
    kept = assign(groups)
    assert {group_id: len(turns) for group_id, turns in kept.items()} == {0: 9, 1: 9, 2: 9}
    assert {item.advantage for item in kept[0] + kept[2]} == {0.0}
    dropped = assign(groups, drop_flat_groups=True)
    assert {group_id: len(turns) for group_id, turns in dropped.items()} == {0: 0, 1: 9, 2: 0}
    assert [item.advantage for item in dropped[1]] == [item.advantage for item in kept[1]]


def test_no_groups_give_no_turns():
    assert assign([]) == {}
