"""Every setting of a training run, with its default, its bounds and its meaning (docs/settings.md lists them).

`configs/*.yaml` override the defaults, and the command line overrides both. The algorithm's defaults are those of the original's
released 7B run, with two exceptions: optim.warmup_updates (the original warms up over 320 optimizer steps) and data.shuffle (the
original reads the file in order). This module imports nothing heavy, so that `--help` answers at once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from memrl.utils.bounds import MAX_GIB, MAX_ROWS, MAX_THREADS, bounded, check_options


@dataclass
class ModelOptions:
    """The model that training starts from."""

    path: str | None = None
    """Hugging Face folder of the model to train; without one, the miniature's model is made from random weights and warmed up."""
    miniature: str = "needle"
    """Without a path: the language of the miniature and the lessons that its start is taught (memrl/miniature/registry.py)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights; auto keeps the checkpoint's."""
    attention: Literal["auto", "eager", "sdpa", "flash", "triton"] = "auto"
    """Attention backend in training and in rollouts; auto picks the fastest that runs here, and the run's first lines name it."""
    checkpoint_layers: bool = True
    """Recompute each layer in the backward pass: less memory, a third more time."""
    lora_rank: int = bounded(0, 0, 4096)
    """Train low-rank adapters of this rank on every linear layer and keep the weights frozen; 0 trains the weights."""
    lora_alpha: float = bounded(32.0, above=0)
    """The adapters' output is multiplied by lora_alpha / lora_rank."""


@dataclass
class DataOptions:
    """The training documents."""

    path: str | None = None
    """A .jsonl or .parquet file with `question`, `context` (or `file`) and `answers` (docs/data.md), or one of the original's
    parquet files; without one, the miniature's documents are generated."""
    min_chunks: int = bounded(6, 1, 100_000)
    """Fewest chunks of a generated document (miniature only). Each step draws one number for all its documents."""
    max_chunks: int = bounded(8, 1, 100_000)
    """Most chunks of a generated document (miniature only)."""
    tasks: list[str] = field(default_factory=lambda: ["needle"])
    """Tasks of the generated documents (miniature only): names in memrl/data/generated.py, such as needle and bench_update; they
    take turns over the samples of a step."""
    shuffle: bool = True
    """Read the file in a new random order in each epoch; the original reads it in order."""
    allow_files: bool = False
    """Let `file` in training and validation data name files anywhere, not only below the folder of the data set; only for data
    that you trust."""


@dataclass
class AgentOptions:
    """How a document is read; see `memrl/agents/memory.py`."""

    function: str = "memory"
    """The agent: a name in memrl/agents, or FILE.py:NAME, an async function (llm, sample, config) (docs/writing_an_agent.md)."""
    prompts: str = "question_first"
    """Prompt file: a path, or a name in memrl/prompts."""
    chunk_tokens: int = bounded(5000, 1)
    """Document tokens per chunk."""
    memory_tokens: int = bounded(1024, 1)
    """Most tokens of the memory; longer ones are cut."""
    answer_tokens: int = bounded(1024, 1)
    """Most tokens of the answer turn."""
    question_tokens: int = bounded(1024, 1)
    """Most tokens of a question; a longer one is an error."""
    caps: dict[str, int] = field(default_factory=dict)
    """Most tokens of turns of further kinds, by kind (agents other than `memory`)."""
    options: dict[str, Any] = field(default_factory=dict)
    """The agent's own options; docs/agents.md lists those of each agent."""


@dataclass
class RolloutOptions:
    """Sampling of the training trajectories."""

    temperature: float = bounded(1.0, above=0)
    """Sampling temperature; the loss uses the same."""
    top_p: float = 1.0
    """Must be 1: the loss uses the full softmax."""
    top_k: int = 0
    """Must be 0 (off): the loss uses the full softmax."""
    max_rows: int = bounded(128, 1, MAX_ROWS)
    """Sequences decoded together on each rank."""
    max_step_tokens: int = bounded(0, 0)
    """Prompt and response tokens per forward pass of the sampler; 0 chooses by model and device."""
    share_prefixes: bool = True
    """Compute and store common prefixes of prompts once."""
    cache_gib: float = bounded(8.0, above=0, at_most=MAX_GIB)
    """Size of the key/value cache of each rank, GiB."""


