"""Run by tests/test_reshard.py: train small odd-sized models under ZeRO and save them, or load saved ones on other ranks.

[torchrun --nproc_per_node N] reshard.py OUT.pt save|load FOLDER CASE [CASE ...], each ZERO_STAGE-DTYPE-late|early-...
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from memrl.config import EngineOptions, OptimOptions
from memrl.engine import deepspeed_engine as engine
from memrl.engine import distributed
from memrl.engine.deepspeed_engine import Engine
from memrl.engine.reshard import MOMENTS, load_resharded

engine.SUB_GROUP = 20  # several of them, as large models have

OPTIM = OptimOptions(lr=1e-2, warmup_updates=5, min_lr_ratio=0.1)
STEPS, TOTAL = 3, 20


class Odd(nn.Module):
    """Sizes that no number of ranks divides, one tensor small enough to stay whole under stage 3, one that is not trained."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        torch.manual_seed(0)
        self.dtype = dtype
        self.layers = nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 5, bias=False), nn.Tanh(), nn.Linear(5, 1))
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x + self.frozen).float().square().sum()


def step(engine: Engine, index: int) -> tuple[float, float]:
    rows = torch.randn(12, 7, generator=torch.Generator().manual_seed(index)).to(engine.engine.module.dtype)
    engine.backward(engine(rows[distributed.rank() :: distributed.world_size()]) / 12, is_last=True)
    return engine.step()


def whole_state(engine: Engine) -> dict[str, Tensor]:
    """Weights, masters and moments by name, put together by DeepSpeed from the running ranks."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    state = {}
    for name, parameter in engine.engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            state[f"{name} weight"] = parameter.detach().clone()
        if parameter.requires_grad:
            state[f"{name} master"] = safe_get_full_fp32_param(parameter).clone()
            for key in MOMENTS:
                state[f"{name} {key}"] = safe_get_full_optimizer_state(parameter, key).clone()
    return state


def run_case(mode: str, folder: Path, stage: str, dtype: str, early: bool) -> dict:
    options = EngineOptions(zero_stage=int(stage), persistence_threshold=6)
    model = Odd(getattr(torch, dtype))
    if mode == "load":
        for parameter in model.parameters():
            if parameter.requires_grad:
                nn.init.zeros_(parameter)
    engine = Engine(model, OPTIM, options, TOTAL)
    result: dict = {}
    if mode == "save":
        for index in range(0 if early else STEPS):
            step(engine, index)
        engine.save(folder)
    else:
        result["words"] = load_resharded(engine, folder)
    if not early:
        result["state"] = whole_state(engine)
        result["adam_step"] = [float(state["step"]) for state in engine.engine.optimizer.optimizer.state.values()]
    result["steps"] = [step(engine, STEPS + index) for index in range(3)]
    result["after"] = whole_state(engine)
    engine.close()
    return result


def main(out: str, mode: str, folder: str, cases: list[str]) -> None:
    torch.set_num_threads(1)
    distributed.init("cpu")
    results = {}
    for case in cases:
        stage, dtype, when, *_ = case.split("-")
        results[case] = run_case(mode, Path(folder) / case, stage, dtype, when == "early")
    if distributed.rank() == 0:
        torch.save(results, out)
    distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:4], sys.argv[4:])
