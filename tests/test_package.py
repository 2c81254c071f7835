"""The wheel: what it holds, what it depends on, and that its commands work outside the checkout."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.test_layering import all_imports
from tests.tiny_run import make_run

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # which pytest needs there

REPO = Path(__file__).resolve().parent.parent
# Imported only if they are installed: kernels of GPUs, trackers.
OPTIONAL = {"flash_attn", "triton", "tensorboard", "wandb"}
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy of the sources, so that nothing of the build stays in the checkout."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("memrl", "kernels", "configs", "tests"):
        shutil.copytree(REPO / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "train.py", "infer.py", "eval.py"):
        shutil.copy(REPO / name, source)
    has_setuptools = int(importlib.metadata.version("setuptools").split(".")[0]) >= 77
    isolation = ["--no-isolation"] if has_setuptools else []
    # From the archive of the sources, which has to hold everything too.
    run(sys.executable, "-m", "build", *isolation, "--outdir", out, source)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> Path:
    """A virtual environment with the wheel, which finds everything else in the environment of the tests."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    Path(packages, "others.pth").write_text("\n".join({sysconfig.get_path(kind) for kind in ("purelib", "platlib")}) + "\n")
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", wheel)
    return folder


def run(*command: object, cwd: Path | None = None) -> str:
    """Standard output of a command that has to succeed, without PYTHONPATH."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_holds_the_package_and_its_files_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    information = f"memrl-{PROJECT_VERSION}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"memrl", information}
    expected = {"memrl/py.typed", f"{information}/licenses/LICENSE"}
    for path in [*REPO.joinpath("memrl").rglob("*"), *REPO.joinpath("kernels").rglob("*"), *REPO.joinpath("configs").rglob("*")]:
        name = path.relative_to(REPO).as_posix()
        if path.suffix in (".py", ".yaml") or path.parent.name == "templates":
            expected.add(name if name.startswith("memrl/") else f"memrl/{name}")
    packed = {name for name in names if name.startswith("memrl/") or name.endswith("LICENSE")}
    known = {"memrl/kernels/logprob.py", "memrl/configs/tiny.yaml", "memrl/prompts/miniature.yaml"}
    assert packed == expected and known <= packed


def test_the_commands_work_outside_the_checkout(environment, tmp_path):
    settings = make_run(tmp_path, checkpoint={"every": 0}, log={"tensorboard": False})
    memrl, python, model = environment / "bin" / "memrl", environment / "bin" / "python", tmp_path / "run" / "model"
    where = run(python, "-c", "import memrl; print(memrl.__file__)", cwd=tmp_path).strip()
    assert Path(where).is_relative_to(environment)
    assert "train a memory agent" in run(memrl, "--help", cwd=tmp_path) == run(python, "-m", "memrl", "--help", cwd=tmp_path)
    assert "rollout:" in run(memrl, "train", "--config", "configs/memagent_0.5b.yaml", "--print_config", cwd=tmp_path)
    run(memrl, "train", *settings, "--run_dir", "run", "--device", "cpu", "--rl.steps", 1, cwd=tmp_path)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1
    run(memrl, "data", "needle", "--chunks", 2, "--out", "text.txt", cwd=tmp_path)
    cpu = ("--model", model, "--device", "cpu")
    run(memrl, "infer", "text.txt", "-q", "name ?", *cpu, "--json", "a.json", "--trace", "page.html", cwd=tmp_path)
    (answer,) = json.loads((tmp_path / "a.json").read_text())
    assert answer["chunks"] > 1 and answer["file"] == "text.txt" and "</html>" in (tmp_path / "page.html").read_text()
    run(memrl, "eval", *cpu, "--lengths", 1, "--samples", 2, "--out", "results", cwd=tmp_path)
    assert (tmp_path / "results" / "accuracy.png").is_file()
    run(memrl, "report", "results", "--out", "report", cwd=tmp_path)
    assert (tmp_path / "report" / "report.md").is_file()


def test_the_name_kernels_is_left_to_the_package_of_that_name(environment, tmp_path):
    """transformers imports a package `kernels` if one is installed; ours is `memrl.kernels`."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("OWNER = 'somebody else'\n")
    script = f"import sys; sys.path.append({str(tmp_path)!r}); import kernels, memrl.kernels.elementwise; print(kernels.OWNER)"
    assert run(sys.executable, "-c", script, cwd=REPO) == "somebody else\n"
    assert run(environment / "bin" / "python", "-c", script, cwd=tmp_path.parent) == "somebody else\n"


def test_the_package_imports_only_what_it_declares():
    """A module of the checkout, such as `benchmarks`, is not there once the package is installed."""
    declared = {re.split(r"[^\w-]", line)[0] for line in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["train"]]}
    distributions = importlib.metadata.packages_distributions()
    wrong = []
    for found in all_imports("memrl"):
        name = found.target.partition(".")[0]
        if name not in {"memrl", "tokenizers", *OPTIONAL, *sys.stdlib_module_names}:  # tokenizers is part of transformers
            if not declared & {distribution.lower().replace("_", "-") for distribution in distributions.get(name, [])}:
                wrong.append(str(found))
    assert not wrong, "\n".join(wrong)


def requirements(name: str) -> list[str]:
    lines = [line.split("  #")[0].strip() for line in (REPO / name).read_text(encoding="utf-8").splitlines()]
    found = []
    for line in lines:
        if line.startswith("-r "):
            found += requirements(line.removeprefix("-r "))
        elif line and not line.startswith("#"):
            found.append(line)
    return found


def test_requirements_files_and_the_project_say_the_same():
    def normal(lines: list[str]) -> list[str]:
        return sorted(line.replace("'", '"') for line in lines)

    extras = PROJECT["optional-dependencies"]
    base = [*PROJECT["dependencies"], *extras["train"]]
    assert normal(requirements("requirements.txt")) == normal(base)
    assert normal(requirements("requirements-dev.txt")) == normal([*base, *extras["dev"]])
    assert normal(requirements("requirements-gpu.txt")) == normal([*base, *extras["gpu"]])


PROJECT_VERSION = re.search(r'^__version__ = "(.*)"$', (REPO / "memrl" / "__init__.py").read_text(), re.M)[1]
