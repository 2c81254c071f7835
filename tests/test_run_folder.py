"""A run's folder: which settings may resume it, and repairs after a kill."""

import errno
import json
import math

import pytest
import yaml

from memrl.config import TrainConfig
from memrl.engine import distributed
from memrl.training.checkpoint import RunFolder, SaveError

INPUTS = {"prompts": "a", "data": "b"}


class FakeEngine:
    """Writes and reads one small file, as DeepSpeed would many large ones."""

    def __init__(self):
        self.state = "fresh"

    def save(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "state").write_text(self.state)
        return [folder / "state"]

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


def exporter(text: str):
    """What writes an export whose weights are `text`."""

    def export(path):
        path.mkdir()
        (path / "weights").write_text(text)

    return export


def saved(folder: RunFolder, *steps: int) -> None:
    engine = FakeEngine()
    for step in steps:
        engine.state = f"after {step}"
        folder.log("metrics.jsonl", {"step": step})
        folder.save(engine, step, 2, exporter(f"after {step}"))


def test_a_folder_without_steps_may_be_reused_with_new_settings(make):
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


def test_a_run_with_a_falling_rate_is_not_extended_and_the_message_says_why(make):
    folder = make()
    folder.open(changed(optim__min_lr_ratio=0.0), INPUTS)
    saved(folder, 1)
    with pytest.raises(ValueError, match=r"\(rl\.steps: 400 -> 900\); .*and rl\.steps if optim\.min_lr_ratio is 1") as error:
        make().open(changed(optim__min_lr_ratio=0.0, rl__steps=900), INPUTS)
    assert "\n" not in str(error.value)


def test_how_work_is_cut_may_change_and_a_constant_rate_lets_a_run_go_on(make):
    folder = make()
    folder.open(TrainConfig(), INPUTS)
    saved(folder, 1, 2)
    smaller = changed(rl__micro_batch_tokens=99, rollout__cache_gib=1.0, model__checkpoint_layers=False, threads=3)
    assert make().open(smaller, INPUTS) == 2
    assert make().open(changed(rl__steps=900), INPUTS) == 2
    with pytest.raises(ValueError, match=r"Only these may change: run_dir, .*, rl\.steps$"):
        make().open(changed(rl__steps=900, seed=1), INPUTS)
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


def test_a_key_that_the_folder_does_not_know_counts_as_its_default(make):
    folder = make()
    folder.open(TrainConfig(), INPUTS)
    saved(folder, 1)
    old = yaml.safe_load((folder.path / "config.yaml").read_text())
    del old["rl"]["baseline"], old["validation"]
    (folder.path / "config.yaml").write_text(yaml.safe_dump(old))
    with pytest.raises(ValueError, match=r"rl\.baseline: mean -> leave_one_out"):
        make().open(changed(rl__baseline="leave_one_out"), INPUTS)
    assert make().open(changed(validation__samples=3), INPUTS) == 1


def weights(path) -> str:
    return (path / "weights").read_text()


def test_the_export_is_the_checkpoints_and_model_is_the_last_ones(make):
    folder = make()
    folder.open(TrainConfig(), INPUTS)
    for step in (1, 2, 3):
        saved(folder, step)
        assert weights(folder.path / "model") == weights(folder.checkpoints / f"step-{step}" / "model") == f"after {step}"
    assert sorted(path.name for path in folder.path.iterdir() if path.name.startswith(".")) == [".lock"]
    assert weights(folder.checkpoints / "step-2" / "model") == "after 2"


@pytest.mark.parametrize("moment", ["before the swap", "within the swap", "after the swap"])
def test_a_kill_while_model_is_replaced_is_repaired(make, moment):
    folder = make()
    folder.open(TrainConfig(), INPUTS)
    saved(folder, 1, 2)
    model = folder.path / "model"
    old, fresh = model.with_name(".model.old"), model.with_name(".model.new")
    if moment == "before the swap":
        exporter("half")(fresh)
        (model / "weights").unlink()  # a link: the checkpoint keeps its file
        (model / "weights").write_text("after 1")
    elif moment == "within the swap":
        model.rename(old)
        exporter("after 2")(fresh)
    else:
        exporter("after 1")(old)
    assert make().open(TrainConfig(), INPUTS) == 2
    assert weights(model) == "after 2" and not old.exists() and not fresh.exists()


class FullDisk(FakeEngine):
    def save(self, folder):
        super().save(folder)
        raise OSError(errno.ENOSPC, "No space left on device")


