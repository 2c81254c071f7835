"""A whole training run in this process that takes a tenth of a second, and a record of what its settings reached.

What lies between the settings and their effects is the real code: `memrl.training.run.run`, the Trainer, the rollouts, the
update, AdamW. Its ends are stand-ins: DeepSpeed (`tests/plain_deepspeed.py`), the sampler's tokens, the reward's processes,
trackers, signals. The tokens depend on a request's seed and cap alone; their log-probabilities are noise, so that every clip
takes effect.
"""

import contextlib
import json
import os
import random
import re
from collections.abc import Callable
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from memrl.config import TrainConfig
from memrl.engine import deepspeed_engine, distributed, load
from memrl.model import TransformerConfig, save_model
from memrl.model.loader import from_scratch
from memrl.prompts import Prompts
from memrl.rl.health import RunError
from memrl.sampler import Sampler
from memrl.scoring.reward_pool import RewardPool
from memrl.scoring.reward_worker import judge, load_function, read_by
from memrl.training import miniature_report, run, trainer
from memrl.training.checkpoint import RunFolder
from memrl.types import Sample, Trajectory
from tests.plain_deepspeed import PlainDeepSpeed, PlainEngine
from tests.tiny_folder import PROMPTS, WORDS, make_tokenizer

TRAINING_DOCUMENTS, VALIDATION_DOCUMENTS = 7, 5
DRAWN = ("red", "blue", "green", "grey")  # in both vocabularies, and in no question
FAILING_WORDS = 1
REWARD = f"""
def words(response, answers, metadata):
    if len(response.split()) == {FAILING_WORDS}:
        raise ValueError("no reward for so many words")
    return float(len(response.split()) % 3)
"""
TURN_REWARD = f"""
def words(trajectory, answers, metadata):
    counts = [len(turn.text.split()) for turn in trajectory.turns]
    if counts[-1] == {FAILING_WORDS}:
        raise ValueError("no reward for so many words")
    return {{"reward": float(counts[-1] % 3), "turns": [count / 4 for count in counts]}}
"""
NO_REWARD = "def words(response, answers, metadata):\n    raise ValueError('never a reward')\n"


AGENT = Path(__file__).with_name("own_agent.py").read_text()


def make_inputs(folder: Path) -> None:
    """Model, prompts, data, reward function: the files that BASE names. Every question occurs once, and names its data set.

    The last document of each data set is a file outside its folder, but for that of tasks/inside.jsonl.
    """
    tokenizer = make_tokenizer()
    config = TransformerConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_size=16,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    for seed, name in enumerate(("model", "other_model")):
        save_model(from_scratch(config, seed=seed), folder / name, tokenizer)
    write_prompts(folder / "prompts.yaml", PROMPTS)
    other = Prompts(memory="{memory} M S {section} Q {question}", answer="A {memory} Q {question}", no_memory="one")
    write_prompts(folder / "other_prompts.yaml", other)
    for name, word, count in (("data", "name", TRAINING_DOCUMENTS), ("validation", "two", VALIDATION_DOCUMENTS)):
        lines = [
            {"question": f"code {word} {WORDS[4 + i]} ?", "context": " ".join(WORDS[i : i + 4] * (1 + i % 3)), "answers": ["red"]}
            for i in range(count)
        ]
        write_lines(folder / "tasks" / "inside.jsonl", lines)
        document = folder / f"{name}.txt"
        document.write_text(lines[-1].pop("context"))
        lines[-1]["file"] = str(document)
        write_lines(folder / "tasks" / f"{name}.jsonl", lines)
        write_lines(folder / "tasks" / f"other_{name}.jsonl", lines[::-1])
    (folder / "agents.py").write_text(AGENT)
    (folder / "other_agents.py").write_text(AGENT.replace('ORDER = "forwards"', 'ORDER = "backwards"'))
    (folder / "reward.py").write_text(REWARD)
    (folder / "other_reward.py").write_text(REWARD.replace("% 3", "% 2"))
    (folder / "turn_reward.py").write_text(TURN_REWARD)
    (folder / "no_reward.py").write_text(NO_REWARD)
    (folder / "flat_reward.py").write_text(REWARD.replace("% 3", "* 0"))


