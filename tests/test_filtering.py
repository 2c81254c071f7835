"""Dropping what a model knows anyway: over a real server, a real folder, and a process that is killed."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memrl.commands.filter_dataset import Filter
from memrl.data import load_samples
from memrl.data.filtering import QUESTION_ALONE, AnswersFile, Characters, Rule, ask_questions, decide
from memrl.endpoint import RemoteLLM
from memrl.llm import Decoding
from memrl.types import Sample
from memrl.utils.command_line import parse_options
from tests.fake_endpoint import FakeEndpoint, Reply
from tests.tiny_folder import make_folder

REPO = Path(__file__).resolve().parent.parent
RIGHT, LENIENT, WRONG = r"\boxed{red}", r"\boxed{it is red}", r"\boxed{blue}"


def line(strict, lenient=None):
    return {"strict": strict, "lenient": strict if lenient is None else lenient, "error": None}


def write_questions(path: Path, count: int, **changes) -> Path:
    rows = [
        {"id": f"id{i}", "question": f"number {i}?", "answers": ["red"], "context": f"SECRET {i}", "level": i}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row | changes) + "\n" for row in rows))
    return path


def number_of(body: dict) -> int:
    return int(re.search(r"number (\d+)\?", body["messages"][-1]["content"])[1])


def command(*words: object) -> None:
    (options,) = parse_options([Filter], [*map(str, words)], prog="memrl data filter")
    options.run()


def filter_by(server: FakeEndpoint, questions: Path, out: Path, *more: object) -> list[str]:
    command(questions, out, "--endpoint", server.url, "--name", "fake", *more)
    return load_samples(out).ids


# --- the rule ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("criterion", "drop_when", "drops"),
    [
        ("strict", "any", [False, True, False, True]),
        ("strict", "all", [False, False, False, True]),
        ("lenient", "any", [False, True, True, True]),
        ("lenient", "all", [False, False, True, True]),
        ("either", "any", [False, True, True, True]),
        ("either", "all", [False, False, True, True]),
    ],
)
def test_the_rule_by_hand(criterion, drop_when, drops):
    cases = [line([0.0, 0.0]), line([1.0, 0.0]), line([0.0, 0.0], [1.0, 1.0]), line([1.0, 1.0])]
    assert [Rule(criterion, drop_when).drops(case) for case in cases] == drops


def test_either_counts_a_response_that_is_strictly_right_alone():
    # "+" has no word, so the lenient verifier finds nothing in it.
    case = line([1.0, 0.0], [0.0, 1.0])
    assert Rule("either", "all").drops(case) and not Rule("lenient", "all").drops(case)


# --- asking ------------------------------------------------------------------------------------------------


def test_questions_are_asked_alone_and_those_that_are_known_are_dropped(tmp_path, capsys):
    replies = {0: RIGHT, 1: LENIENT, 2: WRONG, 3: ""}
    questions = write_questions(tmp_path / "in.jsonl", 4)
    with FakeEndpoint(lambda body: replies[number_of(body)]) as server:
        assert filter_by(server, questions, tmp_path / "out.jsonl", "--criterion", "strict") == ["id1", "id2", "id3"]
    assert len(server.questions) == 8 and not [text for text in server.questions if "SECRET" in text]
    assert server.questions[0].startswith("Answer the question from what you know") and r"\boxed{}" in server.questions[0]
    body = server.bodies[0]
    assert (body["temperature"], body["top_p"], body["max_tokens"]) == (1.0, 0.7, 512)
    assert len({(number_of(body), body["seed"]) for body in server.bodies}) == 8
    report = "4 questions asked; any response right: strict 1, lenient 2, either 2; by the criterion strict 1 dropped, 3 kept"
    assert report in capsys.readouterr().out


def test_what_stays_is_as_it_was(tmp_path):
    questions = write_questions(tmp_path / "in.jsonl", 3)
    with FakeEndpoint(lambda body: WRONG) as server:
        filter_by(server, questions, tmp_path / "out.parquet", "--limit", 2)
    assert list(load_samples(tmp_path / "out.parquet")) == list(load_samples(questions))[:2]


def test_another_criterion_asks_nothing_again_and_other_settings_are_refused(tmp_path):
    questions, out = write_questions(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    with FakeEndpoint(lambda body: LENIENT if number_of(body) else WRONG) as server:
        assert filter_by(server, questions, out, "--criterion", "strict") == ["id0", "id1", "id2"]
        assert filter_by(server, questions, out, "--criterion", "strict") == ["id0", "id1", "id2"]
        with pytest.raises(ValueError, match=r"out.jsonl: exists and was made with other settings"):
            filter_by(server, questions, out, "--criterion", "lenient")
        out.unlink()
        assert filter_by(server, questions, out, "--criterion", "lenient") == ["id0"]
        assert len(server.bodies) == 6
        with pytest.raises(ValueError, match=r"answers.jsonl: was made with other settings \(samples 2 instead of 3\)"):
            filter_by(server, questions, out, "--samples", 3)


def test_a_question_that_was_changed_is_asked_again(tmp_path):
    questions, out = write_questions(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    with FakeEndpoint(lambda body: LENIENT) as server:
        filter_by(server, questions, out, "--criterion", "strict")
        out.unlink()
        write_questions(questions, 3, answers=["it is red"])
        with pytest.raises(ValueError, match="nothing stays: 3 questions asked"):
            filter_by(server, questions, out, "--criterion", "strict")
    assert len(server.bodies) == 12


def test_all_answers_have_to_be_named_where_the_sample_says_so(tmp_path):
    questions = write_questions(tmp_path / "in.jsonl", 2, answers=["red", "blue"], match="all")
    with FakeEndpoint(lambda body: [r"\boxed{red}", r"\boxed{blue, red}"][number_of(body)]) as server:
        assert filter_by(server, questions, tmp_path / "out.jsonl") == ["id0"]


def test_keep_takes_the_first_that_stay_and_stops_asking(tmp_path, capsys):
    questions = write_questions(tmp_path / "in.jsonl", 60)

    def answer(body):  # later questions come back sooner, which must not matter
        return Reply(RIGHT if number_of(body) % 3 == 0 else WRONG, seconds=0.03 if number_of(body) < 4 else 0.0)

    for concurrency in (1, 8):
        with FakeEndpoint(answer) as server:
            out = tmp_path / f"{concurrency}.jsonl"
            kept = filter_by(server, questions, out, "--keep", 5, "--concurrency", concurrency)
        assert kept == ["id1", "id2", "id4", "id5", "id7"]
        assert len(server.bodies) < 60
    printed = capsys.readouterr().out.splitlines()
    assert "1.jsonl: 8 questions asked; any response right: strict 3" in printed[0]
    many = len((tmp_path / "8.jsonl.answers.jsonl").read_text().splitlines()) - 1
    assert f"8.jsonl: {many} questions asked, the first 8 of them decide; any" in printed[1]
    assert json.loads((tmp_path / "8.jsonl.recipe.json").read_text())["recipe"]["keep"] == 5
    assert len((tmp_path / "1.jsonl.answers.jsonl").read_text().splitlines()) == 1 + 8


def test_what_failed_is_asked_again_and_nothing_is_written_before(tmp_path):
    questions, out = write_questions(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    ill = True

    def answer(body):
        return Reply(status=400, message="filtered") if ill and number_of(body) == 1 else WRONG

    with FakeEndpoint(answer) as server:
        with pytest.raises(
            ValueError, match=r"1 questions failed, the first one id1: EndpointError: .*HTTP 400: filtered; the same"
        ):
            filter_by(server, questions, out)
        assert not out.exists()
        ill = False
        assert filter_by(server, questions, out) == ["id0", "id1", "id2"]
    assert server.times_asked(r"number \d") == {"number 0": 2, "number 1": 1 + 2, "number 2": 2}


def test_what_fails_for_good_can_be_kept_and_is_counted(tmp_path, capsys):
    questions, out = write_questions(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    with FakeEndpoint(lambda body: Reply(status=400) if number_of(body) == 1 else RIGHT) as server:
        assert filter_by(server, questions, out, "--keep_failed") == ["id1"]
    assert "2 dropped, 1 kept, 1 of them failed" in capsys.readouterr().out


def test_a_server_that_refuses_everything_ends_the_run(tmp_path):
    questions = write_questions(tmp_path / "in.jsonl", 400)
    with FakeEndpoint(lambda body: Reply(status=403, message="no")) as server:
        with pytest.raises(ValueError, match=r"^5\d questions in a row failed, the last one with: EndpointError: .*HTTP 403: no"):
            filter_by(server, questions, tmp_path / "out.jsonl", "--concurrency", 4)
    assert len(server.bodies) < 60


# --- the journal -------------------------------------------------------------------------------------------


def test_a_torn_line_is_asked_again_and_a_damaged_one_is_named(tmp_path):
    questions, out = write_questions(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    journal = tmp_path / "out.jsonl.answers.jsonl"
    with FakeEndpoint(lambda body: WRONG) as server:
        filter_by(server, questions, out)
        out.unlink()
        whole = journal.read_bytes()
        journal.write_bytes(whole[:-10])
        assert filter_by(server, questions, out) == ["id0", "id1", "id2"]
        out.unlink()
        assert filter_by(server, questions, out) == ["id0", "id1", "id2"]
        assert len(server.bodies) == 8
        out.unlink()
        journal.write_bytes(whole.replace(b'"error": null', b'"error": nul', 1))
        with pytest.raises(ValueError, match=r"answers.jsonl: line 2 is damaged"):
            filter_by(server, questions, out)


def test_settings_without_an_answer_may_change(tmp_path):
    path = tmp_path / "x.answers.jsonl"
    AnswersFile(path, {"model": "a"}).__exit__()
    with AnswersFile(path, {"model": "b"}) as journal:
        journal.add({"id": "1", **line([0.0])})
        assert path.read_text().count("\n") == 2  # on its way to the disk, whatever becomes of this process
        with pytest.raises(ValueError, match="another process is writing it"):
            AnswersFile(path, {"model": "b"})
    with pytest.raises(ValueError, match='model "b" instead of "a"'):
        AnswersFile(path, {"model": "a"})


def test_a_killed_command_goes_on_where_it_was(tmp_path):
    questions, out = write_questions(tmp_path / "in.jsonl", 24), tmp_path / "out.jsonl"
    journal = tmp_path / "out.jsonl.answers.jsonl"

    def finished() -> list[str]:
        content = journal.read_bytes() if journal.exists() else b""
        return [json.loads(row)["id"] for row in content[: content.rfind(b"\n") + 1].splitlines()[1:]]

    with FakeEndpoint(lambda body: Reply(RIGHT if number_of(body) % 2 else WRONG, seconds=0.05)) as server:
        words = ["filter", questions, out, "--endpoint", server.url, "--name", "fake", "--concurrency", 2]
        process = subprocess.Popen(
            [sys.executable, "-m", "memrl", "data", *map(str, words)],
            cwd=REPO,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        try:
            while len(finished()) < 5:
                assert process.poll() is None
                time.sleep(0.01)
        finally:
            process.kill()
            process.wait()
        before = finished()
        assert 5 <= len(before) < 24 and not out.exists()
        time.sleep(0.2)  # what was under way at the kill has come to the server by then
        asked = server.times_asked(r"number \d+")
        command(*words[1:])
    assert load_samples(out).ids == [f"id{i}" for i in range(0, 24, 2)]
    assert sorted(finished()) == sorted(f"id{i}" for i in range(24))
    after = server.times_asked(r"number \d+")
    for name in before:
        question = f"number {name.removeprefix('id')}"
        assert after[question] == asked[question] == 2
    assert all(2 <= count <= 4 for count in after.values())


# --- a model on this machine ---------------------------------------------------------------------------------


def test_a_local_model_is_asked_and_batches_do_not_matter(tmp_path):
    model, questions = make_folder(tmp_path / "model"), write_questions(tmp_path / "in.jsonl", 6, answers=["zebra"])
    options = ["--model", model, "--max_new_tokens", 6, "--samples", 3, "--device", "cpu", "--cache_gib", 0.01]
    lines = []
    for rows in (1, 5):
        out = tmp_path / f"{rows}.jsonl"
        command(questions, out, *options, "--concurrency", rows)
        journal = (tmp_path / f"{rows}.jsonl.answers.jsonl").read_text().splitlines()
        lines.append(sorted(journal[1:]))
        assert load_samples(out).ids == [f"id{i}" for i in range(6)]
    assert lines[0] == lines[1]
    for name in ("config.json", "tokenizer_config.json", "memrl_agent.yaml", "generation_config.json", "chat_template.jinja"):
        before = (model / name).read_text() if (model / name).exists() else None
        (model / name).write_text((before or "") + "\n")
        with pytest.raises(ValueError, match=r"answers.jsonl: was made with other settings \(model_files"):
            command(questions, out, *options)
        (model / name).unlink() if before is None else (model / name).write_text(before)
    responses = [json.loads(text)["responses"] for text in lines[0]]
    assert len({text for group in responses for text in group}) > 10


def test_a_question_that_does_not_fit_is_a_failure_of_its_own(tmp_path):
    with FakeEndpoint(lambda body: WRONG) as server, AnswersFile(tmp_path / "j", {}) as journal:
        llm = RemoteLLM(server.url, "fake", Characters(), Decoding())
        samples = [Sample("a", "red?", "", ("x",)), Sample("b", 7, "", ("x",)), Sample("c", "blue?", "", ("x",))]
        ask_questions(llm, samples, journal, Rule(), num_samples=1, max_new_tokens=4, seed=0)
        outcome = decide(["a", "b", "c"], journal, Rule())
    assert (outcome.kept, outcome.failed) == ([0, 1, 2], 1) and outcome.error.startswith("b: AttributeError")


def test_a_question_travels_to_a_server_as_it_is():
    text = "Wer? \N{SNOWMAN} <|im_end|> \U0001f600"
    assert Characters().decode(Characters().encode(text)) == text
    assert QUESTION_ALONE.count("{question}") == 1


# --- mistakes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--endpoint", "http://x"], "give the name|--name NAME"),
        (["--model", "nowhere"], "there is no model folder nowhere"),
        (["--model", "nowhere", "--name", "x"], "name is 'x', which only a server's models have"),
        (["--endpoint", "http://x", "--name", "x", "--temperature", "0"], "samples is 2, but at temperature 0 all are the same"),
        (["--endpoint", "http://x", "--name", "x", "--top_p", "0"], r"top_p is 0.0"),
        (["--endpoint", "http://x", "--name", "x", "--temperature", ".nan"], r"temperature is nan"),
        (["--endpoint", "x", "--name", "x"], "endpoint 'x' is not an address"),
    ],
)
def test_mistakes_are_told_before_anything_is_asked(tmp_path, words, message, monkeypatch):
    monkeypatch.setenv("MEMRL_TRACEBACK", "1")  # raise instead of ending the process
    with pytest.raises(ValueError, match=message):
        command(write_questions(tmp_path / "in.jsonl", 1), tmp_path / "out.jsonl", *words)


def test_the_output_must_not_be_the_input(tmp_path):
    questions = write_questions(tmp_path / "in.jsonl", 1)
    with pytest.raises(ValueError, match="is an input file too"):
        command(questions, questions, "--endpoint", "http://x", "--name", "x")


def test_an_output_of_which_questions_are_left_is_refused_before_asking(tmp_path):
    questions, out = write_questions(tmp_path / "in.jsonl", 2), tmp_path / "out.jsonl"
    out.write_text("{}\n")
    with FakeEndpoint() as server, pytest.raises(ValueError, match="exists, and questions are left to ask"):
        filter_by(server, questions, out)
    assert server.bodies == []
