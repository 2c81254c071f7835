"""Who may import whom, read off the source files."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

REPO = Path(__file__).resolve().parent.parent
ENTRY_POINTS = {"train", "infer", "eval"}

NOT_FOR_MATHEMATICS = {
    "memrl.types",
    "memrl.config",
    "memrl.model",
    "memrl.sampler",
    "memrl.llm",
    "memrl.agents",
    "memrl.data",
    "memrl.rl.distributed",
    "memrl.rl.engine",
    "memrl.rl.packing",
    "kernels",
    "deepspeed",
    "transformers",
}

# What a package or module, and all below it, must not import, not even inside a function.
FORBIDDEN = {
    "kernels": {"memrl", "transformers", "deepspeed", *ENTRY_POINTS},
    "memrl": ENTRY_POINTS,
    "memrl.types": {"memrl", "kernels", "torch", "transformers"},
    "memrl.config": {"memrl", "kernels", "torch", "transformers"},
    "memrl.prompts": {"memrl.agents", "memrl.llm", "memrl.sampler", "memrl.model", "memrl.rl", "torch"},
    "memrl.tokenizer": {"memrl", "kernels", "torch"},
    "memrl.verify": {
        "memrl.rl",
        "memrl.agents",
        "memrl.llm",
        "memrl.sampler",
        "memrl.model",
        "torch",
        "transformers",
    },
    "memrl.model": {
        "memrl.sampler",
        "memrl.llm",
        "memrl.agents",
        "memrl.rl",
        "memrl.prompts",
        "memrl.evaluation",
    },
    "memrl.sampler": {
        "memrl.llm",
        "memrl.agents",
        "memrl.rl",
        "memrl.prompts",
        "memrl.tokenizer",
        "memrl.evaluation",
    },
    "memrl.llm": {"memrl.agents", "memrl.rl", "memrl.model", "memrl.evaluation", "memrl.rewards"},
    "memrl.agents": {
        "memrl.rl",
        "memrl.model",
        "memrl.sampler",
        "memrl.evaluation",
        "memrl.rewards",
        "torch",
    },
    **{f"memrl.rl.{name}": NOT_FOR_MATHEMATICS for name in ("advantage", "aggregation", "loss", "mismatch", "overlong")},
    "memrl.rl.packing": {
        "memrl.model",
        "memrl.sampler",
        "memrl.agents",
        "memrl.llm",
        "deepspeed",
        "transformers",
    },
    "memrl.evaluation": {"memrl.rl", "deepspeed"},
    "memrl.data": {"memrl.rl", "memrl.llm", "memrl.agents", "memrl.model", "memrl.evaluation", "deepspeed"},
}


class Import(NamedTuple):
    path: str
    line: int
    target: str

    def __str__(self):
        return f"{self.path}:{self.line} imports {self.target}"


def module_name(path: Path) -> str:
    parts = path.relative_to(REPO).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports_of(source: str, path: str = "file.py", package: str = "") -> list[Import]:
    """Every import that can run: those inside functions too, those for type checkers alone not."""
    found: list[Import] = []

    def visit(node: ast.AST) -> None:
        if is_type_checking(node):
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            found.extend(Import(path, node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *([base] if base else [])])
            # `from memrl import rl` imports memrl.rl; `from memrl.rl import loss` may be a module or a name.
            found.extend(Import(path, node.lineno, f"{base}.{alias.name}") for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(source, path))
    return found


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def files() -> list[Path]:
    found = [path for folder in ("memrl", "kernels") for path in sorted((REPO / folder).rglob("*.py"))]
    assert len(found) > 20
    return found


def all_imports(package: str) -> list[Import]:
    found = []
    for path in files():
        name = module_name(path)
        if is_within(name, package):
            parent = name if path.stem == "__init__" else name.rpartition(".")[0]
            found += imports_of(path.read_text(encoding="utf-8"), str(path.relative_to(REPO)), parent)
    return found


def test_the_reader_of_imports_sees_every_kind():
    source = """
import torch.nn as nn, memrl.rl
from memrl import agents
from .packing import pack
from .. import llm
def f():
    from memrl.model import Transformer
if TYPE_CHECKING:
    from memrl.evaluation import x
else:
    import json
"""
    assert [i.target for i in imports_of(source, package="memrl.rl")] == [
        "torch.nn",
        "memrl.rl",
        "memrl.agents",
        "memrl.rl.packing.pack",
        "memrl.llm",
        "memrl.model.Transformer",
        "json",
    ]
    assert is_within("memrl.rl.loss", "memrl.rl")
    assert not is_within("memrl.rlx", "memrl.rl")


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_point_one_way(package):
    imports = all_imports(package)
    assert any(is_within(module_name(path), package) for path in files()), f"{package} is gone; adapt the table"
    wrong = [i for i in imports if any(is_within(i.target, other) for other in FORBIDDEN[package])]
    assert not wrong, "\n".join(map(str, wrong))


def test_kernels_import_torch_triton_and_the_standard_library_only():
    allowed = {"torch", "triton", "flash_attn", "kernels", *sys.stdlib_module_names}
    wrong = [i for i in all_imports("kernels") if i.target.split(".")[0] not in allowed]
    assert not wrong, "\n".join(map(str, wrong))


def test_nothing_is_unpickled():
    for path in files():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = {i.target.split(".")[0] for i in imports_of(path.read_text(encoding="utf-8"))}
        assert not imported & {"pickle", "dill", "cloudpickle", "joblib"}, path
        calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert not calls & {"pickle.load", "pickle.loads", "eval", "exec"}, path


def modules_after(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after the statement."""
    code = f"{statement}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_config_and_command_line_load_nothing_heavy():
    loaded = modules_after("import memrl.config, memrl.cli, memrl.types, memrl.verify, memrl.agents")
    assert {"memrl", "jsonargparse"} <= loaded
    assert not loaded & {"torch", "transformers", "deepspeed", "datasets", "matplotlib"}


def test_the_pure_functions_load_neither_deepspeed_nor_transformers():
    loaded = modules_after("import memrl.rl.advantage, memrl.rl.loss, memrl.rl.packing, memrl.sampler, memrl.llm")
    assert "torch" in loaded
    assert not loaded & {"transformers", "deepspeed", "datasets", "matplotlib"}
