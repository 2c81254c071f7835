"""Learning curves: what is read of a run, and that the picture is there whatever the run holds."""

import json
import math

import pytest

from memrl.commands.report import Curves
from memrl.report.curves import plot_curves, read_curves, smooth
from memrl.utils import pictures


def write_run(folder, steps: int, validations=(), **extra):
    folder.mkdir(parents=True, exist_ok=True)
    records = [
        {
            "step": step,
            "reward/strict": step / (steps + 1),
            "reward/lenient": step / (steps + 1),
            "loss/kl": 10.0**-step if step < 30 else 0.0,
            "optim/grad_norm": None if step % 3 == 0 else 0.5,
            **extra,
        }
        for step in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if validations:
        lines = [json.dumps({"step": step, "strict": score, "lenient": score, "n": 8}) + "\n" for step, score in validations]
        (folder / "validation.jsonl").write_text("".join(lines))
    return folder


def drawn(path, monkeypatch, arguments):
    """The panels of the figure that the command saves, by title."""
    figures, save = [], pictures.save
    monkeypatch.setattr(pictures, "save", lambda figure, path: (figures.append(figure), save(figure, path)))
    assert Curves.main([str(argument) for argument in arguments]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    (figure,) = figures
    return {axes.get_title(loc="left"): axes for axes in figure.axes if axes.axison}


@pytest.mark.parametrize("steps", [1, 2, 40])
def test_picture_of_a_run_of_any_length(tmp_path, steps):
    path = plot_curves(write_run(tmp_path / "run", steps))
    assert path == tmp_path / "run" / "curves.png"
    assert path.stat().st_size > 10_000
    assert sorted(p.name for p in path.parent.iterdir()) == ["curves.png", "metrics.jsonl"]


def test_a_run_without_steps_has_no_picture(tmp_path):
    assert plot_curves(tmp_path) is None
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/st')  # torn by a kill
    assert plot_curves(tmp_path) is None


def test_series_hold_nulls_as_gaps_and_validations_by_their_own_steps(tmp_path):
    run = read_curves(write_run(tmp_path / "run", 3, validations=[(0, 0.25), (2, 0.5)]))
    steps, values = run.series["optim/grad_norm"]
    assert steps == [1, 2, 3] and values[:2] == [0.5, 0.5] and math.isnan(values[2])
    assert run.series["validation/strict"] == ([0, 2], [0.25, 0.5])
    assert "step" not in run.series and run.label == "run"


def test_smoothing_is_the_mean_of_finite_neighbours():
    assert smooth([1.0, 2.0, 6.0, math.nan, 5.0], 3).tolist() == [1.5, 3.0, 4.0, 5.5, 5.0]
    assert smooth([1.0, 7.0], 1).tolist() == [1.0, 7.0]
    assert math.isnan(smooth([math.nan, math.inf], 2)[0])


def test_panels_show_what_the_run_has_and_log_axes_where_values_span_much(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", 40, validations=[(0, 0.1), (40, 0.9)])
    panels = drawn(folder / "curves.png", monkeypatch, [folder])
    assert set(panels) == {"Reward", "KL to the frozen start", "Gradient norm"}
    assert panels["KL to the frozen start"].get_yscale() == "log"
    assert panels["Gradient norm"].get_yscale() == "linear"  # it does not span enough
    assert panels["Reward"].get_ylim() == pytest.approx((-0.02, 1.02))
    legend = [text.get_text() for text in panels["Reward"].get_legend().get_texts()]
    assert legend == ["strict", "lenient", "validation, strict", "validation, lenient"]
    lines = panels["Reward"].get_lines()
    assert sorted(line.get_linewidth() for line in lines) == [0.7, 0.7, 1.6, 1.6, 2, 2]  # thin raw, thick smoothed, sparse


def test_runs_are_overlaid_and_labelled_by_folder(tmp_path, monkeypatch):
    one, two = write_run(tmp_path / "one", 5), write_run(tmp_path / "two", 9)
    panels = drawn(tmp_path / "both.png", monkeypatch, [one, two, "--out", tmp_path / "both.png"])
    lines = panels["Gradient norm"].get_lines()
    assert len(lines) == 2 and lines[0].get_color() != lines[1].get_color()
    (legend,) = panels["Gradient norm"].figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["one", "two"]


def test_folders_of_one_name_are_labelled_by_their_paths(tmp_path, monkeypatch):
    folders = [write_run(tmp_path / parent / "run", 2) for parent in ("a", r"$\frac{$")]
    panels = drawn(tmp_path / "x.png", monkeypatch, [*folders, "--out", tmp_path / "x.png"])
    (legend,) = panels["Reward"].figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [pictures.literal(str(folder)) for folder in folders]


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        (None, (), "there is no such file"),
        ("", (), "no step"),
        ('{"step": 1}\nnot json\n', (), "line 2 is not JSON"),
        ("[1]\n", (), "line 1 is not a JSON object"),
        ('{"reward/strict": 1}\n', (), "line 1 has no whole number as its step"),
        ('{"step": 1, "loss/kl": 1}\n', ("--out", "nowhere/x.png"), "there is no folder nowhere"),
        ('{"step": 1, "loss/kl": 1}\n', ("--out", "x.pdf"), "has to end in .png"),
        ('{"step": 1, "loss/kl": 1}\n', ("--wrong",), "unrecognized arguments"),
    ],
)
def test_mistakes_end_in_one_line_and_code_2(tmp_path, capsys, content, options, words):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(SystemExit) as exit:
        Curves.main([str(tmp_path), *options])
    errors = capsys.readouterr().err
    assert exit.value.code == 2 and errors.count("\n") == 1 and words in errors


def test_a_file_in_place_of_a_folder_is_refused(tmp_path, capsys):
    write_run(tmp_path, 1)
    with pytest.raises(SystemExit):
        Curves.main([str(tmp_path / "metrics.jsonl")])
    assert "is not a folder; give a run's folder" in capsys.readouterr().err
