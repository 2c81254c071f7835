"""The training loop: sample, compare, update, repeat.

Every rank holds a plain replica of the policy to sample from, and a part of the policy that DeepSpeed trains. One step:

    groups     = the agent reads each of the step's samples group_size times            rl/rollout.py
    advantages = R - mean of the group, the same on all turns of a trajectory           rl/advantage.py
    epochs * updates_per_step times: gradient of the clipped loss over some groups      rl/update.py, rl/loss.py
    replica    = the new weights                                                        engine/deepspeed_engine.py

and at regular intervals a validation and a checkpoint (training/validation.py, training/checkpoint.py).
"""

import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from memrl.agents import AgentConfig
from memrl.agents.agent_file import save_agent
from memrl.agents.limits import longest_turn, prompt_sizes
from memrl.config import TrainConfig
from memrl.data.training_source import FileSource
from memrl.engine import distributed
from memrl.engine.deepspeed_engine import Engine
from memrl.engine.load import load_policy
from memrl.kernels.attention import pick_attention
from memrl.llm import Decoding, LocalLLM
from memrl.model import load_model, save_model
from memrl.model.hf_config import longest_text, read_config
from memrl.rl.health import (
    NO_EFFECT,
    RunError,
    StepWatch,
    first_not_finite,
    first_update_warnings,
    on_all_ranks,
    turn_reward_warning,
)
from memrl.rl.memory_gain import MemoryGain
from memrl.rl.metrics import rollout_metrics, update_metrics
from memrl.rl.packing import TrainTurn
from memrl.rl.reference import make_reference
from memrl.rl.rollout import assign_advantages, collect_step
from memrl.rl.update import accumulate_gradients, add_logprobs, prepare_update, split_groups
from memrl.sampler import Sampler
from memrl.scoring.reward_pool import RewardPool
from memrl.tokenizer import Tokenizer
from memrl.training.checkpoint import RunFolder
from memrl.training.graceful_stop import GracefulStop
from memrl.training.inputs import check_questions, check_window, make_source
from memrl.training.memory_plan import check_fits
from memrl.training.rollout_log import rollout_records
from memrl.training.validation import validate_policy, validation_samples
from memrl.types import Group, Sample

MAX_SKIPPED = 20  # optimizer steps in a row without a finite gradient

OnStep = Callable[[int, dict[str, float], dict[str, float], dict[str, float] | None], None]


