"""Every option of the `memrl data` commands changes what is asked, written or printed; a new option without a case fails."""

import json
from dataclasses import fields
from types import SimpleNamespace

import pytest

from memrl.commands import build_dataset, check_dataset
from memrl.commands.filter_dataset import Filter
from memrl.data import filtering, load_samples
from memrl.endpoint import RemoteLLM
from memrl.llm import LocalLLM
from memrl.reading import open_model
from tests.test_sources import hotpot_item
from tests.tiny_folder import make_folder


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    made = {"MODEL": make_folder(root / "model"), "HOTPOT": root / "a.json", "OTHER": root / "b.json", "POOL": root / "pool.json"}
    made["HOTPOT"].write_text(json.dumps([hotpot_item(number) for number in range(4)]))
    made["OTHER"].write_text(json.dumps([hotpot_item(number) for number in range(1, 5)]))
    made["POOL"].write_text(json.dumps([{"title": f"Extra {n}", "text": f"More about {n}."} for n in range(30)]))
    made["MODEL2"] = make_folder(root / "model2", seed=1)
    for name, start in (("LINES", 0), ("MORE", 1), ("FAILING", 9)):
        rows = [{"id": f"id{i}", "question": f"q{i}?", "answers": ["red"], "context": "red"} for i in range(start, start + 3)]
        made[name] = root / f"{name}.jsonl"
        made[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
    made["OUTSIDE"] = root / "folder" / "OUTSIDE.jsonl"  # needs --allow_files
    made["OUTSIDE"].parent.mkdir()
    made["OUTSIDE"].write_text(json.dumps({"question": "q?", "answers": ["red"], "file": "../LINES.jsonl"}) + "\n")
    return made


def words_of(files, out, words) -> list[str]:
    return [str(out / word[4:]) if word.startswith("OUT/") else str(files.get(word, word)) for word in words]


# --- commands that write data sets -----------------------------------------------------------------------------------------

HOTPOT = ["HOTPOT", "--out", "OUT/x.jsonl", "--documents", "5"]
RULER_HOTPOT = ["HOTPOT", "--out", "OUT/x", "--documents", "5", "--samples", "2", "--format", "jsonl"]
RULER = ["--lengths", "400", "--tokenizer", "MODEL", "--out", "OUT/x", "--tasks", "vt", "--samples", "1", "--format", "jsonl"]
NEEDLE = ["--chunks", "4", "--out", "OUT/x.txt"]
# By command: its class, its base words, and by option the words that are added (or, with None, replace the base).
BUILDERS = {
    "hotpotqa": (
        build_dataset.Hotpotqa,
        HOTPOT,
        {
            "input": (None, ["OTHER", *HOTPOT[1:]]),
            "out": (None, ["HOTPOT", "--out", "OUT/y.jsonl", "--documents", "5"]),
            "documents": (HOTPOT, ["--documents", "6"]),
            "tokens": (None, [*HOTPOT[:3], "--tokens", "60", "--tokenizer", "MODEL"]),
            "tokenizer": (None, [*HOTPOT[:3], "--tokens", "60", "--tokenizer", "MODEL"]),
            "limit": (HOTPOT, ["--limit", "2"]),
            "seed": (HOTPOT, ["--seed", "5"]),
            "pool": (HOTPOT, ["--pool", "POOL"]),
            "repeat": (HOTPOT, ["--documents", "500", "--repeat", "report"]),
        },
    ),
    "ruler_hotpotqa": (
        build_dataset.RulerHotpotqa,
        RULER_HOTPOT,
        {
            "input": (None, ["OTHER", *RULER_HOTPOT[1:]]),
            "out": (RULER_HOTPOT, ["--out", "OUT/y"]),
            "documents": (RULER_HOTPOT, ["--documents", "5,6"]),
            "samples": (RULER_HOTPOT, ["--samples", "3"]),
            "format": (RULER_HOTPOT, ["--format", "parquet"]),
            "seed": (RULER_HOTPOT, ["--seed", "5"]),
            "pool": (RULER_HOTPOT, ["--pool", "POOL"]),
            "repeat": (RULER_HOTPOT, ["--documents", "500", "--repeat", "report"]),
        },
    ),
    "ruler": (
        build_dataset.Ruler,
        RULER,
        {
            "lengths": (RULER, ["--lengths", "500"]),
            "out": (RULER, ["--out", "OUT/y"]),
            "tasks": (RULER, ["--tasks", "niah_single_1"]),
            "samples": (RULER, ["--samples", "2"]),
            "seed": (RULER, ["--seed", "5"]),
            "format": (RULER, ["--format", "parquet"]),
        },
    ),
    "needle": (
        build_dataset.Needle,
        NEEDLE,
        {
            "chunks": (NEEDLE, ["--chunks", "5"]),
            "out": (NEEDLE, ["--out", "OUT/y.txt"]),
            "seed": (NEEDLE, ["--seed", "5"]),
        },
    ),
    "convert": (
        check_dataset.Convert,
        ["LINES", "--out", "OUT/x.jsonl"],
        {
            "input": (None, ["MORE", "--out", "OUT/x.jsonl"]),
            "out": (None, ["LINES", "--out", "OUT/x.parquet"]),
            "allow_files": (None, ["OUTSIDE", "--out", "OUT/x.jsonl", "--allow_files"]),
        },
    ),
    "check": (
        check_dataset.Check,
        ["LINES"],
        {
            "input": (None, ["MORE"]),
            "tokenizer": (["LINES"], ["--tokenizer", "MODEL"]),
            "allow_files": (None, ["OUTSIDE", "--allow_files"]),
        },
    ),
}
# Files of RULER's tasks: tests/test_ruler_tasks.py and tests/test_ruler_qa.py; a model's tokenizer alone is the text's length.
ELSEWHERE = {"ruler": {"essays", "squad", "hotpotqa", "pool", "repeat", "tokenizer"}}


def outcome(kind, arguments, out, capsys) -> dict:
    """What a command printed and wrote, by file name, without the recipes and the place."""
    try:
        assert kind.main(arguments) == 0
    except SystemExit as stop:
        return {"code": stop.code}
    made = {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*.*")) if "recipe" not in path.name}
    return made | {"printed": capsys.readouterr().out.replace(str(out), "")}


@pytest.mark.parametrize("name", BUILDERS)
def test_every_option_of_a_command_changes_what_it_writes(name, files, tmp_path, capsys):
    kind, base, cases = BUILDERS[name]
    assert cases.keys() | ELSEWHERE.get(name, set()) == {item.name for item in fields(kind)}
    results = []
    for number, words in enumerate([base, base, *([*(before or []), *more] for before, more in cases.values())]):
        out = tmp_path / str(number)
        out.mkdir()
        results.append(outcome(kind, words_of(files, out, words), out, capsys))
    plain, again, *changed = results
    assert plain == again and "code" not in plain
    for option, result in zip(cases, changed, strict=True):
        assert "code" not in result and result != plain, option


# --- filter ----------------------------------------------------------------------------------------------------------------

LOCAL = ["--model", "MODEL", "--device", "cpu"]
SERVER = ["--endpoint", "http://localhost:9/v1", "--name", "served"]
FILTER_CASES = {
    "input": (["MORE", "OUT/x.jsonl", *LOCAL], lambda run: run.ids == ["id1", "id2", "id3"]),
    "out": (["LINES", "OUT/y.parquet", *LOCAL], lambda run: run.written == ["y.parquet"]),
    "model": (["LINES", "OUT/x.jsonl", "--model", "MODEL2"], lambda run: run.model.name == "model2"),
    "endpoint": (["LINES", "OUT/x.jsonl", *SERVER], lambda run: isinstance(run.llm, RemoteLLM) and ":9/v1" in run.llm.url),
    "name": (["LINES", "OUT/x.jsonl", *SERVER], lambda run: getattr(run.llm, "model", "") == "served"),
    "samples": (["--samples", "3"], lambda run: run.asked["num_samples"] == 3),
    "criterion": (["--criterion", "lenient"], lambda run: run.rule.criterion == run.recipe["criterion"] == "lenient"),
    "drop_when": (["--drop_when", "all"], lambda run: run.rule.drop_when == run.recipe["drop_when"] == "all"),
    "limit": (["--limit", "2"], lambda run: run.ids == ["id0", "id1"] and len(run.questions) == 2),
    "keep": (["--keep", "1"], lambda run: run.ids == ["id0"] and run.asked["keep"] == run.recipe["keep"] == 1),
    "allow_files": (["OUTSIDE", "OUT/x.jsonl", *LOCAL, "--allow_files"], lambda run: run.ids == ["OUTSIDE.jsonl:1"]),
    "keep_failed": (["FAILING", "OUT/x.jsonl", *LOCAL, "--keep_failed"], lambda run: run.ids == ["id9", "id10", "id11"]),
    "temperature": (["--temperature", "0.5"], lambda run: run.llm.params.temperature == run.recipe["temperature"] == 0.5),
    "top_p": (["--top_p", "0.9"], lambda run: run.llm.params.top_p == run.recipe["top_p"] == 0.9),
    "max_new_tokens": (["--max_new_tokens", "9"], lambda run: run.asked["max_new_tokens"] == run.recipe["max_new_tokens"] == 9),
    "seed": (["--seed", "5"], lambda run: run.asked["seed"] == run.recipe["seed"] == 5),
    "concurrency": (["--concurrency", "3"], lambda run: run.llm.concurrency == run.reader.max_rows == 3),
    "device": (["--device", "auto"], lambda run: run.reader.device == "auto"),
    "dtype": (["--dtype", "float16"], lambda run: run.reader.dtype == run.recipe["dtype"] == "float16"),
    "cache_gib": (["--cache_gib", "0.5"], lambda run: run.reader.cache_gib == 0.5),
}


@pytest.fixture
def run_filter(files, tmp_path, monkeypatch):
    """run_filter(*words): what the command asked, and what it wrote; no question is answered right, id9 to id11 fail."""

    def run_filter(*words):
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        out.mkdir()
        run = SimpleNamespace(model=None, reader=None)

        def ask(llm, samples, journal, rule, **options):
            run.llm, run.rule, run.asked, run.questions = llm, rule, options, list(samples)
            for sample in run.questions:
                error = "x" if sample.id in ("id9", "id10", "id11") else None
                line = {"id": sample.id, "question": sample.question, "answers": list(sample.answers), "match": "any"}
                journal.add(line | {"responses": ["blue"], "strict": [0.0], "lenient": [0.0], "error": error})

        opened = open_model.open_llm
        monkeypatch.setattr(filtering, "ask_questions", ask)
        monkeypatch.setattr(RemoteLLM, "check", lambda self: None)
        monkeypatch.setattr(
            open_model, "open_llm", lambda *given: vars(run).update(model=given[0], reader=given[3]) or opened(*given)
        )
        words = words if words and words[0].isupper() else ["LINES", "OUT/x.jsonl", *LOCAL, *words]
        code = Filter.main(words_of(files, out, words))
        monkeypatch.undo()
        assert code == 0
        (made,) = [path for path in out.iterdir() if not {"recipe", "answers"} & set(path.name.split("."))]
        run.ids, run.written = load_samples(made).ids, [made.name]
        run.recipe = json.loads((out / f"{made.name}.recipe.json").read_text())["recipe"]
        return run

    return run_filter


def test_every_option_of_filter_arrives(run_filter):
    assert FILTER_CASES.keys() == {item.name for item in fields(Filter)}
    plain = run_filter()
    assert isinstance(plain.llm, LocalLLM)
    for name, (words, holds) in FILTER_CASES.items():
        assert holds(run_filter(*words)), name
        assert not holds(plain), name
    for name in ("FAILING", "OUTSIDE"):
        with pytest.raises(SystemExit):
            run_filter(name, "OUT/x.jsonl", *LOCAL)
