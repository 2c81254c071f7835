"""Every option of eval.py changes what it says: each is run with another value, up to the call that reads the documents."""

import importlib
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from memrl.commands import eval as command
from memrl.data.ruler import RulerFiles
from memrl.endpoint import RemoteLLM
from memrl.evaluation import evaluation_run
from memrl.evaluation.methods import MethodOptions
from memrl.evaluation.options import Options
from memrl.evaluation.results import read_config
from memrl.prompts import load_prompts
from memrl.reading import open_model
from memrl.reading.open_model import AgentOverrides, ReaderOptions
from tests.tiny_folder import make_folder

ENDPOINT = ["--endpoint", "http://localhost:9/v1", "--tokenizer", "MODEL", "--window", "5000"]


OWN = f"{Path(__file__).with_name('own_agent.py')}:read"


def has_method(run, name, **expected) -> bool:
    config = run.methods[name].config if name in run.methods else None
    return config is not None and all(getattr(config, key) == value for key, value in expected.items())


# By option: the words of a command that gives it, and what is true of its run and of no run without it.
CASES = {
    "model": (["--model", "OTHER"], lambda run: run.loaded.endswith("other")),
    "task": (["--task", "vt", "--lengths", "400"], lambda run: {key.task for key in run.keys} == set(run.tasks) == {"vt"}),
    "lengths": (["--lengths", "3,1"], lambda run: [key.length for key in run.keys] == [3, 3, 1, 1]),
    "methods": (["--methods", "memory,one_shot"], lambda run: {key.method for key in run.keys} == {"memory", "one_shot"}),
    "samples": (["--samples", "3"], lambda run: [key.index for key in run.keys] == [0, 1, 2]),
    "repeats": (["--repeats", "2", "--temperature", "1"], lambda run: [key.repeat for key in run.keys] == [0, 1, 0, 1]),
    "seed": (["--seed", "5"], lambda run: run.seed == run.config["seed"] == 5),
    "out": (["--out", "ELSEWHERE"], lambda run: run.folder.name == "elsewhere"),
    "resume": (["--resume", "no"], lambda run: run.resume is False),
    "label": (["--label", "model"], lambda run: run.columns["model"] == run.config["model"] == "model"),
    "allow_files": (["--allow_files"], lambda run: run.allow_files is True),
    "endpoint": (ENDPOINT, lambda run: isinstance(run.llm, RemoteLLM) and run.llm.url == "http://localhost:9/v1"),
    "tokenizer": (
        [*ENDPOINT, "--tokenizer", "OTHER"],
        lambda run: run.llm.tokenizer.hf.name_or_path.endswith("/other"),
    ),
    "temperature": (["--temperature", "0.7"], lambda run: run.params.temperature == run.config["decoding"]["temperature"] == 0.7),
    "top_p": (["--top_p", "0.9"], lambda run: run.params.top_p == run.config["decoding"]["top_p"] == 0.9),
    "top_k": (["--top_k", "7"], lambda run: run.params.top_k == run.config["decoding"]["top_k"] == 7),
    "min_p": (["--min_p", "0.1"], lambda run: run.params.min_p == run.config["decoding"]["min_p"] == 0.1),
    "max_rows": (["--max_rows", "3"], lambda run: run.llm.concurrency == run.sampler["max_rows"] == 3),
    "cache_gib": (["--cache_gib", "0.5"], lambda run: run.sampler["cache_gib"] == 0.5),
    "attention": (["--attention", "eager"], lambda run: run.sampler["attention"].name == "eager"),
    "max_step_tokens": (["--max_step_tokens", "99"], lambda run: run.sampler["max_step_tokens"] == 99),
    "share_prefixes": (["--share_prefixes", "false"], lambda run: run.sampler["share_prefixes"] is False),
    "dtype": (["--dtype", "float16"], lambda run: run.dtype == "torch.float16" and run.config["dtype"] == "float16"),
    "yarn": (
        ["--yarn", "4"],
        lambda run: run.llm.sampler.model.config.rope.factor == run.config["config"]["rope"]["factor"] == 4,
    ),
    "device": (["--device", "auto"], lambda run: "auto" in run.devices),
    "max_memory": (["--device", "map", "--max_memory", "cpu=9GiB"], lambda run: run.max_memory == {"cpu": "9GiB"}),
    "threads": (["--threads", "3"], lambda run: run.threads == 3),
    "window": (["--methods", "one_shot", "--window", "900"], lambda run: has_method(run, "one_shot", window=900)),
    "retrieval_tokens": (
        ["--methods", "retrieval", "--retrieval_tokens", "700"],
        lambda run: has_method(run, "retrieval", tokens=700),
    ),
    "passage_tokens": (
        ["--methods", "retrieval", "--passage_tokens", "70"],
        lambda run: has_method(run, "retrieval", passage_tokens=70),
    ),
    "agent.function": (["--agent.function", OWN], lambda run: has_method(run, OWN, function=OWN)),
    "agent.caps": (
        ["--agent.function", OWN, "--agent.caps.check", "3"],
        lambda run: run.agent.caps == {"check": 3, "other": 5},
    ),
    "agent.options": (
        ["--agent.function", OWN, "--agent.options.twice", "true"],
        lambda run: run.agent.options_dict() == {"twice": True},
    ),
    "agent.prompts": (["--agent.prompts", "miniature"], lambda run: run.agent.prompts == load_prompts("miniature")),
    "agent.chunk_tokens": (
        ["--agent.chunk_tokens", "11"],
        lambda run: run.agent.chunk_tokens == run.columns["chunk_tokens"] == run.tasks["needle"].tokens_per_unit == 11,
    ),
    "agent.memory_tokens": (["--agent.memory_tokens", "5"], lambda run: run.agent.memory_tokens == 5),
    "agent.answer_tokens": (["--agent.answer_tokens", "6"], lambda run: run.agent.answer_tokens == 6),
    "agent.question_tokens": (["--agent.question_tokens", "7"], lambda run: run.agent.question_tokens == 7),
    "essays": (["--essays", "x"], lambda run: run.files.essays == "x"),
    "squad": (["--squad", "x"], lambda run: run.files.squad == "x"),
    "hotpotqa": (["--hotpotqa", "x"], lambda run: run.files.hotpotqa == "x"),
    "pool": (["--pool", "x", "y"], lambda run: run.files.pool == ["x", "y"]),
    "repeat": (["--repeat", "report"], lambda run: run.files.repeat == "report"),
}


