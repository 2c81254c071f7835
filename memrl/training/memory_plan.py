"""How much memory a training run takes on each GPU: arithmetic on the model's shape, without weights and without a GPU.

A rank holds some things all the time and others by turns, so its peak is the larger of two sums:

    sampling   what is always held + the key/value cache + the sampler's forward pass
    updating   what is always held + the larger of (a micro-batch's forward and backward pass, the optimizer's step)

Every formula is derived in `docs/memory.md`. P are all weights, T those that are trained (all, or the adapters), N the ranks and
w the bytes of a weight.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from memrl.config import TrainConfig
from memrl.engine.deepspeed_engine import REDUCE_BUCKET, SUB_GROUP
from memrl.model.hf_config import dtype_named, read_raw_config
from memrl.model.lora import add_adapters
from memrl.model.transformer import TransformerConfig, meta_model
from memrl.sampler.kv_cache import KVCache
from memrl.sampler.sampler import GPU_STEP_TOKENS

GIB = 2**30
FP32 = 4
ADAM_MOMENTS = 2
# DeepSpeed's own defaults, in elements (stage3_prefetch_bucket_size, stage3_max_live_parameters).
PREFETCH, MAX_LIVE = 50_000_000, 1_000_000_000
PAGE_TOKENS = 256  # of a cache page; flash-attn's, the largest
OUTPUT_TILES = 128 * 2**20  # tiles of logits and of their gradient, see kernels/logprob.py
RESERVE = 3 * GIB  # CUDA's context, NCCL's and cuBLAS's buffers, fragmentation: assumed, not measured
MACHINE_GPUS = 8
CERTAIN = ("weights", "masters", "Adam moments", "gradients", "replica")


@dataclass(frozen=True)
class ModelSizes:
    """What the formulas need to know of a model.

    Attributes:
        dtype: of the weights.
        base: elements of the weights without adapters.
        numels: elements of each parameter, adapters included; tied ones count once.
        trained: elements of each parameter that is trained.
    """

    config: TransformerConfig
    dtype: torch.dtype
    base: int
    numels: tuple[int, ...]
    trained: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes per rank by component.

    Attributes:
        always, sampling, backward: GPU memory held all the time, while sampling, during a forward and backward pass.
        step: GPU memory of the optimizer's step, which comes when the backward pass is over.
        cpu: CPU memory of what is offloaded.
    """

    world_size: int
    always: dict[str, int] = field(default_factory=dict)
    sampling: dict[str, int] = field(default_factory=dict)
    backward: dict[str, int] = field(default_factory=dict)
    step: dict[str, int] = field(default_factory=dict)
    cpu: dict[str, int] = field(default_factory=dict)

    @property
    def sampling_peak(self) -> int:
        return _total(self.always) + _total(self.sampling)

    @property
    def updating_peak(self) -> int:
        return _total(self.always) + max(_total(self.backward), _total(self.step))

    @property
    def peak(self) -> int:
        return max(self.sampling_peak, self.updating_peak)

    @property
    def cpu_per_machine(self) -> int:
        return _total(self.cpu) * min(self.world_size, MACHINE_GPUS)


def weights_dtype(config: TrainConfig) -> torch.dtype:
    """The type that the run's weights will have; raises ValueError where `auto` finds an unsupported one."""
    if config.model.dtype == "auto" and config.model.path is None:
        return torch.float32
    return dtype_named(config.model.dtype, read_raw_config(config.model.path) if config.model.dtype == "auto" else {})


def count_sizes(model_config: TransformerConfig, dtype: torch.dtype, lora_rank: int = 0) -> ModelSizes:
    """Count a model's parameters on a model of shapes alone."""
    model = meta_model(model_config, dtype)
    base = sum(_numels(model.parameters()))
    if lora_rank:
        add_adapters(model, lora_rank, 1.0, 0)
    trained = _numels(p for p in model.parameters() if p.requires_grad)
    return ModelSizes(model_config, dtype, base, _numels(model.parameters()), trained)


def plan_memory(config: TrainConfig, sizes: ModelSizes, world_size: int) -> MemoryPlan:
    """The plan of one of `world_size` ranks; `sizes` counted with `config.model.lora_rank`."""
    plan = MemoryPlan(world_size)
    _add_state(plan, config, sizes)
    _add_models(plan, config, sizes)
    plan.always["CUDA, NCCL, fragmentation (assumed)"] = RESERVE
    plan.sampling["key/value cache"] = cache_bytes(config, sizes)
    plan.sampling["sampler's forward pass"] = sampler_bytes(config, sizes)
    _add_backward(plan, config, sizes)
    if not config.engine.offload_optimizer:
        plan.step["optimizer's step"] = step_bytes(config, sizes, world_size)
    return plan


