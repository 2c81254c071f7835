"""What a run checks of itself: rewards that fail, groups without signal, weights that are not finite, computations that disagree.

Every decision comes from numbers over all ranks, so all ranks take the same one.
"""

import math
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import nn

from memrl.config import RewardOptions, RLOptions
from memrl.engine import distributed
from memrl.types import Group

T = TypeVar("T")

# Two computations of the same weights may differ by this much in the log-probability of a token, in nats, on average. In fp32
# they differ by 1e-7 to 1e-5 (measured), with TF32 by some 1e-3; in bf16, where logits around 20 are rounded to 1/16, by 1e-2.
SAME_FP32, SAME_16_BIT = 0.01, 0.1

NO_EFFECT = (
    "they are only logged and have no effect on training, because rl.outcome_weight is 1; set it below 1, for example to 0.8, to "
    "train on them"
)


class RunError(RuntimeError):
    """The run cannot go on; every rank raises it with the same message."""


def on_all_ranks(work: Callable[[], T]) -> T:
    """This rank's result; RunError on every rank if a rank's work raises ValueError or OSError (a data file that has changed, for
    example). Collective, but `work` must not be.
    """
    results: list[T] = []
    problems: list[str] = []
    try:
        results.append(work())
    except (ValueError, OSError) as error:
        problems = [" ".join(str(error).split()) or type(error).__name__]
    if problems := distributed.gather_lists(problems):
        raise RunError(f"{problems[0]}; put this right, and the same command resumes from the last checkpoint")
    return results[0]


def first_update_warnings(
    update: dict[str, float], dtype: torch.dtype, rl: RLOptions, temperature: float, is_start: bool
) -> list[str]:
    """What is wrong with a process's first update, whose forward pass has the weights that sampled.

    Args:
        update: the metrics of `accumulate_gradients`.
        is_start: no optimizer step was done before, so the policy is the reference too.
    """
    bound = (SAME_FP32 if dtype == torch.float32 else SAME_16_BIT) / min(1.0, temperature)
    warnings = []
    if not update["logprob_diff"] <= bound:  # also if it is NaN
        warnings.append(
            f"the trainer's log-probabilities differ from the sampler's by {update['logprob_diff']:.3g} per token before the "
            f"first optimizer step, with equal ones by less than {bound:.3g} (rollout/logprob_diff_mean); check that the files "
            "of model.path were not replaced, and try --model.attention eager and --rollout.share_prefixes false"
        )
    # k1 is the mean difference itself; k2 and k3 are about half its square.
    if is_start and "kl" in update and not abs(update["kl"]) <= (bound if rl.kl_estimator == "k1" else bound**2 / 2):
        warnings.append(
            f"the KL to the reference is {update['kl']:.3g} before the first optimizer step, where both have the same weights "
            "and it is 0; check that the files of model.path were not replaced, and try --rl.reference device"
        )
    return warnings


def turn_reward_warning(groups: Iterable[Group], rl: RLOptions) -> str | None:
    """What is wrong if turns have rewards of their own that are not trained on, or none where they should have."""
    rewarded = any(turn.reward for group in groups for trajectory in group.trajectories for turn in trajectory.turns)
    if rewarded and rl.outcome_weight == 1:
        return f"turns have rewards of their own; {NO_EFFECT}"
    if not rewarded and rl.outcome_weight < 1:
        return (
            f"rl.outcome_weight is {rl.outcome_weight:g}, and no turn has a reward of its own, so it only scales the advantages; "
            "take a reward.function that returns one for each turn (docs/rewards.md), or set it to 1"
        )
    return None


def first_not_finite(model: nn.Module) -> str | None:
    """The name of a parameter that holds NaN or infinity; None if there is none."""
    for name, parameter in model.named_parameters():
        if parameter.numel() and not math.isfinite(torch.linalg.vector_norm(parameter.detach(), math.inf)):
            return name
    return None


class StepWatch:
    """Counts steps in a row without a reward, and without a signal."""

    def __init__(self, reward: RewardOptions, rl: RLOptions, flat_steps: int):
        self._max_failed, self._rl, self._every = reward.max_failed_steps, rl, flat_steps
        self._failed = self._flat = 0

    def check(self, metrics: dict[str, float], groups: Iterable[Group]) -> str | None:
        """Count a step; returns a warning, or None. Collective.

        Args:
            metrics: the step's, over all ranks.
            groups: all that this rank sampled.

        Raises:
            RunError: all rewards failed in `reward.max_failed_steps` steps in a row.
        """
        sampled = (self._rl.prompts_per_step + metrics["reward/replaced_groups"]) * self._rl.group_size
        self._failed = self._failed + 1 if metrics["reward/errors"] == sampled else 0
        self._flat = self._flat + 1 if metrics["reward/signal"] == 0 else 0
        if self._failed and self._failed == self._max_failed:
            errors = [trajectory.error for group in groups for trajectory in group.trajectories if trajectory.error]
            reason = distributed.gather_lists(errors[-1:])[-1]
            raise RunError(
                f"all rewards failed in {self._failed} steps in a row (reward.max_failed_steps), the last with {reason}; "
                "put this right, and the same command goes on from the last checkpoint (a changed reward.function needs a new "
                "run_dir)"
            )
        times = self._flat / self._every if self._every else 0
        return self._flat_warning(metrics) if times >= 1 and math.log2(times).is_integer() else None

    def _flat_warning(self, metrics: dict[str, float]) -> str:
        if metrics["reward/errors"]:
            advice = f"{metrics['reward/errors']} rewards failed in this step alone, for the reasons printed above"
        elif metrics["reward/strict"] >= 0.99:
            advice = "all answers are right: take harder questions, or longer documents"
        elif metrics["reward/strict"] == 0 < metrics["reward/lenient"]:
            advice = "some answers have the right words, but not in a box: check the answer prompt (agent.prompts)"
        else:
            advice = "try easier questions, a larger rl.group_size, rl.dynamic_rounds, or a reward.function with more levels"
        return (
            f"no group had a signal in the last {self._flat} steps: the rewards within each group were equal (mean "
            f"{metrics['reward/mean']:.3g}), so nothing is learned; {advice}"
        )
