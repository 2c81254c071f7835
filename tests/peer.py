"""Build transformers' model with the weights of a memrl model, to compare their outputs."""

import torch

from memrl.model import Transformer, TransformerConfig
from memrl.model.positions import RopeConfig


def rope_settings(rope: RopeConfig) -> dict:
    settings = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        settings["factor"] = rope.factor
    if rope.kind in ("yarn", "llama3"):
        settings["original_max_position_embeddings"] = rope.original_max_position_embeddings
    if rope.kind == "llama3":
        settings |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        settings |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        if rope.attention_factor is not None:
            settings["attention_factor"] = rope.attention_factor
    return settings


def peer_config(config: TransformerConfig):
    from transformers import AutoConfig

    only = {
        "qwen2": {},
        "qwen3": {"attention_bias": config.attention_bias},
        "llama": {"attention_bias": config.attention_bias},
        "mistral": {"sliding_window": None},
    }
    return AutoConfig.for_model(
        config.family,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_size,
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=config.tie_word_embeddings,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=rope_settings(config.rope),
        bos_token_id=None,
        eos_token_id=None,
        **only[config.family],
    )


def peer_of(model: Transformer):
    """transformers' model with the same weights (the same tensors, in fact)."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        peer = AutoModelForCausalLM.from_config(peer_config(model.config))
    peer.load_state_dict(model.state_dict(), assign=True, strict=True)
    peer.tie_weights()
    # Built on meta, it has no frequencies; a fresh rotary module on the CPU has.
    peer.model.rotary_emb = type(peer.model.rotary_emb)(peer.config)
    return peer.eval()


@torch.no_grad()
def peer_logits(model: Transformer, ids: list[int]) -> torch.Tensor:
    """fp32 [len(ids), V]."""
    return peer_of(model)(torch.tensor([ids])).logits[0].float()
