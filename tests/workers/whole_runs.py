"""Called by two_ranks.py: whole training runs on two ranks, one of them taken up again, and one taken up by one rank alone."""

import os
import shutil
import time
from pathlib import Path

import pytest
import torch

from memrl.engine import distributed
from memrl.engine.deepspeed_engine import Engine
from memrl.training import trainer
from tests.recorded_run import BASE, NoisySampler, make_config, run_with_stand_ins

# Two steps of two passes over two updates, at temperature 0.7, with an advantage for each turn.
SETTINGS = BASE | {
    "resume": "auto",
    "engine.zero_stage": 3,
    "engine.offload_optimizer": False,
    "rollout.max_step_tokens": 0,
    "checkpoint.keep_last": 9,
    "checkpoint.keep_best": True,
    "rl.micro_batch_tokens": 60,
    "reward.function": "turn_reward.py:words",
    "reward.turns": "memory_gain",
    "rl.outcome_weight": 0.6,
    "rl.turn_return": "to_go",
    "rl.turn_discount": 0.5,
}


def train(inputs: Path, run_dir: Path) -> list[int]:
    """Train there, or go on; returns the tokens of this rank's forward passes with gradient in each optimizer step."""
    config = make_config(inputs, SETTINGS)
    config.run_dir = str(run_dir)
    tokens = [0]
    forward, step = Engine.__call__, Engine.step

    def counted_forward(self, ids, *arguments):
        tokens[-1] += len(ids) if torch.is_grad_enabled() else 0
        return forward(self, ids, *arguments)

    def counted_step(self, *arguments):
        tokens.append(0)
        return step(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "__call__", counted_forward)
        patch.setattr(Engine, "step", counted_step)
        patch.setattr(trainer, "Sampler", NoisySampler)
        patch.setattr(distributed, "shutdown", lambda: None)
        run_with_stand_ins(patch, config, process := {})
    assert process["error"] is None, process["error"]
    return tokens[:-1]


def without_last_step(run_dir: Path, name: str) -> Path:
    """A copy of a run as if it had been killed in its last step; for rank 0."""
    copy = run_dir.with_name(name)
    if distributed.rank() == 0:
        shutil.copytree(run_dir, copy)
        shutil.rmtree(copy / "checkpoints" / "step-2")
    return copy


def whole_runs(inputs: Path) -> dict:
    """Write inputs/whole, inputs/again and inputs/alone; returns each rank's tokens by optimizer step. Ends all ranks but 0."""
    tokens = train(inputs, inputs / "whole")
    by_rank = distributed.gather_lists([tokens])
    again = without_last_step(inputs / "whole", "again")
    distributed.barrier()
    train(inputs, again)
    if distributed.rank() != 0:
        while not (inputs / "alone").exists():  # rank 0 may still be in its last collective, which a rank that leaves would break
            time.sleep(0.05)
        end_group()
    else:
        end_group()
        alone = without_last_step(inputs / "whole", "alone")
        become_the_only_rank()
        train(inputs, alone)
    return {"tokens": by_rank}


def end_group() -> None:
    """`distributed.shutdown`, so that DeepSpeed too forgets the other ranks."""
    import deepspeed.comm

    deepspeed.comm.destroy_process_group()


def become_the_only_rank() -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
        os.environ.pop(name)
    distributed.init("cpu")
