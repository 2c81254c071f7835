"""The exercises: each has one bug, which its check finds, and the solutions pass."""

import importlib.util
import random
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "exercises"
spec = importlib.util.spec_from_file_location("exercise_check", FOLDER / "check.py")
assert spec is not None and spec.loader is not None
checker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(checker)
EXERCISES = checker.EXERCISES

# The bug of each exercise, and what belongs in its place.
REPAIRS = {
    1: (
        "    num_groups = len(group_ids.unique())\n    means = rewards.view(num_groups, -1).mean(dim=1)\n"
        "    return rewards - means.repeat_interleave(len(rewards) // num_groups)\n",
        "    return rewards - torch.stack([rewards[group_ids == i].mean() for i in group_ids])\n\n\nimport torch\n",
    ),
    2: ("logprobs[prompt_len:]", "logprobs[prompt_len - 1 : -1]"),
    3: ("= place < lens[:, None]", "= (place < lens[:, None]) & (place >= prompt_lens[:, None])"),
    4: ("clamp(1 - clip_high, 1 + clip_low)", "clamp(1 - clip_low, 1 + clip_high)"),
    5: ("logprobs - ref_logprobs", "ref_logprobs - logprobs"),
    6: ("torch.stack([losses.mean() for losses in turn_losses])", "torch.cat(turn_losses)"),
    7: ("[-memory_tokens:]", "[:memory_tokens]"),
    8: ("[token for token in response if token != end_id]", "response"),
    9: (
        "        old_logprobs = logprobs.detach()\n",
        "        old_logprobs = logprobs.detach() if _ == 0 else old_logprobs\n",
    ),
    10: ("torch.tensor([slot + 1])", "torch.tensor([slot])"),
}


def source(number: int) -> str:
    return (FOLDER / f"{EXERCISES[number].file}.py").read_text(encoding="utf-8")


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.py"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("number", EXERCISES)
def test_the_bug_is_found_and_hinted_at(number):
    assert EXERCISES[number].hint in checker.check(number)


@pytest.mark.parametrize("number", EXERCISES)
def test_the_repaired_exercise_passes(number, tmp_path):
    """So the bug is the only one."""
    bug, repair = REPAIRS[number]
    assert source(number).count(bug) == 1
    assert checker.check(number, write(tmp_path, source(number).replace(bug, repair))) is None


@pytest.mark.parametrize("number", EXERCISES)
def test_the_solution_passes(number):
    assert checker.check(number, FOLDER / "solutions.py") is None


@pytest.mark.parametrize("number", EXERCISES)
def test_a_function_that_knows_one_result_does_not_pass(number):
    exercise = EXERCISES[number]
    checker.torch.manual_seed(0)
    arguments = exercise.inputs(random.Random(0))
    answer = exercise.expected(*arguments)
    assert "random input" in checker.find_fault(exercise, lambda *_: answer)


def test_a_solution_that_calls_the_package_does_not_count(tmp_path):
    path = write(tmp_path, "from memrl.rl.loss import k3 as kl_penalty\n")
    assert checker.check(5, path) == "mine.py imports the package or the solutions; write the function with torch alone"
    path = write(tmp_path, "def kl_penalty(a, b):\n    from solutions import kl_penalty\n    return kl_penalty(a, b)\n")
    assert "imports the package or the solutions" in checker.check(5, path)


def test_faults_of_a_solution_are_one_line(tmp_path):
    cases = {
        "def kl_penalty(a, b):\n    raise KeyError('a\\nb')\n": "kl_penalty raises KeyError: 'a\\nb'",
        "def other(a, b):\n    return a\n": "mine.py has no function kl_penalty; keep its name",
        "def kl_penalty(a, b)\n": "expected ':'",
        "def kl_penalty(a, b):\n    return None\n": "kl_penalty raises AttributeError",
    }
    for text, message in cases.items():
        fault = checker.check(5, write(tmp_path, text))
        assert message in fault and "\n" not in fault


def test_the_command_names_what_is_unsolved(capsys, monkeypatch):
    assert checker.main(["3"]) == 1
    assert capsys.readouterr().out.startswith("exercise 3: not solved: ")
    monkeypatch.setattr(checker, "check", lambda number: None if number != 4 else "a fault")
    assert checker.main([]) == 1 and checker.main(["3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[3] == "exercise 4: not solved: a fault" and lines[0] == "exercise 1: solved" and len(lines) == 11
    with pytest.raises(SystemExit, match="2"):
        checker.main(["11"])


def test_the_page_lists_every_exercise_and_names_files_that_exist():
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"(?m)^\| (\d+) \| `(\w+)\.py`", page))
    assert rows == {str(number): exercise.file for number, exercise in EXERCISES.items()}
    assert sorted(path.stem for path in FOLDER.glob("ex*.py")) == sorted(rows.values())
    repository = FOLDER.parent.parent
    for path in re.findall(r"`(memrl/[\w/]+\.py)`", page):
        assert (repository / path).is_file(), path
    for link in re.findall(r"\]\(([^)]+)\)", page):
        assert (FOLDER / link).exists(), link
