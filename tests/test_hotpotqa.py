"""The commands that write HotpotQA, SQuAD and MuSiQue questions on long documents, and RULER-HotpotQA."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memrl.__main__ import main
from memrl.data import load_samples
from memrl.data.documents import FORMAT
from tests.test_sources import hotpot_item, hub_row, json_lines, musique_item, squad_file

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def write_items(tmp_path):
    def write_items(items, name="hotpot.json.gz") -> Path:
        content = json.dumps(items).encode()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return tmp_path / name

    return write_items


def command(*arguments, **environment) -> subprocess.CompletedProcess:
    words = [sys.executable, "-m", "memrl", "data", *map(str, arguments)]
    env = {**os.environ, **environment}
    return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


def written(*arguments, **environment) -> str:
    """What a command that succeeds prints."""
    done = command(*arguments, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def num_documents(sample) -> int:
    return sample.context.count("\n\nDocument ") + 1


def test_hotpotqa_writes_the_same_bytes_every_time_and_they_load(write_items, tmp_path):
    source, out = write_items([hotpot_item(i) for i in range(30)]), [tmp_path / "1.jsonl", tmp_path / "2.jsonl"]
    for path, salt in zip(out, "12", strict=True):
        printed = written("hotpotqa", source, "--out", path, "--documents", 20, "--seed", 5, PYTHONHASHSEED=salt)
        assert printed == f"{path}: 30 questions, 20 documents each\n"
    assert out[0].read_bytes() == out[1].read_bytes()
    samples = load_samples(out[0])
    assert [sample.id for sample in samples] == [f"q{i}" for i in range(30)]
    assert all(num_documents(sample) == 20 for sample in samples)
    metadata = samples[3].metadata
    names = ["type", "level", "supporting_facts", "num_documents", "repeated", "seed", "evidence", "depths"]
    assert list(metadata) == names
    assert metadata["seed"] == 5


def test_hotpotqa_samples_do_not_depend_on_the_order_of_the_file(write_items, tmp_path):
    items = [hotpot_item(i) for i in range(30)]
    turned = [{**item, "context": item["context"][::-1]} for item in items[::-1]]
    out = [tmp_path / "1.jsonl", tmp_path / "2.jsonl"]
    written("hotpotqa", write_items(items, "a.json"), "--out", out[0], "--documents", 20)
    written("hotpotqa", write_items(turned, "b.json"), "--out", out[1], "--documents", 20)
    assert out[0].read_text().splitlines() == out[1].read_text().splitlines()[::-1]


def test_hotpotqa_as_parquet_holds_the_same_samples(write_items, tmp_path):
    pytest.importorskip("pyarrow")
    source, out = write_items([hotpot_item(i) for i in range(5)]), [tmp_path / "a.jsonl", tmp_path / "a.parquet"]
    for path in out:
        written("hotpotqa", source, "--out", path, "--documents", 10)
    assert list(load_samples(out[1])) == list(load_samples(out[0]))


def test_shards_in_a_folder_are_one_file_and_the_recipe_names_all(write_items, tmp_path):
    from pyarrow import Table, parquet

    rows = [hub_row(hotpot_item(i)) for i in range(6)]
    (tmp_path / "hub").mkdir()
    for name, part in (("b", rows[3:]), ("a", rows[:3])):
        parquet.write_table(Table.from_pylist(part), tmp_path / "hub" / f"{name}.parquet")
    extra, out = write_items([hotpot_item(6)]), tmp_path / "out.jsonl"
    printed = written("hotpotqa", tmp_path / "hub", extra, "--out", out, "--documents", 28)
    assert printed == f"{out}: 7 questions, 28 documents each\n"
    whole, other = write_items([hotpot_item(i) for i in range(7)], "whole.json"), tmp_path / "other.jsonl"
    written("hotpotqa", whole, "--out", other, "--documents", 28)
    assert out.read_bytes() == other.read_bytes()
    recipe = json.loads((tmp_path / "out.jsonl.recipe.json").read_text())["recipe"]
    assert [name.split()[0] for name in recipe["input"]] == ["a.parquet", "b.parquet", "hotpot.json.gz"]
    assert recipe["format"] == FORMAT


def test_limit_pool_and_repetition(write_items, tmp_path):
    source, out = write_items([hotpot_item(i) for i in range(3)]), tmp_path / "out.jsonl"
    lists = {name: [{"title": f"{name}{i}", "text": "x"} for i in range(9)] for name in "ab"}
    pools = [write_items(items, name=f"{name}.json") for name, items in lists.items()]
    written("hotpotqa", source, "--out", out, "--documents", 30, "--limit", 2, "--pool", *pools)
    assert [num_documents(sample) for sample in load_samples(out)] == [30, 30]
    again = tmp_path / "again.jsonl"
    printed = written("hotpotqa", source, "--out", again, "--documents", 30, "--limit", 2, "--repeat", "report")
    assert printed == f"{again}: 2 questions, 30 documents each; 36 of the 60 paragraphs just written are copies\n"
    assert [sample.metadata["repeated"] for sample in load_samples(again)] == [18, 18]


def test_squad_and_musique_tell_what_they_leave_out(write_items, tmp_path):
    source, out = write_items(squad_file()), tmp_path / "squad.jsonl"
    printed = written("squad", source, "--out", out, "--documents", 4)
    assert printed == f"{out}: 3 questions, 4 documents each; 1 without an answer are left out\n"
    first = load_samples(out)[0]
    assert (first.answers, first.metadata["article"]) == (("Al", "Alpha"), "Greek letters")
    items, out = [musique_item(0), musique_item(0, answerable=False), musique_item(1)], tmp_path / "musique.jsonl"
    (tmp_path / "m.jsonl").write_text(json_lines(items))
    printed = written("musique", tmp_path / "m.jsonl", "--out", out, "--documents", 5)
    assert printed == f"{out}: 2 questions, 5 documents each; 1 without an answer are left out\n"
    assert [len(sample.metadata["evidence"]) for sample in load_samples(out)] == [2, 2]


def test_documents_of_so_many_tokens(write_items, tmp_path):
    from memrl.data.needle import build_tokenizer

    build_tokenizer().save_pretrained(tmp_path / "model")  # a word is a token
    source, out = write_items([hotpot_item(i) for i in range(200)]), tmp_path / "out.jsonl"
    written("hotpotqa", source, "--out", out, "--tokens", "1k", "--tokenizer", tmp_path / "model", "--limit", 20)
    for sample in load_samples(out):
        assert 1013 < len(sample.context.split()) == sample.metadata["num_tokens"] <= 1024


def test_ruler_hotpotqa_writes_the_same_questions_at_each_length(write_items, tmp_path):
    source, out = write_items([hotpot_item(i) for i in range(30)]), tmp_path / "ruler"
    written("ruler_hotpotqa", source, "--documents", "50,20", "--out", out, "--samples", 7, "--seed", 1, "--format", "jsonl")
    files = [load_samples(out / f"ruler_hotpotqa_{count}.jsonl") for count in (20, 50)]
    assert [[sample.id for sample in samples] for samples in files] == [[f"q{i}" for i in range(7)]] * 2
    assert [[num_documents(sample) for sample in samples] for samples in files] == [[20] * 7, [50] * 7]
    again = tmp_path / "again"
    common = ("--documents", "50", "--out", again, "--seed", 1)
    written("ruler_hotpotqa", source, *common, "--samples", 7, "--format", "jsonl", PYTHONHASHSEED="3")
    name = "ruler_hotpotqa_50.jsonl"
    assert (again / name).read_bytes() == (out / name).read_bytes()
    printed, path = written("ruler_hotpotqa", source, *common), again / "ruler_hotpotqa_50.parquet"
    assert printed == f"{path}: 30 questions (all that there are, not 128), 50 documents each\n"
    assert list(load_samples(path))[:7] == list(load_samples(again / name))


MISTAKES = {
    # what the one line must say: arguments; {} is the folder of the test's files
    "--documents": "hotpotqa {}/good.json --out {}/o.jsonl",
    "documents is 0": "hotpotqa {}/good.json --out {}/o.jsonl --documents 0",
    "9 documents": "hotpotqa {}/good.json --out {}/o.jsonl --documents 9",
    "none.json": "hotpotqa {}/none.json --out {}/o.jsonl --documents 4",
    "cut.json.gz: cannot be read": "hotpotqa {}/cut.json.gz --out {}/o.jsonl --documents 4",
    "bad.json: not JSON": "hotpotqa {}/bad.json --out {}/o.jsonl --documents 4",
    "no folder": "hotpotqa {}/good.json --out {}/none/o.jsonl --documents 4",
    "input file too": "hotpotqa {}/lines.jsonl --out {}/lines.jsonl --documents 4",
    "holds HotpotQA, but SQuAD is needed": "squad {}/good.json --out {}/o.jsonl --documents 4",
    "belong together": "hotpotqa {}/good.json --out {}/o.jsonl --tokens 4k",
    "has to end in": "hotpotqa {}/good.json --out {}/o.txt --documents 4",
    "300 documents": "ruler_hotpotqa {}/good.json --out {}/ruler --documents 300",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(words, write_items, tmp_path, capsys):
    good = write_items([hotpot_item(0)], "good.json")
    write_items([hotpot_item(0)], "lines.jsonl")
    write_items([hotpot_item(0)], "cut.json.gz").write_bytes(gzip.compress(good.read_bytes())[:40])
    (tmp_path / "bad.json").write_text("[{")
    with pytest.raises(SystemExit) as ended:
        main(["data", *MISTAKES[words].format(tmp_path, tmp_path).split()])
    assert ended.value.code == 2
    *_, line = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ") and words in line
    assert not (tmp_path / "o.jsonl").exists()


def test_help_loads_nothing_heavy():
    words = [sys.executable, "-X", "importtime", "-m", "memrl", "data", "hotpotqa", "--help"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--documents" in done.stdout
    assert not {"torch", "transformers", "pyarrow"} & {line.split("|")[-1].strip() for line in done.stderr.splitlines()}


def test_making_documents_does_not_import_torch():
    script = "import sys, memrl.data.documents, memrl.data.corpora, memrl.data.ruler_hotpotqa; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60).returncode == 0
