"""The table that a training run prints."""

import io
import math

import pytest

from memrl.config import RewardOptions, RLOptions, RolloutOptions, TrainConfig
from memrl.training.console import StepTable, command_name, next_commands, recipe_line

METRICS = {
    "reward/mean": 0.5416,
    "loss/kl": 0.00012345,
    "optim/grad_norm": 0.124367,
    "rollout/response_tokens": 3.7048,
}
SECONDS = {"step_s": 1.94, "tokens_per_s": 2140.4, "rollout_s": 1.0}


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run_steps(stream, steps, total=400, start=0, seconds_each=4.0, **extra) -> list[str]:
    clock = Clock()
    with StepTable(total, start, stream, clock=clock) as table:
        for step in steps:
            clock.now += seconds_each
            table.row(step, METRICS | extra, SECONDS)
    return stream.getvalue().splitlines()


def test_log_file_gets_the_header_once_a_row_every_ten_seconds_and_the_last_one():
    lines = run_steps(io.StringIO(), range(1, 8))
    assert lines[0].split() == ["step", "reward", "valid", "kl", "grad", "norm", "tokens", "tok/s", "s/step", "left"]
    assert [line.split()[0] for line in lines[1:-1]] == ["1/400", "4/400", "7/400"]
    assert lines[1].split() == ["1/400", "0.542", "-", "0.000123", "0.124", "3.7", "2,140", "1.9", "26:36"]
    assert lines[-1] == "train  7/400 steps  2%  0:28 elapsed, 26:12 left"
    assert {len(line) for line in lines[:-1]} == {79}, "columns must line up and fit a terminal of 80"


def test_row_that_was_held_back_is_shown_at_the_end():
    lines = run_steps(io.StringIO(), [1, 2], total=2)
    assert [line.split()[0] for line in lines[1:]] == ["1/2", "2/2", "train"]
    assert lines[-1] == "train  2/2 steps  100%  0:08 elapsed"


def test_interrupted_run_shows_its_last_row():
    stream = io.StringIO()
    with pytest.raises(KeyboardInterrupt), StepTable(9, 0, stream) as table:
        table.row(1, METRICS, SECONDS)
        table.row(2, METRICS, SECONDS)
        raise KeyboardInterrupt
    assert stream.getvalue().splitlines()[2].split()[0] == "2/9"


def test_time_left_is_from_the_pace_of_this_process():
    lines = run_steps(io.StringIO(), [301], total=400, start=300, seconds_each=20.0)
    assert lines[1].split()[-1] == "33:00"  # 99 steps of 20 seconds


def test_missing_values_are_dashes_and_numbers_that_are_none_are_shown():
    stream = io.StringIO()
    with StepTable(5, 0, stream) as table:
        table.row(1, {"reward/mean": None, "optim/grad_norm": math.inf, "loss/kl": math.nan}, {})
    assert stream.getvalue().splitlines()[1].split()[:7] == ["1/5", "-", "-", "nan", "inf", "-", "-"]


def test_validation_score_stays_until_the_next_one():
    stream, clock = io.StringIO(), Clock()
    with StepTable(5, 0, stream, clock=clock) as table:
        for step, score in enumerate([0.25, None, 0.75], 1):
            clock.now += 20
            table.row(step, METRICS | ({} if score is None else {"validation/reward": score}), SECONDS)
    assert [line.split()[2] for line in stream.getvalue().splitlines()[1:4]] == ["0.250", "0.250", "0.750"]


def test_no_step_at_all_prints_no_table():
    stream = io.StringIO()
    with StepTable(5, 5, stream):
        pass
    assert "reward" not in stream.getvalue()


def test_terminal_gets_every_row_and_a_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    text = "\n".join(run_steps(Terminal(), range(1, 6), total=5))
    assert "\x1b[" in text and text.count("grad norm") == 1
    assert all(f" {step}/5   0.542" in text for step in range(1, 6))
    assert "5/5 steps" in text


def test_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    lines = run_steps(Terminal(), range(1, 8))
    assert [line.split()[0] for line in lines] == ["step", "1/400", "4/400", "7/400", "train"]


def test_a_finished_miniature_names_commands_that_read_evaluate_and_show_it():
    from memrl.data.needle import make_sample

    config = TrainConfig(run_dir="runs/my tiny")
    read, evaluate, trace = next_commands(config)
    assert "memrl data needle --chunks 512 --seed 1 --out needle.txt" in read
    assert f"memrl infer needle.txt -q \"{make_sample(512, 1).question}\" --model 'runs/my tiny/model'" in read
    assert evaluate == "memrl eval --model 'runs/my tiny/model' --task needle --lengths 1,8,64,512"
    assert trace == "memrl trace 'runs/my tiny/rollouts.jsonl' --out 'runs/my tiny/rollouts.html'"
    config.log.rollouts = 0
    assert next_commands(config) == [read, evaluate]


def test_a_run_of_a_users_agent_names_its_file_in_every_command_that_runs_it():
    config = TrainConfig(run_dir="run")
    config.agent.function = "my own.py:read"
    read, evaluate, _ = next_commands(config)
    assert read.endswith("--model run/model --agent.function 'my own.py:read'")
    assert evaluate.startswith("memrl eval --model run/model --agent.function 'my own.py:read' --task needle")
    config.agent.function, config.data.tasks = "gated", ["bench_update"]
    assert next_commands(config)[0] == "memrl eval --model run/model --task bench --methods gated,one_shot,oracle,chance"


def test_commands_begin_as_this_python_can_start_them(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.executable", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.chdir(tmp_path)
    assert command_name() == ".venv/bin/python -m memrl"
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    command = tmp_path / ".venv" / "bin" / "memrl"
    command.touch(mode=0o755)
    assert command_name() == ".venv/bin/memrl"
    monkeypatch.setenv("PATH", str(command.parent))
    assert command_name() == "memrl"


def test_a_run_of_the_users_own_model_is_evaluated_on_its_validation_file():
    config = TrainConfig(run_dir="run")
    config.model.path, config.validation.path = "folder", "dev.jsonl"
    assert next_commands(config)[:2] == [
        'memrl infer FILE.txt -q "QUESTION" --model run/model',
        "memrl eval --model run/model --task dev.jsonl",
    ]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({}, "as in the original's recipe: exact-match reward, KL 0.001, clip 0.2/0.2, no division by the std, top_p 1"),
        (
            {"rl": RLOptions(clip_high=0.28, normalize_std=True)},
            "differs from the original's recipe: rl.clip_high 0.28 (original: 0.2), rl.normalize_std True (original: False)",
        ),
        (
            {"reward": RewardOptions("f.py:g"), "rl": RLOptions(kl_coef=0.0, clip_low=0.1)},
            "differs from the original's recipe: reward.function f.py:g (original: the exact match), rl.kl_coef 0.0 (original: "
            "0.001), rl.clip_low 0.1 (original: 0.2)",
        ),
        (
            {"rollout": RolloutOptions(top_p=0.9)},
            "differs from the original's recipe: rollout.top_p 0.9 (original: 1.0)",
        ),
    ],
)
def test_the_recipe_line_says_what_differs_from_the_original(change, line):
    assert recipe_line(TrainConfig(**change)) == line
