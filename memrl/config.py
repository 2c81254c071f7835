"""Every setting of a training run, with its default and what it does.

The defaults are those of the original's released 7B run; `configs/*.yaml` override them, and the command line overrides both.
This module imports nothing heavy, so that `--help` answers at once.
"""

from __future__ import annotations

import math
import operator
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Literal


@dataclass
class ModelOptions:
    """Where the policy starts."""

    path: str | None = None
    """Hugging Face folder of a Qwen2.5 checkpoint; nothing builds the miniature's model and warms it up from random weights."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights; auto keeps the checkpoint's own."""
    attention: Literal["auto", "eager", "sdpa", "flash", "triton"] = "auto"
    """What computes attention, in training and in rollouts; auto takes the best that runs here and says which."""
    checkpoint_layers: bool = True
    """Recompute each layer in the backward pass: less memory, a third more time."""
    lora_rank: int = 0
    """Train low-rank adapters of this rank beside every linear layer, and leave the weights alone; 0 trains the weights."""
    lora_alpha: float = 32.0
    """The adapters' output is multiplied by lora_alpha / lora_rank."""


@dataclass
class DataOptions:
    """What is read."""

    path: str | None = None
    """A .jsonl or .parquet file with `question`, `context` (or `file`) and `answers` (docs/data.md), or one of the original's
    parquet files; nothing means the miniature's generated documents."""
    min_chunks: int = 6
    """Shortest generated document, in chunks (miniature only)."""
    max_chunks: int = 8
    """Longest generated document, in chunks (miniature only)."""
    shuffle: bool = True
    """Draw the order of a JSON lines file anew in each epoch."""


@dataclass
class AgentOptions:
    """How a document is read; see `memrl/agents/memory.py`."""

    prompts: str = "question_first"
    """Prompt file: a path, or a name in memrl/prompts."""
    chunk_tokens: int = 5000
    """Document tokens of one chunk."""
    memory_tokens: int = 1024
    """Hard cap on the memory."""
    answer_tokens: int = 1024
    """Cap on the answer turn."""
    question_tokens: int = 1024
    """A longer question is refused."""


@dataclass
class RolloutOptions:
    """How trajectories are sampled in training."""

    temperature: float = 1.0
    """Of the policy that is sampled and of the policy that is differentiated: they are the same."""
    top_p: float = 1.0
    """Must be 1: the loss differentiates the full softmax."""
    top_k: int = 0
    """Must be 0, for the same reason."""
    max_rows: int = 128
    """Rows decoded together, on each rank."""
    max_step_tokens: int = 0
    """Prompt and response tokens of one forward pass of the sampler; 0 fits the model and the device."""
    share_prefixes: bool = True
    """Compute and keep what prompts have in common once."""
    cache_gib: float = 8.0
    """Bound on the key/value cache of each rank."""


@dataclass
class RewardOptions:
    """What a trajectory earns, and who works it out."""

    function: str | None = None
    """`FILE.py:NAME`, a function (response, answers, metadata) -> number; nothing means the strict verifier."""
    workers: int = 2
    """Processes that score trajectories, on each rank, so that a slow function never holds generation up."""
    timeout_s: float = 30.0
    """A function that takes longer is killed; the trajectory earns 0 and is counted in reward/errors."""


