"""Damaged and foreign run folders: damage is found and said, the run goes back to what is whole, nothing of a user's is lost."""

import json
import math
import os
import random
import shutil
import signal
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memrl.config import TrainConfig
from memrl.engine import distributed
from memrl.training.checkpoint import RunFolder
from memrl.utils.checksums import SUMS
from tests.test_run_folder import INPUTS, FakeEngine, best, changed, exporter, saved, weights


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    distributed.init()
    yield
    distributed.shutdown()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """A reader that waits for a pipe fails instead of hanging; the disk need not be flushed."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    signal.alarm(60)
    yield
    signal.alarm(0)


def opened(path: Path, config: TrainConfig | None = None, inputs: dict | None = None) -> tuple[RunFolder, int]:
    """Open the folder as a new process would, with the lock given back at once."""
    folder = RunFolder(path)
    try:
        return folder, folder.open(config or TrainConfig(), inputs or INPUTS)
    finally:
        if folder._lock_file is not None:
            folder._lock_file.close()


@pytest.fixture
def run(tmp_path) -> Path:
    folder, _ = opened(tmp_path / "run")
    saved(folder, 1, 2)
    folder.keep_best(1, 0.5, exporter("after 1"))
    return tmp_path / "run"


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"
    }


# --- checkpoints ------------------------------------------------------------------------------------------------


def flip(path: Path, bit: int) -> None:
    """Flip one bit in a file of its own: a hard link's other names keep the old content."""
    content = bytearray(path.read_bytes())
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    path.unlink()
    path.write_bytes(content)


FILES = ("state", "state.json", "model/weights", SUMS)


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_found_and_the_run_goes_back_to_the_checkpoint_before(run, name, capsys):
    step = run / "checkpoints" / "step-2"
    whole = (step / name).read_bytes()
    bits = range(len(whole) * 8)
    for bit in random.Random(0).sample(bits, min(len(bits), 12)):
        flip(step / name, bit)
        folder, done = opened(run)
        assert done == 1 and weights(run / "model") == "after 1"
        damaged = run / "checkpoints" / "damaged-step-2"
        [line] = [line for line in capsys.readouterr().err.splitlines() if "damaged" in line]
        assert line.startswith("warning: the checkpoint after step 2 is damaged (") and line.endswith(
            ", the run goes back to step 1"
        )
        assert (damaged / name).read_bytes() != whole and (damaged / "model" / "weights").exists()
        engine = FakeEngine()
        folder.load(engine, done)
        assert engine.state == "after 1"
        damaged.rename(step)
        (step / name).write_bytes(whole)
    assert opened(run)[1] == 2 and weights(run / "model") == "after 2" and best(RunFolder(run)) == (1, 0.5, "after 1")


def test_the_logs_follow_the_checkpoint_and_the_step_is_saved_again_beside_the_damaged_one(run):
    flip(run / "checkpoints" / "step-2" / "state", 3)
    folder, done = opened(run)
    folder.truncate_logs(done)
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1]
    saved(folder, 2)
    flip(run / "checkpoints" / "step-2" / "state", 3)
    assert opened(run)[1] == 1
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["damaged-step-2", "damaged-step-2-2", "step-1"]


@pytest.mark.parametrize("how", ["deleted", "cut", "pipe", "folder", "device", "no checksums", "cut checksums"])
def test_other_damage_is_found_too(run, how):
    file = run / "checkpoints" / "step-2" / (SUMS if "checksums" in how else "state")
    if how.startswith("cut"):
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.unlink()
    if how == "pipe":
        os.mkfifo(file)
    elif how == "folder":
        file.mkdir()
    elif how == "device":
        file.symlink_to("/dev/zero")
    assert opened(run)[1] == 1


def test_if_no_checkpoint_is_whole_one_line_says_so_and_nothing_is_changed(run):
    for step in (1, 2):
        flip(run / "checkpoints" / f"step-{step}" / "state", 1)
    before = contents(run)
    words = r"no checkpoint in .* is whole \(step-2: state differs from its checksum; step-1: state .*\); nothing was changed"
    with pytest.raises(ValueError, match=words) as error:
        opened(run)
    assert "\n" not in str(error.value) and contents(run) == before


