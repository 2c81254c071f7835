"""Compute the GPU memory of a training run from the model's shape, without weights and without a GPU.

A rank holds some parts all the time and others in turn, so its peak is the larger of two sums:

    sampling   always + key/value cache + the sampler's forward pass
    updating   always + the larger of (forward and backward pass of a micro-batch, optimizer step)

`docs/memory.md` derives every formula. P are all weights, T the trained ones (all, or the adapters), N the ranks and w the bytes
of a weight.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from memrl.config import ModelOptions, RolloutOptions, TrainConfig, ValidationOptions
from memrl.engine.deepspeed_engine import REDUCE_BUCKET, SUB_GROUP
from memrl.model.hf_config import dtype_named, read_raw_config
from memrl.model.lora import add_adapters
from memrl.model.transformer import TransformerConfig, meta_model
from memrl.sampler.kv_cache import KVCache
from memrl.sampler.sampler import GPU_STEP_TOKENS

GIB = 2**30
FP32 = 4
ADAM_MOMENTS = 2
# DeepSpeed's defaults, in elements (stage3_prefetch_bucket_size, stage3_max_live_parameters).
PREFETCH, MAX_LIVE = 50_000_000, 1_000_000_000
PAGE_TOKENS = 256  # per cache page, of flash-attn, which has the largest
OUTPUT_TILES = 128 * 2**20  # tiles of logits and of their gradient, see kernels/logprob.py
RESERVE = 3 * GIB  # CUDA context, buffers of NCCL and cuBLAS, fragmentation: assumed, not measured
MACHINE_GPUS = 8
CERTAIN = ("weights", "masters", "Adam moments", "gradients", "replica")


@dataclass(frozen=True)
class ModelSizes:
    """The type of the weights, and how many elements they have.

    Attributes:
        base: elements of the weights without adapters.
        numels: elements of each parameter, adapters included; tied ones count once.
        trained: elements of each trained parameter.
    """

    config: TransformerConfig
    dtype: torch.dtype
    base: int
    numels: tuple[int, ...]
    trained: tuple[int, ...]


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes per rank, by component.

    Attributes:
        always, sampling, backward: GPU memory held all the time, while sampling, during a forward and backward pass.
        step: GPU memory of the optimizer step, which follows the backward pass.
        cpu: CPU memory of what is offloaded.
    """

    world_size: int
    always: dict[str, int]
    sampling: dict[str, int]
    backward: dict[str, int]
    step: dict[str, int]
    cpu: dict[str, int]

    @property
    def sampling_peak(self) -> int:
        return sum(self.always.values()) + sum(self.sampling.values())

    @property
    def updating_peak(self) -> int:
        return sum(self.always.values()) + max(sum(self.backward.values()), sum(self.step.values()))

    @property
    def peak(self) -> int:
        return max(self.sampling_peak, self.updating_peak)

    @property
    def cpu_per_machine(self) -> int:
        return sum(self.cpu.values()) * min(self.world_size, MACHINE_GPUS)


def weights_dtype(options: ModelOptions) -> torch.dtype:
    """Type of the run's weights; raises ValueError if `auto` finds an unsupported one."""
    raw = read_raw_config(options.path) if options.dtype == "auto" and options.path is not None else {}
    return dtype_named(options.dtype, raw)


def count_sizes(model_config: TransformerConfig, dtype: torch.dtype, lora_rank: int = 0) -> ModelSizes:
    """Count the parameters on a model without storage."""
    model = meta_model(model_config, dtype)
    base = sum(p.numel() for p in model.parameters())
    if lora_rank:
        add_adapters(model, lora_rank, 1.0, 0)
    numels = tuple(p.numel() for p in model.parameters())
    return ModelSizes(model_config, dtype, base, numels, tuple(p.numel() for p in model.parameters() if p.requires_grad))