@dataclass
class RLOptions:
    """The algorithm."""

    steps: int = 400
    """Batches of rollouts."""
    prompts_per_step: int = 128
    """Questions per batch, over all ranks."""
    group_size: int = 16
    """Rollouts of each question; they are each other's baseline."""
    updates_per_step: int = 16
    """Optimizer steps per pass over a batch; each takes whole groups."""
    epochs: int = 1
    """Passes over each batch of rollouts."""
    baseline: Literal["mean", "leave_one_out"] = "mean"
    """What a reward is compared with: the mean of its group, or the mean of the others in it."""
    normalize_std: bool = False
    """Divide advantages by the group's standard deviation."""
    credit: Literal["broadcast", "final_only", "split"] = "broadcast"
    """Where a trajectory's advantage falls: whole on every turn, on the answer turn alone, or divided by the number of turns."""
    loss: Literal["ppo", "cispo", "gspo", "reinforce"] = "ppo"
    """The clipped ratio of each token (ppo) or of each turn (gspo), the clipped weight (cispo), or no ratio at all."""
    clip_low: float = 0.2
    """The ratio's lower bound is 1 - clip_low (not in cispo)."""
    clip_high: float = 0.2
    """The ratio's upper bound is 1 + clip_high; DAPO's clip-higher is 0.28. gspo wants about a thousandth of it."""
    dual_clip: float | None = 3.0
    """Bound on the loss of tokens with a negative advantage, in units of the advantage (ppo and gspo)."""
    kl_coef: float = 0.001
    """Weight of the penalty to the frozen start; 0 leaves it and the reference model out."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """How the penalty is estimated from the sampled tokens; see `memrl/rl/loss.py` for value and gradient of each."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    aggregation: Literal["token_mean", "prompt_mean", "seq_mean", "constant"] = "token_mean"
    """What the loss is the mean of: the step's tokens; groups, each the mean of its tokens; turns, each the mean of its
    tokens; or trajectories, each the sum of its tokens over a constant."""
    aggregation_tokens: int = 1024
    """The constant of aggregation `constant`."""
    mismatch: Literal["off", "truncate", "mask"] = "off"
    """What is done where trainer and sampler disagree about a token: weigh its policy gradient by their ratio, up to
    mismatch_bound; or give turns whose mean ratio is beyond it no policy gradient."""
    mismatch_bound: float = 2.0
    """Largest weight (truncate); largest ratio of a turn, and its inverse the smallest (mask)."""
    drop_flat_groups: bool = False
    """Leave groups whose rewards are all equal out of the update; they carry no signal but that of the penalty."""
    dynamic_rounds: int = 0
    """Replace groups whose rewards are all equal by fresh questions, up to so many times, then leave them out; 0 is off."""
    overlong_buffer_memory: int = 0
    """A memory turn loses reward for each token that it comes closer than this to its cap; 0 is off."""
    overlong_buffer_answer: int = 0
    """The same for the answer turn."""
    overlong_penalty: float = 1.0
    """What a turn that its cap ended loses, where there is a buffer."""
    overlong_filter: Literal["none", "memory", "answer", "all"] = "none"
    """Turns of this kind that their cap ended are left out of the loss."""
    reference: Literal["device", "cpu"] = "device"
    """Where the frozen start waits between its uses."""
    micro_batch_tokens: int = 16384
    """Hard bound on the tokens of one forward and backward pass."""


@dataclass
class WarmStartOptions:
    """How the miniature gets from random weights to a start that reinforcement learning can work with."""

    quote_steps: int = 250
    """Optimizer steps on random text that quotes itself; they teach looking things up."""
    teach_steps: int = 500
    """Optimizer steps on single turns written by a flawed teacher; they teach the form of the task."""
    flaw: float = 0.8
    """How often the teacher gives in to its bad habit: a chunk that ends in a fact makes it forget what it knew for that fact."""
    batch_size: int = 64
    """Examples per optimizer step."""


@dataclass
class OptimOptions:
    """AdamW and its schedule, counted in optimizer steps."""

    lr: float = 1e-6
    """Peak learning rate."""
    min_lr_ratio: float = 1.0
    """The rate falls linearly to this part of the peak by the last step; 1 keeps it."""
    warmup_updates: int = 20
    """Optimizer steps of linear warm-up; the first already has lr / warmup_updates."""
    beta1: float = 0.9
    """Decay of AdamW's first moment."""
    beta2: float = 0.999
    """Decay of AdamW's second moment."""
    weight_decay: float = 0.01
    """AdamW's decoupled weight decay."""
    grad_clip: float = 1.0
    """Bound on the gradient's norm."""


@dataclass
class EngineOptions:
    """DeepSpeed."""

    zero_stage: Literal[1, 2, 3] = 3
    """What is partitioned over the ranks: optimizer (1), and gradients (2), and weights (3)."""
    persistence_threshold: int = 100_000
    """Weights with fewer elements stay whole on every rank (stage 3)."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in CPU memory (GPU runs)."""
    offload_params: bool = False
    """Keep the partitioned weights in CPU memory (GPU runs)."""


@dataclass
class CheckpointOptions:
    """What is kept for resuming."""

    every: int = 10
    """Steps between checkpoints; 0 writes none."""
    keep_last: int = 2
    """Older checkpoints are deleted."""
    keep_best: bool = True
    """Keep the policy with the best validation score in best/, a Hugging Face folder."""


@dataclass
class ValidationOptions:
    """Reading documents that are not trained on, with the same agent, before the first step and every so often."""

    every: int = 0
    """Steps between validations; 0 has none."""
    path: str | None = None
    """JSON lines, as data.path; nothing means documents of the miniature that training never draws."""
    samples: int = 128
    """Questions; a file's first ones."""
    repeats: int = 1
    """Readings of each question; scores are means over them (the original takes 4)."""
    temperature: float = 0.0
    """0 is greedy (the original samples at 1.0)."""
    top_p: float = 1.0
    """The original's is 0.7."""


@dataclass
class LogOptions:
    """What of a run can be looked at."""

    rollouts: int = 2
    """Trajectories of each step in rollouts.jsonl, with every prompt, memory and answer."""
    tensorboard: bool = True
    """Write tensorboard/ where the package is installed."""
    wandb_project: str | None = None
    """Send metrics to this Weights & Biases project."""