def option_names() -> set[str]:
    names = {item.name for kind in (Options, ReaderOptions, MethodOptions, RulerFiles) for item in fields(kind)}
    return names - {"agent"} | {f"agent.{item.name}" for item in fields(AgentOverrides)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("wiring")
    return {"MODEL": make_folder(root / "model"), "OTHER": make_folder(root / "other", seed=1), "ELSEWHERE": root / "elsewhere"}


@pytest.fixture
def run_eval(folders, tmp_path, monkeypatch):
    """run_eval(*words): everything that an evaluation made of its options, recorded on its way to the readings."""

    def run_eval(*words):
        run = SimpleNamespace(devices=[], max_memory=None, loaded="", sampler={}, llm=None)

        def record(module, name, note):
            original = getattr(importlib.import_module(module), name)

            def recorded(*arguments, **options):
                note(arguments, options)
                return original(*arguments, **options)

            monkeypatch.setattr(f"{module}.{name}", recorded)

        def read_all(llm, keys, tasks, methods, seed, **options):
            run.llm, run.keys, run.tasks, run.methods, run.seed, run.columns = llm, keys, tasks, methods, seed, options["columns"]

        record("memrl.sampler", "Sampler", lambda arguments, options: run.sampler.update(options))
        record(
            "memrl.evaluation.evaluation_run",
            "make_tasks",
            lambda given, _: vars(run).update(files=given[3], allow_files=given[4]),
        )
        record(
            "memrl.evaluation.evaluation_run",
            "Results",
            lambda arguments, options: vars(run).update(options, folder=arguments[0]),
        )
        record("memrl.reading.open_model", "pick_device", lambda arguments, _: run.devices.append(arguments[0]))
        record("memrl.reading.open_model", "_load_weights", lambda arguments, _: setattr(run, "loaded", str(arguments[0])))
        record("memrl.model.device_map", "load_dispatched", lambda arguments, _: setattr(run, "max_memory", arguments[3]))
        monkeypatch.setattr(open_model, "set_threads", lambda threads: setattr(run, "threads", threads))
        monkeypatch.setattr(RemoteLLM, "check", lambda self: None)
        monkeypatch.setattr(evaluation_run, "read_all", read_all)
        base = ["--model", folders["MODEL"], "--lengths", "2", "--samples", "2", "--device", "cpu"]
        every = [*base, "--out", tmp_path / "_".join(words[:2]).replace("/", "-"), *words]
        assert command.main([str(folders.get(word, word)) for word in every]) == 1  # rows are missing
        monkeypatch.undo()
        run.config = read_config(run.folder)
        run.agent = next(iter(run.methods.values())).agent
        run.params = getattr(run.llm, "params", None) or run.llm.decoding
        run.dtype = str(run.llm.sampler.model.dtype) if hasattr(run.llm, "sampler") else None
        return run

    return run_eval


def test_every_option_has_a_case():
    assert CASES.keys() == option_names()


@pytest.fixture(scope="module")
def plain():
    return {}


@pytest.mark.parametrize("name", CASES)
def test_an_option_reaches_what_it_is_about(name, run_eval, plain, capsys):
    words, holds = CASES[name]
    assert holds(run_eval(*words)), name
    if not plain:
        plain["run"] = run_eval()
    if name != "tokenizer":  # only an endpoint has one
        assert not holds(plain["run"]), name
