"""The memory plan's formulas against what PyTorch, the sampler and DeepSpeed really allocate for small models."""

import json
import os
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memrl.config import TrainConfig
from memrl.engine.deepspeed_engine import REDUCE_BUCKET
from memrl.model import Transformer, TransformerConfig
from memrl.model.attention_context import PackedContext
from memrl.model.lora import add_adapters
from memrl.sampler import Sampler, SamplingParams
from memrl.sampler.sampling import RowParams, sample_tokens, uniform
from memrl.training import memory_plan
from memrl.training.memory_plan import GIB, check_fits, count_sizes, partition_elements, plan_memory

REPO = Path(__file__).resolve().parent.parent
BF16, FP32 = torch.bfloat16, torch.float32

SMALL = TransformerConfig(
    vocab_size=64, hidden_size=128, intermediate_size=640, num_layers=3, num_heads=8, num_kv_heads=2, head_size=16
)
QWEN_7B = TransformerConfig(
    vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_layers=28, num_heads=28, num_kv_heads=4, head_size=128
)


def settings(**changes) -> TrainConfig:
    """bf16, ZeRO-3, no reference, whole layers kept; changes are given as `rl__kl_coef=0.1`."""
    config = TrainConfig()
    given = {"model__dtype": "bfloat16", "rl__kl_coef": 0.0, "model__checkpoint_layers": False, "rl__micro_batch_tokens": 256}
    for name, value in (given | changes).items():
        section, field = name.split("__")
        assert hasattr(getattr(config, section), field)
        setattr(getattr(config, section), field, value)
    return config


def planned(world_size=1, shape=SMALL, **changes):
    config = settings(**changes)
    return plan_memory(config, count_sizes(shape, memory_plan.weights_dtype(config.model), config.model.lora_rank), world_size)


def real_model(shape, dtype=BF16, lora_rank=0, checkpoint_layers=False) -> Transformer:
    model = Transformer(shape).to(dtype).train()
    if lora_rank:
        add_adapters(model, lora_rank, 32.0, 0)
    model.checkpoint_layers = checkpoint_layers
    return model


# Weights and the state of training


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_parameters_are_counted_as_a_real_model_holds_them(tied, lora_rank):
    shape = replace(SMALL, tie_word_embeddings=tied)
    sizes, model = count_sizes(shape, BF16, lora_rank), real_model(shape, lora_rank=lora_rank)
    assert sum(sizes.numels) * sizes.dtype.itemsize == sum(p.nbytes for p in model.parameters())
    assert sum(sizes.trained) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sizes.base == sum(p.numel() for p in Transformer(shape).parameters())


def test_the_7b_shape_has_as_many_parameters_as_its_checkpoint():
    assert count_sizes(QWEN_7B, BF16).base == 7_615_616_512


def test_each_parameter_is_cut_into_padded_equal_parts():
    assert partition_elements([10, 3, 1], 4) == 3 + 1 + 1
    assert partition_elements([10, 3, 1], 1) == 14


RANK = """
import json, sys, torch
from memrl.config import EngineOptions, OptimOptions
from memrl.model.attention_context import PackedContext
from memrl.engine import distributed
from memrl.engine.deepspeed_engine import Engine
from tests.test_memory_plan import SMALL, real_model
distributed.init("cpu")
held = {}
for rank in (0, 4):
    engine = Engine(real_model(SMALL, lora_rank=rank), OptimOptions(), EngineOptions(persistence_threshold=200), 10)
    zero = engine.engine.optimizer
    ids = torch.arange(8)
    engine.backward(engine(ids, PackedContext([8]), ids, ids, 1.0)[0].sum(), True)
    engine.step()
    parameters = list(engine.module.parameters())
    moments = [v for state in zero.optimizer.state.values() for k, v in state.items() if k.startswith("exp_avg")]
    held[rank] = {
        "weights": sum(p.ds_tensor.nbytes + p.nbytes for p in parameters),
        "masters": sum(t.nbytes for t in zero.fp32_partitioned_groups_flat),
        "Adam moments": sum(t.nbytes for t in moments),
        "gradients": zero.grad_partitions_flat_buffer.nbytes,
        "reduction bucket": sum(b.buffer.nbytes for b in zero.ipg_buckets.values()),
    }
if distributed.rank() == 0:
    open(sys.argv[1], "w").write(json.dumps(held))
"""