def check_fits(config: TrainConfig, model_config: TransformerConfig, world_size: int, gpu_bytes: int) -> None:
    """Refuse a start that cannot end well, before weights are read.

    It counts only what is sure to be held for the whole run, so a run that passes may still run out of memory.

    Args:
        gpu_bytes: all memory of one GPU.

    Raises:
        ValueError: weights, masters, moments, gradients and the replica alone exceed it; one line with the numbers.
    """
    sizes = count_sizes(model_config, weights_dtype(config), config.model.lora_rank)
    held = {name: size for name, size in plan_memory(config, sizes, world_size).always.items() if name in CERTAIN and size}
    if _total(held) > gpu_bytes:
        parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in held.items())
        raise ValueError(
            f"the run needs at least {_total(held) / GIB:.1f} GiB on each of {world_size} GPUs ({parts}), and a GPU has "
            f"{gpu_bytes / GIB:.1f}; `train.py --dry_run` with the same options says what would fit"
        )


def partition_elements(numels: Iterable[int], world_size: int) -> int:
    """Elements of one rank's part when each parameter is cut into equal parts, the last one padded (ZeRO-3)."""
    return sum(-(-numel // world_size) for numel in numels)


def cache_bytes(config: TrainConfig, sizes: ModelSizes) -> int:
    """The key/value cache: whole pages within rollout.cache_gib, and one more for padding. All of it is taken, used or not."""
    page = PAGE_TOKENS * kv_bytes_per_token(sizes)
    return (int(config.rollout.cache_gib * GIB) // page + 1) * page


def cache_tokens(config: TrainConfig, sizes: ModelSizes) -> int:
    """Tokens that the cache has room for."""
    return cache_bytes(config, sizes) // kv_bytes_per_token(sizes) - PAGE_TOKENS


def kv_bytes_per_token(sizes: ModelSizes) -> int:
    return KVCache.bytes_per_token(sizes.config, sizes.dtype)


def sampler_bytes(config: TrainConfig, sizes: ModelSizes) -> int:
    """A step of the sampler: the widest layer for its tokens, and the logits of its rows with what choosing a token takes."""
    rollout, validation = config.rollout, config.validation
    tokens = rollout.max_step_tokens or GPU_STEP_TOKENS
    truncated = validation.every and validation.temperature > 0 and validation.top_p < 1
    # Bytes for each logit, counted with `sample_tokens`: fp32 logits, 16-bit ones before, and its own; more to cut a nucleus.
    per_logit = 52 if truncated else 12
    return tokens * forward_bytes_per_token(sizes) + rollout.max_rows * sizes.config.vocab_size * per_logit


def forward_bytes_per_token(sizes: ModelSizes) -> int:
    """The most that a forward pass without gradient holds: x, residual, norm, and four tensors of the feed-forward size."""
    shape = sizes.config
    return sizes.itemsize * (4 * shape.intermediate_size + 3 * shape.hidden_size) + _position_bytes(sizes)


def saved_bytes_per_token(sizes: ModelSizes, lora_rank: int = 0) -> int:
    """What autograd keeps of one token in one layer, all tensors that `saved_tensors_hooks` is shown, weights left out."""
    shape, w = sizes.config, sizes.itemsize
    q, kv = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    norms = 2 * _norm_bytes(shape.hidden_size, 1, w)
    qk_norms = _norm_bytes(q, shape.num_heads, w) + _norm_bytes(kv, shape.num_kv_heads, w) - w * (q + kv)
    # Rotated q and k, v, the output (once more where sequences of several lengths are put together), and log-sum-exps.
    attention = w * (q + 2 * kv) + 2 * w * q + FP32 * shape.num_heads
    feed_forward = 4 * w * shape.intermediate_size  # gate, silu(gate), up, their product
    adapters = 7 * w * lora_rank  # A x of q, k, v, o, gate, up and down
    return norms + (qk_norms if shape.qk_norm else 0) + attention + feed_forward + adapters


def backward_bytes_per_token(sizes: ModelSizes) -> int:
    """What a layer's backward pass adds to what was kept: the gradients of its output, of silu(gate) up, and of one factor."""
    shape = sizes.config
    return sizes.itemsize * (2 * shape.intermediate_size + shape.hidden_size) + _position_bytes(sizes)


def step_bytes(config: TrainConfig, sizes: ModelSizes, world_size: int) -> int:
    """AdamW on one sub-group at a time (ZeRO-3) or on everything: a flat copy of the gradient; fused, it needs nothing else."""
    part = partition_elements(sizes.trained, world_size)
    if config.engine.zero_stage == 3:
        part = min(part, SUB_GROUP + -(-max(sizes.trained) // world_size))
    return FP32 * part


def _add_state(plan: MemoryPlan, config: TrainConfig, sizes: ModelSizes) -> None:
    """The policy under ZeRO (Rajbhandari et al., arXiv 1910.02054): weights, masters, moments, gradients, communication."""
    engine, w = config.engine, sizes.itemsize
    whole, trained = sum(sizes.numels), sum(sizes.trained)
    part = partition_elements(sizes.trained, plan.world_size)
    offload = engine.offload_optimizer
    if engine.zero_stage == 3:
        small = sum(numel for numel in sizes.numels if numel <= engine.persistence_threshold)
        cut = w * partition_elements(sizes.numels, plan.world_size)
        weights = w * small + (0 if engine.offload_params else cut)
        if engine.offload_params:
            plan.cpu["weights"] = _pinned(cut)
        gradients = 0 if offload else FP32 * part
    else:
        weights = w * whole
        gradients = FP32 * (trained if engine.zero_stage == 1 else part)
    plan.always["weights"] = weights
    plan.always["masters"] = 0 if offload else FP32 * part
    plan.always["Adam moments"] = 0 if offload else ADAM_MOMENTS * FP32 * part
    plan.always["gradients"] = gradients
    # Under ZeRO-1 and 2 there are two, and they come with the backward pass.
    plan.always["reduction bucket"] = w * REDUCE_BUCKET * (1 if engine.zero_stage == 3 else 2)
    if offload:
        plan.cpu["masters and Adam moments"] = (1 + ADAM_MOMENTS) * FP32 * part
        # The accumulator and what AdamW reads, both pinned, though ZeRO-1 and 2 have the first on the GPU.
        plan.cpu["gradients"] = (2 if engine.zero_stage == 3 else 1) * _pinned(FP32 * part)
        plan.cpu["optimizer's step"] = step_bytes(config, sizes, plan.world_size)


def _add_models(plan: MemoryPlan, config: TrainConfig, sizes: ModelSizes) -> None:
    """The copy to sample with and the frozen start. Adapters' frozen start is their base, so it takes nothing."""
    size = sizes.itemsize * sizes.base
    plan.always["replica"] = size
    needed = config.rl.kl_coef > 0 and not config.model.lora_rank
    on_device = config.rl.reference == "device"
    plan.always["reference"] = size if needed and on_device else 0
    if needed and not on_device:
        plan.cpu["reference"] = size


def _add_backward(plan: MemoryPlan, config: TrainConfig, sizes: ModelSizes) -> None:
    """One micro-batch of rl.micro_batch_tokens, all of whose tokens may be response tokens."""
    shape, w, tokens = sizes.config, sizes.itemsize, config.rl.micro_batch_tokens
    width, matrix = shape.hidden_size, shape.vocab_size * shape.hidden_size
    largest = max(sizes.trained)
    if config.engine.zero_stage == 3:
        plan.backward["gathered weights"] = w * min(sum(sizes.numels), max(MAX_LIVE, max(sizes.numels) + PREFETCH))
    saved = tokens * saved_bytes_per_token(sizes, config.model.lora_rank)
    if config.model.checkpoint_layers:
        kept, again = shape.num_layers * tokens * w * width, saved
    else:
        kept, again = shape.num_layers * saved, 0
    layer = again + tokens * backward_bytes_per_token(sizes)
    # Saved and in work for each response token: the last norm, three statistics, and the gradient of the hidden state.
    output = tokens * (_norm_bytes(width, 1, w) + 3 * FP32 + (FP32 + w) * width) + OUTPUT_TILES
    output_trained = not config.model.lora_rank
    output += w * matrix if output_trained else 0
    plan.backward["activations kept"] = kept
    plan.backward["layer or output layer at work"] = max(layer, output)
    # A parameter's gradient as it comes, the bucket put together anew to be sent, and this rank's part of it in fp32.
    sent = max(largest, min(REDUCE_BUCKET, sum(sizes.trained)))
    waiting = w * matrix if shape.tie_word_embeddings and output_trained else 0  # until the embedding's own is there
    plan.backward["gradients on their way"] = w * largest + waiting + w * sent + FP32 * -(-sent // plan.world_size)


def _norm_bytes(size: int, num_rows: int, w: int) -> int:
    """Kept of an RMSNorm: its input in fp32, a factor for each row, the product of the two, the output."""
    return FP32 * size + FP32 * num_rows + 2 * w * size


def _position_bytes(sizes: ModelSizes) -> int:
    """Cosines, sines, ids and positions, all layers together."""
    return 2 * sizes.itemsize * sizes.config.head_size + 16


def _pinned(size: int) -> int:
    """PyTorch's allocator of pinned memory takes the next power of two."""
    return 1 << (size - 1).bit_length() if size else 0


def _numels(parameters: Iterable[nn.Parameter]) -> tuple[int, ...]:
    return tuple(parameter.numel() for parameter in parameters)


def _total(components: dict[str, int]) -> int:
    return sum(components.values())
