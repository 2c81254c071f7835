"""docs/one_training_step.ipynb: its cells run, and find what its stored outputs show."""

import base64
import importlib.util
import json
import re
from pathlib import Path

import pytest

from memrl.engine import distributed

DOCS = Path(__file__).resolve().parent.parent / "docs"
NOTEBOOK = DOCS / "one_training_step.ipynb"
NUMBER = re.compile(r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?")
CONTENT = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
CELLS = [cell for cell in CONTENT["cells"] if cell["cell_type"] == "code"]


@pytest.fixture(scope="module")
def runner():
    spec = importlib.util.spec_from_file_location("run_notebook", DOCS / "run_notebook.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    distributed.shutdown()


def printed(outputs: list[dict]) -> str:
    return "".join(line for output in outputs for line in output.get("text", []))


def pictures(outputs: list[dict]) -> list[bytes]:
    return [base64.b64decode(output["data"]["image/png"]) for output in outputs if output["output_type"] == "display_data"]


def test_the_cells_find_what_the_stored_outputs_show(runner):
    """Words are equal; numbers within 2% or 0.02, because another machine rounds differently."""
    for cell, outputs in zip(CELLS, runner.run(CONTENT), strict=True):
        found, stored = printed(outputs), printed(cell["outputs"])
        assert NUMBER.sub("#", found).split() == NUMBER.sub("#", stored).split()
        numbers = [[float(number.replace(",", "")) for number in NUMBER.findall(text)] for text in (found, stored)]
        assert numbers[0] == pytest.approx(numbers[1], rel=0.02, abs=0.02), stored
        assert [data[:8] for data in pictures(outputs)] == [b"\x89PNG\r\n\x1a\n"] * len(pictures(cell["outputs"]))


def test_the_stored_outputs_prove_the_gradient_and_hold_pictures():
    text = "".join(printed(cell["outputs"]) for cell in CELLS)
    assert "the gradients agree to better than 1 in 10,000" in text and "the gradients agree again" in text
    assert sum(len(pictures(cell["outputs"])) for cell in CELLS) == 4
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, len(CELLS) + 1))
    assert NOTEBOOK.stat().st_size < 600_000
