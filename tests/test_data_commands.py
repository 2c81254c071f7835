"""`memrl data`: the list of commands, and those that check and convert data sets."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from memrl.__main__ import DATA, main
from memrl.commands.check_dataset import evidence_depths, histogram, spread
from memrl.data import load_samples, write_samples
from memrl.data.needle import build_tokenizer
from memrl.types import Sample
from memrl.utils.command_line import check_out
from tests.test_ruler_qa import squad_articles

ROOT = Path(__file__).resolve().parents[1]
GOOD = {"question": "Who?", "context": "Ed did.", "answers": ["Ed"]}


@pytest.fixture
def call(capsys):
    """call(argument, ...): (exit code, standard output, standard error)."""

    def call(*arguments):
        try:
            code = main(["data", *map(str, arguments)])
        except SystemExit as error:
            code = error.code
        return code, *capsys.readouterr()

    return call


def write_lines(path: Path, *rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# --- the list -----------------------------------------------------------------------------------------------


def test_check_tells_places_that_are_wrong_in_one_line_whatever_the_format(call, tmp_path):
    import pyarrow as pa

    wrong = {"depths": 0.5}, {"evidence": [{"begin": "here"}]}, {"evidence": "here"}
    for number, metadata in enumerate(wrong):
        path = write_lines(tmp_path / f"{number}.jsonl", {**GOOD, **metadata})
        parquet = tmp_path / f"{number}.parquet"
        pq.write_table(pa.Table.from_pylist([{**GOOD, **metadata}]), parquet)
        for name, place in ((path, "line 1"), (parquet, "row 1")):
            code, _, err = call("check", name)
            assert (code, err.strip().splitlines()[-1].startswith(f"error: {name}: {place}: {next(iter(metadata))}: ")) == (
                2,
                True,
            )


def test_ruler_tells_lengths_that_cannot_be_made_before_it_writes(call, tmp_path):
    build_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "squad.json").write_text(json.dumps(squad_articles(40)))
    common = ("--tokenizer", tmp_path / "model", "--out", tmp_path / "out", "--samples", 2, "--squad", tmp_path / "squad.json")
    code, _, err = call("ruler", "--tasks", "qa_1,niah_single_1", "--lengths", "240,2k", *common)
    assert (code, "niah_single_1: a length of 240 tokens is too short" in err) == (2, True), err
    code, _, err = call("ruler", "--tasks", "fwe,qa_1", "--lengths", "2k,20k", *common)
    assert (code, "qa_1: a length of 20480 needs paragraphs of" in err and "--repeat report" in err) == (2, True), err
    assert not (tmp_path / "out").exists()
    assert call("ruler", "--tasks", "qa_1", "--lengths", "2k,20k", *common, "--repeat", "report")[0] == 0


def test_help_lists_every_command_without_importing_any():
    script = "import sys; from memrl.__main__ import main; main(['data', '--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert (done.returncode, done.stderr) == (0, "") and not loaded & {"torch", "transformers", "pyarrow", "openai"}
    assert not any(name.startswith("memrl.commands.") for name in loaded)
    assert all(f"\n  {name} " in done.stdout for name in DATA)


@pytest.mark.parametrize("name", DATA)
def test_every_command_has_help_of_its_own(call, name):
    code, out, err = call(name, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: memrl data {name} ") and "options:" in out


@pytest.mark.parametrize(
    ("arguments", "words"), [((), "give a command"), (("chek",), "'chek'"), (("check",), "input"), (("check", "--x", "a"), "--x")]
)
def test_mistakes_are_one_line_and_exit_code_2(call, arguments, words):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert words in err and err.count("\n") == 1


def test_lengths_are_read_with_their_units(call, tmp_path):
    (tmp_path / "in.json").write_text(json.dumps(squad_articles(40)))
    command = ("squad", tmp_path / "in.json", "--out", tmp_path / "out.jsonl", "--tokenizer", tmp_path, "--tokens")
    for text in ("0", "-4", "4g", "1.5k", "4k,8k"):
        code, _, err = call(*command, text)
        assert code == 2 and "is not a length" in err and err.count("\n") == 1
    for text in ("0", "4g", "4k,4096", "4k,,8k"):
        code, _, err = call("ruler_hotpotqa", tmp_path / "in.json", "--out", tmp_path / "out", "--documents", text)
        assert code == 2 and "lengths holds" in err and err.count("\n") == 1


def test_a_place_to_write_is_checked_first(tmp_path):
    check_out(tmp_path / "a.jsonl", [tmp_path / "b.jsonl"], (".jsonl",))
    for path, words in (("none/a.jsonl", "no folder"), ("b.jsonl", "an input file too"), ("a.txt", "has to end in .jsonl")):
        with pytest.raises(ValueError, match=words):
            check_out(tmp_path / path, [tmp_path / "b.jsonl"], (".jsonl",))


# --- check --------------------------------------------------------------------------------------------------


def test_check_prints_what_is_in_a_data_set(call, tmp_path):
    rows = [
        {**GOOD, "id": "q0", "context": "word " * 100, "depths": [0.0, 0.31]},
        {**GOOD, "context": "x" * 10, "evidence": [{"begin": 9}], "match": "all", "answers": ["Ed", "Al", "Bo"]},
        {**GOOD, "context": ""},
    ]
    for path in (write_lines(tmp_path / "data.jsonl", *rows), tmp_path / "data.parquet"):
        if path.suffix == ".parquet":
            samples = load_samples(tmp_path / "data.jsonl")
            write_samples(path, samples.__getitem__, 3, {}, "test")
        code, out, _ = call("check", path)
        lines = out.splitlines()
        assert code == 0
        assert lines[0] == f"{path}: 3 samples, no mistakes"
        assert lines[1].split() == "characters min 0 mean 170.0 max 500".split()
        assert lines[2].split() == "answers min 1 mean 1.7 max 3; all have to be named in 1 samples".split()
        assert lines[3].split() == "evidence 1 0 0 1 0 0 0 0 0 1 by tenths of the document".split()
        assert "first sample q0" in lines and lines[-1].startswith("document    word word") and lines[-1].endswith("word ...")


def test_check_counts_tokens_with_a_tokenizer(call, tmp_path):
    from memrl.data.needle import build_tokenizer, make_sample

    build_tokenizer().save_pretrained(tmp_path / "tokenizer")
    write_samples(tmp_path / "data.jsonl", lambda i: make_sample(i + 1, i), 3, {}, "test")
    code, out, _ = call("check", tmp_path / "data.jsonl", "--tokenizer", tmp_path / "tokenizer")
    assert code == 0
    assert ["tokens", "min", "25", "mean", "50.0", "max", "75"] in [line.split() for line in out.splitlines()]


def test_check_names_the_first_mistake(call, tmp_path):
    path = write_lines(tmp_path / "data.jsonl", GOOD, {**GOOD, "answers": []})
    code, out, err = call("check", path)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {path}: line 2: answers: ") and err.count("\n") == 1


def test_evidence_is_placed_by_depths_or_by_characters():
    assert evidence_depths(Sample("a", "?", "x" * 8, metadata={"depths": [0.5], "evidence": [{"begin": 0}]})) == [0.5]
    evidence = [{"begin": 2}, {"begin": 6}, {"title": "t"}]
    assert evidence_depths(Sample("a", "?", "x" * 8, metadata={"evidence": evidence})) == [0.25, 0.75]
    assert evidence_depths(Sample("a", "?", "x")) == []
    assert histogram([]).split() == ["evidence", "not", "marked"]
    assert histogram([0.0, 0.1, 0.99, 1.0]).split()[1:11] == list("1100000002")
    assert spread("tokens", [1, 3_000]).split() == "tokens min 1 mean 1,500.5 max 3,000".split()


# --- convert ------------------------------------------------------------------------------------------------


def test_convert_there_and_back_gives_the_same_bytes(call, tmp_path):
    samples = [Sample(f"s{i}", "Who?", "text " * i, ("Ed",), "all", {"depths": [i / 3]}) for i in range(4)]
    first = tmp_path / "a.jsonl"
    write_samples(first, samples.__getitem__, 4, {}, "test")
    for source, target in (("a.jsonl", "b.parquet"), ("b.parquet", "c.jsonl"), ("c.jsonl", "d.parquet")):
        code, out, _ = call("convert", tmp_path / source, "--out", tmp_path / target)
        assert (code, out) == (0, f"{tmp_path / target}: 4 samples\n")
    assert (tmp_path / "c.jsonl").read_bytes() == first.read_bytes()
    assert (tmp_path / "d.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()


def test_convert_takes_documents_in_and_published_files(call, tmp_path):
    import pyarrow as pa

    (tmp_path / "a.txt").write_text("the document")
    lines = write_lines(tmp_path / "a.jsonl", {"question": "Who?", "answers": "Ed", "file": "a.txt"})
    call("convert", lines, "--out", tmp_path / "a.parquet")
    assert pq.read_table(tmp_path / "a.parquet")["context"].to_pylist() == ["the document"]

    published = {"prompt": [{"role": "user", "content": "Who?"}], "context": "c", "reward_model": {"ground_truth": ["Ed"]}}
    (tmp_path / "shards").mkdir()
    for i in range(2):
        row = {**published, "extra_info": {"index": i}}
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / "shards" / f"{i}.parquet")
    call("convert", tmp_path / "shards", "--out", tmp_path / "all.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert [(row["id"], row["extra_info"]) for row in rows] == [("0", {"index": 0}), ("1", {"index": 1})]


def test_convert_refuses_what_it_would_destroy(call, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", GOOD)
    other = write_lines(tmp_path / "b.jsonl", GOOD)
    refused = ((path, "input file too"), (other, "delete it or choose another name"), (tmp_path / "c.csv", "has to end in"))
    for out, words in refused:
        code, _, err = call("convert", path, "--out", out)
        assert code == 2 and words in err and err.count("\n") == 1


def test_convert_notices_that_its_input_has_changed(call, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", GOOD)
    out = tmp_path / "b.parquet"
    assert call("convert", path, "--out", out)[0] == 0
    assert "made by the same command" in call("convert", path, "--out", out)[2]
    write_lines(path, {**GOOD, "question": "When?"})
    code, _, err = call("convert", path, "--out", out)
    assert code == 2 and "was made with other settings (input" in err