def test_a_checkpoint_of_an_earlier_version_is_taken_up_and_said_to_be_unverified(run, capsys):
    step = run / "checkpoints" / "step-2"
    (step / SUMS).unlink()
    (step / "state.json").write_text('{"step": 2, "world_size": 1}')
    assert opened(run)[1] == 2
    assert "step-2 is from an earlier version and has no checksums" in capsys.readouterr().err


def test_a_folder_that_only_looks_like_a_checkpoint_is_not_taken_up(run):
    checkpoints = run / "checkpoints"
    shutil.copytree(checkpoints / "step-2", checkpoints / "step-7")  # its state says 2
    for name in ("step-99999999999999999999", "step-007", "step-x", "step-\u0663"):
        (checkpoints / name).mkdir()
    os.mkfifo(checkpoints / "step-9")
    assert opened(run)[1] == 2
    kept = {path.name for path in checkpoints.iterdir()}
    assert {"damaged-step-7", "damaged-step-9", "step-99999999999999999999", "step-007", "step-x", "step-\u0663"} < kept


def test_the_checkpoint_from_before_the_first_skipped_step_is_kept(tmp_path):
    folder, _ = opened(tmp_path / "run")
    engine = FakeEngine()
    for step in range(1, 9):
        folder.save(engine, step, 2, None, keep=3 if step > 3 else None)
    assert folder._steps() == [3, 7, 8]
    folder.save(engine, 9, 2)
    assert folder._steps() == [8, 9]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_never_published(tmp_path, tiny_model, value):
    import torch

    from memrl.model import save_model
    from memrl.training.checkpoint import SaveError

    folder, _ = opened(tmp_path / "run")
    folder.save(FakeEngine(), 1, 2, lambda path: save_model(tiny_model, path))
    before = contents(folder.path / "model")
    with torch.no_grad():
        next(tiny_model.parameters()).view(-1)[5] = value
    words = (
        r"could not be written \(rank 0: .* holds values that are not finite, so the model is not saved\); earlier checkpoints"
    )
    with pytest.raises(SaveError, match=f"checkpoint after step 2 {words}"):
        folder.save(FakeEngine(), 2, 1, lambda path: save_model(tiny_model, path))
    for write in (lambda: folder.write_model(export), lambda: folder.keep_best(2, 1.0, export)):

        def export(path):
            save_model(tiny_model, path)

        with pytest.raises(SaveError, match=words):
            write()
    assert contents(folder.path / "model") == before and not (folder.path / "best").exists()
    assert [path.name for path in folder.checkpoints.iterdir()] == ["step-1"]


# --- the folder -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model", "best", "start", "checkpoints", "metrics.jsonl", "config.yaml", "report.json"])
def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path, name):
    place = tmp_path / "mine"
    (place / "notes").mkdir(parents=True)
    if "." in name:
        (place / name).write_text("mine")
    else:
        (place / name / "tmp-1").mkdir(parents=True)
        (place / name / "tmp-1" / "weights").write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=rf"run_dir .* holds {name}, but not both config\.yaml and inputs\.json of a run"):
        opened(place)
    assert contents(tmp_path) == before


def test_a_folder_with_other_things_and_a_start_that_was_killed_are_fine(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert opened(tmp_path)[1] == 0
    for written in (("config.yaml",), ("config.yaml", "inputs.json")):  # inputs.json comes first
        for name in written:
            (tmp_path / name).unlink()
        assert opened(tmp_path)[1] == 0
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("place", ["", " ", os.sep, str(Path.home()), str(Path(__file__).parents[1] / "tests" / "..")])
def test_no_folder_of_its_own_is_refused(place):
    with pytest.raises(ValueError, match=r"run_dir .*(is empty|itself).*; give"):
        opened(place)


def test_a_model_whose_checkpoints_are_gone_is_not_replaced(run):
    shutil.rmtree(run / "checkpoints")
    before = contents(run)
    with pytest.raises(ValueError, match=r"holds model/ but no checkpoint, so training would begin anew and replace it"):
        opened(run)
    assert contents(run) == before


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ValueError, match=r"run_dir .*file is not a folder; choose another run_dir"):
            opened(place)


