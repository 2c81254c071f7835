"""A run's folder: who may take it up, and what a kill leaves behind."""

import json
import math

import pytest

from memrl.config import TrainConfig
from memrl.rl import distributed
from memrl.rl.checkpoint import RunFolder

INPUTS = {"prompts": "a", "data": "b"}


class FakeEngine:
    """Writes and reads one small file, as DeepSpeed would many large ones."""

    def __init__(self):
        self.state = "fresh"

    def save(self, folder):
        folder.mkdir(parents=True)
        (folder / "state").write_text(self.state)

    def load(self, folder):
        self.state = (folder / "state").read_text()


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    distributed.init()
    yield
    distributed.shutdown()


@pytest.fixture
def make(tmp_path):
    """make(): a RunFolder object as a new process would hold it, nothing of an earlier one's lock left."""
    held = []

    def make() -> RunFolder:
        while held:
            if (lock := held.pop()._lock_file) is not None:
                lock.close()
        held.append(RunFolder(tmp_path / "run"))
        return held[0]

    return make


def changed(**sections) -> TrainConfig:
    config = TrainConfig()
    for name, value in sections.items():
        section, _, key = name.rpartition("__")
        setattr(getattr(config, section) if section else config, key, value)
    return config


def saved(folder: RunFolder, *steps: int) -> None:
    engine = FakeEngine()
    for step in steps:
        engine.state = f"after {step}"
        folder.log("metrics.jsonl", {"step": step})
        folder.save(engine, step, keep_last=2)


def test_settings_that_came_to_nothing_bind_nobody(make):
    assert make().open(TrainConfig(), INPUTS) == 0
    assert make().open(changed(optim__lr=1.0), INPUTS) == 0
    assert make().open(changed(resume="no"), INPUTS) == 0


@pytest.mark.parametrize(
    ("fields", "inputs", "named"),
    [
        ({"optim__lr": 1.0}, INPUTS, "optim.lr: 1e-06 -> 1.0"),
        ({}, INPUTS | {"prompts": "c"}, "inputs.prompts: a -> c"),
        ({}, INPUTS | {"data": "d"}, "inputs.data: b -> d"),
        ({"rl__steps": 300, "optim__min_lr_ratio": 0.5}, INPUTS, "rl.steps: 400 -> 300"),
        ({"resume": "no"}, INPUTS, "already holds a run"),
    ],
)
def test_another_run_is_refused_and_the_difference_named(make, fields, inputs, named):
    folder = make()
    folder.open(TrainConfig(), INPUTS)
    saved(folder, 1)
    with pytest.raises(ValueError, match=named):
        make().open(changed(**fields), inputs)
    assert make().open(TrainConfig(), INPUTS) == 1


def test_how_work_is_cut_may_change_and_a_constant_rate_lets_a_run_go_on(make):
    folder = make()
    folder.open(TrainConfig(), INPUTS)
    saved(folder, 1, 2)
    smaller = changed(rl__micro_batch_tokens=99, rollout__cache_gib=1.0, model__checkpoint_layers=False, threads=3)
    assert make().open(smaller, INPUTS) == 2
    assert make().open(changed(rl__steps=900), INPUTS) == 2
    with pytest.raises(ValueError, match=r"has done 2 steps already, and rl\.steps is 1"):
        make().open(changed(rl__steps=1), INPUTS)


def test_two_processes_do_not_train_in_one_folder(make, tmp_path):
    make().open(TrainConfig(), INPUTS)
    with pytest.raises(ValueError, match="another process is training"):
        RunFolder(tmp_path / "run").open(TrainConfig(), INPUTS)


def test_checkpoints_appear_whole_and_only_the_last_are_kept(make):
    folder = make()
    folder.open(TrainConfig(), INPUTS)
    saved(folder, 1, 2, 3)
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == ["step-2", "step-3"]
    (folder.checkpoints / "tmp-4").mkdir()  # a kill while saving
    (folder.checkpoints / "tmp-old-1").mkdir()  # a kill while deleting
    again = make()
    assert again.open(TrainConfig(), INPUTS) == 3
    assert sorted(path.name for path in again.checkpoints.iterdir()) == ["step-2", "step-3"]
    engine = FakeEngine()
    again.load(engine, 3)
    assert engine.state == "after 3"


def test_damaged_checkpoints_are_named_with_the_way_out(make):
    folder = make()
    folder.open(TrainConfig(), INPUTS)
    saved(folder, 1, 2)
    (folder.checkpoints / "step-2" / "state").unlink()
    with pytest.raises(ValueError, match=r"step-2 cannot be read .*delete that folder"):
        make().load(FakeEngine(), 2)
    (folder.checkpoints / "step-2" / "state.json").write_text('{"step": 2')
    with pytest.raises(ValueError, match=r"step-2 is damaged; delete that folder"):
        make().open(TrainConfig(), INPUTS)
    (folder.checkpoints / "step-2" / "state.json").write_text('{"step": 2, "world_size": 4}')
    with pytest.raises(ValueError, match="written by 4 ranks and this run has 1"):
        make().open(TrainConfig(), INPUTS)
    (folder.path / "config.yaml").write_text("rl: [")
    with pytest.raises(ValueError, match=r"config\.yaml .*is missing or damaged"):
        make().open(TrainConfig(), INPUTS)


def test_logs_go_back_to_the_checkpoint_and_are_always_json(make):
    folder = make()
    folder.open(TrainConfig(), INPUTS)
    for step in (1, 2, 3):
        folder.log("metrics.jsonl", {"step": step, "loss": math.nan, "deep": {"norm": math.inf}})
    with open(folder.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "torn')
    folder.truncate_logs(2)
    lines = [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": step, "loss": None, "deep": {"norm": None}} for step in (1, 2)]