@dataclass
class RewardOptions:
    """The reward function and the processes that run it."""

    function: str | None = None
    """`FILE.py:NAME`, a function (response, answers, metadata) -> number; without one, the strict verifier. One whose first
    parameter is named trajectory sees all turns and may reward each (docs/rewards.md)."""
    workers: int = bounded(2, 1, 1024)
    """Processes that score trajectories on each rank, so that a slow function does not delay generation."""
    timeout_s: float = bounded(30.0, above=0, at_most=1e6)
    """Seconds per call; a slower call is killed, and its reward has failed."""
    memory_gib: float = bounded(0.0, 0, 1e6)
    """Most memory of a worker (its address space), GiB; 0 sets no limit."""
    on_error: Literal["skip", "zero"] = "skip"
    """A trajectory whose reward failed is left out of its group's baseline and of the loss (skip), or earns 0 (zero);
    reward/errors counts it."""
    max_failed_steps: int = bounded(3, 0)
    """End the run when all rewards failed for this many steps in a row; 0 never does."""
    turns: Literal["none", "memory_gain"] = "none"
    """Added to the rewards of single turns (rl.outcome_weight); memory_gain: how much more probable the gold answer is given the
    memory after the turn than given the one before, in nats per token, for the current policy."""


@dataclass
class RLOptions:
    """The reinforcement learning algorithm."""

    steps: int = bounded(400, 1)
    """Training steps; each samples one batch of rollouts."""
    prompts_per_step: int = bounded(128, 1, 100_000)
    """Questions per step, over all ranks."""
    group_size: int = bounded(16, 2, 65_536, why="a group's baseline needs at least 2 rollouts")
    """Rollouts per question; the group's rewards are the baseline."""
    updates_per_step: int = bounded(16, 1)
    """Optimizer steps per pass over a batch; each uses whole groups."""
    epochs: int = bounded(1, 1)
    """Passes over each batch of rollouts."""
    baseline: Literal["mean", "leave_one_out"] = "mean"
    """Subtracted from each reward: the mean of its group, or the mean of the group's other rewards."""
    normalize_std: bool = False
    """Divide advantages by the standard deviation of the group's rewards; a turn's own by that of the returns at its place."""
    credit: Literal["broadcast", "final_only", "split"] = "broadcast"
    """Advantage of each turn: the trajectory's on every turn, on the answer turn only, or divided by the number of turns."""
    outcome_weight: float = bounded(1.0, 0, 1)
    """alpha in the advantage of a turn, A = alpha A_outcome + (1 - alpha) A_turn: A_outcome is the trajectory's by rl.credit,
    A_turn comes from the turns' own rewards, which 1 leaves out. ReMemR1 takes 0.8."""
    turn_return: Literal["own", "to_go"] = "own"
    """A turn is judged by its own reward, or by the discounted sum of the rewards from it on."""
    turn_discount: float = bounded(1.0, 0, 1)
    """Discount of each later turn's reward (turn_return to_go)."""
    loss: Literal["ppo", "cispo", "gspo", "reinforce"] = "ppo"
    """Policy loss: ratio clipped per token (ppo) or per turn (gspo), clipped weights (cispo), or no ratio (reinforce)."""
    clip_low: float = bounded(0.2, above=0, below=1)
    """Lower bound of the ratio is 1 - clip_low (not in cispo)."""
    clip_high: float = bounded(0.2, above=0)
    """Upper bound of the ratio is 1 + clip_high; DAPO's clip-higher is 0.28; gspo needs about a thousandth of it."""
    dual_clip: float | None = bounded(3.0, above=1)
    """Largest loss of a token with a negative advantage, as a multiple of -advantage (ppo and gspo); null is off."""
    kl_coef: float = bounded(0.001, 0)
    """Weight of the KL penalty to the reference model (the frozen start); 0 leaves out both."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL penalty from the sampled tokens; `memrl/rl/loss.py` gives each one's value and gradient."""
    entropy_coef: float = bounded(0.0, 0)
    """Weight of the entropy bonus."""
    aggregation: Literal["token_mean", "prompt_mean", "seq_mean", "constant"] = "token_mean"
    """Mean of the loss over all tokens of a step (token_mean), over groups' token means (prompt_mean), over turns' token means
    (seq_mean), or over trajectories' token sums divided by aggregation_tokens (constant)."""
    aggregation_tokens: int = bounded(1024, 1)
    """Divisor of aggregation `constant`."""
    mismatch: Literal["off", "truncate", "mask"] = "off"
    """Correction for probabilities that differ between trainer and sampler: weight each token's policy gradient by their ratio,
    at most mismatch_bound (truncate), or drop the policy gradient of turns whose mean ratio is out of bounds (mask)."""
    mismatch_bound: float = bounded(2.0, 1)
    """Largest weight (truncate); largest mean ratio of a turn, and 1 / mismatch_bound the smallest (mask)."""
    drop_flat_groups: bool = False
    """Leave groups with equal rewards out of the update, as dynamic_rounds does anyway; only the KL penalty has a gradient
    there."""
    dynamic_rounds: int = bounded(0, 0, 1000)
    """Replace groups with equal rewards by new questions, at most this many times, then leave them out; 0 is off."""
    denominator: Literal["kept", "all"] = "kept"
    """Groups with equal rewards that are left out: fewer optimizer steps, each over the groups that are kept (kept), or as many
    steps, and they count in the denominators of the loss, so that the gradient falls with the signal (all)."""
    overlong_buffers: dict[str, int] = field(default_factory=dict)
    """By kind of turn, such as memory or answer: a turn loses reward for each token within this many tokens of its cap."""
    overlong_penalty: float = bounded(1.0, 0)
    """Reward lost by a turn cut off at its cap, if its kind has a buffer."""
    overlong_filter: list[str] = field(default_factory=list)
    """Kinds of turn, or all: those that were cut off at their cap are left out of the loss."""
    reference: Literal["device", "cpu"] = "device"
    """Device of the reference model between uses."""
    micro_batch_tokens: int = bounded(16384, 1)
    """Most tokens of one forward and backward pass."""


