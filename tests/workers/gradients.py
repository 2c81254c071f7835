"""Run by tests/test_distributed.py on 1 and 3 ranks, and by two_ranks.py: gradients of one fixed ragged batch, several losses.

[torchrun --nproc_per_node 3] gradients.py OUT.pt MICRO_BATCH_TOKENS PERSISTENCE_THRESHOLD ORDER
"""

import contextlib
import random
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from memrl.config import EngineOptions, OptimOptions, RLOptions
from memrl.engine import deepspeed_engine as engine
from memrl.engine import distributed
from memrl.engine.deepspeed_engine import Engine
from memrl.model import TransformerConfig
from memrl.model.loader import from_scratch
from memrl.rl.packing import TrainTurn
from memrl.rl.update import accumulate_gradients, add_logprobs, prepare_update
from memrl.types import Turn
from tests.workers.launch import full_gradients

engine.SUB_GROUP = 2000  # several of them, as large models have

CONFIG = TransformerConfig(97, 48, 80, 2, 4, 2, 12, tie_word_embeddings=True, initializer_range=0.2)
OPTIM = OptimOptions(lr=1e-30, warmup_updates=0)  # too small to move a weight, so that the cases follow each other
CASES = {
    "ppo, token mean, k3": RLOptions(kl_coef=0.1, clip_high=0.28),
    "gspo, turn mean, no penalty": RLOptions(loss="gspo", aggregation="seq_mean", kl_coef=0.0),
    "cispo, group mean, k2": RLOptions(loss="cispo", aggregation="prompt_mean", kl_coef=0.1, kl_estimator="k2"),
    "reinforce, constant, k1, entropy": RLOptions(
        loss="reinforce", aggregation="constant", kl_coef=0.1, kl_estimator="k1", entropy_coef=0.01
    ),
    "ppo, token mean, truncated mismatch": RLOptions(mismatch="truncate", kl_coef=0.1),
    "ppo, turn mean, masked mismatch": RLOptions(mismatch="mask", mismatch_bound=1.5, aggregation="seq_mean"),
}


def make_turns(num_groups: int = 5) -> list[TrainTurn]:
    """Groups of unequal numbers of trajectories of unequal numbers of turns of unequal lengths; ranks get unequal shares.

    Each turn has an advantage of its own.
    """
    rng, own = random.Random(0), random.Random(1)
    turns = []
    for trajectory in range(num_groups * 3):
        advantage = rng.random() - 0.5
        for _ in range(rng.randrange(1, 9)):
            prompt = [rng.randrange(97) for _ in range(rng.choice([1, 7, 20, 37]))]
            response = [rng.randrange(97) for _ in range(rng.randrange(1, 9))]
            logprobs = [-4 - rng.random() for _ in response]
            turn = Turn("memory", prompt, response, logprobs, "stop")
            turns.append(TrainTurn(turn, advantage + own.uniform(-0.3, 0.3), min(trajectory // 2, num_groups - 1), trajectory))
    return turns


class FrozenStart:
    """A reference that differs from the policy, so that the penalty pulls."""

    def __init__(self):
        self.model = from_scratch(CONFIG, seed=1)

    def ready(self):
        return contextlib.nullcontext()

    def logprobs(self, batch, context, temperature):
        return self.model(batch.ids, context, batch.select, batch.targets, temperature)[0]


def gradients_of_cases(micro_batch_tokens: int, persistence_threshold: int, order: int) -> dict:
    """Metrics and whole gradients by the names of CASES. Collective over ranks."""
    options = EngineOptions(persistence_threshold=persistence_threshold)
    engine = Engine(from_scratch(CONFIG, seed=0).train(), OPTIM, options, total_updates=10)
    mine = [turn for turn in make_turns() if turn.group_id % distributed.world_size() == distributed.rank()]
    random.Random(order).shuffle(mine)
    results = {}
    for name, case in CASES.items():
        rl = replace(case, micro_batch_tokens=micro_batch_tokens)
        update = prepare_update(mine, rl)
        add_logprobs([update], engine, FrozenStart() if rl.kl_coef else None, rl, 1.0)
        metrics = accumulate_gradients(engine, update, rl, 1.0)
        gradients = full_gradients(engine)
        grad_norm, _ = engine.step()
        results[name] = {"metrics": metrics, "gradients": gradients, "grad_norm": grad_norm}
    engine.close()
    return results


def main(out: str, *arguments: int) -> None:
    torch.set_num_threads(1)
    distributed.init("cpu")
    results = gradients_of_cases(*arguments)
    if distributed.rank() == 0:
        torch.save(results, out)
    distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
