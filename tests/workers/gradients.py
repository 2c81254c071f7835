"""Run by tests/test_distributed.py on 1 and 2 ranks: the gradient, step and new weights of one fixed ragged batch.

    [torchrun --nproc_per_node 2] gradients.py OUT.pt MICRO_BATCH_TOKENS PERSISTENCE_THRESHOLD
"""

import copy
import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from memrl.config import EngineOptions, OptimOptions, RLOptions
from memrl.model import TransformerConfig
from memrl.model.loader import from_scratch
from memrl.rl import distributed
from memrl.rl.engine import Engine
from memrl.rl.packing import TrainTurn
from memrl.rl.update import accumulate_gradients
from memrl.types import Turn

CONFIG = TransformerConfig(97, 48, 80, 2, 4, 2, 12, tie_word_embeddings=True, initializer_range=0.2)
OPTIM = OptimOptions(lr=1e-3, warmup_updates=1)
RL = RLOptions(kl_coef=0.1, clip_high=0.28)


def make_groups(num_groups: int = 5) -> dict[int, list[TrainTurn]]:
    """Groups of unequal numbers of turns of unequal lengths, so that ranks get unequal shares."""
    rng = random.Random(0)

    def turn() -> TrainTurn:
        prompt = [rng.randrange(97) for _ in range(rng.choice([1, 7, 20, 37]))]
        response = [rng.randrange(97) for _ in range(rng.randrange(1, 9))]
        logprobs = [-4 - rng.random() for _ in response]
        return TrainTurn(Turn("memory", prompt, response, logprobs, "stop"), rng.random() - 0.5)

    return {group: [turn() for _ in range(rng.randrange(3, 25))] for group in range(num_groups)}


def reference_model() -> torch.nn.Module:
    """A frozen start that differs from the policy, so that the KL term pulls."""
    return from_scratch(CONFIG, seed=1)


def main(out: str, micro_batch_tokens: int, persistence_threshold: int) -> None:
    torch.set_num_threads(1)
    distributed.init()
    policy = from_scratch(CONFIG, seed=0).train()
    replica = copy.deepcopy(policy)
    engine = Engine(policy, OPTIM, EngineOptions(persistence_threshold=persistence_threshold), total_updates=10)
    mine = [
        turn
        for group, turns in make_groups().items()
        if group % distributed.world_size() == distributed.rank()
        for turn in turns
    ]
    RL.micro_batch_tokens = micro_batch_tokens
    metrics = accumulate_gradients(engine, reference_model(), mine, RL, temperature=1.0)
    gradients = engine.gradients()
    grad_norm, learning_rate = engine.step()
    engine.copy_weights_to(replica)
    if distributed.rank() == 0:
        result = {"metrics": metrics, "gradients": gradients, "grad_norm": grad_norm, "lr": learning_rate}
        torch.save(result | {"weights": replica.state_dict()}, out)
    distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