def plan_memory(config: TrainConfig, sizes: ModelSizes, world_size: int) -> MemoryPlan:
    """The plan of one of `world_size` ranks; `sizes` counted with `config.model.lora_rank`.

    The policy's state is partitioned as ZeRO does (Rajbhandari et al., arXiv 1910.02054).
    """
    engine, w = config.engine, sizes.dtype.itemsize
    is_cut, is_moved = engine.zero_stage == 3, engine.offload_optimizer
    weights = w * partition_elements(sizes.numels, world_size)
    part = FP32 * partition_elements(sizes.trained, world_size)
    # The sampler's replica of the policy, and the reference model. With adapters their base is the reference.
    replica = w * sizes.base
    reference = replica if config.rl.kl_coef > 0 and not config.model.lora_rank else 0
    is_waiting = config.rl.reference == "cpu"
    if is_cut:
        small = w * sum(numel for numel in sizes.numels if numel <= engine.persistence_threshold)
        held = small + (0 if engine.offload_params else weights)
        gradients = 0 if is_moved else part
    else:
        held = w * sum(sizes.numels)
        gradients = FP32 * sum(sizes.trained) if engine.zero_stage == 1 else part
    always = {
        "weights": held,
        "masters": 0 if is_moved else part,
        "Adam moments": 0 if is_moved else ADAM_MOMENTS * part,
        "gradients": gradients,
        # Two under ZeRO-1 and 2, allocated with the backward pass.
        "reduction bucket": w * REDUCE_BUCKET * (1 if is_cut else 2),
        "replica": replica,
        "reference": 0 if is_waiting else reference,
        "CUDA, NCCL, fragmentation (assumed)": RESERVE,
    }
    sampling = {
        "key/value cache": cache_bytes(config.rollout, sizes),
        "sampler's forward pass": sampler_bytes(config.rollout, config.validation, sizes),
    }
    # Fused AdamW needs only a flat copy of the gradient: of one sub-group at a time (ZeRO-3), or of everything.
    largest = FP32 * (SUB_GROUP + -(-max(sizes.trained) // world_size))
    step = {"optimizer's step": min(part, largest) if is_cut else part}
    cpu = {"weights": _pinned(weights)} if is_cut and engine.offload_params else {}
    if is_moved:
        cpu["masters and Adam moments"] = (1 + ADAM_MOMENTS) * part
        # The accumulator and AdamW's input, both pinned; ZeRO-1 and 2 have the accumulator on the GPU.
        cpu["gradients"] = (2 if is_cut else 1) * _pinned(part)
        cpu |= step
    if is_waiting and reference:
        cpu["reference"] = reference
    return MemoryPlan(world_size, always, sampling, backward_bytes(config, sizes, world_size), {} if is_moved else step, cpu)


def check_fits(config: TrainConfig, model_config: TransformerConfig, world_size: int, gpu_bytes: int) -> None:
    """Raise ValueError, one line with the numbers, if a run cannot fit on GPUs of `gpu_bytes`; called before weights are read.

    Only components that are certain and held for the whole run count, so a run that passes may still run out of memory.
    """
    sizes = count_sizes(model_config, weights_dtype(config.model), config.model.lora_rank)
    held = {name: size for name, size in plan_memory(config, sizes, world_size).always.items() if name in CERTAIN and size}
    total = sum(held.values())
    if total > gpu_bytes:
        parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in held.items())
        raise ValueError(
            f"the run needs at least {total / GIB:.1f} GiB on each of {world_size} GPUs ({parts}), and a GPU has "
            f"{gpu_bytes / GIB:.1f}; add --dry_run to the same command to see what would fit"
        )


def partition_elements(numels: Iterable[int], world_size: int) -> int:
    """Elements of one rank's part if each parameter is cut into equal parts, the last one padded (ZeRO-3)."""
    return sum(-(-numel // world_size) for numel in numels)


def cache_bytes(options: RolloutOptions, sizes: ModelSizes) -> int:
    """The key/value cache: whole pages within cache_gib, and one more for padding; allocated at once, used or not."""
    page = PAGE_TOKENS * KVCache.bytes_per_token(sizes.config, sizes.dtype)
    return (int(options.cache_gib * GIB) // page + 1) * page


def cache_tokens(options: RolloutOptions, sizes: ModelSizes) -> int:
    """Tokens that fit into the cache, apart from the page for padding."""
    return cache_bytes(options, sizes) // KVCache.bytes_per_token(sizes.config, sizes.dtype) - PAGE_TOKENS


def sampler_bytes(rollout: RolloutOptions, validation: ValidationOptions, sizes: ModelSizes) -> int:
    """A step of the sampler: the widest layer for its tokens, and for its rows the logits and the choice of a token."""
    tokens = rollout.max_step_tokens or GPU_STEP_TOKENS
    truncated = validation.every and validation.temperature > 0 and validation.top_p < 1
    # Bytes per logit, counted on `sample_tokens`: 16-bit and fp32 logits and temporaries; more for top_p.
    per_logit = 52 if truncated else 12
    return tokens * forward_bytes_per_token(sizes) + rollout.max_rows * sizes.config.vocab_size * per_logit


def forward_bytes_per_token(sizes: ModelSizes) -> int:
    """Peak of a forward pass without gradient: x, residual, norm, and four tensors of the feed-forward size."""
    shape = sizes.config
    return sizes.dtype.itemsize * (4 * shape.intermediate_size + 3 * shape.hidden_size) + _position_bytes(sizes)


def saved_bytes_per_token(sizes: ModelSizes, lora_rank: int = 0) -> int:
    """Bytes that autograd saves per token in one layer, as counted with `saved_tensors_hooks`, without weights."""
    shape, w = sizes.config, sizes.dtype.itemsize
    q, kv = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    norms = 2 * _norm_bytes(shape.hidden_size, 1, w)
    qk_norms = _norm_bytes(q, shape.num_heads, w) + _norm_bytes(kv, shape.num_kv_heads, w) - w * (q + kv)
    # Rotated q and k, v, the output (twice if sequences of several lengths are concatenated), log-sum-exps.
    attention = w * (q + 2 * kv) + 2 * w * q + FP32 * shape.num_heads
    feed_forward = 4 * w * shape.intermediate_size  # gate, silu(gate), up, their product
    adapters = 7 * w * lora_rank  # A x of q, k, v, o, gate, up and down
    return norms + (qk_norms if shape.qk_norm else 0) + attention + feed_forward + adapters


def backward_bytes_per_token(sizes: ModelSizes) -> int:
    """What a layer's backward pass adds to the saved bytes: gradients of its output, of silu(gate) up, and of one factor."""
    shape = sizes.config
    return sizes.dtype.itemsize * (2 * shape.intermediate_size + shape.hidden_size) + _position_bytes(sizes)


def backward_bytes(config: TrainConfig, sizes: ModelSizes, world_size: int) -> dict[str, int]:
    """One micro-batch of rl.micro_batch_tokens, all of which may be response tokens."""
    shape, w, tokens = sizes.config, sizes.dtype.itemsize, config.rl.micro_batch_tokens
    width, largest = shape.hidden_size, max(sizes.trained)
    saved = tokens * saved_bytes_per_token(sizes, config.model.lora_rank)
    layer = tokens * backward_bytes_per_token(sizes)
    if config.model.checkpoint_layers:
        kept, layer = shape.num_layers * tokens * w * width, layer + saved
    else:
        kept = shape.num_layers * saved
    # Per response token: the last norm, three statistics, and the gradient of the hidden state.
    output = tokens * (_norm_bytes(width, 1, w) + 3 * FP32 + (FP32 + w) * width) + OUTPUT_TILES
    output_gradient = 0 if config.model.lora_rank else w * shape.vocab_size * width
    # A parameter's new gradient, the bucket concatenated for sending, and this rank's part of it in fp32.
    sent = max(largest, min(REDUCE_BUCKET, sum(sizes.trained)))
    waiting = output_gradient if shape.tie_word_embeddings else 0  # until the embedding's gradient is there
    gathered = {"gathered weights": w * min(sum(sizes.numels), max(MAX_LIVE, max(sizes.numels) + PREFETCH))}
    return (gathered if config.engine.zero_stage == 3 else {}) | {
        "activations kept": kept,
        "layer or output layer at work": max(layer, output + output_gradient),
        "gradients on their way": w * largest + waiting + w * sent + FP32 * -(-sent // world_size),
    }


def _norm_bytes(size: int, num_rows: int, w: int) -> int:
    """Saved by an RMSNorm: its input in fp32, a factor per row, their product, the output."""
    return FP32 * size + FP32 * num_rows + 2 * w * size


def _position_bytes(sizes: ModelSizes) -> int:
    """Cosines, sines, ids and positions, for all layers together."""
    return 2 * sizes.dtype.itemsize * sizes.config.head_size + 16


def _pinned(size: int) -> int:
    """Size rounded up to the next power of two, as PyTorch's allocator of pinned memory does."""
    return 1 << (size - 1).bit_length() if size else 0