@dataclass
class WarmStartOptions:
    """Supervised training of the miniature before reinforcement learning (miniature only)."""

    quote_steps: int = bounded(250, 0)
    """Optimizer steps on random text that quotes itself; they teach the model to look things up."""
    teach_steps: int = bounded(500, 0)
    """Optimizer steps on single turns of a flawed teacher; they teach the form of the task."""
    flaw: float = bounded(0.8, 0, 1)
    """Probability of the teacher's error: if a chunk ends in another fact, that fact replaces the one in memory."""
    batch_size: int = bounded(64, 1, 4096)
    """Examples per optimizer step."""


@dataclass
class OptimOptions:
    """AdamW and its learning rate schedule, in optimizer steps."""

    lr: float = bounded(1e-6, above=0)
    """Peak learning rate."""
    min_lr_ratio: float = bounded(1.0, 0, 1)
    """The rate falls linearly to min_lr_ratio * lr at the last step; 1 keeps it constant."""
    warmup_updates: int = bounded(20, 0)
    """Optimizer steps of linear warm-up; the first has lr / warmup_updates. The original warms up over 320."""
    beta1: float = bounded(0.9, 0, 0.9999999)
    """Decay of AdamW's first moment."""
    beta2: float = bounded(0.999, 0, 0.9999999)
    """Decay of AdamW's second moment."""
    weight_decay: float = bounded(0.01, 0)
    """AdamW's decoupled weight decay."""
    grad_clip: float = bounded(1.0, above=0)
    """Largest norm of the gradient; larger ones are scaled down."""


@dataclass
class EngineOptions:
    """DeepSpeed's ZeRO."""

    zero_stage: Literal[1, 2, 3] = 3
    """Partition over the ranks: optimizer state (1), and gradients (2), and weights (3)."""
    persistence_threshold: int = bounded(100_000, 0)
    """Parameters with at most this many elements stay whole on every rank (stage 3)."""
    offload_optimizer: bool = False
    """Keep the optimizer state in CPU memory (GPU runs)."""
    offload_params: bool = False
    """Keep the partitioned weights in CPU memory (GPU runs, stage 3)."""


@dataclass
class CheckpointOptions:
    """Checkpoints and the best policy."""

    every: int = bounded(10, 0)
    """Steps between checkpoints; 0 writes none, except when a signal stops the run."""
    keep_last: int = bounded(2, 1)
    """Checkpoints to keep; older ones are deleted."""
    keep_best: bool = True
    """Keep the policy with the best validation score in best/, a Hugging Face folder."""


@dataclass
class ValidationOptions:
    """Scores on other documents than the training ones, with the same agent, before the first step and during the run."""

    every: int = bounded(0, 0)
    """Steps between validations; 0 is off."""
    path: str | None = None
    """A file as in data.path; without one, the miniature's documents that training never draws."""
    samples: int = bounded(128, 1)
    """Questions; the first ones of a file."""
    repeats: int = bounded(1, 1)
    """Readings of each question; scores are their means. The original takes 4."""
    temperature: float = bounded(0.0, 0)
    """Sampling temperature; 0 is greedy. The original's is 1."""
    top_p: float = bounded(1.0, 1e-6, 1)
    """Sample from the smallest set of most likely tokens with this probability. The original's is 0.7."""


@dataclass
class LogOptions:
    """Logging."""

    rollouts: int = bounded(2, 0)
    """Trajectories per step in rollouts.jsonl, with every prompt, memory and answer."""
    tensorboard: bool = True
    """Write tensorboard/ if the package tensorboard is installed."""
    flat_steps: int = bounded(10, 0)
    """Say so when no group had a signal for this many steps in a row, and again whenever that number has doubled; 0 is off."""
    wandb_project: str | None = None
    """Send metrics to this Weights & Biases project."""


@dataclass
class ReportOptions:
    """Accuracy by document length before and after training (miniature only)."""

    lengths: list[int] = field(default_factory=list)
    """Chunks per document; an empty list leaves the report out."""
    samples: int = bounded(128, 1)
    """Documents per length up to 64 chunks."""
    samples_long: int = bounded(64, 1)
    """Documents per longer length."""
    max_rows: int = bounded(256, 1, MAX_ROWS)
    """Sequences decoded together."""