def no_room_for_an_export(path):
    path.mkdir()
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(("engine", "export"), [(FullDisk(), exporter("x")), (FakeEngine(), no_room_for_an_export)])
def test_a_full_disk_leaves_the_earlier_checkpoint_and_is_a_one_line_error(make, engine, export):
    folder = make()
    folder.open(TrainConfig(), INPUTS)
    saved(folder, 1)
    with pytest.raises(SaveError, match=r"checkpoint after step 2 could not .*rank 0: .*No space left.*GiB are free") as caught:
        folder.save(engine, 2, 2, export)
    assert "\n" not in str(caught.value)
    assert [path.name for path in folder.checkpoints.iterdir()] == ["step-1"]
    assert weights(folder.path / "model") == "after 1"
    with pytest.raises(SaveError, match="best/ could not be written"):
        folder.keep_best(2, 0.5, no_room_for_an_export)
    assert make().open(TrainConfig(), INPUTS) == 1


def best(folder: RunFolder) -> tuple[int, float, str]:
    record = json.loads((folder.path / "best" / "best.json").read_text())
    return record["step"], record["score"], weights(folder.path / "best")


def begun(make) -> RunFolder:
    """A run that has done a step, so that its settings must not change."""
    folder = make()
    folder.open(TrainConfig(), INPUTS)
    folder.log("metrics.jsonl", {"step": 1})
    return folder


def test_best_of_earlier_settings_without_a_step_is_deleted(make):
    folder = make()
    folder.open(TrainConfig(), INPUTS)
    folder.keep_best(0, 0.9, exporter("another model's start"))
    again = make()
    again.open(changed(model__path="another"), INPUTS)
    assert again.keep_best(0, 0.1, exporter("this one's")) and best(again) == (0, 0.1, "this one's")


def test_best_is_replaced_by_a_strictly_better_score_only(make):
    folder = begun(make)
    scores = {1: 0.5, 2: 0.5, 3: math.nan, 4: 0.4, 5: 0.7, 6: 0.6}
    kept = [step for step, score in scores.items() if folder.keep_best(step, score, exporter(f"after {step}"))]
    assert kept == [1, 5] and best(folder) == (5, 0.7, "after 5")
    again = make()  # killed, and steps 5 and 6 are done again
    again.open(TrainConfig(), INPUTS)
    assert not any(again.keep_best(step, scores[step], exporter("other")) for step in (5, 6))
    assert best(again) == (5, 0.7, "after 5")


def test_a_kill_while_best_is_replaced_leaves_the_old_one(make):
    folder = begun(make)
    folder.keep_best(1, 0.5, exporter("after 1"))
    target = folder.path / "best"
    target.rename(target.with_name(".best.old"))
    exporter("half")(target.with_name(".best.new"))
    again = make()
    again.open(TrainConfig(), INPUTS)
    assert best(again) == (1, 0.5, "after 1")
    assert again.keep_best(2, 0.6, exporter("after 2")) and best(again) == (2, 0.6, "after 2")


def test_scores_of_other_validation_settings_are_not_compared(make):
    folder = begun(make)
    folder.keep_best(1, 0.9, exporter("after 1"))
    again = make()
    again.open(changed(validation__every=7), INPUTS)
    assert not again.keep_best(2, 0.8, exporter("after 2"))
    again = make()
    again.open(changed(validation__samples=9), INPUTS)
    assert again.keep_best(3, 0.2, exporter("after 3")) and best(again) == (3, 0.2, "after 3")


def test_every_log_goes_back_to_the_checkpoint(make):
    folder = make()
    folder.open(TrainConfig(), INPUTS)
    for name in ("validation.jsonl", "rollouts.jsonl"):
        for step in (0, 1, 2):
            folder.log(name, {"step": step})
    folder.truncate_logs(1)
    for name in ("validation.jsonl", "rollouts.jsonl"):
        assert [json.loads(line)["step"] for line in (folder.path / name).read_text().splitlines()] == [0, 1]


def test_scores_of_another_content_of_the_validation_file_are_not_compared(make, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    here, there = tmp_path / "validation.jsonl", tmp_path / "elsewhere" / "validation.jsonl"
    here.write_text("one\n")
    there.write_text("one\n")
    folder = begun(make)
    folder.open(changed(validation__path=str(here)), INPUTS)
    assert folder.keep_best(1, 0.9, exporter("after 1"))
    again = make()
    again.open(changed(validation__path=str(there)), INPUTS)
    assert not again.keep_best(2, 0.8, exporter("after 2"))
    there.write_text("two\n")
    again = make()
    again.open(changed(validation__path=str(there)), INPUTS)
    assert again.keep_best(3, 0.2, exporter("after 3")) and best(again) == (3, 0.2, "after 3")
