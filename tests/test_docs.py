"""What the documents promise about the repository: links, paths, names, commands, examples and the README's length."""

import ast
import doctest
import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

REPO = Path(__file__).resolve().parent.parent
PAGES = [REPO / "README.md", REPO / "CONTRIBUTING.md", REPO / "CHANGELOG.md", *sorted((REPO / "docs").glob("*.md"))]
COMMANDS = {"train", "infer", "eval", "data", "report", "trace", "curves", "prompts"}
MOVED = {"CHANGELOG.md", "decisions.md"}  # name old places on purpose
WITH_EXAMPLES = [path for path in sorted((REPO / "memrl").rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")]
README = (REPO / "README.md").read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"(?m)^#+ (.+)$", page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file), f"{page.name} links to {target}"


def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in MOVED], ids=lambda page: page.name)
def test_paths_and_functions_exist(page):
    text = page.read_text(encoding="utf-8")
    folders = r"(?:memrl|kernels|tests|benchmarks|configs|rl|agents|training|scoring|sampler|model|data)"
    for path, name in re.findall(rf"`({folders}/[\w/.]+\.(?:py|yaml))(?::(\w+))?`", text):
        file = next((root / path for root in (REPO, REPO / "memrl") if (root / path).is_file()), None)
        assert file is not None, f"{page.name} names {path}"
        assert not name or name in names_in(file), f"{page.name} names {path}:{name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page):
    text = page.read_text(encoding="utf-8")
    for module, command in re.findall(r"python -m (memrl[\w.]*)(?: ([a-z]+))?", text):
        if page.name in MOVED and module != "memrl":
            continue
        assert module == "memrl" and command in COMMANDS, f"{page.name}: python -m {module} {command}"
    for config in re.findall(r"--config (configs/\S+\.yaml)", text):
        assert (REPO / config).is_file(), f"{page.name} names {config}"
    for script in re.findall(r"python (benchmarks/\w+\.py)", text):
        assert (REPO / script).is_file(), f"{page.name} names {script}"


def test_the_readme_is_short_and_its_first_block_has_the_two_commands():
    assert len(README.split()) <= 1200
    first = re.search(r"```sh\n(.*?)```", README, re.DOTALL)
    assert first is not None
    train, test = first.group(1).splitlines()
    assert "requirements.txt" in train and train.endswith("train.py")
    assert "requirements-dev.txt" in test and test.endswith("-m pytest")


def test_commands_of_the_readme_need_no_activated_environment():
    blocks = re.findall(r"```(?:sh|console)\n(.*?)```", README, re.DOTALL)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    bare = [line for line in lines if re.match(r"(python|pip|torchrun|hf|memrl)\b", line)]
    assert not bare


def test_the_tree_shows_every_package_and_nothing_else():
    tree = re.search(r"## Where things are\n\n```\n(.*?)```", README, re.DOTALL)
    assert tree is not None
    shown = {
        name.rstrip("/")
        for line in tree.group(1).splitlines()
        for name in re.findall(r"^ +((?:[\w.]+/?  ?)+)", line + " ")
        for name in name.split()
    }
    there = {p.name for p in (REPO / "memrl").iterdir() if not p.is_symlink() and not p.name.startswith(("_", "."))} - {
        "py.typed"
    }
    assert shown == there


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: path.stem)
def test_examples_in_docstrings_give_what_they_show(path):
    module = importlib.import_module(".".join(path.relative_to(REPO).with_suffix("").parts))
    results = doctest.testmod(module)
    assert results.attempted and not results.failed


def python_of(page: str) -> dict:
    """The names that a page's Python blocks define, after running them."""
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", (REPO / "docs" / page).read_text(encoding="utf-8"), re.DOTALL):
        exec(block, names)
    return names


def test_the_example_of_a_reward_function_does_what_it_says():
    grade = python_of("rewards.md")["grade"]
    assert [grade(text, ["Paris"], {}) for text in (r"\boxed{Paris}", r"\boxed{Rome}", "Paris")] == [1.0, 0.1, 0.0]


def test_the_example_of_a_reward_for_turns_does_what_it_says():
    recall_gain = python_of("rewards.md")["recall_gain"]
    turns = [SimpleNamespace(memory=memory) for memory in ("nothing yet", "a man named Ed", "Ed Wood", "Wood", None)]
    assert recall_gain(SimpleNamespace(turns=turns), ["Ed Wood"], {}) == [0.0, 0.5, 0.5, -0.5, 0.0]


def test_the_example_of_reading_and_writing_data_runs(tmp_path, monkeypatch):
    from memrl.data import load_samples, write_samples
    from memrl.types import Sample

    monkeypatch.chdir(tmp_path)
    write_samples("train.parquet", lambda i: Sample(str(i), f"question {i}", "text", ("a",)), 4, {}, "test")
    assert len(python_of("data.md")["samples"]) == 4
    assert load_samples("sums.jsonl")[2].answers == ("5",)


def test_every_python_block_of_the_documents_is_run_above():
    blocks = {page.name for page in PAGES if "```python\n" in page.read_text(encoding="utf-8")}
    assert blocks == {"rewards.md", "data.md", "writing_an_agent.md"}  # the last one by tests/test_writing_an_agent.py
