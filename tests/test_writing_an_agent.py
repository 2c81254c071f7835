"""docs/writing_an_agent.md does what it says: its code is trained, evaluated and used as printed."""

import asyncio
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from memrl.agents import AgentConfig, load_agent_function, make_config
from memrl.commands import eval as eval_command
from memrl.commands import infer
from memrl.data.needle import make_sample
from memrl.prompts import load_prompts
from memrl.types import Sample
from tests.test_agent import scripted
from tests.test_tokenizer import character_tokenizer

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "writing_an_agent.md").read_text(encoding="utf-8")
QUICK = "--warm_start.quote_steps 2 --warm_start.teach_steps 2 --rl.steps 2 --rl.prompts_per_step 2 --rl.group_size 2 "
QUICK += "--report.lengths []"


def block(language: str, first: str = "") -> str:
    return next(text for text in re.findall(rf"```{language}\n(.*?)```", PAGE, re.S) if text.startswith(first))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The page's files, outside the repository, and a document in the miniature's language."""
    (tmp_path / "in_parts.py").write_text(block("python", "# in_parts.py"))
    (tmp_path / "in_parts.yaml").write_text(block("yaml", "# in_parts.yaml"))
    sample = make_sample(4, 0)
    (tmp_path / "document.txt").write_text(sample.context)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def commands(extra: str = "") -> list[list[str]]:
    """The page's commands without their interpreter; the first one with further words."""
    lines = [shlex.split(line)[1:] for line in block("sh").splitlines()]
    lines[0] += shlex.split(extra)
    return lines


def test_the_agent_is_trained_evaluated_and_used_as_the_page_says(folder, capsys):
    training, evaluation, reading = commands(f"--device cpu {QUICK}")
    run(training)  # DeepSpeed can be started once in a process
    assert eval_command.main([*evaluation[1:], "--samples", "2"]) == 0
    assert infer.main(reading[1:]) == 0
    saved = yaml.safe_load((folder / "runs/in_parts/model/memrl_agent.yaml").read_text())
    assert saved["function"] == "in_parts.py:read_in_parts" and saved["options"] == {"parts": 3}
    rows = [json.loads(line) for line in Path("runs/in_parts/eval/model/samples.jsonl").read_text().splitlines()]
    assert {row["method"] for row in rows} == {"in_parts.py:read_in_parts", "memory"} and not any(row["error"] for row in rows)
    assert "answer: " in capsys.readouterr().out


def run(words: list[str], *launcher: str) -> None:
    words = [word.replace("configs/tiny.yaml", str(ROOT / "configs/tiny.yaml")) for word in words]
    done = subprocess.run([sys.executable, *launcher, str(ROOT / words[0]), *words[1:]], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_the_agent_trains_on_two_ranks_and_its_model_is_used(folder):
    training, evaluation, reading = commands(QUICK)
    run(training, "-m", "torch.distributed.run", "--nproc_per_node", "2")
    run([*evaluation, "--samples", "2"])
    run(reading)
    records = [json.loads(line) for line in Path("runs/in_parts/metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2] and all(record["reward/errors"] == 0 for record in records)


def test_the_parts_are_read_at_once_and_joined_in_order(folder):
    tokenizer = character_tokenizer()
    prompts = load_prompts("question_first")
    config = make_config(
        prompts, function="in_parts.py:read_in_parts", options={"parts": 2}, chunk_tokens=4, memory_tokens=3, answer_tokens=3
    )
    assert isinstance(config, AgentConfig)
    _, llm, _ = scripted(tokenizer, lambda request: tokenizer.encode("abc"))
    function = load_agent_function(config.function)
    [found] = llm.run([function.run(llm.session(1), Sample("s", "q", "x" * 14), config)])
    assert [turn.kind for turn in found.turns] == ["memory"] * 4 + ["answer"]
    assert found.memory == "abcabc" and asyncio.iscoroutinefunction(function.run)


def test_every_row_of_the_page_names_what_there_is(folder):
    function = load_agent_function("in_parts.py:read_in_parts")
    assert set(function.texts) == {"memory", "answer", "no_memory"}
    with pytest.raises(ValueError, match="no option 'pieces'; there are parts"):
        make_config(load_prompts("miniature"), function="in_parts.py:read_in_parts", options={"pieces": 2})
    with pytest.raises(ValueError, match=r"agent.options.parts is 'two'"):
        make_config(load_prompts("miniature"), function="in_parts.py:read_in_parts", options={"parts": "two"})
