"""The model against transformers' Qwen2, weight for weight and logit for logit."""

import dataclasses
import itertools

import pytest
import torch

from memrl.model import PackedContext, Transformer, TransformerConfig, logits_of, read_config
from memrl.model.loader import from_scratch
from memrl.model.positions import RopeConfig, rope_angles, rope_inverse_frequencies
from tests.peer import peer_config, peer_logits, peer_of

# hidden, heads, kv heads, head size, feed-forward size, layers, vocabulary, tied
SHAPES = {
    "grouped, tied": (64, 4, 2, 16, 128, 2, 512, True),
    "grouped, untied": (64, 4, 2, 16, 128, 2, 512, False),
    "one kv head": (48, 6, 1, 8, 80, 3, 101, False),
    "a kv head per head": (40, 5, 5, 8, 72, 2, 257, True),
    "seven heads to a kv head": (56, 14, 2, 4, 99, 1, 77, False),
    "heads wider than hidden": (36, 3, 1, 32, 50, 2, 131, True),
    "heads narrower than hidden": (90, 3, 3, 10, 31, 2, 67, False),
    "odd sizes": (33, 3, 1, 22, 17, 2, 53, False),
}
YARN = RopeConfig(theta=1e6, kind="yarn", factor=4.0, original_max_position_embeddings=64)
ROPES = {
    "default": RopeConfig(theta=10_000.0),
    "linear": RopeConfig(theta=10_000.0, kind="linear", factor=3.0),
    "yarn": YARN,
    "yarn, own betas": dataclasses.replace(YARN, beta_fast=8.0, beta_slow=2.0, attention_factor=1.3),
    "yarn, not truncated": dataclasses.replace(YARN, theta=5e4, factor=2.5, truncate=False),
    "yarn, factor 1": dataclasses.replace(YARN, factor=1.0),
    "llama3": RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_position_embeddings=64),
    "llama3, own bands": RopeConfig(
        theta=1e4, kind="llama3", factor=32.0, original_max_position_embeddings=96, low_freq_factor=0.5, high_freq_factor=11.0
    ),
    "yarn, every pair turns": dataclasses.replace(YARN, theta=500.0, original_max_position_embeddings=8192),
}
PARAMETERS = {
    "Qwen2.5-0.5B-Instruct.config.json": 494_032_768,
    "Qwen2.5-1.5B-Instruct.tf5.config.json": 1_543_714_304,
    "Qwen2.5-7B-Instruct.config.json": 7_615_616_512,
    "Qwen2.5-14B.config.json": 14_770_033_664,
}


def make_config(hidden, heads, kv_heads, head_size, feed_forward, layers, vocab, tied, **more) -> TransformerConfig:
    return TransformerConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        tie_word_embeddings=tied,
        **more,
    )


def random_ids(count: int, vocab_size: int, seed: int = 0) -> list[int]:
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_transformers_in_fp32(shape, eps, randomize, record_property):
    config = make_config(*SHAPES[shape], rms_norm_eps=eps, rope=RopeConfig(theta=10_000.0))
    model = Transformer(config).eval()
    randomize(model, seed=len(shape))
    ids = random_ids(45, config.vocab_size)
    ours, theirs = logits_of(model, ids), peer_logits(model, ids)
    assert ours.dtype == torch.float32 and not ours.requires_grad
    assert theirs.std() > 0.1, "weights too small for a mistake to show"
    record_property("difference", largest_difference(ours, theirs))
    assert largest_difference(ours, theirs) <= 1e-5


@pytest.mark.parametrize("rope", ROPES)
def test_rope_kinds_equal_transformers_beyond_the_window(rope, randomize):
    config = make_config(*SHAPES["grouped, untied"], rope=ROPES[rope], max_position_embeddings=64)
    model = Transformer(config).eval()
    randomize(model, seed=3, std=0.15)
    ids = random_ids(300, config.vocab_size)
    assert largest_difference(logits_of(model, ids), peer_logits(model, ids)) <= 1e-5


@pytest.mark.parametrize("head_size", [8, 64, 128])
@pytest.mark.parametrize("rope", ROPES)
def test_rope_angles_equal_transformers_at_far_positions(rope, head_size):
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

    config = make_config(head_size * 2, 2, 2, head_size, 8, 1, 8, False, rope=ROPES[rope])
    positions = torch.tensor([0, 1, 63, 64, 255, 32_767, 32_768, 131_072, 1_000_003])
    theirs = Qwen2RotaryEmbedding(peer_config(config))(torch.zeros(1), positions[None])
    frequencies = rope_inverse_frequencies(config.rope, head_size)
    assert frequencies.dtype == torch.float32 and frequencies.shape == (head_size // 2,)
    ours = rope_angles(frequencies, positions, config.rope, torch.float32)
    for mine, peer in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, peer[0], rtol=1e-6, atol=1e-6)


