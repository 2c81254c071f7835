"""Run by tests/test_engine.py on one rank: fp32 masters, offloading, frozen weights and checkpoints at every ZeRO stage.

engine_options.py OUT.pt FOLDER
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from memrl.config import EngineOptions, OptimOptions
from memrl.engine import deepspeed_engine as engine
from memrl.engine import distributed
from memrl.engine.deepspeed_engine import Engine
from memrl.model import PackedContext, TransformerConfig
from memrl.model.loader import from_scratch
from memrl.model.lora import add_adapters
from tests.workers.launch import full_gradients

engine.SUB_GROUP = 2000  # several of them, as large models have

CONFIG = TransformerConfig(97, 48, 80, 2, 4, 2, 12, tie_word_embeddings=True, initializer_range=0.2)
TINY_LR, TINY_UPDATES = 1e-6, 100
IDS = torch.tensor([3, 14, 15, 92, 65, 35, 89, 79, 32, 38])
RESUMED = ((1, "bfloat16"), (2, "float32"), (3, "bfloat16"))
OFFLOADING = [{}, {"offload_optimizer": True}, {"offload_optimizer": True, "offload_params": True}]


def make_engine(stage: int, dtype: str, lr: float, lora: bool = False, **options) -> Engine:
    model = from_scratch(CONFIG, seed=0, dtype=dtype).train()
    if lora:
        add_adapters(model, rank=4, alpha=8, seed=0)
    optim = OptimOptions(lr=lr, warmup_updates=1, weight_decay=0.0)
    return Engine(model, optim, EngineOptions(zero_stage=stage, **options), total_updates=1000)


def accumulate(engine: Engine, index: int = 0) -> None:
    ids = (IDS + index) % 97
    logprobs, _ = engine(ids[:-1], PackedContext([len(ids) - 1]), None, ids[1:])
    engine.backward(-logprobs.mean(), is_last=True)


def update(engine: Engine, index: int = 0) -> None:
    accumulate(engine, index)
    engine.step()


def parameters(engine: Engine) -> dict[str, torch.Tensor]:
    """Every parameter as it is, adapters beside the weights."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        with engine._gathered([parameter]):
            found[name] = parameter.detach().clone()
    return found


def masters(engine: Engine) -> dict[str, torch.Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param

    return {name: safe_get_full_fp32_param(parameter).clone() for name, parameter in engine.module.named_parameters()}


def tiny_updates(stage: int) -> dict:
    engine = make_engine(stage, "bfloat16", TINY_LR)
    states = [parameters(engine), masters(engine)]
    for _ in range(TINY_UPDATES):
        update(engine)
    states += [parameters(engine), masters(engine)]
    engine.close()
    return dict(zip(("weights", "masters", "new_weights", "new_masters"), states, strict=True))


def offloaded(dtype: str) -> list[dict[str, torch.Tensor]]:
    """The weights after some updates with nothing, the optimizer and everything in CPU memory."""
    ends = []
    for options in OFFLOADING:
        engine = make_engine(3, dtype, 1e-2, **options)
        for index in range(3):
            update(engine, index)
        ends.append(parameters(engine))
        engine.close()
    return ends


def resumed(stage: int, dtype: str, folder: Path) -> dict:
    """Adapters trained without a break, and saved and loaded on the way; `start` is what the saved model began with."""
    engine = make_engine(stage, dtype, 1e-2, lora=True)
    start = parameters(engine)
    accumulate(engine, 0)
    gradients = list(full_gradients(engine))
    engine.step()
    engine.save(folder)
    for index in (1, 2):
        update(engine, index)
    end = parameters(engine)
    engine.close()
    engine = make_engine(stage, dtype, 1e-2, lora=True)
    engine.load(folder)
    for index in (1, 2):
        update(engine, index)
    again = parameters(engine)
    engine.close()
    return {"start": start, "end": end, "again": again, "gradients": gradients, "saved": saved_names(folder)}


def saved_names(folder: Path) -> list[str]:
    """Names of the weights in a checkpoint's model file, and of frozen parts beside them."""
    [file] = (folder / "engine").glob("*model_states.pt")
    state = torch.load(file, weights_only=False)
    return [*state["module"], *(state.get("frozen_param_fragments") or {})]


def main(out: str, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init("cpu")
    result = {
        "tiny": {stage: tiny_updates(stage) for stage in (1, 2, 3)},
        "offloaded": {dtype: offloaded(dtype) for dtype in ("float32", "bfloat16")},
        "resumed": {stage: resumed(stage, dtype, Path(folder) / str(stage)) for stage, dtype in RESUMED},
    }
    torch.save(result, out)
    distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
