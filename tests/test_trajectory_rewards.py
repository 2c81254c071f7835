"""Reward functions that see the whole trajectory and may reward its turns."""

import asyncio
import json
import math

import pytest

from memrl.scoring.reward_pool import RewardPool
from memrl.scoring.reward_worker import judge, load_function
from memrl.types import Sample, Trajectory, Turn

FUNCTIONS = r"""
def described(trajectory, answers, metadata):
    seen = [vars(turn) for turn in trajectory.turns]
    expected = [
        {"kind": "memory", "text": "Ed is blue", "finish_reason": "length", "tokens": 3, "memory": "Ed is blue", "reward": 0.5},
        {"kind": "answer", "text": "\\boxed{blue}", "finish_reason": "stop", "tokens": 2, "memory": None, "reward": 0.0},
    ]
    rest = (trajectory.response, trajectory.memory, answers, metadata)
    return seen == expected and rest == ("\\boxed{blue}", "Ed is blue", ["blue"], {"page": 7})

def per_turn(trajectory, answers, metadata):
    return [float(answers[0] in turn.text) + len(trajectory.turns) for turn in trajectory.turns]

def both(trajectory, answers, metadata):
    return {"reward": 0.25, "turns": [1, True], "held": 1.0}

def by_metadata(trajectory, answers, metadata):
    return metadata["value"]

def of_prompts(trajectory, answers, metadata, prompts):
    assert prompts == [turn.prompt for turn in trajectory.turns]
    return {"reward": 0.0, "turns": [len(prompt) for prompt in prompts]}
"""


def make_trajectory() -> Trajectory:
    memory = Turn("memory", [1] * 9, [2, 3, 4], [-1.0] * 3, "length", "Ed is blue", memory="Ed is blue", reward=0.5)
    answer = Turn("answer", [1] * 4, [5, 6], [-1.0] * 2, "stop", "\\boxed{blue}")
    return Trajectory([memory, answer], response=answer.text, memory="Ed is blue")


@pytest.fixture(scope="module")
def graders(tmp_path_factory):
    path = tmp_path_factory.mktemp("functions") / "graders.py"
    path.write_text(FUNCTIONS)
    return path


class PoolWithoutProcess(RewardPool):
    """The real pool, whose worker keeps the last message."""

    def __init__(self, graders, name: str, on_error: str = "skip"):
        self._function, self._on_error, self._printed = name, on_error, set()
        self.function = load_function(f"{graders}:{name}")

    def _call(self, trajectory, sample):
        from memrl.scoring.reward_worker import read_by

        self.message = json.dumps(self._request(trajectory, sample, read_by(self.function)))
        return json.loads(json.dumps(judge(self.function, *json.loads(self.message))))

    @property
    def _threads(self):
        from tests.recorded_run import AtOnce

        return AtOnce


def scored(pool: RewardPool, trajectory: Trajectory | None = None, **metadata) -> Trajectory:
    trajectory = trajectory or make_trajectory()
    asyncio.run(pool.score(trajectory, Sample("s", "q", "", ("blue",), metadata=metadata or {"page": 7})))
    return trajectory


def rewards(trajectory: Trajectory) -> list[float]:
    return [turn.reward for turn in trajectory.turns]


def test_processes_score_trajectories_and_prompts_are_sent_to_those_who_ask(graders):
    with RewardPool(f"{graders}:of_prompts", 1, 20.0) as pool:
        pool.decode = lambda ids: "x" * len(ids)
        done = scored(pool)
    assert (done.reward, rewards(done), done.error) == (0.0, [9.0, 4.0], "")


def test_a_function_of_the_trajectory_sees_its_turns(graders):
    assert scored(PoolWithoutProcess(graders, "described")).reward == 1.0


def test_prompts_are_not_sent_to_a_function_that_does_not_ask(graders):
    pool = PoolWithoutProcess(graders, "described")
    pool.decode = lambda ids: pytest.fail("prompts were decoded")
    scored(pool)
    assert "prompt" not in pool.message and len(pool.message) < 500