def test_yarn_keeps_fast_pairs_and_slows_slow_ones_by_the_factor():
    rope = RopeConfig(theta=1e6, kind="yarn", factor=4.0, original_max_position_embeddings=32768)
    plain, scaled = (rope_inverse_frequencies(r, 128) for r in (RopeConfig(theta=1e6), rope))
    torch.testing.assert_close(scaled[:16], plain[:16])
    torch.testing.assert_close(scaled[-16:], plain[-16:] / 4)
    assert ((scaled <= plain * 1.000001) & (scaled >= plain / 4.000001)).all()
    assert rope.attention_scaling == pytest.approx(1.138629436)


def test_llama3_keeps_short_waves_and_lengthens_long_ones_by_the_factor():
    rope = RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_position_embeddings=8192)
    plain, scaled = (rope_inverse_frequencies(r, 128) for r in (RopeConfig(theta=5e5), rope))
    wavelengths = 2 * torch.pi / plain
    short, long = wavelengths < 8192 / 4, wavelengths > 8192 / 1
    assert short.sum() == 29 and long.sum() == 29  # Llama 3.1's 64 pairs
    assert torch.equal(scaled[short], plain[short]) and torch.equal(scaled[long], plain[long] / 8)
    between = ~(short | long)
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()
    assert rope.attention_scaling == 1.0


def test_rope_angles_are_computed_in_fp32_and_only_then_rounded():
    rope = RopeConfig()
    frequencies, positions = rope_inverse_frequencies(rope, 64), torch.tensor([30_001])
    cos, sin = rope_angles(frequencies, positions, rope, torch.bfloat16)
    exact_cos, exact_sin = rope_angles(frequencies, positions, rope, torch.float32)
    assert cos.dtype == torch.bfloat16
    assert torch.equal(cos, exact_cos.bfloat16()) and torch.equal(sin, exact_sin.bfloat16())


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"kind": "longrope"}, "longrope.*default, linear, yarn"),
        ({"theta": 0.0}, "theta"),
        ({"factor": 0.0}, "factor"),
        ({"kind": "llama3", "low_freq_factor": 5.0}, r"low_freq_factor \(5.0\).*high_freq_factor \(4.0\)"),
    ],
)
def test_rope_config_out_of_range_names_the_value(bad, named):
    with pytest.raises(ValueError, match=named):
        RopeConfig(**bad)


def test_odd_head_size_is_refused():
    with pytest.raises(ValueError, match="7"):
        rope_inverse_frequencies(RopeConfig(), 7)


def test_frequencies_are_real_on_meta_and_survive_dtype_changes(tiny_config):
    expected = rope_inverse_frequencies(tiny_config.rope, tiny_config.head_size)
    with torch.device("meta"):
        model = Transformer(tiny_config)
    for m in (model, model.bfloat16(), Transformer(tiny_config).half()):
        assert m.inverse_frequencies.device.type == "cpu" and torch.equal(m.inverse_frequencies, expected)


def test_frequencies_keep_fp32_where_float_constructors_give_bf16(monkeypatch):
    expected = rope_inverse_frequencies(YARN, 1024)

    def rounding(plain):  # as DeepSpeed's zero.Init has it
        def made(*args, **kwargs):
            tensor = plain(*args, **kwargs)
            return tensor.bfloat16() if tensor.is_floating_point() else tensor

        return made

    for name in ("arange", "tensor", "zeros", "ones", "full", "empty"):
        monkeypatch.setattr(torch, name, rounding(getattr(torch, name)))
    assert torch.arange(3.0).dtype == torch.bfloat16
    assert torch.equal(rope_inverse_frequencies(YARN, 1024), expected)


def test_positions_start_anew_in_every_packed_sequence():
    assert PackedContext([3, 1, 2]).positions.tolist() == [0, 1, 2, 0, 0, 1]


def test_packed_sequences_equal_the_sequences_alone(tiny_model):
    lens = [7, 1, 7, 7, 30, 1, 1, 13]
    sequences = [random_ids(length, 512, seed) for seed, length in enumerate(lens)]
    packed = tiny_model(torch.tensor(list(itertools.chain(*sequences))), PackedContext(lens))
    for part, ids in zip(packed.split(lens), sequences, strict=True):
        assert largest_difference(part, logits_of(tiny_model, ids)) <= 1e-5


def test_later_tokens_do_not_change_earlier_logits(tiny_model):
    ids = random_ids(20, 512)
    assert largest_difference(logits_of(tiny_model, ids)[:11], logits_of(tiny_model, ids[:11])) <= 1e-5