class Trainer:
    def __init__(
        self,
        config: TrainConfig,
        run: RunFolder,
        start: Path,
        tokenizer: Tokenizer,
        agent: AgentConfig,
        rewards: RewardPool,
    ):
        """
        Args:
            start: Hugging Face folder of the policy's initial weights.
            rewards: scores the trajectories; closed with the trainer.

        Raises:
            ValueError: something cannot be read, or the agent's limits allow turns that the other settings do not.
            RunError: the weights are not finite.
        """
        self.config, self.run, self.tokenizer, self.agent, self.rewards = config, run, tokenizer, agent, rewards
        rewards.decode = tokenizer.decode
        self.source = make_source(config.data, config.rl.prompts_per_step, config.seed)
        training = self.source.samples if isinstance(self.source, FileSource) else ()
        self.validation_samples: list[Sample] = []
        if config.validation.every:
            self.validation_samples = validation_samples(config.validation, config.data, config.seed, training)
        self._check_inputs(training, start)
        self.memory_gain: MemoryGain | None = None
        self._load_models(start)
        self.llm = self._make_llm(Decoding(config.rollout.temperature, config.rollout.top_p, config.rollout.top_k))
        self._watch = StepWatch(config.reward, config.rl, config.log.flat_steps)
        self._skipped_in_a_row = 0
        self._last_sound: int | None = None  # step of the last checkpoint that was not saved between skipped optimizer steps
        self._is_first_step, self._is_first_update, self._is_start = True, True, True
        if self.memory_gain is not None and config.rl.outcome_weight == 1:
            warn(f"reward.turns gives turns rewards of their own; {NO_EFFECT}")
            self._is_first_step = False  # it would say so too

    def _check_inputs(self, training: Sequence[Sample], start: Path) -> None:
        """Raise ValueError now for what would otherwise end the run at its first long question or document."""
        config, device = self.config, distributed.device()
        check_questions(config.validation.path, self.validation_samples, self.tokenizer, self.agent)
        check_questions(config.data.path, training, self.tokenizer, self.agent)
        check_window(start, prompt_sizes(self.tokenizer, self.agent), self.agent)
        self._window = longest_text(read_config(start))
        self._check_longest_turn(config.rl.micro_batch_tokens, "rl.micro_batch_tokens is")
        if device.type == "cuda":
            memory = torch.cuda.get_device_properties(device).total_memory
            check_fits(config, read_config(start), distributed.world_size(), memory)

    def _check_longest_turn(self, limit: int, setting: str) -> None:
        longest = longest_turn(self.tokenizer, self.agent)
        if longest is not None and longest > limit:
            raise ValueError(
                f"the agent's limits allow turns of {longest} tokens, and {setting} {limit}; raise it, or lower the limits"
            )

    def _load_models(self, start: Path) -> None:
        """Make the replica, the engine with the policy, the reference and the sampler."""
        config, device = self.config, distributed.device()
        rl, rollout = config.rl, config.rollout
        self.replica = load_model(start, config.model.dtype, device).requires_grad_(False)
        self._check_finite(f"the weights in {start} are")
        policy = load_policy(start, config.model, config.optim, config.engine, config.seed, device)
        self.engine = Engine(policy, config.optim, config.engine, rl.steps * rl.updates_per_step * rl.epochs)
        self.reference = make_reference(rl, config.model, start, self.replica, self.engine, device)
        self.attention, self.attention_reason = pick_attention(config.model.attention, device, self.replica.dtype)
        self.sampler = Sampler(
            self.replica,
            self.tokenizer,
            max_rows=rollout.max_rows,
            max_step_tokens=rollout.max_step_tokens or None,
            cache_gib=rollout.cache_gib,
            share_prefixes=rollout.share_prefixes,
            attention=self.attention,
        )
        if config.reward.turns == "memory_gain":
            options = (rollout.temperature, rl.micro_batch_tokens, self.attention)
            self.memory_gain = MemoryGain(self.replica, self.tokenizer, self.agent.prompts, *options)
        self._check_longest_turn(self.sampler.cache_tokens, "rollout.cache_gib has room for")

    def _make_llm(self, decoding: Decoding) -> LocalLLM:
        most = min(self._window, self.config.rl.micro_batch_tokens)
        return LocalLLM(self.sampler, self.tokenizer, decoding, self.agent.prompts.system, max_turn_tokens=most)

    def resume(self, first_step: int) -> None:
        """Load what was saved after `first_step` steps; nothing for step 0."""
        if first_step:
            self.run.load(self.engine, first_step)
            self._update_replica(f"the weights in the checkpoint after step {first_step} are")
            self._last_sound, self._is_start = first_step, False
        if distributed.rank() == 0:
            self.run.truncate_logs(first_step or -1)  # a validation before the first step is logged as step 0

    def train(self, first_step: int, on_step: OnStep, stop: GracefulStop) -> int:
        """Run the steps after `first_step`, with the validations and checkpoints of the settings.

        Args:
            on_step: called after each step with the number of steps done, its metrics, its seconds and its validation or None.
            stop: checked after each step; if a stop was requested, the run saves a checkpoint and returns.

        Returns:
            The number of steps done.
        """
        steps, every, validate_every = self.config.rl.steps, self.config.checkpoint.every, self.config.validation.every
        if validate_every and first_step == 0:
            on_step(0, {}, {}, self.validate(0))
        for step in range(first_step, steps):
            done, is_last = step + 1, step + 1 == steps
            stop.step = done
            metrics, seconds = self.step(step)
            validation = self.validate(done) if validate_every and (done % validate_every == 0 or is_last) else None
            stopping = stop.agreed()
            on_step(done, metrics, seconds, validation)
            # Also without checkpoint.every, a run that was stopped has a checkpoint; its last step must not leave an older one.
            if (every and (done % every == 0 or is_last)) or stopping or (is_last and first_step):
                self._save(done)
                stopping = stop.agreed()  # includes a request that came while saving
            if stopping:
                return done
        stop.step = None
        return steps

    def _save(self, done: int) -> None:
        """Save a checkpoint. While optimizer steps are skipped, the last one from before the first of them is kept: its weights
        are those before the run diverged."""
        is_sound = self._skipped_in_a_row == 0
        keep = None if is_sound else self._last_sound
        self.run.save(self.engine, done, self.config.checkpoint.keep_last, self.export, keep)
        if is_sound:
            self._last_sound = done

    def step(self, step: int) -> tuple[dict[str, float], dict[str, float]]:
        """Sample one batch and run its optimizer steps; logs and returns the step's metrics and seconds."""
        rl = self.config.rl
        started = time.perf_counter()
        indices = range(distributed.rank(), rl.prompts_per_step, distributed.world_size())
        options = {"seed": self.config.seed, "step": step, "question_indices": indices, "reward_turns": self.reward_turns}
        groups = on_all_ranks(lambda: collect_step(self.llm, self.source, self.agent, self.rewards, rl, **options))
        self.sampler.release()  # the update needs the memory, and the cached keys and values belong to the old weights
        sampled = time.perf_counter()
        updates = self._update(step, assign_advantages(groups.kept, rl))
        self._update_replica(f"after step {step + 1} the weights are")
        metrics = {"step": step + 1} | rollout_metrics(groups, rl, self.config.reward) | update_metrics(updates)
        finished = time.perf_counter()
        tokens = metrics["rollout/response_tokens"] * metrics["rollout/turns"]
        seconds = {
            "rollout_s": sampled - started,
            "update_s": finished - sampled,
            "step_s": finished - started,
            "tokens_per_s": tokens / (finished - started),
        }
        if distributed.rank() == 0:
            self.run.log("metrics.jsonl", metrics)
            self.run.log("timing.jsonl", {"step": step + 1} | seconds)
            for record in rollout_records(step + 1, groups.kept, self.config.log.rollouts, self.tokenizer, rl):
                self.run.log("rollouts.jsonl", record)
        if self._is_first_step and (warning := turn_reward_warning(groups.kept, rl)) is not None:
            warn(f"step {step + 1}: {warning}")
        self._is_first_step = False
        if (warning := self._watch.check(metrics, groups.kept + groups.replaced)) is not None:
            warn(f"step {step + 1}: {warning}")
        return metrics, seconds

    def reward_turns(self, groups: list[Group]) -> None:
        """Add the rewards of `reward.turns` to the turns of groups that were just sampled."""
        if self.memory_gain is not None:
            self.sampler.release()  # the forward passes need the memory
            self.memory_gain.add_to(groups)

    def _update(self, step: int, turns: dict[int, list[TrainTurn]]) -> list[dict[str, float]]:
        """The batch's optimizer steps: `epochs` passes over the same updates."""
        rl, temperature = self.config.rl, self.config.rollout.temperature
        parts = split_groups(turns, rl.updates_per_step)
        updates = [update for part in parts if (update := prepare_update(part, rl)) is not None]
        add_logprobs(updates, self.engine, self.reference, rl, temperature, self.attention)
        records = []
        planned = step * rl.updates_per_step * rl.epochs
        for number, update in enumerate(updates * rl.epochs):
            metrics = accumulate_gradients(self.engine, update, rl, temperature, self.attention)
            if self._is_first_update:
                self._is_first_update = False
                for warning in first_update_warnings(metrics, self.replica.dtype, rl, temperature, self._is_start):
                    warn(f"step {step + 1}: {warning}")
            grad_norm, lr = self.engine.step(planned + number)
            records.append(metrics | {"grad_norm": grad_norm, "lr": lr})
            self._check_gradient(grad_norm)
        return records

    def _check_gradient(self, grad_norm: float) -> None:
        """End a run that no longer learns: DeepSpeed silently skips a step whose gradient is not finite."""
        self._skipped_in_a_row = 0 if math.isfinite(grad_norm) else self._skipped_in_a_row + 1
        if self._skipped_in_a_row == MAX_SKIPPED:
            earlier = "" if self._last_sound is None else f"; the last checkpoint from before them is step-{self._last_sound}"
            raise RunError(
                f"the gradient was not finite in {MAX_SKIPPED} optimizer steps in a row; lower optim.lr and start again, or "
                f"resume from an earlier checkpoint in {self.run.checkpoints}{earlier}"
            )

    def _update_replica(self, what: str) -> None:
        self.engine.copy_weights_to(self.replica)
        self._check_finite(what)

    def _check_finite(self, what: str) -> None:
        """End a run that would sample from, save or publish a broken model: the replica is what all of them read."""
        if (name := first_not_finite(self.replica)) is not None:
            raise RunError(f"{what} not finite (the first: {name}); take other weights, or lower optim.lr and start again")

    def validate(self, step: int) -> dict[str, float]:
        """Validate the current weights, log the scores and keep the best policy. Collective."""
        options = self.config.validation
        llm = self._make_llm(Decoding(options.temperature, options.top_p))
        record = validate_policy(
            llm, self.validation_samples, self.agent, self.rewards, repeats=options.repeats, seed=self.config.seed
        )
        self.sampler.release()
        if record["errors"]:
            mean = "its mean is over the others" if self.config.reward.on_error == "skip" else "each counts as 0"
            warn(f"validation after step {step}: {record['errors']} of {record['n']} rewards failed; {mean}")
        if distributed.rank() == 0:
            seconds = record.pop("seconds")
            self.run.log("validation.jsonl", {"step": step} | record)
            self.run.log("timing.jsonl", {"step": step, "validation_s": seconds})
        if self.config.checkpoint.keep_best:
            self.run.keep_best(step, record["reward"], self.export)
        return record

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder of the current weights with the agent's settings; call it on rank 0 only."""
        save_model(self.replica, folder, self.tokenizer, finish=lambda new: save_agent(self.agent, new))

    def close(self) -> None:
        self.rewards.close()
        self.engine.close()


def warn(text: str) -> None:
    """One line on rank 0's standard error."""
    if distributed.rank() == 0:
        print(f"warning: {text}", file=sys.stderr, flush=True)
