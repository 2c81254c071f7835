"""docs/metrics.md explains what the code logs, and nothing else."""

import ast
import json
import re
from pathlib import Path

import pytest

from tests.metrics_doc import assert_documented, documented, pattern_of

RL = Path(__file__).resolve().parent.parent / "memrl" / "rl"
GROUPS = ("reward", "rollout", "loss", "optim", "update", "scores")


def texts_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_every_name_in_the_code_has_its_formula():
    pattern = re.compile(rf"({'|'.join(GROUPS)})/[a-z_]+")
    for path in sorted(RL.glob("*.py")):
        used = {text for text in texts_in(path) if pattern.fullmatch(text)}
        known = [pattern_of(name) for name in documented("metrics.jsonl")]
        assert all(any(one.fullmatch(name) or one.fullmatch(f"{name}x") for one in known) for name in used), path


def test_every_formula_belongs_to_a_name_in_the_code():
    texts = texts_in(RL / "metrics.py")
    for name in documented("metrics.jsonl").keys() - {"step"}:
        name = re.sub("KIND.*|NAME", "", name)
        # Some names are put together from a group and the name within it.
        assert name in texts or (name.split("/")[1] in texts and f"{name.split('/')[0]}/" in texts), name


def test_table_is_read_with_its_conditions():
    table = documented("metrics.jsonl")
    assert table["reward/strict"] == "" and table["loss/kl"] == "`rl.kl_coef` > 0"
    assert table["rollout/response_tokens"] == "", "an escaped bar is no end of a column"
    assert {"strict", "lenient", "n"} <= documented("validation.jsonl").keys()
    assert {"step", "sample", "group", "rollout"} <= documented("rollouts.jsonl").keys()


def write_run(folder: Path, **changes) -> Path:
    record = dict.fromkeys((name for name, only_where in documented("metrics.jsonl").items() if not only_where), 1)
    record = {name: value for name, value in (record | changes).items() if value is not None}
    (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    (folder / "timing.jsonl").write_text('{"step": 1, "step_s": 2.0}\n')
    return folder


def test_a_run_is_held_against_the_document(tmp_path):
    assert_documented(write_run(tmp_path))
    assert_documented(write_run(tmp_path, **{"loss/kl": 0.1}))
    with pytest.raises(AssertionError, match=r"does not explain .*loss/new"):
        assert_documented(write_run(tmp_path, **{"loss/new": 0.1}))
    assert_documented(write_run(tmp_path, **{"rollout/check_tokens": 3.0, "scores/passes": 1.0}))
    with pytest.raises(AssertionError, match=r"promises .*reward/strict"):
        assert_documented(write_run(tmp_path, **{"reward/strict": None}))
    (write_run(tmp_path) / "timing.jsonl").write_text('{"step": 1, "coffee_s": 2.0}\n')
    with pytest.raises(AssertionError, match=r"coffee_s.* of timing.jsonl"):
        assert_documented(tmp_path)