def test_select_and_targets_equal_the_log_softmax_of_all_logits(tiny_model):
    ids, select = torch.tensor(random_ids(12, 512)), torch.tensor([3, 0, 11])
    targets = torch.tensor([5, 511, 0])
    logits = tiny_model(ids, PackedContext([12]))
    selected = tiny_model(ids, PackedContext([12]), select=select)
    torch.testing.assert_close(selected, logits[select], rtol=0, atol=1e-5)
    logprobs, entropies = tiny_model(ids, PackedContext([12]), select, targets, temperature=0.7)
    log_p = (logits[select] / 0.7).log_softmax(-1)
    torch.testing.assert_close(logprobs, log_p[torch.arange(3), targets], rtol=0, atol=1e-5)
    torch.testing.assert_close(entropies, -(log_p.exp() * log_p).sum(-1), rtol=0, atol=1e-4)


def test_bf16_logits_are_as_close_to_fp32_as_those_of_transformers(tiny_config, randomize):
    model = Transformer(tiny_config).eval()
    randomize(model, seed=1)
    model.bfloat16().float()  # so that both runs hold the very same weights
    ids = random_ids(60, 512)
    exact = logits_of(model, ids)
    model.bfloat16()
    ours, theirs = logits_of(model, ids), peer_logits(model, ids)
    assert ours.dtype == torch.float32
    assert (ours - exact).abs().mean() <= 1.25 * (theirs - exact).abs().mean()
    assert largest_difference(ours, theirs) <= 0.05 * exact.abs().max()


def gradients(model: Transformer, ids: torch.Tensor, lens: list[int]) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    logprobs, _ = model(ids[:-1], PackedContext(lens), targets=ids[1:])
    logprobs.sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_recomputed_layers_give_the_same_gradients(tiny_model):
    tiny_model.train()
    ids, lens = torch.tensor(random_ids(26, 512)), [20, 5]
    kept = gradients(tiny_model, ids, lens)
    tiny_model.checkpoint_layers = True
    recomputed = gradients(tiny_model, ids, lens)
    assert kept.keys() == recomputed.keys()
    for name in kept:
        assert kept[name].abs().max() > 0, name
        torch.testing.assert_close(recomputed[name], kept[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_equal_transformers(tied, tiny_config, randomize):
    model = Transformer(dataclasses.replace(tiny_config, tie_word_embeddings=tied))
    randomize(model, seed=5)
    ids = torch.tensor(random_ids(30, 512))
    ours = gradients(model, ids, [29])
    twin = Transformer(model.config)
    twin.load_state_dict(model.state_dict())
    peer = peer_of(twin)
    log_p = peer(ids[None, :-1]).logits[0].log_softmax(-1)
    log_p.gather(-1, ids[1:, None]).sum().backward()
    theirs = {name: p.grad for name, p in peer.named_parameters()}
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("file", PARAMETERS)
def test_real_configs_have_the_published_parameter_counts(file, shared_data, tmp_path):
    (tmp_path / "config.json").write_bytes((shared_data / "qwen_configs" / file).read_bytes())
    with torch.device("meta"):
        model = Transformer(read_config(tmp_path))
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[file]


@pytest.mark.slow
def test_real_0_5b_shape_equals_transformers(shared_data, tmp_path, record_property):
    file = shared_data / "qwen_configs" / "Qwen2.5-0.5B-Instruct.config.json"
    (tmp_path / "config.json").write_bytes(file.read_bytes())
    config = read_config(tmp_path)
    with torch.device("meta"):
        model = Transformer(config)
    model.to_empty(device="cpu").eval()
    model.tie_weights()
    # Half a billion normal draws would take most of the test's time; a repeated stretch serves too.
    draws = 0.02 * torch.randn(1_000_003, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = draws.repeat(p.numel() // draws.numel() + 1)[: p.numel()].view_as(p)
            p.copy_(1 + noise * 5 if "norm" in name else noise * (10 if name.endswith("bias") else 1))
    ids = random_ids(24, config.vocab_size)
    ours, theirs = logits_of(model, ids), peer_logits(model, ids)
    record_property("difference", largest_difference(ours, theirs))
    assert theirs.std() > 0.1
    assert largest_difference(ours, theirs) <= 1e-5 * max(1.0, theirs.abs().max().item())


def test_from_scratch_depends_on_the_seed_alone(tiny_config):
    a, b, c = (from_scratch(tiny_config, seed) for seed in (1, 1, 2))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.lm_head.weight, c.lm_head.weight)
    assert a.lm_head.weight is a.model.embed_tokens.weight
    half = from_scratch(tiny_config, 1, "bfloat16")
    assert half.dtype == torch.bfloat16 and torch.equal(half.lm_head.weight, a.lm_head.weight.bfloat16())
    assert a.lm_head.weight.std().item() == pytest.approx(tiny_config.initializer_range, rel=0.05)


@pytest.mark.parametrize("ids", [[], [512], [-1]])
def test_logits_of_refuses_ids_outside_the_vocabulary(ids, tiny_model):
    with pytest.raises(ValueError, match="0 to 511"):
        logits_of(tiny_model, ids)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"num_attention_heads \(4\).*num_key_value_heads \(3\)"):
        make_config(64, 4, 3, 16, 8, 1, 8, False)
