"""The ablations: statistics against closed forms, the table from made-up results, every config file, and the command."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from benchmarks.ablation_plot import plot_ablations
from benchmarks.ablation_table import (
    SeedResult,
    Variant,
    accuracy,
    by_accuracy,
    change,
    format_table,
    steps_to_level,
)
from benchmarks.ablations import find_variants, plan, publish, write_documents
from memrl.commands.train import parse
from memrl.config import validate
from memrl.evaluation.statistics import paired_interval

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "configs" / "ablations").glob("*.yaml"))
TINY, LARGE = (ROOT / "configs" / name for name in ("tiny.yaml", "memagent_7b.yaml"))


def result(right: list[int], rewards: list[float] = (0.5, 1.0), before: list[int] | None = None) -> SeedResult:
    return SeedResult({64: [bool(r) for r in right]}, rewards, 12.0, {64: [bool(r) for r in before]} if before else {})


BASE = Variant("base", {0: result([1, 1, 0, 0], before=[0, 0, 0, 1]), 1: result([1, 0, 0, 0], before=[0, 0, 0, 0])})


@pytest.mark.parametrize(("gains", "losses", "n"), [(12, 2, 100), (0, 0, 384), (5, 0, 5), (3, 90, 128)])
def test_the_paired_interval_is_agresti_and_mins(gains, losses, n):
    # The paper's form: half a document added to each cell of the 2 x 2 table, then the Wald interval of the paired difference.
    b, c, m = gains + 0.5, losses + 0.5, n + 2
    centre, variance = (b - c) / m, ((b + c) / m - ((b - c) / m) ** 2) / m
    low, high = paired_interval(gains, losses, n)
    assert low == pytest.approx(max(-1, centre - 1.959963984540054 * math.sqrt(variance)), abs=1e-12)
    assert high == pytest.approx(min(1, centre + 1.959963984540054 * math.sqrt(variance)), abs=1e-12)


def test_equal_answers_leave_an_interval_that_is_not_empty():
    low, high = paired_interval(0, 0, 384)
    assert low == -high and 0.004 < high < 0.006


@pytest.mark.parametrize("counts", [(0, 0, 0), (-1, 0, 4), (3, 2, 4)])
def test_impossible_counts_are_refused(counts):
    with pytest.raises(ValueError, match="have no interval"):
        paired_interval(*counts)


def test_a_change_is_counted_document_by_document_and_seed_by_seed():
    other = Variant("other", {0: result([0, 1, 1, 1]), 1: result([1, 0, 0, 1]), 2: result([0, 0, 0, 0])})
    difference = change(other, BASE, 64)  # seed 0: 2 gains and 1 loss; seed 1: 1 gain; the base has no seed 2
    assert (difference.mean, difference.least, difference.most) == (2 / 8, 1 / 4, 1 / 4)
    assert (difference.low, difference.high) == paired_interval(3, 1, 8)


def test_a_change_without_a_common_seed_is_none():
    assert change(Variant("other", {7: result([1])}), BASE, 64) is None


def test_other_documents_than_the_bases_are_refused():
    with pytest.raises(ValueError, match="longer than"):
        change(Variant("other", {0: result([1, 1])}), BASE, 64)


def test_an_accuracy_is_over_all_documents_with_the_range_over_seeds():
    estimate = accuracy([[True, True, False, True], [False, True, False, False]])
    assert (estimate.mean, estimate.least, estimate.most) == (0.5, 0.25, 0.75)
    assert estimate.low < 0.25 < 0.75 < estimate.high


def test_a_level_is_reached_by_the_mean_of_several_steps():
    assert steps_to_level([1.0, 0.0, 0.9, 0.9, 0.9], level=0.9, window=3) == 5
    assert steps_to_level([0.9, 0.9, 0.9], level=0.9, window=3) == 3
    assert steps_to_level([1.0, 1.0], level=0.9, window=3) is None
    assert steps_to_level([0.8] * 9, level=0.9, window=3) is None


def test_the_base_comes_first_and_what_failed_last():
    better, worse = Variant("better", {0: result([1, 1, 1, 1])}), Variant("worse", {0: result([0, 0, 0, 0])})
    failed = Variant("failed", errors={0: "no"})
    assert by_accuracy([failed, worse, better, BASE], BASE, 64) == [BASE, better, worse, failed]


def test_the_table_holds_accuracies_changes_and_failures():
    mixed = Variant("mixed", {0: result([1, 1, 1, 1], rewards=[0.25, 0.75])}, {1: "the loss | is not finite"})
    table = format_table([BASE, mixed, Variant("lost", errors={0: "boom"}), Variant("same", note="is the base")], BASE, [64])
    header, rule, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.split("\n"))
    assert len({len(header), len(rule), *map(len, rows)}) == 1, "every row has every column"
    rows = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    low, high = paired_interval(2, 0, 4)
    assert rows["mixed"]["change at 64"] == f"+50.0 [{100 * low:+.1f}, {100 * high:+.1f}] (+50.0 to +50.0)"
    assert rows["mixed"]["64 chunks"].startswith("100.0 [") and rows["mixed"]["before RL at 64"] == "as base"
    assert rows["mixed"]["reward, last 10 steps"] == "0.50 (0.50 to 0.50)"
    assert rows["mixed"]["seeds"] == "1; failed: seed 1: the loss / is not finite"
    assert rows["base"]["64 chunks"].startswith("37.5 [") and rows["base"]["64 chunks"].endswith("(25.0 to 50.0)")
    assert rows["base"]["change at 64"] == "" and rows["base"]["before RL at 64"].startswith("12.5 [")
    assert rows["base"]["steps to 0.9"] == "never in 2 of 2"
    assert rows["lost"]["64 chunks"] == "failed: seed 0: boom" and rows["same"]["64 chunks"] == "is the base"


def test_the_picture_is_drawn_and_needs_a_base(tmp_path):
    variants = [BASE, *(Variant(f"v{i}", {0: result([1, 1, 1, i % 2])}) for i in range(5)), Variant("lost", errors={0: "boom"})]
    plot_ablations(tmp_path / "picture.png", variants, BASE, 64, "title")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="the base has no result"):
        plot_ablations(tmp_path / "none.png", variants, Variant("base"), 64, "title")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_says_what_it_does_and_changes_the_miniature(path):
    assert path.read_text().startswith("# ")
    settings, base = (parse(["--config", str(TINY), *extra, "--run_dir", "x"]) for extra in (["--config", str(path)], []))
    validate(settings)
    assert (settings == base) == (path.stem == "clip_higher"), "configs/tiny.yaml has clip-higher already, and nothing else"


@pytest.mark.parametrize("path", [path for path in FILES if not path.stem.endswith("_miniature")], ids=lambda path: path.stem)
def test_files_for_all_models_go_over_the_7b_config_too(path):
    settings, base = (parse(["--config", str(LARGE), *extra, "--run_dir", "x"]) for extra in (["--config", str(path)], []))
    validate(settings)
    assert (settings == base) == (path.stem == "clip_symmetric"), "the original's bounds are symmetric already, and nothing else"
    assert settings.agent == base.agent


def test_the_miniatures_file_comes_before_the_general_one(tmp_path):
    for name in ("gspo", "gspo_miniature", "cispo", "wide_miniature"):
        (tmp_path / f"{name}.yaml").touch()
    assert {name: path.stem for name, path in find_variants(tmp_path).items()} == {
        "cispo": "cispo",
        "gspo": "gspo_miniature",
        "wide": "wide_miniature",
    }


def make_plan(out: Path, names: list[str], *extra: str):
    known = find_variants(ROOT / "configs" / "ablations")
    configs = {"base": [TINY]} | {name: [TINY, known[name]] for name in names}
    return plan(configs, [0, 1], out, {0: [], 1: []}, list(extra))


def test_variants_share_the_warm_start_of_a_base_with_the_same_agent_and_seed(tmp_path):
    runs, same = make_plan(tmp_path, ["gspo", "section_first", "clip_higher"])
    sources = {(run.variant, run.seed): run.source and (run.source.variant, run.source.seed) for run in runs}
    assert sources == {
        ("base", 0): None,
        ("base", 1): None,
        ("gspo", 0): ("base", 0),
        ("gspo", 1): ("base", 1),
        ("section_first", 0): None,
        ("section_first", 1): None,
    }
    assert [variant.name for variant in same] == ["clip_higher"]
    assert all(run.config.seed == run.seed and run.config.rl.steps == 24 for run in runs)


def test_a_finished_run_with_other_settings_is_refused(tmp_path):
    runs, _ = make_plan(tmp_path, [])
    for name in ("before", "after"):
        (runs[0].folder / name).mkdir(parents=True)
        (runs[0].folder / name / "summary.json").write_text("[]")
    moved = runs[0].config.to_dict() | {"run_dir": "where/it/was/before"}
    (runs[0].folder / "config.yaml").write_text(yaml.safe_dump(moved))
    make_plan(tmp_path, [])
    with pytest.raises(ValueError, match=r"seed0 is finished with other settings \(rl.steps: 24 -> 7\)"):
        make_plan(tmp_path, [], "--rl.steps=7")


def test_documents_are_the_same_again_and_others_are_refused(tmp_path):
    paths = write_documents(tmp_path, [2, 3], 4, seed=0)
    text = [path.read_text() for path in paths]
    assert [path.read_text() for path in write_documents(tmp_path, [2, 3], 4, seed=0)] == text
    rows = [json.loads(line) for line in text[1].splitlines()]
    assert len(rows) == 4 and all(len(row["context"].split()) == 3 * 25 for row in rows)
    with pytest.raises(ValueError, match="holds other documents"):
        write_documents(tmp_path, [2, 3], 4, seed=1)


def test_a_table_is_published_between_its_marks(tmp_path):
    page, picture = tmp_path / "page.md", tmp_path / "p.png"
    picture.write_bytes(b"picture")
    page.write_text((ROOT / "docs" / "ablations.md").read_text())
    for table in ("| old |", "| new |"):
        publish(page, table, picture)
    assert page.read_text().count("| new |") == 1 and "| old |" not in page.read_text()
    assert "## How it is measured" in page.read_text() and (tmp_path / "page.png").read_bytes() == b"picture"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="lacks the marks"):
        publish(page, "| x |", picture)


COMMAND = [sys.executable, str(ROOT / "benchmarks" / "ablations.py"), "--seeds", "0", "--jobs", "2", "--documents", "4"]
COMMAND += ["--lengths", "2", "--rl.steps", "2", "--rl.prompts_per_step", "2", "--rl.group_size", "2"]
COMMAND += ["--warm_start.quote_steps", "2", "--warm_start.teach_steps", "2"]


@pytest.mark.slow
def test_the_command_runs_resumes_and_outlives_a_failing_variant(tmp_path):
    out = tmp_path / "out"
    (out / "std" / "seed0" / "start").mkdir(parents=True)  # without settings, so train.py refuses it
    command = [*COMMAND, "--only", "no_kl,clip_higher", "--out", str(out)]
    first = subprocess.Popen(command, start_new_session=True)
    deadline = time.monotonic() + 120
    while not (out / "base" / "seed0" / "start").exists():
        assert first.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    first.send_signal(signal.SIGINT)
    assert first.wait(timeout=100) == 130
    assert not running_in(out), "an interrupted command leaves nothing running"
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    base, other = out / "base" / "seed0", out / "no_kl" / "seed0"
    assert (other / "start" / "copied_from").read_text().strip() == str(base)
    assert (other / "start" / "model.safetensors").read_bytes() == (base / "start" / "model.safetensors").read_bytes()
    assert (base / "before").is_dir() and not (other / "before").exists()
    table = (out / "ablations.md").read_text()
    assert "| no_kl | " in table and "| clip_higher | is the base |" in table and (out / "ablations.png").exists()
    log = (out / "no_kl" / "seed0.log").read_bytes()
    failing = subprocess.run([*COMMAND, "--only", "no_kl,std", "--out", str(out)], capture_output=True, text=True, timeout=300)
    assert failing.returncode == 1 and "| std | failed: seed 0:" in failing.stdout, failing.stdout + failing.stderr
    assert (out / "no_kl" / "seed0.log").read_bytes() == log, "a finished run is not run again"


def running_in(folder: Path) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            found += [words] if str(folder) in words else []
    return found