@pytest.mark.slow
def test_deepspeed_holds_on_each_of_two_ranks_what_is_planned(tmp_path):
    out = tmp_path / "held.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    done = subprocess.run(
        [*launcher, str(script), str(out)],
        cwd=REPO,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert out.exists(), done.stderr[-3000:]
    for lora_rank, held in json.loads(out.read_text()).items():
        always = planned(2, model__lora_rank=int(lora_rank), engine__persistence_threshold=200).always
        assert held == {name: always[name] for name in held}


def test_deepspeeds_defaults_are_the_ones_that_are_counted_with():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero = DeepSpeedZeroConfig(stage=3)
    assert zero.prefetch_bucket_size == memory_plan.PREFETCH
    assert zero.max_live_parameters == memory_plan.MAX_LIVE


def test_lower_stages_partition_less():
    elements = count_sizes(SMALL, BF16).base
    for stage, weights, gradients in ((1, 1, 1), (2, 1, 4)):
        always = planned(4, engine__zero_stage=stage).always
        assert always["weights"] == 2 * elements // weights
        assert always["gradients"] == pytest.approx(4 * elements / gradients, rel=1e-3)
        assert always["masters"] == pytest.approx(elements, rel=1e-3)
        assert always["reduction bucket"] == 2 * planned(4).always["reduction bucket"] == 2 * 2 * REDUCE_BUCKET
        assert always["Adam moments"] == pytest.approx(2 * elements, rel=1e-3)


def test_offloading_moves_the_state_to_the_cpu():
    whole, moved = planned(2), planned(2, engine__offload_optimizer=True, engine__offload_params=True)
    assert moved.always["masters"] == moved.always["Adam moments"] == moved.always["gradients"] == 0
    assert not moved.step and not whole.cpu
    assert moved.cpu["masters and Adam moments"] == whole.always["masters"] + whole.always["Adam moments"]
    # Two pinned buffers, each rounded up to a power of two.
    assert 2 * whole.always["gradients"] <= moved.cpu["gradients"] < 4 * whole.always["gradients"]
    persistent = sum(2 * n for n in count_sizes(SMALL, BF16).numels if n <= 100_000)
    assert moved.always["weights"] == persistent
    assert moved.cpu_per_machine == 2 * sum(moved.cpu.values())
    assert planned(64, engine__offload_optimizer=True).cpu_per_machine % 8 == 0


def test_the_frozen_start_is_held_where_the_settings_say():
    copy = 2 * count_sizes(SMALL, BF16).base
    assert planned().always["reference"] == 0
    on_device = planned(rl__kl_coef=0.1)
    assert on_device.always["reference"] == on_device.always["replica"] == copy and not on_device.cpu
    waiting = planned(rl__kl_coef=0.1, rl__reference="cpu")
    assert waiting.always["reference"] == 0 and waiting.cpu == {"reference": copy}
    adapted = planned(rl__kl_coef=0.1, model__lora_rank=4)
    assert adapted.always["reference"] == 0 and adapted.always["replica"] == copy


def test_more_gpus_never_need_more_memory_each():
    for changes in ({}, {"engine__offload_optimizer": True}, {"engine__zero_stage": 2}, {"model__lora_rank": 16}):
        peaks = [planned(n, QWEN_7B, **changes).peak for n in (1, 2, 3, 8, 32, 128)]
        assert peaks == sorted(peaks, reverse=True)


