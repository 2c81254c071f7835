"""Every option of infer.py changes what it does: what reaches the sampler or the agent, or what it writes and prints.

A new option without an entry in OPTIONS fails.
"""

import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memrl.commands.infer import InferOptions, main
from memrl.prompts import load_prompts
from memrl.reading.open_model import AgentOverrides, ReaderOptions
from memrl.reading.reader import read_documents
from tests.tiny_folder import make_folder

BASE = {"files": "{a}", "--question": "name ?", "--model": "{model}"}
ANOTHER = object()  # any other value than without the option
MAPPED = {"--device": "map"}
THREADS = (os.cpu_count() or 1) + 1  # other than any default
OWN = f"{Path(__file__).with_name('own_agent.py')}:read"
# For each option: what is added to the command line, what is looked at, and what it must be then and must not be without.
OPTIONS: dict[str, tuple[dict[str, str], Callable[[SimpleNamespace], Any], Any]] = {
    "files": ({"files": "{b}"}, lambda seen: seen.samples[0].context, "stone river"),
    "question": ({"--question": "code ?"}, lambda seen: seen.samples[0].question, "code ?"),
    "model": ({"--model": "{other}"}, lambda seen: seen.weights, ANOTHER),
    "json": ({"--json": "out"}, lambda seen: Path("out").exists() and '"answer"' in Path("out").read_text(), True),
    "trace": ({"--trace": "page"}, lambda seen: Path("page").exists() and "<html" in Path("page").read_text(), True),
    "show_memory": ({"--show_memory": "false"}, lambda seen: "memory (" in seen.out, False),
    "seed": ({"--seed": "7"}, lambda seen: seen.seed, 7),
    "temperature": ({"--temperature": "0.7"}, lambda seen: seen.llm.params.temperature, 0.7),
    "top_p": ({"--top_p": "0.8"}, lambda seen: seen.llm.params.top_p, 0.8),
    "top_k": ({"--top_k": "3"}, lambda seen: seen.llm.params.top_k, 3),
    "min_p": ({"--min_p": "0.1"}, lambda seen: seen.llm.params.min_p, 0.1),
    "max_rows": ({"--max_rows": "3"}, lambda seen: (seen.sampler.max_rows, seen.sampler.scheduler.max_rows), (3, 3)),
    "cache_gib": ({"--cache_gib": "0.001"}, lambda seen: seen.sampler.cache_tokens * 256 / 2**30, pytest.approx(0.001, rel=0.01)),
    "attention": ({"--attention": "eager"}, lambda seen: seen.sampler.attention.name, "eager"),
    "max_step_tokens": ({"--max_step_tokens": "9"}, lambda seen: seen.sampler.scheduler.max_tokens, 9),
    "share_prefixes": ({"--share_prefixes": "false"}, lambda seen: seen.sampler.scheduler.share_prefixes, False),
    "dtype": ({"--dtype": "bfloat16"}, lambda seen: seen.sampler.model.dtype, torch.bfloat16),
    "yarn": ({"--yarn": "4"}, lambda seen: "YaRN, factor 4" in seen.err and seen.sampler.window >= 4 * 32768, True),
    "device": (MAPPED, lambda seen: seen.mapped is not None, True),
    "max_memory": (MAPPED | {"--max_memory": "cpu=1GiB"}, lambda seen: seen.mapped, {"cpu": "1GiB"}),
    "threads": ({"--threads": str(THREADS)}, lambda seen: seen.threads, THREADS),
    "agent.function": ({"--agent.function": OWN}, lambda seen: seen.agent.function, OWN),
    "agent.caps": ({"--agent.function": OWN, "--agent.caps.check": "2"}, lambda seen: seen.agent.caps.get("check"), 2),
    "agent.options": (
        {"--agent.function": OWN, "--agent.options.twice": "true"},
        lambda seen: seen.agent.options_dict(),
        {"twice": True},
    ),
    "agent.prompts": ({"--agent.prompts": "miniature"}, lambda seen: seen.agent.prompts, load_prompts("miniature")),
    "agent.chunk_tokens": ({"--agent.chunk_tokens": "5"}, lambda seen: (seen.agent.chunk_tokens, seen.chunks), (5, 2)),
    "agent.memory_tokens": ({"--agent.memory_tokens": "2"}, lambda seen: (seen.agent.memory_tokens, seen.longest), (2, 3)),
    "agent.answer_tokens": ({"--agent.answer_tokens": "2"}, lambda seen: seen.agent.answer_tokens, 2),
    "agent.question_tokens": ({"--agent.question_tokens": "5"}, lambda seen: seen.agent.question_tokens, 5),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("options")
    (base / "a").write_text("red blue " * 4)
    (base / "b").write_text("stone river")
    return {"a": base / "a", "b": base / "b", "model": make_folder(base / "model"), "other": make_folder(base / "other", seed=1)}


@pytest.fixture
def run(paths, monkeypatch, capsys, tmp_path):
    """run(options) -> what the command did with them; it reads a document of one chunk."""
    monkeypatch.chdir(tmp_path)

    def run(options: dict[str, str]) -> SimpleNamespace:
        seen = SimpleNamespace(mapped=None)

        def read(llm, samples, agent, on_progress, *, seed):
            seen.llm, seen.sampler, seen.samples, seen.agent, seen.seed = llm, llm.sampler, samples, agent, seed
            seen.threads = torch.get_num_threads()
            seen.weights = sum(float(p.detach().sum()) for p in llm.sampler.model.parameters())
            readings = read_documents(llm, samples, agent, on_progress, seed=seed)
            seen.chunks, seen.longest = readings[0].chunks_read, max(step.tokens for step in readings[0].steps)
            return readings

        def load_dispatched(model, dtype, device, max_memory, *rest):
            from memrl.model import load_model

            seen.mapped = max_memory or {}
            return load_model(model, dtype, "cpu")

        words = {name: value.format(**paths) for name, value in (BASE | options).items()}
        line = [words.pop("files"), *(word for pair in words.items() for word in pair)]
        with monkeypatch.context() as patch:
            patch.setattr("memrl.commands.infer.read_documents", read)
            patch.setattr("memrl.model.device_map.load_dispatched", load_dispatched)
            assert main(line) == 0
        torch.set_num_threads(1)
        seen.out, seen.err = capsys.readouterr()
        return seen

    return run


def names_of(kind: type, prefix: str = "") -> set[str]:
    return {f"{prefix}{item.name}" for item in fields(kind)}


def test_every_option_has_an_entry():
    options = names_of(InferOptions) | names_of(ReaderOptions) - {"agent"} | names_of(AgentOverrides, "agent.")
    assert options == set(OPTIONS)


def test_every_option_reaches_what_it_changes(run):
    plain = run({})
    unchanged = {name: look(plain) for name, (_, look, _) in OPTIONS.items()}
    for name, (options, look, expected) in OPTIONS.items():
        found = look(run(options))
        assert unchanged[name] != found, name
        assert expected is ANOTHER or (name, found) == (name, expected)
