"""The training loop: collect, compare, update, repeat.

Every rank holds a plain replica of the policy to sample with, and a part of the policy that DeepSpeed trains. A step is

    groups     = the agent reads each of the step's samples group_size times            rl/rollout.py
    advantages = R - mean of the group, the same on all turns of a trajectory           rl/advantage.py
    epochs * updates_per_step times: gradient of the clipped loss over some groups      rl/update.py, rl/loss.py
    replica    = the new weights
"""

import copy
import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from kernels import pick_attention
from memrl.agents import AgentConfig
from memrl.agents.memory import check_question
from memrl.agents.settings import save_agent
from memrl.config import TrainConfig
from memrl.data.source import FileSource, NeedleSource, Source
from memrl.files import fingerprint
from memrl.limits import longest_turn
from memrl.llm import Decoding, LocalLLM
from memrl.model import load_model, save_model
from memrl.prompts import load_prompts
from memrl.rl import distributed
from memrl.rl.checkpoint import RunFolder
from memrl.rl.engine import Engine
from memrl.rl.metrics import rollout_metrics, update_metrics
from memrl.rl.packing import TrainTurn
from memrl.rl.rollout import assign_advantages, collect_groups
from memrl.rl.update import accumulate_gradients
from memrl.sampler import Sampler
from memrl.tokenizer import Tokenizer
from memrl.types import Group

MAX_SKIPPED = 20  # optimizer steps in a row without a finite gradient
ROLLOUTS_LOGGED = 2  # trajectories of each step that rank 0 writes to rollouts.jsonl


