"""Named and generated attacks on real commands: each ends in one line, in bounded time and memory, and changes no input."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def attack(folder: Path, *options: object) -> list[dict]:
    """Every outcome of benchmarks/attacks.py. In a process of its own: it forks, which test workers with threads must not."""
    outcomes = folder / "outcomes.json"
    command = [sys.executable, ROOT / "benchmarks" / "attacks.py", "--json", outcomes, *options]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode in (0, 1) and outcomes.exists(), done.stderr
    return json.loads(outcomes.read_text())


def failures(outcomes: list[dict]) -> list[str]:
    return [f"{one['reader']}: {one['name']}: {one['failures']}\n{one['said'][-1000:]}" for one in outcomes if one["failures"]]


def test_named_and_generated_attacks_end_in_one_line(tmp_path):
    outcomes = attack(tmp_path, "--quick", "--count", 22)
    assert not failures(outcomes), "\n\n".join(failures(outcomes))
    assert len(outcomes) > 45 and sum(one["code"] == 2 for one in outcomes) > 25


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_many_attacks_end_in_one_line(tmp_path, seed):
    outcomes = attack(tmp_path, "--count", 230, "--seed", seed)
    assert not failures(outcomes), "\n\n".join(failures(outcomes))


def test_the_machinery_sees_what_it_looks_for(tmp_path):
    from benchmarks import attack_runner

    (tmp_path / "mine").write_text("mine")
    before = attack_runner.contents(tmp_path)
    one = attack_runner.Attack("reader", "name", ["infer"], codes=(2,), says=("config.json",))
    assert attack_runner.wrong_end(one, 2, "", "error: config.json is wrong\n") == []
    for code, said, expected in (
        (0, "", "exit code 0"),
        (-9, "", "exit code -9"),
        (2, "Traceback (most recent call last)\n", "a traceback"),
        (2, "error: config.json\nerror: twice\n", "not one line of error at the end"),
        (2, "error: config.json\nmore\n", "not one line of error at the end"),
        (2, "error: config.json \x1b[2J\n", "a message that is too long, or that controls the terminal"),
        (2, "error: wrong\n", "says none of config.json"),
    ):
        assert expected in attack_runner.wrong_end(one, code, "", said)
    (tmp_path / "mine").write_text("yours")
    assert attack_runner.lost(before, attack_runner.contents(tmp_path), tmp_path, one) == ["mine was changed"]
    (tmp_path / "mine").unlink()
    (tmp_path / "proof").mkdir()
    found = attack_runner.lost(before, attack_runner.contents(tmp_path), tmp_path, one)
    assert found == ["mine was changed", "code was executed"]
