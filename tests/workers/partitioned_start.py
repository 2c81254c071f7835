"""Called by two_ranks.py: policies that are loaded in parts, compared with the same ones loaded whole."""

import torch

from memrl.config import EngineOptions, ModelOptions, OptimOptions
from memrl.engine import deepspeed_engine as engine
from memrl.engine import distributed
from memrl.engine.deepspeed_engine import Engine
from memrl.engine.load import load_policy
from memrl.model import PackedContext, Transformer, load_model

engine.SUB_GROUP = 2000  # several of them, as large models have

IDS = torch.tensor([3, 14, 15, 92, 65, 35, 89, 79, 32, 38])


def held_here(model: Transformer) -> tuple[int, int]:
    """Elements of the weights in this rank's memory, and how many of them lie there whole."""
    parts = sum(parameter.ds_tensor.numel() for parameter in model.parameters())
    return parts, sum(parameter.numel() for parameter in model.parameters())


def train(engine: Engine, updates: int = 3) -> list[float]:
    """Gradient norms of some optimizer steps on tokens that differ from rank to rank."""
    norms = []
    for update in range(updates):
        ids = (IDS * (2 + distributed.rank()) + update) % 97
        logprobs, _ = engine(ids[:-1], PackedContext([len(ids) - 1]), None, ids[1:])
        engine.backward(-logprobs.mean() / distributed.world_size(), is_last=True)
        norms.append(engine.step()[0])
    return norms


def whole_weights(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.weights()}


def masters(engine: Engine) -> dict[str, torch.Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param

    return {name: safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}


def compare(folder: str) -> dict:
    optim, options = OptimOptions(lr=1e-2, warmup_updates=1), EngineOptions(persistence_threshold=0)
    policy = load_policy(folder, ModelOptions(), optim, options, 0, "cpu")
    result = {"held": held_here(policy), "checkpoint_layers": policy.checkpoint_layers, "training": policy.training}
    engine = Engine(policy, optim, options, total_updates=10)
    result |= {"start": whole_weights(engine), "masters": masters(engine), "norms": train(engine), "end": whole_weights(engine)}
    result["sub_groups"] = len(engine.engine.optimizer.fp32_partitioned_groups_flat)
    engine.close()
    whole = load_model(folder).train()
    whole.checkpoint_layers = True
    engine = Engine(whole, optim, options, total_updates=10)
    result |= {"norms_whole": train(engine), "end_whole": whole_weights(engine)}
    engine.close()
    return result


def compare_all(folders: list[str]) -> dict:
    """The results of each model on this rank, and what each rank held. Collective over ranks."""
    results = [compare(folder) for folder in folders]
    return {"results": results, "held": distributed.gather_lists([[result["held"] for result in results]])}
