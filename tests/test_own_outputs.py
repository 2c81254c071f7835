"""Commands replace what they wrote themselves, and nothing else."""

import json
import os

import pytest

from memrl.commands.build_dataset import Needle
from memrl.commands.filter_dataset import Filter
from memrl.commands.report import Curves, Report, Trace
from memrl.data.filtering import AnswersFile
from memrl.evaluation.results import Results
from tests.test_report import make_row, write_folder

SETTINGS = {"format": 3, "methods": {}, "tasks": {}}


def run(main, *arguments) -> int:
    try:
        return main([str(argument) for argument in arguments], "memrl")
    except SystemExit as stop:
        return int(stop.code or 0)


def refused(capsys, main, *arguments) -> str:
    assert run(main, *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("content", ["my notes", "my notes\n", '{"id": "q1"}\n', "\0\n"])
def test_filter_refuses_an_answers_file_that_it_did_not_write(tmp_path, capsys, content):
    (tmp_path / "in.jsonl").write_text(json.dumps({"question": "q", "context": "c", "answers": "a"}) + "\n")
    answers = tmp_path / "out.jsonl.answers.jsonl"
    answers.write_text(content)
    line = refused(capsys, Filter.main, tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--endpoint", "http://x", "--name", "x")
    assert "out.jsonl.answers.jsonl: exists and was not written by this command" in line and answers.read_text() == content


def test_the_head_of_an_answers_file_that_a_kill_tore_is_written_again(tmp_path):
    path = tmp_path / "answers.jsonl"
    for torn in ('{"sett', '{"settings": {"mod'):
        path.write_text(torn)
        AnswersFile(path, {"model": "a"}).close()
        assert path.read_text() == '{"settings": {"model": "a"}}\n'


def test_needle_writes_its_text_once_and_replaces_no_other(tmp_path, capsys):
    out = tmp_path / "needle.txt"
    assert run(Needle.main, "--chunks", 4, "--out", out) == 0
    text = out.read_text()
    assert run(Needle.main, "--chunks", 4, "--out", out) == 0 and out.read_text() == text
    capsys.readouterr()
    assert "exists and is another text" in refused(capsys, Needle.main, "--chunks", 4, "--seed", 1, "--out", out)
    assert out.read_text() == text


def test_pages_and_pictures_replace_only_their_own_kind(tmp_path, capsys):
    rollouts = tmp_path / "rollouts.jsonl"
    rollouts.write_text(json.dumps({"step": 1, "question": "q", "turns": []}) + "\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "loss/kl": 1}\n')
    folder = write_folder(tmp_path / "results", [make_row(index=index) for index in range(3)])
    commands = {
        "page.html": (Trace.main, rollouts, "--out", tmp_path / "page.html"),
        "x.png": (Curves.main, tmp_path / "run", "--out", tmp_path / "x.png"),
        **{
            f"report/{name}": (Report.main, folder, "--out", tmp_path / "report")
            for name in ("report.md", "accuracy_by_length.png")
        },
    }
    for name, (main, *arguments) in commands.items():
        assert run(main, *arguments) == run(main, *arguments) == 0, name
        path = tmp_path / name
        path.write_bytes(b"mine")
        capsys.readouterr()
        assert f"{name}: exists and was not written by this command" in refused(capsys, main, *arguments)
        assert path.read_bytes() == b"mine"
        path.unlink()
    assert run(Curves.main, tmp_path / "run") == run(Curves.main, tmp_path / "run") == 0  # in the run's own folder


@pytest.mark.parametrize("name", ["samples.jsonl", "summary.json", "accuracy.png", "samples.rank1.jsonl", "eval_config.json"])
def test_an_evaluation_takes_no_folder_in_which_its_names_are_taken(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(ValueError, match=f"{name} (exists without eval_config.json|is damaged, or not of)"):
        Results(tmp_path, SETTINGS)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: "mine"}


def test_a_data_set_takes_no_recipe_and_no_journal_of_others_and_follows_no_link(tmp_path):
    from memrl.data import write_samples
    from memrl.types import Sample

    def write():
        write_samples(tmp_path / "out.jsonl", lambda index: Sample(str(index), "q", "c", ("a",)), 2, {"seed": 1}, "test")

    recipe, journal, mine = (tmp_path / name for name in ("out.jsonl.recipe.json", ".out.jsonl.partial.jsonl", "mine"))
    for path in (recipe, journal):
        path.write_text("mine")
        with pytest.raises(ValueError, match=f"{path.name}: exists and"):
            write()
        assert path.read_text() == "mine"
        path.unlink()
    mine.write_text("mine")
    for make in (os.symlink, os.link):
        make(mine, tmp_path / ".out.jsonl.new")
        write()
        assert mine.read_text() == "mine" and not (tmp_path / "out.jsonl").is_symlink()
        assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2
        (tmp_path / "out.jsonl").unlink()