# Sampling


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_cache_takes_what_is_planned(dtype):
    config = settings(model__dtype=dtype, rollout__cache_gib=0.013)
    model = Transformer(SMALL).to(getattr(torch, dtype))
    sampler = Sampler(model, cache_gib=0.013, page_size=memory_plan.PAGE_TOKENS)
    sampler.cache.prepare([], [])
    sizes = count_sizes(SMALL, getattr(torch, dtype))
    assert sum(t.nbytes for t in (*sampler.cache.k, *sampler.cache.v)) == memory_plan.cache_bytes(config.rollout, sizes)
    assert sampler.cache_tokens == memory_plan.cache_tokens(config.rollout, sizes)


class Allocations(TorchDispatchMode):
    """Counts the bytes of all tensors that operators return; what an operator takes for itself is not seen."""

    def __init__(self, *known: torch.Tensor):
        super().__init__()
        self.now = self.peak = 0
        self.live = {t.untyped_storage()._cdata for t in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in self.live:
                storage = leaf.untyped_storage()
                self.live.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        return out

    def _freed(self, key: int, size: int) -> None:
        self.live.discard(key)
        self.now -= size


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("wide", [200, 640])
def test_a_forward_pass_without_gradient_peaks_where_planned(dtype, wide):
    shape, tokens = replace(SMALL, intermediate_size=wide), 256
    model = real_model(shape, dtype)
    ids, context = torch.zeros(tokens, dtype=torch.int64), PackedContext([tokens])
    with torch.no_grad(), Allocations(*model.parameters()) as seen:
        model(ids, context, ids[:1])
    assert seen.peak == pytest.approx(tokens * memory_plan.forward_bytes_per_token(count_sizes(shape, dtype)), rel=0.05)


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_choosing_tokens_stays_within_the_plan(top_p):
    rows, vocab = 8, 20_000
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))
    params = RowParams.of([SamplingParams(1, seed=i, top_p=top_p) for i in range(rows)], "cpu")
    with torch.inference_mode(), Allocations(logits) as seen:
        sample_tokens(logits, params, uniform(params.seed, torch.zeros(rows, dtype=torch.int64)))
    shape = replace(SMALL, vocab_size=vocab)
    config = settings(rollout__max_rows=rows, validation__every=1, validation__temperature=1.0, validation__top_p=top_p)
    sizes = count_sizes(shape, BF16)
    pass_alone = memory_plan.GPU_STEP_TOKENS * memory_plan.forward_bytes_per_token(sizes)
    per_logit = (memory_plan.sampler_bytes(config.rollout, config.validation, sizes) - pass_alone) / (rows * vocab)
    needed = 2 + 4 + seen.peak / (rows * vocab)  # the output layer's own, in fp32, and what is seen here
    assert 0.85 * per_logit < needed <= per_logit


# Updating


