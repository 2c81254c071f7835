"""What the documents promise about the repository: links, paths, names, commands and the README's length."""

import ast
import re
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
PAGES = [REPO / "README.md", REPO / "CONTRIBUTING.md", REPO / "CHANGELOG.md", *sorted((REPO / "docs").glob("*.md"))]
COMMANDS = {"train", "infer", "eval", "data", "report", "trace", "curves", "prompts"}
MOVED = {"CHANGELOG.md", "decisions.md"}  # name old places on purpose
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
