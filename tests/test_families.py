"""Qwen2, Qwen3, Llama and Mistral: logits, gradients and folders against transformers, family by family."""

import json

import pytest
import torch

from memrl.model import PackedContext, Transformer, TransformerConfig, load_model, logits_of, read_config, save_model
from memrl.model.positions import RopeConfig
from memrl.model.transformer import meta_model
from tests.peer import peer_logits, peer_of

FAMILIES = ("qwen2", "qwen3", "llama", "mistral")
# hidden, heads, kv heads, head size, tied, attention_bias
SHAPES = {
    "grouped, tied": (64, 4, 2, 16, True, False),
    "a kv head per head, untied": (40, 5, 5, 8, False, False),
    "heads wider than hidden": (36, 3, 1, 32, True, False),
    "biases": (64, 4, 2, 16, False, True),
}
CASES = [(family, shape) for family in FAMILIES for shape in SHAPES if family in ("qwen3", "llama") or shape != "biases"]
ROPES = {
    "linear": RopeConfig(theta=1e4, kind="linear", factor=3.0),
    "yarn": RopeConfig(theta=1e6, kind="yarn", factor=4.0, original_max_position_embeddings=64),
    "llama3": RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_position_embeddings=64),
}
MAX_DIFFERENCE = 1e-5


def make_model(family: str, shape: str, randomize, rope: RopeConfig | None = None, seed: int = 3) -> Transformer:
    hidden, heads, kv_heads, head_size, tied, attention_bias = SHAPES[shape]
    config = TransformerConfig(
        vocab_size=211,
        hidden_size=hidden,
        intermediate_size=96,
        num_layers=2,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        tie_word_embeddings=tied,
        max_position_embeddings=64,
        rope=rope or RopeConfig(theta=1e4),
        family=family,
        attention_bias=attention_bias,
    )
    model = Transformer(config).eval()
    randomize(model, seed=seed, std=0.15)
    return model


def random_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(211, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


@pytest.mark.parametrize(("family", "shape"), CASES)
def test_logits_equal_transformers_in_fp32(family, shape, randomize, record_property):
    model, ids = make_model(family, shape, randomize), random_ids(45)
    ours, theirs = logits_of(model, ids), peer_logits(model, ids)
    assert theirs.std() > 0.1, "weights too small for a mistake to show"
    record_property("difference", largest_difference(ours, theirs))
    assert largest_difference(ours, theirs) <= MAX_DIFFERENCE


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_rope_scaling_equals_transformers_beyond_the_window(family, rope, randomize, record_property):
    model, ids = make_model(family, "grouped, tied", randomize, ROPES[rope]), random_ids(200)
    ours, theirs = logits_of(model, ids), peer_logits(model, ids)
    record_property("difference", largest_difference(ours, theirs))
    assert largest_difference(ours, theirs) <= MAX_DIFFERENCE
    unscaled = make_model(family, "grouped, tied", randomize, RopeConfig(theta=ROPES[rope].theta))
    assert largest_difference(ours, logits_of(unscaled, ids)) > 0.01, "the scaling makes no difference here"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_is_as_close_to_fp32_as_transformers(family, dtype, randomize, record_property):
    """Two correct programs may round differently, but neither further from the truth than the other by much."""
    model, ids = make_model(family, "grouped, tied", randomize), random_ids(60)
    model.to(dtype).float()  # so that both runs hold the very same weights
    exact = logits_of(model, ids)
    model.to(dtype)
    ours, theirs = logits_of(model, ids), peer_logits(model, ids)
    assert ours.dtype == torch.float32 and ours.isfinite().all()
    rounding = largest_difference(theirs, exact)
    assert rounding > 0, "nothing was rounded"
    record_property("difference", largest_difference(ours, theirs))
    assert (ours - exact).abs().mean() <= 1.25 * (theirs - exact).abs().mean()
    assert largest_difference(ours, theirs) <= 2 * rounding


@pytest.mark.parametrize(("family", "shape"), [case for case in CASES if case[1] in ("grouped, tied", "biases")])
def test_gradients_equal_transformers(family, shape, randomize):
    model, ids = make_model(family, shape, randomize), torch.tensor(random_ids(30))
    model(ids[:-1], PackedContext([29]), targets=ids[1:])[0].sum().backward()
    ours = {name: p.grad for name, p in model.named_parameters()}
    twin = Transformer(model.config)
    twin.load_state_dict(model.state_dict())
    peer = peer_of(twin)
    log_p = peer(ids[None, :-1]).logits[0].log_softmax(-1)
    log_p.gather(-1, ids[1:, None]).sum().backward()
    theirs = {name: p.grad for name, p in peer.named_parameters()}
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].abs().max() > 0, name
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=2e-4, msg=name)