@dataclass
class TrainConfig:
    """Train a memory agent by reinforcement learning."""

    run_dir: str = "runs/tiny"
    """Folder of the run: settings, metrics, rollouts, checkpoints, the trained model."""
    resume: Literal["auto", "no"] = "auto"
    """auto resumes from the run folder's last checkpoint; no refuses a folder that already holds a run."""
    seed: int = bounded(0, 0, 2**62)
    """Seed of all random numbers."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto uses GPUs if there are any; cuda requires them."""
    threads: int = bounded(0, 0, MAX_THREADS)
    """CPU threads per rank; 0 divides the machine's cores among its ranks."""
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


MAPPINGS = ("agent.caps", "agent.options", "rl.overlong_buffers")  # settings that are mappings themselves


def flatten(tree: dict, prefix: str = "") -> dict:
    """{"rl": {"steps": 3}} to {"rl.steps": 3}."""
    flat = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat.update(flatten(value, f"{name}.") if isinstance(value, dict) and name not in MAPPINGS else {name: value})
    return flat


def differences(old: dict, new: dict, free: tuple[str, ...]) -> list[str]:
    """Differences of two flat settings, each as "key: old -> new"; keys and sections in `free` are not compared."""
    prefixes = tuple(f"{key}." for key in free)
    return [
        f"{key}: {old.get(key)} -> {new.get(key)}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not f"{key}.".startswith(prefixes)
    ]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def validate(config: TrainConfig) -> None:
    """Check bounds and combinations of settings; raises ValueError naming the field and the fix."""
    check_options(config)
    rl, data, engine, lengths = config.rl, config.data, config.engine, config.report.lengths
    _require(
        rl.updates_per_step <= rl.prompts_per_step,
        f"rl.updates_per_step ({rl.updates_per_step}) is above rl.prompts_per_step ({rl.prompts_per_step}); an optimizer step "
        "uses whole groups, so there can be no more steps than groups",
    )
    caps = {"memory": config.agent.memory_tokens, "answer": config.agent.answer_tokens, **config.agent.caps}
    for kind, buffer in rl.overlong_buffers.items():
        _require(buffer >= 0, f"rl.overlong_buffers.{kind} is {buffer}; it must be at least 0")
        cap = caps.get(kind, buffer)
        _require(
            buffer <= cap, f"rl.overlong_buffers.{kind} is {buffer}; it must be at most the cap of these turns, which is {cap}"
        )
    _require(
        engine.zero_stage == 3 or not engine.offload_params,
        f"engine.offload_params needs engine.zero_stage 3 (it is {engine.zero_stage}): lower stages do not partition weights",
    )
    _require(data.max_chunks >= data.min_chunks, "data.max_chunks must be at least data.min_chunks")
    _require(
        config.rollout.top_p == 1 and config.rollout.top_k == 0,
        "rollout.top_p must be 1 and rollout.top_k 0 in training: the loss uses the full softmax, and samples from a truncated "
        "one would bias it",
    )
    _require(
        all(1 <= length <= 100_000 for length in lengths) and len(set(lengths)) == len(lengths),
        f"report.lengths is {lengths}; it must hold different numbers of chunks, each between 1 and 100000",
    )


def validate_start(config: TrainConfig) -> None:
    """Check that model and data exist and belong together: the miniature shares no settings with other models.

    Raises:
        ValueError: names the field and the fix.
    """
    model, data, validation = config.model.path, config.data.path, config.validation.path
    miniature = Path(config.agent.prompts).stem.startswith("miniature")
    _require(
        model is None or Path(model).is_dir(),
        f"model.path {model} is not a folder; download the checkpoint there, or correct the path",
    )
    for name, path, is_read in (("data.path", data, True), ("validation.path", validation, config.validation.every)):
        _require(
            model is None or path is not None or not is_read,
            f"{name} is missing: your own model (model.path) needs your own documents",
        )
        _require(
            model is not None or path is None or not is_read,
            f"{name} is set, but model.path is not: the miniature reads only its own documents",
        )
    _require(
        model is None or not (miniature or config.report.lengths),
        "model.path is set, but agent.prompts or report.lengths are the miniature's; give --config configs/memagent_7b.yaml "
        "or another that fits your model (without --config, configs/tiny.yaml is used)",
    )
    _require(
        model is not None or miniature,
        "model.path is not set, so this would be the miniature, but its settings are missing; give --config "
        "configs/tiny.yaml first, or a model.path",
    )
    for name, path in (("data.path", data), ("validation.path", validation)):
        _require(path is None or Path(path).is_file(), f"{name} {path} is not a file")
