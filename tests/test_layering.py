"""Who may import whom, read off the source files."""

import ast
import graphlib
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

REPO = Path(__file__).resolve().parent.parent
ENTRY_POINTS = {"train", "infer", "eval"}

# One import direction: a package may import those named before it, and itself; nothing may import an entry point.
LAYERS = [
    "types",
    "utils",
    "config",
    "kernels",
    "tokenizer",
    "prompts",
    "model",
    "sampler",
    "llm",
    "agents",
    "endpoint",
    "scoring",
    "verify",
    "reading",
    "data",
    "engine",
    "rl",
    "evaluation",
    "report",
    "miniature",
    "training",
    "commands",
]
MATHEMATICS = [f"memrl.rl.{name}" for name in ("advantage", "aggregation", "loss", "mismatch", "overlong", "turn_advantage")]

# What else a package or module must not import, not even inside a function.
FORBIDDEN = {
    "memrl.kernels": {"transformers", "deepspeed"},
    "memrl.types": {"torch", "transformers"},
    "memrl.config": {"torch", "transformers"},
    "memrl.prompts": {"torch"},
    "memrl.tokenizer": {"torch"},
    "memrl.agents": {"torch"},
    "memrl.scoring.verify": {"torch", "transformers"},
    **{module: {"memrl", "deepspeed", "transformers"} for module in MATHEMATICS},
    "memrl.rl.packing": {"memrl.model", "memrl.sampler", "memrl.agents", "memrl.llm", "deepspeed", "transformers"},
    "memrl.evaluation": {"deepspeed"},
    "memrl.data": {"memrl.llm", "memrl.agents", "memrl.model", "deepspeed"},
}


class Import(NamedTuple):
    path: str
    line: int
    target: str

    def __str__(self):
        return f"{self.path}:{self.line} imports {self.target}"


def module_name(path: Path) -> str:
    """As it is imported: kernels/logprob.py is memrl.kernels.logprob, by the link memrl/kernels."""
    parts = path.relative_to(REPO).with_suffix("").parts
    parts = ("memrl", *parts) if parts[0] == "kernels" else parts
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


def layer_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_packages_import_downwards_only_even_for_type_checkers():
    wrong = []
    for path in files():
        module = module_name(path)
        if module in ("memrl", "memrl.__main__"):
            continue
        source = path.read_text(encoding="utf-8").replace("if TYPE_CHECKING:", "if True:")
        for found in imports_of(source, str(path.relative_to(REPO))):
            target = layer_of(found.target) if is_within(found.target, "memrl") else ""
            if target and target != layer_of(module) and LAYERS.index(target) >= LAYERS.index(layer_of(module)):
                wrong.append(str(found))
    assert not wrong, "\n".join(wrong)


def test_modules_import_each_other_in_no_circle():
    known = {module_name(path): path for path in files()}
    edges = {}
    for module, path in known.items():
        parent = module if path.stem == "__init__" else module.rpartition(".")[0]
        targets = set()
        for found in imports_of(path.read_text(encoding="utf-8"), package=parent):
            exact = found.target if found.target in known else found.target.rpartition(".")[0]
            # A folder's __init__ lists what its files offer, so files importing each other through it is no circle.
            if exact in known and exact != module and known[exact].stem != "__init__":
                targets.add(exact)
        edges[module] = targets
    graphlib.TopologicalSorter(edges).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_leave_out_what_is_forbidden(package):
    assert any(is_within(module_name(path), package) for path in files()), f"{package} is gone; adapt the table"
    allowed = {package, *MATHEMATICS}
    wrong = [
        i
        for i in all_imports(package)
        if any(is_within(i.target, other) for other in FORBIDDEN[package]) and not any(is_within(i.target, a) for a in allowed)
    ]
    assert not wrong, "\n".join(map(str, wrong))


def test_the_library_imports_no_entry_point():
    wrong = [i for i in all_imports("memrl") if i.target.split(".")[0] in ENTRY_POINTS]
    assert not wrong, "\n".join(map(str, wrong))


def test_kernels_import_torch_triton_and_the_standard_library_only():
    allowed = {"torch", "triton", "flash_attn", *sys.stdlib_module_names}
    wrong = [
        i
        for i in all_imports("memrl.kernels")
        if i.target.split(".")[0] not in allowed and not is_within(i.target, "memrl.kernels")
    ]
    assert not wrong, "\n".join(map(str, wrong))


def test_no_file_name_stands_for_two_things():
    public = REPO / "memrl" / "verify.py"  # the same thing under its public name
    names = Counter(path.stem for path in files() if not path.stem.startswith("__") and path != public)
    assert not [name for name, count in names.items() if count > 1]


def test_no_folder_holds_more_than_fifteen_files():
    sizes = Counter(path.parent for path in files() if path.stem != "__init__")
    assert not {str(folder.relative_to(REPO)): size for folder, size in sizes.items() if size > 15}


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
    loaded = modules_after("import memrl.config, memrl.utils.command_line, memrl.types, memrl.scoring.verify, memrl.agents")
    assert {"memrl", "jsonargparse"} <= loaded
    assert not loaded & {"torch", "transformers", "deepspeed", "datasets", "matplotlib"}


def test_the_pure_functions_load_neither_deepspeed_nor_transformers():
    loaded = modules_after("import memrl.rl.advantage, memrl.rl.loss, memrl.rl.packing, memrl.sampler, memrl.llm")
    assert "torch" in loaded
    assert not loaded & {"transformers", "deepspeed", "datasets", "matplotlib"}