@pytest.mark.parametrize("rope", [None, ROPES["llama3"], ROPES["yarn"]])
@pytest.mark.parametrize(("family", "shape"), CASES)
def test_transformers_loads_what_memrl_saves(family, shape, rope, randomize, tmp_path):
    from transformers import AutoModelForCausalLM

    model, ids = make_model(family, shape, randomize, rope), random_ids(90)
    save_model(model, tmp_path / "model")
    peer, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(loading.values()), loading
    assert peer.config.model_type == family and peer.config.tie_word_embeddings == model.config.tie_word_embeddings
    with torch.no_grad():
        theirs = peer(torch.tensor([ids])).logits[0]
    assert largest_difference(logits_of(model, ids), theirs) <= MAX_DIFFERENCE
    again = load_model(tmp_path / "model")
    assert again.config == model.config
    assert torch.equal(logits_of(again, ids), logits_of(model, ids))


@pytest.mark.parametrize("rope", [None, ROPES["llama3"]])
@pytest.mark.parametrize(("family", "shape"), CASES)
def test_memrl_loads_what_transformers_saves(family, shape, rope, randomize, tmp_path):
    model, ids = make_model(family, shape, randomize, rope), random_ids(90)
    peer_of(model).save_pretrained(tmp_path / "peer", max_shard_size="60KB")
    loaded = load_model(tmp_path / "peer")
    assert loaded.config == model.config
    assert torch.equal(logits_of(loaded, ids), logits_of(model, ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_config_names_the_family_and_no_tokens_of_another_vocabulary(family, randomize, tmp_path):
    save_model(make_model(family, "grouped, tied", randomize), tmp_path / "model")
    raw = json.loads((tmp_path / "model" / "config.json").read_text())
    names = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama", "mistral": "Mistral"}
    assert raw["architectures"] == [f"{names[family]}ForCausalLM"] and raw["model_type"] == family
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(tmp_path / "model")
    assert config.eos_token_id is None
    assert getattr(config, "sliding_window", None) is None  # Mistral's would be 4096 if nothing were said


@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_start_has_zero_biases_and_unit_norms(family):
    config = TransformerConfig(32, 16, 16, 1, 2, 2, 8, family=family, attention_bias=family in ("qwen3", "llama"))
    model = Transformer(config)
    model.init_weights(torch.Generator().manual_seed(0))
    for name, p in model.named_parameters():
        expected = 0.0 if name.endswith("bias") else 1.0 if "norm" in name else None
        assert expected is None or (p == expected).all(), name
        assert expected is not None or 0.01 < p.std() < 0.03, name


@pytest.mark.parametrize(
    ("family", "bias", "named"),
    [("gemma", False, "'gemma'.*qwen2, qwen3, llama, mistral"), ("qwen2", True, "qwen2"), ("mistral", True, "mistral")],
)
def test_what_no_family_has_is_refused(family, bias, named):
    with pytest.raises(ValueError, match=named):
        TransformerConfig(32, 16, 16, 1, 2, 2, 8, family=family, attention_bias=bias)


LLAMA_3_2_ROPE = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
# config.json of released models, as far as it matters -> their published number of parameters
RELEASED = {
    "Qwen3-0.6B": (
        {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
        | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True, "rope_theta": 1e6}
        | {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 28, "attention_bias": False},
        596_049_920,
    ),
    "Llama-3.2-1B": (
        {"model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True, "rope_theta": 5e5}
        | {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "max_position_embeddings": 131072}
        | {"rope_scaling": LLAMA_3_2_ROPE},
        1_235_814_400,
    ),
    "SmolLM2-135M": (
        {"model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
        | {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True, "rope_theta": 1e5}
        | {"rope_interleaved": False, "rope_scaling": None, "attention_bias": False, "mlp_bias": False},
        134_515_008,
    ),
    "Mistral-7B-v0.3": (
        {"model_type": "mistral", "vocab_size": 32768, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": None, "rope_theta": 1e6},
        7_248_023_552,
    ),
}


@pytest.mark.parametrize("name", RELEASED)
def test_released_shapes_have_the_published_parameter_counts(name, tmp_path):
    raw, count = RELEASED[name]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model = meta_model(read_config(tmp_path))
    assert sum(p.numel() for p in model.parameters()) == count
    assert model.config.family == raw["model_type"]


@pytest.mark.parametrize(("family", "kv_heads", "head_size"), [("qwen3", 4, 128), ("llama", 4, 16), ("mistral", 8, 16)])
def test_left_out_settings_default_as_in_transformers(family, kv_heads, head_size, tmp_path):
    from transformers import AutoConfig

    heads = 8 if family == "mistral" else 4
    raw = {"model_type": family, "vocab_size": 32, "hidden_size": heads * 16, "intermediate_size": 16, "num_hidden_layers": 1}
    raw |= {"num_attention_heads": heads} | ({"num_key_value_heads": 4} if family == "qwen3" else {})
    raw |= {"sliding_window": None} if family == "mistral" else {}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ours, theirs = read_config(tmp_path), AutoConfig.from_pretrained(tmp_path)
    assert (ours.num_kv_heads, ours.head_size) == (kv_heads, head_size) == (theirs.num_key_value_heads, theirs.head_dim)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert (ours.rms_norm_eps, ours.rope.theta) == (theirs.rms_norm_eps, theirs.rope_parameters["rope_theta"])