@dataclass
class ReportOptions:
    """The table of accuracy by document length before and after training (miniature only)."""

    lengths: list[int] = field(default_factory=list)
    """Chunks per document; empty leaves the report out."""
    samples: int = 128
    """Documents per length up to 64 chunks."""
    samples_long: int = 64
    """Documents per length beyond."""
    max_rows: int = 256
    """Rows decoded together."""


@dataclass
class TrainConfig:
    """Train a memory agent by reinforcement learning."""

    run_dir: str = "runs/tiny"
    """Folder of the run: resolved config, metrics, rollouts, checkpoints, the trained model."""
    resume: Literal["auto", "no"] = "auto"
    """auto goes on from the run folder's last checkpoint; no refuses a folder that already holds a run."""
    seed: int = 0
    """All randomness is a function of it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPUs where there are any; cuda refuses to start without."""
    threads: int = 0
    """CPU threads of each rank; 0 shares the machine's cores out."""
    model: ModelOptions = field(default_factory=ModelOptions)
    warm_start: WarmStartOptions = field(default_factory=WarmStartOptions)
    data: DataOptions = field(default_factory=DataOptions)
    agent: AgentOptions = field(default_factory=AgentOptions)
    rollout: RolloutOptions = field(default_factory=RolloutOptions)
    reward: RewardOptions = field(default_factory=RewardOptions)
    rl: RLOptions = field(default_factory=RLOptions)
    optim: OptimOptions = field(default_factory=OptimOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    validation: ValidationOptions = field(default_factory=ValidationOptions)
    log: LogOptions = field(default_factory=LogOptions)
    report: ReportOptions = field(default_factory=ReportOptions)

    def to_dict(self) -> dict:
        return asdict(self)


def flatten(tree: dict, prefix: str = "") -> dict:
    """{"rl": {"steps": 3}} to {"rl.steps": 3}."""
    flat = {}
    for key, value in tree.items():
        flat.update(flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat


def differences(old: dict, new: dict, free: tuple[str, ...]) -> list[str]:
    """What differs between flat settings, as "key: old -> new", but for keys that are free or belong to a free section."""
    prefixes = tuple(f"{key}." for key in free)
    return [
        f"{key}: {old.get(key)} -> {new.get(key)}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not f"{key}.".startswith(prefixes)
    ]


def _require_values(options: object, prefix: str = "") -> None:
    # The parser takes a null in a YAML file for any type, so a field that must not be None is caught here.
    for item in fields(options):
        value = getattr(options, item.name)
        if is_dataclass(value):
            _require_values(value, f"{prefix}{item.name}.")
        elif value is None and not item.type.endswith("None"):
            raise ValueError(f"{prefix}{item.name} is null; give it a value or remove its line")


# Smallest and largest allowed value of every number that has bounds.
_BOUNDS: dict[str, tuple[float, float]] = {
    "seed": (0, 2**62),
    "threads": (0, 4096),
    "warm_start.quote_steps": (0, math.inf),
    "warm_start.teach_steps": (0, math.inf),
    "warm_start.flaw": (0, 1),
    "warm_start.batch_size": (1, math.inf),
    "data.min_chunks": (1, math.inf),
    "agent.chunk_tokens": (1, math.inf),
    "agent.memory_tokens": (1, math.inf),
    "agent.answer_tokens": (1, math.inf),
    "agent.question_tokens": (1, math.inf),
    "rollout.max_rows": (1, math.inf),
    "rollout.max_step_tokens": (0, math.inf),
    "rl.steps": (1, math.inf),
    "rl.prompts_per_step": (1, math.inf),
    "rl.group_size": (2, math.inf),
    "rl.updates_per_step": (1, math.inf),
    "rl.epochs": (1, math.inf),
    "model.lora_rank": (0, 4096),
    "reward.workers": (1, 1024),
    "rl.kl_coef": (0, math.inf),
    "rl.entropy_coef": (0, math.inf),
    "rl.aggregation_tokens": (1, math.inf),
    "rl.mismatch_bound": (1, math.inf),
    "rl.dynamic_rounds": (0, 1000),
    "rl.overlong_buffer_memory": (0, math.inf),
    "rl.overlong_buffer_answer": (0, math.inf),
    "rl.overlong_penalty": (0, math.inf),
    "rl.micro_batch_tokens": (1, math.inf),
    "optim.min_lr_ratio": (0, 1),
    "optim.warmup_updates": (0, math.inf),
    "optim.beta1": (0, 0.9999999),
    "optim.beta2": (0, 0.9999999),
    "optim.weight_decay": (0, math.inf),
    "engine.persistence_threshold": (0, math.inf),
    "checkpoint.every": (0, math.inf),
    "checkpoint.keep_last": (1, math.inf),
    "validation.every": (0, math.inf),
    "validation.samples": (1, math.inf),
    "validation.repeats": (1, math.inf),
    "validation.temperature": (0, math.inf),
    "validation.top_p": (1e-6, 1),
    "log.rollouts": (0, math.inf),
    "report.samples": (1, math.inf),
    "report.samples_long": (1, math.inf),
    "report.max_rows": (1, math.inf),
}
_POSITIVE = (
    "model.lora_alpha",
    "reward.timeout_s",
    "rollout.temperature",
    "rollout.cache_gib",
    "rl.clip_low",
    "rl.clip_high",
    "optim.lr",
    "optim.grad_clip",
)


def validate(config: TrainConfig) -> None:
    """Every check that no single field's type can make; raises ValueError naming the field and the fix."""
    _require_values(config)
    rl, data, rollout = config.rl, config.data, config.rollout

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(message)

    for name, (low, high) in _BOUNDS.items():
        value = operator.attrgetter(name)(config)
        limit = f"at least {low}" if high == math.inf else f"between {low} and {high:.9g}"
        why = "; a group's baseline needs at least 2 rollouts" if name == "rl.group_size" else ""
        require(low <= value <= high and math.isfinite(value), f"{name} is {value}; it must be {limit}{why}")
    for name in _POSITIVE:
        value = operator.attrgetter(name)(config)
        require(0 < value < math.inf, f"{name} is {value}; it must be positive")
    require(
        rl.updates_per_step <= rl.prompts_per_step,
        f"rl.updates_per_step ({rl.updates_per_step}) is above rl.prompts_per_step ({rl.prompts_per_step}); an optimizer step "
        "takes whole groups, so there can be no more steps than groups",
    )
    for kind in ("memory", "answer"):
        buffer, cap = getattr(rl, f"overlong_buffer_{kind}"), getattr(config.agent, f"{kind}_tokens")
        require(buffer <= cap, f"rl.overlong_buffer_{kind} is {buffer}; it must be at most agent.{kind}_tokens, which is {cap}")
    require(
        config.engine.zero_stage == 3 or not config.engine.offload_params,
        f"engine.offload_params needs engine.zero_stage 3 (it is {config.engine.zero_stage}): only there are weights partitioned",
    )
    require(data.max_chunks >= data.min_chunks, "data.max_chunks must be at least data.min_chunks")
    require(
        rollout.top_p == 1 and rollout.top_k == 0,
        "rollout.top_p must be 1 and rollout.top_k 0 in training: the loss differentiates the full softmax, and sampling from a "
        "truncated one would bias it",
    )
    require(rl.clip_low < 1, f"rl.clip_low is {rl.clip_low}; it must be below 1")
    require(rl.dual_clip is None or rl.dual_clip > 1, f"rl.dual_clip is {rl.dual_clip}; it must be above 1, or null for off")
    lengths = config.report.lengths
    require(
        all(length >= 1 for length in lengths) and len(set(lengths)) == len(lengths),
        f"report.lengths is {lengths}; it must hold different numbers of chunks, each at least 1",
    )


def validate_start(config: TrainConfig) -> None:
    """Whether what the run starts from is there; a model of one's own and the miniature share no settings. Raises ValueError."""
    model, data = config.model.path, config.data.path
    miniature = Path(config.agent.prompts).stem.startswith("miniature")

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(message)

    if model is not None:
        require(Path(model).is_dir(), f"model.path {model} is not a folder; download the checkpoint there, or correct the path")
        require(data is not None, "data.path is missing: a model of your own (model.path) needs documents of your own")
        require(
            not miniature and not config.report.lengths,
            "model.path is set, but agent.prompts or report.lengths are the miniature's; give --config configs/memagent_7b.yaml "
            "or another that fits your model (without --config, configs/tiny.yaml is used)",
        )
    else:
        require(data is None, "data.path is set, but model.path is not: the miniature reads its own documents only")
        require(
            miniature,
            "model.path is not set, so this would be the miniature, but its settings are missing; give --config "
            "configs/tiny.yaml first, or a model.path",
        )
    require(data is None or Path(data).is_file(), f"data.path {data} is not a file")
    validation = config.validation.path
    if config.validation.every:
        require(
            (model is None) == (validation is None),
            "validation.path is missing: a model of your own (model.path) is validated on documents of your own"
            if validation is None
            else "validation.path is set, but model.path is not: the miniature is validated on its own documents",
        )
    require(validation is None or Path(validation).is_file(), f"validation.path {validation} is not a file")
