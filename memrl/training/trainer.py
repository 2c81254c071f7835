"""The training loop: collect, compare, update, repeat.

Every rank holds a plain replica of the policy to sample with, and a part of the policy that DeepSpeed trains. A step is

    groups     = the agent reads each of the step's samples group_size times            rl/rollout.py
    advantages = R - mean of the group, the same on all turns of a trajectory           rl/advantage.py
    epochs * updates_per_step times: gradient of the clipped loss over some groups      rl/update.py, rl/loss.py
    replica    = the new weights                                                        engine/deepspeed_engine.py

and, every so often, a validation and a checkpoint (training/validation.py, training/checkpoint.py).
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from memrl.agents import AgentConfig
from memrl.agents.agent_file import save_agent
from memrl.agents.limits import longest_turn
from memrl.agents.memory import check_question
from memrl.config import TrainConfig
from memrl.data.training_source import FileSource, NeedleSource, Source
from memrl.engine import distributed
from memrl.engine.deepspeed_engine import Engine
from memrl.engine.load import load_policy, load_replica
from memrl.kernels.attention import pick_attention
from memrl.llm import Decoding, LocalLLM
from memrl.model import save_model
from memrl.model.hf_config import read_config
from memrl.prompts import load_prompts
from memrl.rl.metrics import rollout_metrics, update_metrics
from memrl.rl.packing import TrainTurn
from memrl.rl.reference import make_reference
from memrl.rl.rollout import assign_advantages, collect_step, has_signal
from memrl.rl.update import accumulate_gradients, add_logprobs, prepare_update, split_groups
from memrl.sampler import Sampler
from memrl.scoring.reward_pool import RewardPool
from memrl.tokenizer import Tokenizer
from memrl.training.checkpoint import RunFolder
from memrl.training.graceful_stop import GracefulStop
from memrl.training.memory_plan import check_fits
from memrl.training.validation import validate_policy, validation_samples
from memrl.types import Group, Sample, Turn
from memrl.utils.files import fingerprint

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
            start: Hugging Face folder of the frozen start.
            rewards: scores the trajectories; closed with the trainer.

        Raises:
            ValueError: something cannot be read, or the agent's limits allow what would end the run later.
        """
        self.config, self.run, self.tokenizer, self.agent, self.rewards = config, run, tokenizer, agent, rewards
        self.source = make_source(config)
        training = self.source.samples if isinstance(self.source, FileSource) else ()
        self.validation_samples = validation_samples(config, training) if config.validation.every else []
        check_limits(config, agent, tokenizer, self.source, self.validation_samples)
        device = distributed.device()
        if device.type == "cuda":
            memory = torch.cuda.get_device_properties(device).total_memory
            check_fits(config, read_config(start), distributed.world_size(), memory)
        self.replica = load_replica(start, config, device)
        policy = load_policy(start, config, device)
        total_updates = config.rl.steps * config.rl.updates_per_step * config.rl.epochs
        self.engine = Engine(policy, config.optim, config.engine, total_updates)
        self.reference = make_reference(config, start, self.replica, self.engine, device)
        rollout = config.rollout
        self.attention, self.attention_reason = pick_attention(config.model.attention, device, self.replica.dtype)
        self.sampler = Sampler(
            self.replica,
            tokenizer,
            max_rows=rollout.max_rows,
            max_step_tokens=rollout.max_step_tokens or None,
            cache_gib=rollout.cache_gib,
            share_prefixes=rollout.share_prefixes,
            attention=self.attention,
        )
        if (longest := longest_turn(tokenizer, agent)) > self.sampler.cache_tokens:
            raise ValueError(
                f"the agent's limits allow turns of {longest} tokens, and rollout.cache_gib has room for "
                f"{self.sampler.cache_tokens}; raise it, or lower the limits"
            )
        self.llm = self._llm(Decoding(rollout.temperature, rollout.top_p, rollout.top_k))
        self._skipped_in_a_row = 0

    def _llm(self, decoding: Decoding) -> LocalLLM:
        return LocalLLM(self.sampler, self.tokenizer, decoding, self.agent.prompts.system)

    def resume(self, first_step: int) -> None:
        """Take up what was saved after `first_step` steps; nothing for step 0."""
        if first_step:
            self.run.load(self.engine, first_step)
            self.engine.copy_weights_to(self.replica)
        if distributed.rank() == 0:
            self.run.truncate_logs(first_step or -1)  # a validation before the first step is logged as step 0

    def train(self, first_step: int, on_step: OnStep, stop: GracefulStop) -> int:
        """Run the steps after `first_step`, validating and saving as configured.

        Args:
            on_step: called after each step with the number of steps done, its metrics, its seconds and its validation or None.
            stop: asked after each step; a run that is to stop saves what it has.

        Returns:
            The number of steps done.
        """
        steps, every, validate_every = self.config.rl.steps, self.config.checkpoint.every, self.config.validation.every
        if validate_every and first_step == 0:
            on_step(0, {}, {}, self.validate(0))
        for step in range(first_step, steps):
            done, ends = step + 1, step + 1 == steps
            stop.step = done
            metrics, seconds = self.step(step)
            validation = self.validate(done) if validate_every and (done % validate_every == 0 or ends) else None
            stopping = stop.agreed()
            on_step(done, metrics, seconds, validation)
            # A run without checkpoints that was stopped once has one all the same; its end must not be older than that.
            if (every and (done % every == 0 or ends)) or stopping or (ends and first_step):
                self.run.save(self.engine, done, self.config.checkpoint.keep_last, self.export)
                stopping = stop.agreed()  # also what was asked while saving
            if stopping:
                return done
        stop.step = None
        return steps

    def step(self, step: int) -> tuple[dict[str, float], dict[str, float]]:
        """One batch of rollouts and its optimizer steps; logs and returns the step's metrics and seconds."""
        rl = self.config.rl
        started = time.perf_counter()
        slots = range(distributed.rank(), rl.prompts_per_step, distributed.world_size())
        collected = collect_step(
            self.llm, self.source, self.agent, self.rewards, rl, seed=self.config.seed, step=step, slots=slots
        )
        self.sampler.release()  # the update wants the memory now, and what is cached will not hold after it
        sampled = time.perf_counter()
        updates = self._update(assign_advantages(collected.groups, rl, self.agent))
        self.engine.copy_weights_to(self.replica)
        metrics = {"step": step + 1} | rollout_metrics(collected) | update_metrics(updates)
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
            self._log_rollouts(step + 1, collected.groups)
        return metrics, seconds

    def _update(self, turns: dict[int, list[TrainTurn]]) -> list[dict[str, float]]:
        """The batch's optimizer steps: `epochs` passes over the same updates."""
        rl, temperature = self.config.rl, self.config.rollout.temperature
        parts = split_groups(turns, rl.updates_per_step)
        updates = [update for part in parts if (update := prepare_update(part, rl)) is not None]
        add_logprobs(updates, self.engine, self.reference, rl, temperature, self.attention)
        records = []
        for update in updates * rl.epochs:
            metrics = accumulate_gradients(self.engine, update, rl, temperature, self.attention)
            grad_norm, lr = self.engine.step()
            records.append(metrics | {"grad_norm": grad_norm, "lr": lr})
            self._watch(grad_norm)
        return records

    def validate(self, step: int) -> dict[str, float]:
        """Read the validation's documents with the present weights, log the scores and keep the best policy. Collective."""
        options = self.config.validation
        llm = self._llm(Decoding(options.temperature, options.top_p))
        record = validate_policy(
            llm, self.validation_samples, self.agent, self.rewards, repeats=options.repeats, seed=self.config.seed
        )
        self.sampler.release()
        if distributed.rank() == 0:
            seconds = record.pop("seconds")
            self.run.log("validation.jsonl", {"step": step} | record)
            self.run.log("timing.jsonl", {"step": step, "validation_s": seconds})
        if self.config.checkpoint.keep_best:
            self.run.keep_best(step, record["reward"], self.export)
        return record

    def _watch(self, grad_norm: float) -> None:
        """End a run that no longer learns: DeepSpeed leaves a step with a gradient that is not finite out, without a word."""
        self._skipped_in_a_row = 0 if math.isfinite(grad_norm) else self._skipped_in_a_row + 1
        if self._skipped_in_a_row == MAX_SKIPPED:
            raise RuntimeError(
                f"the gradient was not finite in {MAX_SKIPPED} optimizer steps in a row; lower optim.lr and start anew, or "
                f"resume from an earlier checkpoint in {self.run.checkpoints}"
            )

    def _log_rollouts(self, step: int, groups: list[Group]) -> None:
        """Of the first group with signal, the best and the worst in turn: side by side they show what made the difference."""
        group = next(filter(has_signal, groups), groups[0])
        ranked = sorted(range(len(group.trajectories)), key=lambda index: -group.trajectories[index].reward)
        for place in range(min(self.config.log.rollouts, len(ranked))):
            index = ranked[place // 2] if place % 2 == 0 else ranked[-1 - place // 2]
            trajectory = group.trajectories[index]
            record = {
                "step": step,
                "sample": group.sample.id,
                "question": group.sample.question,
                "answers": list(group.sample.answers),
                "match": group.sample.match,
                "group": group.id,
                "rollout": index,
                "reward": trajectory.reward,
                "penalty": trajectory.penalty,
                "advantage": trajectory.advantage,
                "scores": trajectory.scores,
                "error": trajectory.error,
                "group_rewards": [t.reward for t in group.trajectories],
                "turns": [self._turn_record(turn) for turn in trajectory.turns],
            }
            self.run.log("rollouts.jsonl", record)

    def _turn_record(self, turn: Turn) -> dict:
        return {
            "kind": turn.kind,
            "prompt": self.tokenizer.decode(turn.prompt_ids),
            "response": turn.text,
            "prompt_tokens": len(turn.prompt_ids),
            "response_tokens": len(turn.response_ids),
            "finish_reason": turn.finish_reason,
        }

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder of the current weights (the replica's) that carries the agent's settings; rank 0 alone."""
        save_model(self.replica, folder, self.tokenizer, finish=lambda new: save_agent(self.agent, new))

    def close(self) -> None:
        self.rewards.close()
        self.engine.close()


def check_limits(
    config: TrainConfig, agent: AgentConfig, tokenizer: Tokenizer, source: Source, validation: Sequence[Sample]
) -> None:
    """Refuse now what would otherwise end the run at its first long question or document; raises ValueError."""
    asked = [(config.validation.path, sample.id, sample.question) for sample in validation]
    if isinstance(source, FileSource):
        samples = source.samples
        asked += [(config.data.path, *pair) for pair in zip(samples.ids, samples.questions, strict=True)]
    for path, sample_id, question in asked:
        try:
            check_question(tokenizer.encode(question.strip()), agent)
        except ValueError as error:
            raise ValueError(f"{path}: sample {sample_id}: {error}") from error
    longest, limit = longest_turn(tokenizer, agent), config.rl.micro_batch_tokens
    if longest > limit:
        raise ValueError(
            f"the agent's limits allow turns of {longest} tokens, and rl.micro_batch_tokens is {limit}; raise it, or lower "
            "the limits"
        )


def make_source(config: TrainConfig) -> Source:
    if config.data.path is None:
        return NeedleSource(config.data, config.seed)
    return FileSource(config.data.path, config.rl.prompts_per_step, config.data.shuffle, config.seed)


def run_inputs(config: TrainConfig, agent: AgentConfig) -> dict[str, str]:
    """Fingerprints of what a run reads besides its settings."""
    words = json.dumps(asdict(agent.prompts), sort_keys=True)
    inputs = {"prompts": hashlib.sha256(words.encode()).hexdigest()[:16]}
    if config.data.path is not None:
        inputs["data"] = fingerprint([config.data.path])
    if config.reward.function is not None:
        inputs["reward"] = fingerprint([config.reward.function.rpartition(":")[0]])
    return inputs


def build_agent(config: TrainConfig) -> AgentConfig:
    options = asdict(config.agent)
    return AgentConfig(load_prompts(options.pop("prompts")), **options)
