"""Metrics sent to TensorBoard and Weights & Biases, read back from what they wrote."""

import json
import sys

import pytest

from memrl.config import LogOptions
from memrl.training import tracking
from memrl.training.tracking import Tracker, check_tracking

CONFIG = {"rl": {"steps": 3}, "model": {"path": None}}


def scalars(run_dir, name: str) -> list[tuple[int, float]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_holds_every_number_of_every_step(tmp_path):
    pytest.importorskip("tensorboard")
    tracker = Tracker(tmp_path, LogOptions(), CONFIG, 0)
    tracker.log(0, {"validation/strict": 0.25})
    for step in (1, 2):
        tracker.log(step, {"step": step, "reward/strict": step / 4, "loss/kl": None, "note": "text", "optim/updates": 2})
    tracker.close()
    assert scalars(tmp_path, "validation/strict") == [(0, 0.25)]
    assert scalars(tmp_path, "reward/strict") == [(1, 0.25), (2, 0.5)]
    assert scalars(tmp_path, "optim/updates") == [(1, 2.0), (2, 2.0)]
    for name in ("step", "loss/kl", "note"):
        with pytest.raises(KeyError):
            scalars(tmp_path, name)


def test_config_stands_in_tensorboard_once(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for first_step in (0, 0, 2):
        Tracker(tmp_path, LogOptions(), CONFIG, first_step).close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (text,) = events.Tensors("config/text_summary")
    assert b"steps: 3" in text.tensor_proto.string_val[0]


@pytest.mark.parametrize("first_step", [0, 2])
def test_resumed_run_logs_each_step_to_tensorboard_once(tmp_path, first_step):
    pytest.importorskip("tensorboard")
    killed = Tracker(tmp_path, LogOptions(), CONFIG, 0)
    for step in range(0, 5):
        killed.log(step, {"reward/strict": 0.0})  # never closed: every step is in the file as soon as it is logged
    resumed = Tracker(tmp_path, LogOptions(), CONFIG, first_step)
    for step in range(first_step + 1 if first_step else 0, 4):
        resumed.log(step, {"reward/strict": 1.0})
    resumed.close()
    kept = range(first_step + 1) if first_step else []
    fresh = range(first_step + 1, 4) if first_step else range(4)
    assert scalars(tmp_path, "reward/strict") == [(s, 0.0) for s in kept] + [(s, 1.0) for s in fresh]


def test_nothing_is_written_where_nothing_is_wanted(tmp_path):
    tracker = Tracker(tmp_path, LogOptions(tensorboard=False), CONFIG, 0)
    tracker.log(1, {"reward/strict": 1.0})
    tracker.close()
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_tensorboard_installed_goes_on_without_a_warning(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tracking, "_is_installed", lambda package: False)
    tracker = Tracker(tmp_path, LogOptions(), CONFIG, 0)
    for step in (1, 2):
        tracker.log(step, {"reward/strict": 1.0})
    tracker.close()
    assert capsys.readouterr().err == "" and list(tmp_path.iterdir()) == []


def test_wandb_project_without_the_package_is_refused(monkeypatch):
    monkeypatch.setattr(tracking, "_is_installed", lambda package: False)
    check_tracking(LogOptions())
    with pytest.raises(ValueError, match=r"'mine'.*pip install wandb"):
        check_tracking(LogOptions(wandb_project="mine"))


def test_folder_of_a_packages_name_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "no_such_tracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not tracking._is_installed("no_such_tracker")
    assert tracking._is_installed("torch")


def test_tracker_that_fails_is_dropped_with_one_warning(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    tracker = Tracker(tmp_path, LogOptions(), CONFIG, 0)
    tracker.log(1, {"reward/strict": 1.0})
    tracker._trackers[0]._writer.close()
    tracker._trackers[0]._writer.flush = lambda: 1 / 0
    for step in (2, 3):
        tracker.log(step, {"reward/strict": 1.0})
    tracker.close()
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and "TensorBoard failed" in errors and "ZeroDivisionError" in errors


def test_tracker_that_cannot_start_does_not_end_the_run(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    tracker = Tracker(tmp_path, LogOptions(), CONFIG, 0)
    tracker.log(1, {"reward/strict": 1.0})
    tracker.close()
    assert "could not be started" in capsys.readouterr().err


class FakeRun:
    """Stands for the server, which a test must not contact: its steps only grow."""

    def __init__(self, step: int):
        self.step, self.logged, self.finished = step, [], False

    def log(self, numbers, step):
        assert step >= self.step
        self.step = step
        self.logged.append((step, numbers))

    def finish(self):
        self.finished = True


@pytest.fixture
def wandb(monkeypatch):
    class Module:
        __spec__ = type("Spec", (), {"origin": "here"})
        calls, run = [], FakeRun(0)

        @classmethod
        def init(cls, **options):
            cls.calls.append(options)
            return cls.run

    monkeypatch.setitem(sys.modules, "wandb", Module)
    return Module


def test_wandb_run_is_resumed_by_its_id_and_gets_no_step_twice(tmp_path, wandb):
    options = LogOptions(tensorboard=False, wandb_project="mine")
    first = Tracker(tmp_path, options, CONFIG, 0)
    for step in (1, 2, 3):
        first.log(step, {"reward/strict": 0.0})
    wandb.run = FakeRun(4)  # as the server resumes it: one beyond the last step that it knows
    second = Tracker(tmp_path, options, CONFIG, 2)
    for step in (3, 4):
        second.log(step, {"reward/strict": 0.0})
    second.close()
    assert [step for step, _ in wandb.run.logged] == [4] and wandb.run.finished
    ids = [call["id"] for call in wandb.calls]
    assert ids[0] == ids[1] == (tmp_path / "wandb_id.txt").read_text().strip()
    assert {(call["project"], call["resume"], call["name"]) for call in wandb.calls} == {("mine", "allow", tmp_path.name)}
    assert json.dumps(wandb.calls[0]["config"]) == json.dumps(CONFIG)


def test_wandb_failing_midway_leaves_tensorboard_alone(tmp_path, wandb, capsys):
    pytest.importorskip("tensorboard")
    tracker = Tracker(tmp_path, LogOptions(wandb_project="mine"), CONFIG, 0)
    tracker.log(5, {"reward/strict": 0.5})
    wandb.run.log = None
    for step in (6, 7):
        tracker.log(step, {"reward/strict": 0.5})
    tracker.close()
    assert scalars(tmp_path, "reward/strict") == [(5, 0.5), (6, 0.5), (7, 0.5)]
    assert capsys.readouterr().err.count("Weights & Biases failed") == 1
