"""Workers as real processes under torchrun."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import torch

# DeepSpeed imports an optimizer that calls torch.compile; without the compiler that takes a second less in every process.
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}


def torchrun(worker: ModuleType, out: Path, *arguments: str | Path, ranks: int = 2) -> dict:
    """What a worker module's script, given `out` and the arguments, wrote to `out`."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, str(worker.__file__), str(out), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=ENVIRONMENT)
    assert out.exists(), done.stderr[-3000:]
    return torch.load(out)


def full_gradients(engine) -> dict[str, torch.Tensor]:
    """Whole fp32 gradients of the trained parameters, between the last `backward` and `step` of an Engine; collective."""
    from deepspeed.utils import safe_get_full_grad

    return {n: safe_get_full_grad(p).clone() for n, p in engine.module.named_parameters() if p.requires_grad}
