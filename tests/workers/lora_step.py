"""Run by tests/test_lora.py and tests/test_reference.py on 2 ranks: one step on adapters under ZeRO-3.

torchrun --nproc_per_node 2 lora_step.py OUT.pt MODEL_FOLDER ADAPTER_FOLDER
"""

import random
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from memrl.config import EngineOptions, ModelOptions, OptimOptions, RLOptions, TrainConfig
from memrl.engine import distributed
from memrl.engine.deepspeed_engine import Engine
from memrl.engine.load import load_policy
from memrl.model import PackedContext, load_model
from memrl.model.lora import LoraLinear
from memrl.rl.packing import MicroBatch, TrainTurn, empty_micro_batch, pack_turns
from memrl.rl.reference import make_reference
from memrl.types import Turn
from tests.workers.launch import full_gradients

CONFIG = TrainConfig(
    model=ModelOptions(lora_rank=4, lora_alpha=8.0),
    rl=RLOptions(kl_coef=0.1),
    optim=OptimOptions(lr=1e-2, warmup_updates=1),
    engine=EngineOptions(persistence_threshold=0),
)
TEMPERATURE = 0.9


def make_batches() -> list[MicroBatch]:
    """Micro-batches of turns of unequal lengths; an odd number, so that one of two ranks is left with an empty one."""
    rng = random.Random(0)

    def turn() -> TrainTurn:
        prompt = [rng.randrange(97) for _ in range(rng.choice([1, 7, 20, 37]))]
        response = [rng.randrange(97) for _ in range(rng.randrange(1, 9))]
        return TrainTurn(Turn("memory", prompt, response, [-4 - rng.random() for _ in response], "stop"), rng.random() - 0.5)

    batches = pack_turns([turn() for _ in range(40)], 150)
    return batches if len(batches) % 2 else batches[:-1]


def fill_adapters(model: torch.nn.Module) -> None:
    """Adapters that have learned something; a fresh one's B is zero and so is A's gradient then."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, LoraLinear):
                module.lora_B.normal_(std=0.2, generator=generator)


def loss_of(logprobs: Tensor, reference: Tensor, batch: MicroBatch, num_tokens: int) -> Tensor:
    """A policy gradient with a k3 penalty: the parts of GRPO that the gradient of the adapters depends on."""
    d = reference - logprobs
    policy = -batch.advantages * (logprobs - batch.old_logprobs).exp()
    return (policy + CONFIG.rl.kl_coef * (d.exp() - d - 1)).sum() / num_tokens


def main(out: str, folder: str, adapter_folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init("cpu")
    rank, ranks = distributed.rank(), distributed.world_size()
    policy = load_policy(folder, CONFIG.model, CONFIG.optim, CONFIG.engine, CONFIG.seed, "cpu")
    fill_adapters(policy)
    engine = Engine(policy, CONFIG.optim, CONFIG.engine, total_updates=10)
    replica = load_model(folder).requires_grad_(False)
    reference = make_reference(CONFIG.rl, CONFIG.model, Path(folder), replica, engine, "cpu")
    batches = make_batches()
    num_tokens = sum(batch.num_tokens for batch in batches)
    mine = batches[rank::ranks]
    mine += [empty_micro_batch()] * (-(-len(batches) // ranks) - len(mine))
    references = []
    with reference.ready():
        for index, batch in enumerate(mine):
            context = PackedContext(batch.seq_lens)
            logprobs, _ = engine(batch.ids, context, batch.select, batch.targets, TEMPERATURE)
            # Between the policy's forward and backward pass, the hardest place: layers are recomputed after it.
            references.append(reference.logprobs(batch, context, TEMPERATURE))
            engine.backward(loss_of(logprobs, references[-1], batch, num_tokens), is_last=index == len(mine) - 1)
    gradients = full_gradients(engine)
    grad_norm, _ = engine.step()
    engine.copy_weights_to(replica)
    engine.save_adapter(Path(adapter_folder), base=folder)
    after = reference.logprobs(mine[0], PackedContext(mine[0].seq_lens), TEMPERATURE)
    from_ranks = distributed.gather_lists([{"references": references, "after": after}])
    if rank == 0:
        result = {"gradients": gradients, "grad_norm": grad_norm, "replica": replica.state_dict(), "ranks": from_ranks}
        torch.save(result, out)
    distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