class Trainer:
    def __init__(self, config: TrainConfig, run: RunFolder, start: Path, tokenizer: Tokenizer, agent: AgentConfig):
        """
        Args:
            start: Hugging Face folder of the frozen start.

        Raises:
            ValueError: something cannot be read, or the agent's limits allow what would end the run later.
        """
        self.config, self.run, self.tokenizer, self.agent = config, run, tokenizer, agent
        self.source = make_source(config)
        check_limits(config, agent, tokenizer, self.source)
        device = distributed.device()
        policy = load_model(start, dtype=config.model.dtype, device=device).train()
        self.replica = copy.deepcopy(policy).eval().requires_grad_(False)
        self.reference = copy.deepcopy(self.replica) if config.rl.kl_coef > 0 else None
        policy.checkpoint_layers = config.model.checkpoint_layers
        total_updates = config.rl.steps * config.rl.updates_per_step * config.rl.epochs
        self.engine = Engine(policy, config.optim, config.engine, total_updates)
        rollout = config.rollout
        self.attention, self.attention_reason = pick_attention(config.model.attention, device, self.replica.dtype)
        sampler = Sampler(
            self.replica,
            tokenizer,
            max_rows=rollout.max_rows,
            max_step_tokens=rollout.max_step_tokens or None,
            cache_gib=rollout.cache_gib,
            share_prefixes=rollout.share_prefixes,
            attention=self.attention,
        )
        if (longest := longest_turn(tokenizer, agent)) > sampler.cache_tokens:
            raise ValueError(
                f"the agent's limits allow turns of {longest} tokens, and rollout.cache_gib has room for {sampler.cache_tokens}; "
                "raise it, or lower the limits"
            )
        decoding = Decoding(rollout.temperature, rollout.top_p, rollout.top_k)
        self.llm = LocalLLM(sampler, tokenizer, decoding, agent.prompts.system)
        self._skipped_in_a_row = 0

    def resume(self, first_step: int) -> None:
        """Take up what was saved after `first_step` steps; nothing for step 0."""
        if first_step:
            self.run.load(self.engine, first_step)
            self.engine.copy_weights_to(self.replica)
        if distributed.rank() == 0:
            self.run.truncate_logs(first_step)

    def train(self, first_step: int, on_step: Callable[[int, dict[str, float]], None]) -> None:
        """Run the steps after `first_step`, saving as configured; `on_step(steps done, metrics)` is called after each."""
        steps, every = self.config.rl.steps, self.config.checkpoint.every
        for step in range(first_step, steps):
            metrics = self.step(step)
            if every and ((step + 1) % every == 0 or step + 1 == steps):
                self.run.save(self.engine, step + 1, self.config.checkpoint.keep_last)
                self.export()
            on_step(step + 1, metrics)

    def step(self, step: int) -> dict[str, float]:
        """One batch of rollouts and its optimizer steps; returns the step's metrics and logs them."""
        rl = self.config.rl
        started = time.perf_counter()
        mine = range(distributed.rank(), rl.prompts_per_step, distributed.world_size())
        samples = {index: self.source.sample(step, index) for index in mine}
        groups = collect_groups(
            self.llm, samples, self.agent, group_size=rl.group_size, seed=self.config.seed, step=step
        )
        self.llm.sampler.release()  # the update wants the memory now, and what is cached will not hold after it
        sampled = time.perf_counter()
        turns = assign_advantages(
            groups, normalize_std=rl.normalize_std, credit=rl.credit, drop_flat_groups=rl.drop_flat_groups
        )
        updates = self._update(turns)
        self.engine.copy_weights_to(self.replica)
        metrics = {"step": step + 1} | rollout_metrics(groups) | update_metrics(updates)
        if distributed.rank() == 0:
            finished = time.perf_counter()
            self.run.log("metrics.jsonl", metrics)
            seconds = {"rollout_s": sampled - started, "update_s": finished - sampled, "step_s": finished - started}
            self.run.log("timing.jsonl", {"step": step + 1} | seconds)
            self._log_rollouts(step + 1, groups)
        return metrics

    def _update(self, turns: dict[int, list[TrainTurn]]) -> list[dict[str, float]]:
        """The batch's optimizer steps; each takes a run of neighbouring group ids, the same on any number of ranks."""
        rl = self.config.rl
        updates = []
        for index in [*range(rl.updates_per_step)] * rl.epochs:
            first = index * rl.prompts_per_step // rl.updates_per_step
            last = (index + 1) * rl.prompts_per_step // rl.updates_per_step
            chosen = [turn for group_id, group in turns.items() if first <= group_id < last for turn in group]
            metrics = accumulate_gradients(
                self.engine, self.reference, chosen, rl, self.config.rollout.temperature, self.attention
            )
            if metrics is not None:
                grad_norm, lr = self.engine.step()
                updates.append(metrics | {"grad_norm": grad_norm, "lr": lr})
                self._watch(grad_norm)
        return updates

    def _watch(self, grad_norm: float) -> None:
        """End a run that no longer learns: DeepSpeed leaves a step with a gradient that is not finite out, without a word."""
        self._skipped_in_a_row = 0 if math.isfinite(grad_norm) else self._skipped_in_a_row + 1
        if self._skipped_in_a_row == MAX_SKIPPED:
            raise RuntimeError(
                f"the gradient was not finite in {MAX_SKIPPED} optimizer steps in a row; lower optim.lr and start anew, or "
                f"resume from an earlier checkpoint in {self.run.checkpoints}"
            )

    def _log_rollouts(self, step: int, groups: list[Group]) -> None:
        for group in groups[:ROLLOUTS_LOGGED]:
            trajectory = group.trajectories[0]
            record = {
                "step": step,
                "sample": group.sample.id,
                "question": group.sample.question,
                "answers": list(group.sample.answers),
                "group_rewards": [t.reward for t in group.trajectories],
                "turns": [{"kind": turn.kind, "text": turn.text} for turn in trajectory.turns],
                "scores": trajectory.scores,
            }
            self.run.log("rollouts.jsonl", record)

    def export(self) -> None:
        """Write `model/`, a Hugging Face folder of the current weights (the replica's) that carries the agent's settings too."""
        if distributed.rank() == 0:
            folder = self.run.path / "model"
            save_model(self.replica, folder, self.tokenizer, finish=lambda new: save_agent(self.agent, new))
        distributed.barrier()


def check_limits(config: TrainConfig, agent: AgentConfig, tokenizer: Tokenizer, source: Source) -> None:
    """Refuse now what would otherwise end the run at its first long question or document; raises ValueError."""
    if isinstance(source, FileSource):
        for sample in source.samples:
            try:
                check_question(tokenizer.encode(sample.question.strip()), agent)
            except ValueError as error:
                raise ValueError(f"{config.data.path}: sample {sample.id}: {error}") from error
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
    return inputs


def build_agent(config: TrainConfig) -> AgentConfig:
    options = asdict(config.agent)
    return AgentConfig(load_prompts(options.pop("prompts")), **options)