def test_a_list_rewards_the_turns_and_the_strict_verifier_the_outcome(graders):
    done = scored(PoolWithoutProcess(graders, "per_turn"))
    assert (rewards(done), done.reward, done.scores["reward"]) == ([3.0, 3.0], 1.0, 1.0)
    wrong = make_trajectory()
    wrong.response = "red"
    assert scored(PoolWithoutProcess(graders, "per_turn"), wrong).reward == 0.0


def test_a_dict_may_reward_both_and_hold_further_scores(graders):
    done = scored(PoolWithoutProcess(graders, "both"))
    assert (rewards(done), done.reward) == ([1.0, 1.0], 0.25)
    assert done.scores == {"strict": 1.0, "lenient": 1.0, "reward": 0.25, "held": 1.0}


def test_a_number_leaves_the_turns_as_the_agent_rewarded_them(graders):
    done = scored(PoolWithoutProcess(graders, "by_metadata"), value=0.75)
    assert (rewards(done), done.reward) == ([0.5, 0.0], 0.75)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ([1.0], "ValueError: 1 rewards of turns were returned for a trajectory of 2 turns"),
        ([], "ValueError: 0 rewards of turns were returned for a trajectory of 2 turns"),
        ([1.0, math.nan], "ValueError: the reward of turn 1 is nan, not a finite number"),
        ([None, 1.0], "TypeError: the reward of turn 0 is None, not a number"),
        (["1", 1.0], "TypeError: the reward of turn 0 is '1', not a number"),
        ([[1.0], 1.0], "TypeError: the reward of turn 0 is [1.0], not a number"),
        ([1e7, 0.0], "ValueError: the reward of turn 0 is 1e+07; rewards must be between -1,000,000 and 1,000,000"),
        ({"reward": 1.0, "turns": [1.0, 2.0, 3.0]}, "ValueError: 3 rewards of turns were returned for a trajectory of 2 turns"),
        ({"reward": 1.0, "turns": 1.0}, "TypeError: turns is 1.0, not a list of numbers"),
        ({"turns": [1.0, 2.0]}, 'ValueError: the returned dict has no "reward"'),
        ("1.0", "TypeError: reward is '1.0', not a number"),
        (None, "TypeError: reward is None, not a number"),
    ],
)
def test_what_are_no_rewards_of_the_turns_is_left_out_and_says_why(graders, value, error):
    done = scored(PoolWithoutProcess(graders, "by_metadata"), value=value)
    assert (done.error, done.left_out, rewards(done)) == (error, True, [0.5, 0.0])
    assert done.scores == {"strict": 1.0, "lenient": 1.0}


@pytest.mark.parametrize(
    ("value", "error"), [(math.nan, "ValueError: the reward of turn 1 is nan"), (None, "TypeError: the reward")]
)
def test_what_an_agent_gave_and_is_no_reward_leaves_the_trajectory_out(graders, value, error, capsys):
    trajectory = make_trajectory()
    trajectory.turns[1].reward = value
    done = scored(PoolWithoutProcess(graders, "by_metadata"), trajectory, value=1.0)
    assert done.error.startswith(error) and done.left_out
    assert f"the agent: {error}" in capsys.readouterr().err
    assert (done.reward, rewards(done)) == (0.0, [0.0, 0.0]), "also if a failed reward counts as zero"
    trajectory = make_trajectory()
    trajectory.turns[1].reward = value
    assert rewards(scored(PoolWithoutProcess(graders, "per_turn"), trajectory)) == [3.0, 3.0], "the function's take their place"


def test_a_function_of_the_response_may_still_call_a_score_turns():
    assert judge(lambda *_: {"reward": 1.0, "turns": 3}, "", [], "any", {}, None)["scores"]["turns"] == 3.0
    assert "turns is [1.0]" in judge(lambda *_: {"reward": 1.0, "turns": [1.0]}, "", [], "any", {}, None)["error"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f(trajectory, answers): pass", r"f must take \(trajectory, answers, metadata\): too many positional arguments"),
        ("def f(response, answers, metadata, prompts): pass", r"f must take \(response, answers, metadata\): missing a required"),
    ],
)
def test_a_function_with_other_parameters_is_refused_at_the_start(tmp_path, source, message):
    (tmp_path / "mistake.py").write_text(source)
    with pytest.raises(ValueError, match=message):
        load_function(f"{tmp_path / 'mistake.py'}:f")
