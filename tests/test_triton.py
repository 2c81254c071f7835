"""Our Triton kernels without a GPU: run in the interpreter against the formulas, and compiled for several GPUs."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def run(command: list[str], **variables: str) -> str:
    """Triton chooses between interpreter and compiler when it is imported, so each needs a separate process."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | variables
    done = subprocess.run([sys.executable, *command], cwd=REPO, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_interpreted_kernels_pass_the_tests_of_every_backend():
    run(["-m", "pytest", "tests/test_attention.py", "-p", "no:cacheprovider", "-n", "0"], TRITON_INTERPRET="1")


def test_kernels_compile_into_the_shared_memory_of_small_gpus(tmp_path):
    sizes = run(["tests/workers/compile_triton.py"], TRITON_CACHE_DIR=str(tmp_path)).split()
    assert len(sizes) == 2 and all(0 < int(size) <= 99 * 1024 for size in sizes)
