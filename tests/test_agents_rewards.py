"""The papers' rewards in docs/examples, against their equations."""

import importlib.util
from pathlib import Path

import pytest

from memrl.scoring.reward_worker import judge, load_function
from memrl.types import Trajectory, Turn

PATH = Path(__file__).resolve().parent.parent / "docs" / "examples" / "agent_rewards.py"
specification = importlib.util.spec_from_file_location("agent_rewards", PATH)
rewards = importlib.util.module_from_spec(specification)
specification.loader.exec_module(rewards)


def trajectory(*turns: tuple[str, str], response: str = "\\boxed{42}") -> Trajectory:
    return Trajectory([Turn(kind, [], [], [], "stop", text) for kind, text in (*turns, ("answer", response))], response)


def tags(memory: str | None = None, stop: bool = False) -> tuple[str, str]:
    check = "<check>no</check>" if memory is None else f"<check>yes</check><update>{memory}</update>"
    return "memory", f"{check}<next>{'end' if stop else 'continue'}</next>"


@pytest.mark.parametrize(
    ("turns", "reward", "per_turn", "leave"),
    [
        ((tags(), tags("a"), tags("b", stop=True)), 2.0, [1, 1, 1], 0),
        ((tags(), tags("a", stop=True)), 1.25, [1, 1], -0.75),
        ((tags("x"), tags("a"), tags(), tags()), 1.5, [-1, 1, -1, 1], -0.5),
        ((tags(), tags("a"), ("memory", "b")), 1.0, [1, 1, -1], 0),  # a broken form
    ],
)
def test_the_gates_rewards_are_the_papers(turns, reward, per_turn, leave):
    got = rewards.gates(trajectory(*turns), ["42"], {"evidence_chunks": [1, 2]})
    assert got == {"reward": reward, "turns": [*per_turn, 0], "exit": leave, "format": float(reward != 1.0)}
    wrong = rewards.gates(trajectory(*turns, response="\\boxed{43}"), ["42"], {"evidence_chunks": [1, 2]})
    assert wrong == got | {"reward": reward - 1}


def test_gates_in_bare_words_and_the_miniatures_needle():
    turns = (("memory", "keep"), ("memory", "emma bear stop"))
    got = rewards.word_gates(trajectory(*turns), ["42"], {"needle_chunk": 1})
    assert got == {"reward": 2.0, "turns": [1, 1, 0], "exit": 0, "format": 1}


@pytest.mark.parametrize(("num_passes", "bonus"), [(1, 0.2), (2, 0.1), (3, 0.0)])
def test_fewer_passes_earn_more(num_passes, bonus):
    turns = [("check", ""), ("check", ""), ("merge", "m")] * num_passes
    assert rewards.passes(trajectory(*turns), ["42"], {}) == {"reward": pytest.approx(1 + bonus), "passes": num_passes}


@pytest.mark.parametrize("name", ["gates", "word_gates", "passes"])
def test_a_reward_worker_takes_them(name):
    function = load_function(f"{PATH}:{name}")
    turns = [{"kind": "memory", "text": "keep stop"}, {"kind": "answer", "text": ""}]
    sent = {"response": "\\boxed{42}", "memory": "m", "turns": turns}
    reply = judge(function, "\\boxed{42}", ["42"], "any", {"needle_chunk": 0}, sent)
    assert reply["error"] == "" and reply["scores"]["reward"] > 0
    assert len(reply["turns"]) == (0 if name == "passes" else 2)