def write_lines(path: Path, lines: list[dict]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_prompts(path: Path, prompts: Prompts) -> None:
    path.write_text(yaml.safe_dump({key: value for key, value in asdict(prompts).items() if value is not None}))


# Every setting off its default, but for those that ONLY_DEFAULT lists. Paths are names in the folder of `make_inputs`.
BASE: dict[str, Any] = {
    "run_dir": "run",
    "resume": "no",
    "seed": 1,
    "device": "cpu",
    "threads": 1,
    "model.path": "model",
    "model.dtype": "float32",
    "model.attention": "eager",
    "model.checkpoint_layers": False,
    "data.path": "tasks/data.jsonl",
    "data.allow_files": True,
    "data.shuffle": False,
    "agent.function": "agents.py:read",
    "agent.caps": {"check": 99},
    "agent.options": {"twice": False},
    "agent.prompts": "prompts.yaml",
    "agent.chunk_tokens": 5,
    "agent.memory_tokens": 4,
    "agent.answer_tokens": 6,
    "agent.question_tokens": 7,
    "rollout.temperature": 0.7,
    "rollout.max_rows": 16,
    "rollout.max_step_tokens": 48,
    "rollout.share_prefixes": False,
    "rollout.cache_gib": 0.5,
    "reward.function": "reward.py:words",
    "reward.workers": 1,
    "reward.timeout_s": 7.0,
    "reward.memory_gib": 5.0,
    "reward.on_error": "zero",
    "reward.max_failed_steps": 9,
    "rl.steps": 2,
    "rl.prompts_per_step": 4,
    "rl.group_size": 3,
    "rl.updates_per_step": 2,
    "rl.epochs": 2,
    "rl.baseline": "leave_one_out",
    "rl.normalize_std": True,
    "rl.credit": "split",
    "rl.loss": "gspo",
    "rl.clip_low": 0.1,
    "rl.clip_high": 0.15,
    "rl.dual_clip": 1.2,
    "rl.kl_coef": 0.05,
    "rl.kl_estimator": "k2",
    "rl.entropy_coef": 0.02,
    "rl.aggregation": "constant",
    "rl.aggregation_tokens": 7,
    "rl.mismatch": "truncate",
    "rl.mismatch_bound": 1.3,
    "rl.drop_flat_groups": True,
    "rl.dynamic_rounds": 1,
    "rl.denominator": "all",
    "rl.overlong_buffers": {"memory": 3, "answer": 2},
    "rl.overlong_penalty": 0.5,
    "rl.overlong_filter": ["memory"],
    "rl.reference": "cpu",
    "rl.micro_batch_tokens": 300,
    "optim.lr": 0.02,
    "optim.min_lr_ratio": 0.25,
    "optim.warmup_updates": 4,
    "optim.beta1": 0.8,
    "optim.beta2": 0.95,
    "optim.weight_decay": 0.1,
    "optim.grad_clip": 0.3,
    "engine.zero_stage": 2,
    "engine.persistence_threshold": 7,
    "engine.offload_optimizer": True,
    "checkpoint.every": 1,
    "checkpoint.keep_last": 1,
    "checkpoint.keep_best": False,
    "validation.every": 3,
    "validation.path": "tasks/validation.jsonl",
    "validation.samples": 3,
    "validation.repeats": 2,
    "validation.temperature": 0.9,
    "validation.top_p": 0.6,
    "log.rollouts": 3,
    "log.tensorboard": False,
    "log.flat_steps": 9,
    "log.wandb_project": "project",
}
# The loss needs whole distributions; adapters and offloaded weights exclude other settings; the rest is for the miniature alone.
ONLY_DEFAULT = {
    "model.miniature",
    "rollout.top_p",
    "rollout.top_k",
    "model.lora_rank",
    "model.lora_alpha",
    "engine.offload_params",
}
ONLY_DEFAULT |= {"reward.turns", "rl.outcome_weight", "rl.turn_return", "rl.turn_discount"}  # a group would always have a signal
# What makes the run a miniature of the smallest size.
MINIATURE: dict[str, Any] = {
    "model.path": None,
    "data.path": None,
    "validation.path": None,
    "agent.prompts": "miniature",
    "agent.chunk_tokens": 25,
    "agent.memory_tokens": 6,
    "agent.answer_tokens": 8,
    "rl.steps": 1,
    "data.min_chunks": 1,
    "data.max_chunks": 3,
    "data.tasks": ["needle", "needle"],
    "warm_start.quote_steps": 1,
    "warm_start.teach_steps": 2,
    "warm_start.flaw": 0.5,
    "warm_start.batch_size": 3,
    "report.lengths": [2, 65],
    "report.samples": 3,
    "report.samples_long": 1,
    "report.max_rows": 33,
}
FILES = ("model.path", "agent.function", "data.path", "agent.prompts", "reward.function", "validation.path")


def make_config(folder: Path, settings: dict[str, Any]) -> TrainConfig:
    config = TrainConfig()
    for name, value in settings.items():
        section, _, key = name.rpartition(".")
        if name in FILES and value is not None and (folder / str(value).partition(":")[0]).exists():
            value = str(folder / value)
        assert hasattr(getattr(config, section) if section else config, key), f"there is no setting {name}"
        setattr(getattr(config, section) if section else config, key, deepcopy(value))
    return config


class FakeSampler:
    """Answers each request at once: words drawn by its seed, up to its cap, with log-probabilities that are noise."""

    def __init__(self, model, tokenizer, **options):
        self.model, self.tokenizer, self.options = model, tokenizer, options
        self.max_rows, self.cache_tokens = options.get("max_rows", 256), 10_000
        self.requests, self._waiting = [], []

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def submit(self, request) -> None:
        self._waiting.append(request)

    def step(self) -> list:
        done, self._waiting = self._waiting, []
        for request in done:
            rng = random.Random(request.params.seed)
            stop = self.tokenizer.hf.eos_token_id
            while not request.finish_reason:
                is_last = request.ids and rng.random() < 0.2
                token = stop if is_last else self.tokenizer.hf.convert_tokens_to_ids(rng.choice(DRAWN))
                logprob = -3.5 + rng.uniform(-1, 1)
                request.append(token, logprob, logprob)
        self.requests += done
        return done

    def release(self) -> None:
        assert not self._waiting

    abort = release


class NoisySampler(Sampler):
    """Samples from the model, and tells log-probabilities that are off by noise, the same on any number of ranks."""

    def __init__(self, model, tokenizer, **options):
        super().__init__(model, tokenizer, **options)
        self.options, self.requests = options, []

    def step(self) -> list:
        done = super().step()
        for request in done:
            rng = random.Random(request.params.seed)
            request.logprobs[:] = [logprob + rng.uniform(-0.5, 0.5) for logprob in request.logprobs]
        self.requests += done
        return done


class FakeRewards(RewardPool):
    """The real pool, whose one worker is this process."""

    def __init__(self, function: str | None, workers: int, timeout_s: float, on_error: str, memory_gib: float):
        self.arguments = {"function": function and Path(function).name, "workers": workers, "timeout_s": timeout_s}
        self.arguments |= {"on_error": on_error, "memory_gib": memory_gib}
        self._function, self._on_error, self._printed, self._threads = function, on_error, set(), AtOnce()
        self._loaded = function and load_function(function)

    def _call(self, trajectory: Trajectory, sample: Sample) -> dict:
        return judge(self._loaded, *self._request(trajectory, sample, read_by(self._loaded) if self._loaded else "response"))

    def close(self) -> None:
        pass


class AtOnce:
    """An executor without threads."""

    @staticmethod
    def submit(work: Callable, *arguments) -> Future:
        done: Future = Future()
        done.set_result(work(*arguments))
        return done


class FakeTracker:
    """Keeps what it is given."""

    def __init__(self, run_dir, options, config: dict, first_step: int):
        self.run_dir, self.options, self.config, self.first_step = run_dir, vars(options), config, first_step
        self.lines: list[tuple[int, dict]] = []

    def log(self, step: int, metrics: dict) -> None:
        self.lines.append((step, metrics))

    def close(self) -> None:
        pass


class NoSignals:
    """A GracefulStop that is never asked to stop."""

    signal = exit_code = 0
    step: int | None = None

    def __init__(self, advice: str):
        self.advice = advice

    def agreed(self) -> bool:
        return False


@dataclass
class RecordedRun:
    """A finished run.

    Attributes:
        process: what reached the process: device and threads; the warnings, numbers left out; the error that ended the run.
        sampler, report_samplers: each with its options and all requests in order; the report has one before and one after RL.
    """

    config: TrainConfig
    folder: Path
    engine: PlainEngine
    trainer: trainer.Trainer
    rewards: FakeRewards
    tracker: FakeTracker | None
    sampler: FakeSampler
    report_samplers: list[FakeSampler]
    process: dict = field(default_factory=dict)

    def lines(self, name: str) -> list[dict]:
        path = self.folder / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def text_of(self, ids: list[int]) -> str:
        return self.sampler.tokenizer.decode(ids)

    def question_of(self, prompt: str) -> str:
        """The question's words, as far as they differ: "code name north", and in the miniature "code emma"."""
        words = prompt.split()
        return " ".join(words[words.index("code") :][:3])

    def is_validation(self, request) -> bool:
        """By its question, in data files; by its temperature in the miniature, where training's is another one."""
        if self.config.data.path is None:
            return request.params.temperature != self.config.rollout.temperature
        return self.question_of(self.text_of(request.prompt_ids)).split()[1] == "two"

    def requests(self, validation: bool = False) -> list:
        return [request for request in self.sampler.requests if self.is_validation(request) == validation]

    def weights(self) -> dict[str, torch.Tensor]:
        """The exported policy, without the keys' biases: their gradient is zero but for rounding, which AdamW makes large."""
        found = load_file(self.folder / "model" / "model.safetensors")
        return {name: value for name, value in found.items() if not name.endswith("k_proj.bias")}


def recorded_run(monkeypatch, folder: Path, settings: dict[str, Any], inputs: Path, sampler: type = FakeSampler) -> RecordedRun:
    """Run in `folder`, with the files that `make_inputs` wrote into `inputs`; raises what the run raises."""
    config = make_config(inputs, settings)
    config.run_dir = str(folder / config.run_dir)
    deepspeed, process, samplers = PlainDeepSpeed(), {}, []
    with monkeypatch.context() as patch:
        for module in (deepspeed_engine, load):
            patch.setattr(module, "import_deepspeed", lambda: deepspeed)
        for module in (trainer, miniature_report):
            patch.setattr(module, "Sampler", lambda *a, **options: samplers.append(sampler(*a, **options)) or samplers[-1])
        patch.setattr(miniature_report, "plot_accuracy", lambda *_, trained_to, **__: process.update({"trained to": trained_to}))
        patch.setattr(distributed, "init", lambda device: process.update(device=device))
        patch.setattr(distributed, "shutdown", lambda: None)
        made = run_with_stand_ins(patch, config, process)
    return RecordedRun(config, Path(config.run_dir), deepspeed.engines[0], *made, samplers[0], samplers[1:], process)


def run_with_stand_ins(patch, config: TrainConfig, process: dict) -> tuple[trainer.Trainer, FakeRewards, FakeTracker | None]:
    """`memrl.training.run.run` without processes, trackers, signals and pictures; what it made. Rank 0 alone has a tracker."""
    made: dict[str, Any] = {"Tracker": None}

    def keep(name: str, kind: type) -> None:
        patch.setattr(run, name, lambda *arguments: made.update({name: kind(*arguments)}) or made[name])

    keep("Trainer", trainer.Trainer)
    keep("RunFolder", RunFolder)
    keep("RewardPool", FakeRewards)
    keep("Tracker", FakeTracker)
    patch.setattr(run, "GracefulStop", NoSignals)
    patch.setattr(run, "check_tracking", lambda options: process.update({"checked wandb_project": options.wandb_project}))
    patch.setattr(run, "set_threads", lambda count: process.update(threads=count))
    patch.setattr(run, "plot_curves", lambda run_dir: run_dir)
    patch.setattr(run, "user_errors", contextlib.nullcontext)  # errors stay what they are
    patch.setattr(run, "_end_with_error", lambda error: keep_error(error, process))
    patch.setattr(trainer, "warn", lambda text: process["warnings"].append(re.sub(r"\S*\d\S*", "#", text)))
    process |= {"warnings": [], "error": None}
    patch.setattr(os, "fsync", lambda descriptor: None)
    try:
        run.run(config)
    finally:
        if "RunFolder" in made and (lock := made["RunFolder"]._lock_file) is not None:
            lock.close()  # as the end of the process does
    return made["Trainer"], made["RewardPool"], made["Tracker"]


def keep_error(error: Exception, process: dict) -> int:
    """Note what the run itself ended with; anything else is the test's."""
    if not isinstance(error, RunError):
        raise error
    process["error"] = str(error)
    return 2
