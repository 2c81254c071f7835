"""Run the code cells of docs/one_training_step.ipynb and store their outputs; needs no Jupyter.

    python docs/run_notebook.py

With `--start runs/tiny/start` that model is first stored in docs/miniature_start, in half precision, for the notebook to read.
"""

import argparse
import base64
import contextlib
import io
import json
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).resolve().parent
NOTEBOOK, START = DOCS / "one_training_step.ipynb", DOCS / "miniature_start"


def run(notebook: dict) -> list[list[dict]]:
    """The outputs of each code cell, in Jupyter's format: what it prints, then a PNG of each figure that it makes."""
    names: dict = {"__name__": "__main__"}
    all_outputs = []
    for number, cell in enumerate(code_cells(notebook)):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"cell {number + 1}", "exec"), names)
        outputs: list[dict] = []
        if printed.getvalue():
            outputs.append({"name": "stdout", "output_type": "stream", "text": printed.getvalue().splitlines(keepends=True)})
        outputs += [picture(figure) for figure in map(plt.figure, plt.get_fignums())]
        plt.close("all")
        all_outputs.append(outputs)
    return all_outputs


def code_cells(notebook: dict) -> list[dict]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def picture(figure) -> dict:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=72, bbox_inches="tight", metadata={"Software": None})
    data = {"image/png": base64.b64encode(file.getvalue()).decode(), "text/plain": ["<Figure>"]}
    return {"data": data, "metadata": {}, "output_type": "display_data"}


def store_start(folder: Path) -> None:
    from memrl.agents.agent_file import load_agent, save_agent
    from memrl.model import load_model
    from memrl.model.saver import save_state
    from memrl.tokenizer import load_tokenizer

    model, agent = load_model(folder), load_agent(folder)
    weights, tokenizer = model.state_dict().items(), load_tokenizer(folder)
    save_state(weights, model.config, "float16", START, tokenizer, finish=lambda new: save_agent(agent, new))


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the notebook docs/one_training_step.ipynb and store its outputs in it.")
    parser.add_argument("--start", type=Path, help="first store this model folder in docs/miniature_start, in half precision")
    options = parser.parse_args()
    if options.start is not None:
        store_start(options.start)
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    for number, (cell, outputs) in enumerate(zip(code_cells(notebook), run(notebook), strict=True)):
        cell["execution_count"], cell["outputs"] = number + 1, outputs
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{NOTEBOOK.name}: {NOTEBOOK.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