def saved_bytes(model: Transformer, lens: list[int]) -> int:
    """Bytes of all storages that autograd keeps for a backward pass, weights left out; one response token."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    ids = torch.zeros(sum(lens), dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = model(ids, PackedContext(lens), ids[:1], ids[:1])
    assert result[0].requires_grad
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("lens", [[64], [10, 22, 32]])
def test_autograd_keeps_what_is_planned_of_each_layer(dtype, family, lens):
    one, three = (replace(SMALL, family=family, num_layers=n) for n in (1, 3))
    per_layer = (saved_bytes(real_model(three, dtype), lens) - saved_bytes(real_model(one, dtype), lens)) / 2
    # Sequences of one length are not put together, so there is one copy of the attention's output less.
    copy = dtype.itemsize * SMALL.num_heads * SMALL.head_size if len(lens) == 1 else 0
    assert memory_plan.saved_bytes_per_token(count_sizes(three, dtype)) - copy == pytest.approx(per_layer / sum(lens), rel=0.01)
    assert copy < 0.1 * per_layer / sum(lens)


def test_adapters_keep_no_more_than_planned():
    lens, kept = [10, 22, 32], {}
    one, three = (replace(SMALL, num_layers=n) for n in (1, 3))
    for rank in (8, 72):
        models = (real_model(shape, lora_rank=rank) for shape in (three, one))
        more, less = (saved_bytes(model, lens) for model in models)
        kept[rank] = (more - less) / 2 / sum(lens)
        planned_bytes = memory_plan.saved_bytes_per_token(count_sizes(three, BF16, rank), rank)
        assert kept[rank] <= planned_bytes == pytest.approx(kept[rank], rel=0.11)
    assert kept[72] - kept[8] == 7 * 2 * (72 - 8)


@pytest.mark.parametrize("checkpoint_layers", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_forward_and_backward_peak_where_planned(checkpoint_layers, dtype):
    shape, tokens = SMALL, 512
    model = real_model(shape, dtype, checkpoint_layers=checkpoint_layers)
    for parameter in model.parameters():  # as ZeRO does, which counts them apart
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    ids, context = torch.zeros(tokens, dtype=torch.int64), PackedContext([128, 384])
    with Allocations(*model.parameters()) as seen:
        model(ids, context, ids[:1], ids[:1])[0].sum().backward()
    config = settings(
        model__dtype=str(dtype).removeprefix("torch."),
        model__checkpoint_layers=checkpoint_layers,
        rl__micro_batch_tokens=tokens,
    )
    backward = plan_memory(config, count_sizes(shape, dtype), 1).backward
    # The output layer's part is of a fixed size that no small model reaches.
    layer = tokens * memory_plan.backward_bytes_per_token(count_sizes(shape, dtype))
    layer += tokens * memory_plan.saved_bytes_per_token(count_sizes(shape, dtype)) if checkpoint_layers else 0
    assert seen.peak == pytest.approx(backward["activations kept"] + layer, rel=0.1)


def test_recomputing_layers_keeps_their_inputs_alone():
    kept = {on: planned(shape=QWEN_7B, model__checkpoint_layers=on).backward["activations kept"] for on in (False, True)}
    assert kept[True] == 28 * 256 * 2 * 3584
    assert kept[False] > 50 * kept[True] / 2


def test_the_output_layers_gradient_counts_where_it_is_trained():
    wide = replace(SMALL, vocab_size=4_000_000)
    full, adapted = (planned(shape=wide, model__lora_rank=rank).backward["layer or output layer at work"] for rank in (0, 4))
    assert full - adapted == 2 * 4_000_000 * 128
    tied, untied = (
        planned(shape=replace(wide, tie_word_embeddings=tie)).backward["gradients on their way"] for tie in (True, False)
    )
    assert tied - untied == 2 * 4_000_000 * 128  # the output layer's waits for the embedding's


def test_the_peak_is_that_of_the_worse_of_both_moments():
    plan = planned(shape=QWEN_7B, rollout__cache_gib=1000.0)
    assert plan.peak == plan.sampling_peak > plan.updating_peak
    plan = planned(shape=QWEN_7B, rollout__cache_gib=0.1, rl__micro_batch_tokens=100_000)
    assert plan.peak == plan.updating_peak > plan.sampling_peak
    assert plan.updating_peak == sum(plan.always.values()) + sum(plan.backward.values())


# Refusing to start


def test_a_start_that_cannot_fit_is_refused_with_the_numbers():
    config = settings()
    numbers = r"at least 141\.\d GiB on each of 1 GPUs .*masters 28\.4.*replica 14\.2.*has 79\.1"
    with pytest.raises(ValueError, match=numbers) as caught:
        check_fits(config, QWEN_7B, 1, int(79.1 * GIB))
    assert "\n" not in str(caught.value)
    check_fits(config, QWEN_7B, 8, int(79.1 * GIB))


def test_a_start_is_refused_for_what_is_certain_alone():
    config = settings(rollout__cache_gib=500.0, rl__kl_coef=0.1)
    plan = plan_memory(config, count_sizes(QWEN_7B, BF16), 8)
    certain = sum(plan.always[name] for name in memory_plan.CERTAIN)
    assert plan.peak > 10 * certain
    check_fits(config, QWEN_7B, 8, certain)
    with pytest.raises(ValueError):
        check_fits(config, QWEN_7B, 8, certain - 1)