def test_a_model_in_the_run_folder_is_refused_by_every_name(run, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(run / "model")
    (tmp_path / "shell").mkdir()
    (tmp_path / "shell" / "model.safetensors").symlink_to(run / "model" / "weights")
    (tmp_path / "run_link").symlink_to(run)
    monkeypatch.chdir(run)
    before = contents(run)
    for model in (run, run / "model", "model", "../run/best", tmp_path / "link", tmp_path / "shell"):
        for place in (run, Path("."), tmp_path / "run_link"):
            with pytest.raises(
                ValueError, match=r"model\.path .* is in run_dir .*, which would replace it; choose another run_dir"
            ):
                opened(place, changed(model__path=str(model)))
    with pytest.raises(ValueError, match=r"data\.path .* is among the files that the run writes"):
        opened(run, changed(data__path=str(run / "rollouts.jsonl")))
    assert contents(run) == before
    assert opened(tmp_path / "next", changed(model__path=str(run / "model")))[1] == 0


@pytest.mark.parametrize("name", [".lock", "config.yaml", "metrics.jsonl", "rollouts.jsonl"])
def test_links_that_someone_planted_are_not_followed(run, tmp_path, name):
    precious = tmp_path / "precious"
    precious.write_text('{"step": 99}\n')
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(precious)
    with pytest.raises(ValueError, match=rf"{name} is not a plain file, so it is not a run's; remove it"):
        opened(run)
    assert precious.read_text() == '{"step": 99}\n'


def test_planted_folders_of_temporary_names_are_not_followed(run, tmp_path):
    precious = tmp_path / "precious"
    exporter("mine")(precious)
    for name in ("checkpoints/tmp-3", ".model.new", ".model.old", ".best.new", ".best.old"):
        (run / name).symlink_to(precious)
    folder, _ = opened(run)
    saved(folder, 3)
    assert folder.keep_best(3, 0.9, exporter("after 3"))
    assert weights(precious) == "mine" and weights(run / "model") == "after 3" == weights(run / "best")


# --- its files --------------------------------------------------------------------------------------------------

HOSTILE = {
    "empty": b"",
    "deep": b"[" * 100_000,
    "deep mapping": b'{"a":' * 50_000,
    "no object": b"[1, 2]\n",
    "words": b'{"step": "two", "world_size": "one", "score": "high", "validation": "all"}\n',
    "huge": b'{"step": 1' + b"0" * 400 + b', "world_size": 1e999, "score": 1' + b"0" * 400 + b', "validation": {}}\n',
    "nan": b'{"step": NaN, "world_size": NaN, "score": NaN, "validation": {}}\n',
    "not UTF-8": b'{"step": 1, "\xff\xfe": 2}\n',
    "null": b"\0" * 100,
    "aliases": b"a: &a [x, x, x, x, x, x, x, x, x]\n"
    + b"".join(b"%c: &%c [%s]\n" % (98 + i, 98 + i, b", ".join([b"*%c" % (97 + i)] * 9)) for i in range(20)),
    "large": b'{"a": "' + b"x" * 17 * 2**20 + b'"}',
    "code": b"!!python/object/apply:os.mkdir [proof]\n",
}


@pytest.mark.parametrize("kind", [*HOSTILE, "pipe", "folder", "missing"])
@pytest.mark.parametrize("name", ["config.yaml", "inputs.json", "checkpoints/step-2/state.json", "best/best.json"])
def test_a_damaged_file_of_a_run_is_one_line_or_repaired_and_nothing_is_lost(run, name, kind, capsys, monkeypatch):
    monkeypatch.chdir(run)
    before = contents(run / "best")
    file = run / name
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind != "missing":
        file.write_bytes(HOSTILE[kind])
    try:
        folder, done = opened(run)
    except ValueError as error:
        assert name in ("config.yaml", "inputs.json") and "\n" not in str(error) and "another run_dir" in str(error)
    else:
        assert name == "best/best.json" or done == 1 or (name == "inputs.json" and done == 2)
        if name == "best/best.json":
            spare = run / "damaged-best"
            assert done == 2 and (spare / "weights").read_bytes() == before["weights"]
            assert "damaged; the folder is now" in capsys.readouterr().err
            assert folder.keep_best(2, 0.1, exporter("after 2"))
    assert not (run / "proof").exists()
    weights(run / "model")


LINES = [
    b"[1]\n",
    b"7\n",
    b'{"step": "2"}\n',
    b'{"step": 1' + b"0" * 400 + b"}\n",
    b'{"step": NaN}\n',
    b'{"loss": 1}\n',
    b"\xff\xfe\n",
    b"[" * 50_000 + b"\n",
    b'{"step": 1, "n": 1' + b"0" * 5000 + b"}\n",
    b"\n",
]


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_damaged_lines_of_a_log_are_dropped_and_the_log_as_it_was_is_kept(run, line, capsys):
    log = run / "metrics.jsonl"
    good = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(good[0] + line + good[1])
    before = log.read_bytes()
    folder, done = opened(run)
    folder.truncate_logs(done)
    assert log.read_bytes() == b"".join(good) and (run / "metrics.jsonl.damaged").read_bytes() == before
    assert "warning: metrics.jsonl had damaged lines, which were dropped" in capsys.readouterr().err
    folder.truncate_logs(done)
    assert not (run / "metrics.jsonl.damaged-2").exists()


def test_a_line_longer_than_any_real_one_is_not_read_as_a_whole(run, monkeypatch):
    from memrl.utils import journal

    monkeypatch.setattr(journal, "LINE_BYTES", 1000)
    log = run / "metrics.jsonl"
    good = log.read_bytes()
    for size in (995, 1000, 1001, 1012, 4321):  # at 1012 the part after the limit is an object by itself
        long = b'{"step": 1, "x": "'.ljust(size - 12, b"x") + b'{"step": 1}\n'
        log.write_bytes(long + good)
        RunFolder(run).truncate_logs(2)
        assert log.read_bytes() == good


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["step", "world_size", "score", "rl", "a"]), inner)
    ),
    max_leaves=8,
)


