"""An agent of a user's file that returns what is no trajectory costs its own readings, with a reason, and ends no command."""

import json

import pytest

from memrl.commands import eval as eval_command
from memrl.commands import infer
from memrl.engine import distributed
from tests.recorded_run import BASE, make_inputs, recorded_run
from tests.tiny_folder import make_folder

ANSWER = '    turn = await llm.chat(llm.render("code name ?"), kind="answer", max_new_tokens=3)\n'
BROKEN = {
    "nothing": ("    return None\n", "returned None; it must return a memrl.types.Trajectory"),
    "a text": ('    return "red"\n', "returned a str; it must return a memrl.types.Trajectory"),
    "no turns": ("    return Trajectory([])\n", "returned a trajectory without turns"),
    "other turns": ('    return Trajectory(["red"])\n', "a turn is a str; it must be what llm.chat returns"),
    "no text": (f"{ANSWER}    return Trajectory([turn], None)\n", "whose response is None; it must be a text"),
    "words": (f'{ANSWER}    return Trajectory([turn], "x", scores={{"pages": "many"}})\n', "whose score 'pages' is 'many'"),
    "NaN": (f'{ANSWER}    return Trajectory([turn], "x", scores={{"pages": float("nan")}})\n', "whose score 'pages' is nan"),
    "an error": ('    raise RuntimeError("no\\nluck")\n', "RuntimeError: no"),
}


@pytest.fixture
def agent(tmp_path):
    def write(body):
        file = tmp_path / "broken.py"
        file.write_text(f"from memrl.types import Trajectory\n\nasync def read(llm, sample, config):\n{body}")
        return f"{file}:read"

    return write


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_agent_is_a_failed_reading_with_its_reason(tmp_path, capsys, agent, name):
    body, reason = BROKEN[name]
    folder, own = make_folder(tmp_path / "model"), agent(body)
    (tmp_path / "a.txt").write_text("red blue")
    common = ["--model", str(folder), "--device", "cpu"]
    assert infer.main([str(tmp_path / "a.txt"), "-q", "code ?", *common, "--agent.function", own]) == 1
    assert reason in capsys.readouterr().out
    out = tmp_path / "out"
    given = ["--task", "needle", "--lengths", "1", "--samples", "1", "--methods", own, "--out", str(out)]
    assert eval_command.main([*common, *given]) == 1
    [row] = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert reason in row["error"] and row["strict"] == 0.0


def test_training_leaves_the_broken_readings_out_and_goes_on(tmp_path, monkeypatch, agent, capsys):
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    make_inputs(inputs)
    own = agent(
        "    from memrl.agents import memory_agent\n"
        "    return None if sample.question.endswith(('grey ?', 'north ?')) else await memory_agent(llm, sample, config)\n"
    )
    settings = BASE | {"agent.function": own, "agent.caps": {}, "agent.options": {}, "rl.dynamic_rounds": 0}
    distributed.init("cpu")
    done = recorded_run(monkeypatch, tmp_path, settings, inputs)
    distributed.shutdown()
    records = [json.loads(line) for line in (done.folder / "metrics.jsonl").read_text().splitlines()]
    assert len(records) == 2 and 0 < sum(record["reward/errors"] for record in records) < 24
    assert f"agent {own}: ValueError: the agent returned None; it must return" in capsys.readouterr().err
