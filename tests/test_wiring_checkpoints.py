"""What is renamed to its final name is on the disk before: after a power failure a name never stands for half a file."""

import os
from pathlib import Path

import pytest

from memrl.config import TrainConfig
from memrl.engine import distributed
from memrl.engine.deepspeed_files import save_deepspeed
from memrl.training.checkpoint import RunFolder
from memrl.utils.files import write_whole
from memrl.utils.journal import Journal
from tests.test_run_folder import FakeEngine, exporter


class Disk:
    """Flushes and renames in order, and what was not flushed at each rename.

    Attributes:
        unflushed: by the new name, the files and folders under it that were not flushed when they got that name.
        flushed: what has been flushed since `forget`; files are known by their number, which a rename leaves alone.
    """

    def __init__(self, monkeypatch):
        self.flushed: set[int] = set()
        self.unflushed: dict[str, list[str]] = {}
        self.watched: list[Path] = []
        self.flushed_at: dict[str, set[int]] = {}
        fsync, rename, replace = os.fsync, Path.rename, os.replace

        def counted_fsync(descriptor: int) -> None:
            self.flushed.add(os.fstat(descriptor).st_ino)
            fsync(descriptor)

        def counted_rename(source: Path, target):
            self._note(source, target)
            return rename(source, target)

        def counted_replace(source, target) -> None:
            self._note(source, target)
            replace(source, target)

        monkeypatch.setattr(os, "fsync", counted_fsync)
        monkeypatch.setattr(Path, "rename", counted_rename)
        monkeypatch.setattr(os, "replace", counted_replace)

    def _note(self, source, target) -> None:
        source = Path(source)
        everything = [source, *source.rglob("*")] if source.is_dir() else [source]
        name = Path(target).name
        self.unflushed[name] = [str(path) for path in everything if not self.is_flushed(path)]
        self.flushed_at[name] = set(self.flushed)

    def is_flushed(self, path: Path) -> bool:
        return path.stat().st_ino in self.flushed


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    distributed.init("cpu")
    yield
    distributed.shutdown()


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.open(TrainConfig(), {})
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        folder.log(name, {"step": 1})
    return folder


def test_a_checkpoint_and_the_logs_are_on_the_disk_before_it_has_its_name(folder, monkeypatch):
    disk = Disk(monkeypatch)
    folder.save(FakeEngine(), 1, 2, exporter("weights"))
    assert disk.unflushed["step-1"] == []
    logs = {(folder.path / name).stat().st_ino for name in ("metrics.jsonl", "rollouts.jsonl")}
    assert logs <= disk.flushed_at["step-1"], "a resumed run does not write these lines again"
    assert disk.unflushed["model"] == []


def test_the_names_of_checkpoints_are_on_the_disk_before_model_is_replaced_and_older_ones_go(folder, monkeypatch):
    folder.save(FakeEngine(), 1, 1, exporter("weights"))
    disk = Disk(monkeypatch)
    folder.save(FakeEngine(), 2, 1, exporter("weights"))
    names = folder.checkpoints.stat().st_ino
    assert names not in disk.flushed_at["step-2"]
    assert names in disk.flushed_at["model"] and names in disk.flushed_at["tmp-old-1"]


def test_the_best_policy_is_on_the_disk_before_it_has_its_name(folder, monkeypatch):
    disk = Disk(monkeypatch)
    folder.keep_best(1, 0.5, exporter("weights"))
    assert disk.unflushed["best"] == []


def test_each_rank_flushes_what_it_wrote_of_a_checkpoint(tmp_path, monkeypatch):
    class Writer:
        def save(self, state, path) -> None:
            Path(path).write_text(state)

    class Engine:
        checkpoint_engine = Writer()

        def save_checkpoint(self, folder: str, **_) -> None:
            self.checkpoint_engine.save("state", f"{folder}/rank_1.pt")

    disk = Disk(monkeypatch)
    save_deepspeed(Engine(), tmp_path)
    assert disk.is_flushed(tmp_path / "rank_1.pt")


def test_files_are_on_the_disk_before_they_replace_others(tmp_path, monkeypatch):
    disk = Disk(monkeypatch)
    write_whole(tmp_path / "whole.json", "text")
    with Journal(tmp_path / "lines.jsonl") as journal:
        journal.append({"step": 1})
        journal.keep(lambda record: True)
    assert disk.unflushed == {"whole.json": [], "lines.jsonl": []}