@settings(
    max_examples=50, deadline=None, database=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_readers_of_a_run_folder_survive_anything(data, tmp_path_factory):
    """Any file of the run as random JSON, random bytes or a cut or changed version of itself: a line, or a step that is whole."""
    base = tmp_path_factory.getbasetemp() / "fuzzed"
    if not base.exists():
        folder, _ = opened(base / "run")
        saved(folder, 1, 2)
        folder.keep_best(1, 0.5, exporter("after 1"))
    run = base / "copy"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(base / "run", run)
    names = ("config.yaml", "inputs.json", "metrics.jsonl", "best/best.json", "checkpoints/step-2/state.json")
    file = run / data.draw(st.sampled_from([*names, f"checkpoints/step-2/{SUMS}"]))
    content = file.read_bytes()
    place = data.draw(st.integers(0, len(content)))
    noise = data.draw(st.binary(max_size=20))
    file.write_bytes(
        data.draw(
            st.sampled_from([noise, content[:place] + noise + content[place:], content[:place], content + content])
            | st.builds(lambda value: json.dumps(value).encode(), VALUES)
            | st.builds(lambda value: yaml.safe_dump(value).encode(), VALUES)
        )
    )
    try:
        folder, done = opened(run)
        folder.truncate_logs(done)
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) < 10_000
    else:
        assert done in (1, 2) and weights(run / "model") == f"after {done}"
    assert (run / "checkpoints" / "step-1" / "state").read_text() == "after 1"


def test_each_rank_reads_a_part_of_a_checkpoint_and_all_of_it_is_read(run, monkeypatch):
    from memrl.engine import checkpoint_check

    step, read = run / "checkpoints" / "step-2", []
    first = checkpoint_check._read_sums(step, 2)
    monkeypatch.setattr(checkpoint_check, "damaged_files", lambda folder, sums: read.append(set(sums)) or [])
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "from_rank_0", lambda value: first)
    monkeypatch.setattr(distributed, "gather_lists", lambda items: items)
    for rank in (0, 1):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        assert checkpoint_check.damage_of(step, 2) is None
    assert read[0] | read[1] == {"state", "state.json", "model/weights"} and not read[0] & read[1]


def test_a_start_that_is_no_longer_what_the_run_made_is_refused(tmp_path):
    from memrl.miniature.start import check_start
    from memrl.utils.checksums import write_sums

    start = tmp_path / "start"
    exporter("made by the run")(start)
    check_start(start)  # of an earlier version, without checksums
    write_sums(start)
    check_start(start)
    flip(start / "weights", 4)
    with pytest.raises(ValueError, match=r"the start of the run in .* is damaged \(weights differs from its checksum\); delete"):
        check_start(start)


def test_checksums_are_those_of_sha256sum(run):
    import subprocess

    subprocess.run(["sha256sum", "--check", "--quiet", SUMS], cwd=run / "checkpoints" / "step-2", check=True)
