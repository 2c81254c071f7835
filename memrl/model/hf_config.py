"""A Hugging Face `config.json` to a `TransformerConfig`, and back.

Two dialects are in use: transformers 4 wrote `rope_theta`, `rope_scaling` and `torch_dtype`, transformers 5
writes `rope_parameters` and `dtype`. Both are read; the first is written, because every version reads it.
"""

import json
import math
from dataclasses import replace
from pathlib import Path

import torch

from memrl.model.positions import RopeConfig
from memrl.model.transformer import FAMILIES, TransformerConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
}
_LEFT_OUT = {  # what transformers takes a left-out key for, where that depends on the family
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131_072},
}

_SIZES = {  # config.json's name -> ours
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
}
_ROPE_KEYS = {
    "rope_theta",
    "rope_type",
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "truncate",
    "low_freq_factor",
    "high_freq_factor",
}


class CheckpointError(ValueError):
    """A model folder that cannot be read or written; its one line says what is wrong and what to do."""


def read_json(path: Path) -> dict:
    """The JSON object in a file; CheckpointError where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # undecodable bytes and JSON errors alike
        raise CheckpointError(f"{path} is not valid JSON ({error}); download or copy it again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object; download or copy it again")
    return content


def read_raw_config(path: str | Path) -> dict:
    """config.json of a model folder as it stands."""
    folder = Path(path)
    if not folder.is_dir():
        hint = "memrl reads local folders only; download a model with `hf download NAME --local-dir FOLDER`"
        replaced = folder.parent / f".{folder.name}.old"
        if replaced.is_dir():
            hint = f"a save was cut off while replacing it; rename {replaced} to {folder}"
        raise CheckpointError(f"model folder {folder} does not exist; {hint}")
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} holds no config.json, so it is not a Hugging Face model folder")
    return read_json(folder / "config.json")


def dtype_named(name: str, raw: dict) -> torch.dtype:
    """The type of the weights; "auto" is what `raw`, a config.json, says."""
    where = "dtype"
    if name == "auto":
        where, name = "config.json's dtype", raw.get("dtype") or raw.get("torch_dtype") or "float32"
    name = str(name).removeprefix("torch.")
    if name not in DTYPES:
        raise CheckpointError(f"{where} {name!r} is not supported; allowed: {', '.join(DTYPES)}")
    return DTYPES[name]


def read_config(path: str | Path, yarn: float = 0.0) -> TransformerConfig:
    """The shape of the model in a Hugging Face folder.

    Args:
        yarn: stretch the positions by YaRN for texts so many times longer than config.json's max_position_embeddings, exactly as
            if that file were edited by hand; 0 leaves them as they are.

    Raises CheckpointError (a ValueError) where the folder or its config.json is missing, broken, or of
    a model that memrl has not: another architecture, sliding windows, quantised weights, another rope type; and where
    yarn is not above 1 or the positions are stretched already.
    """
    raw = read_raw_config(path)
    try:
        return _parse(_with_yarn(raw, yarn) if yarn else raw)
    except ValueError as error:
        raise CheckpointError(f"{Path(path) / 'config.json'}: {error}") from None


def longest_text(config: TransformerConfig) -> int:
    """Tokens of the longest text that the positions are made for: the model's window.

    max_position_embeddings counts the stretched window for llama3 and the unstretched one for linear; YaRN has its own number.
    """
    rope = config.rope
    if rope.kind == "yarn":
        return int(rope.factor * rope.original_max_position_embeddings)
    return int(config.max_position_embeddings * (rope.factor if rope.kind == "linear" else 1))


def _with_yarn(raw: dict, factor: float) -> dict:
    """config.json's contents with YaRN added as Qwen's model cards say to add it by hand."""
    if not 1 < factor < math.inf:
        raise ValueError(f"yarn is {factor:g}; it must be above 1, or 0 for positions as config.json has them")
    if raw.get("max_position_embeddings") is None:
        raise ValueError("yarn stretches max_position_embeddings, which is missing; add it, with the longest text of pretraining")
    window = _size(raw, "max_position_embeddings")
    rope = _parse_rope(raw, window)
    if rope.kind != "default":
        raise ValueError(
            f"yarn is {factor:g}, but the positions are stretched already (rope type {rope.kind!r}, factor {rope.factor:g}); "
            "leave yarn out"
        )
    original = raw.get("original_max_position_embeddings") or window
    if original != window:
        raise ValueError(
            f"yarn is {factor:g}, but original_max_position_embeddings {original!r} differs from max_position_embeddings "
            f"{window}, so the window is stretched already; leave yarn out"
        )
    yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": window}
    return raw | {"rope_scaling": (raw.get("rope_scaling") or {}) | yarn}


def _parse(raw: dict) -> TransformerConfig:
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model_type {family!r} is not supported; memrl runs {', '.join(FAMILIES)}")
    raw = _LEFT_OUT[family] | raw
    _refuse_unsupported(raw, family)
    sizes = {ours: _size(raw, theirs) for theirs, ours in _SIZES.items()}
    heads = sizes["num_heads"]
    kv_heads = heads if raw.get("num_key_value_heads") is None else _size(raw, "num_key_value_heads")
    if raw.get("head_dim") is not None:
        head_size = _size(raw, "head_dim")
    elif sizes["hidden_size"] % heads:
        raise ValueError(f"hidden_size {sizes['hidden_size']} is no multiple of num_attention_heads {heads}")
    else:
        head_size = sizes["hidden_size"] // heads
    if head_size % 2:
        raise ValueError(f"heads of {head_size} units cannot be rotated; the head size must be even")
    max_positions = _size({"max_position_embeddings": 32768} | raw, "max_position_embeddings")
    rope = _parse_rope(raw, max_positions)
    _refuse_sliding_window(raw, family, sizes["num_layers"], max_positions * rope.factor)
    return TransformerConfig(
        **sizes,
        num_kv_heads=kv_heads,
        head_size=head_size,
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        max_position_embeddings=max_positions,
        initializer_range=_number(raw, "initializer_range", 0.02),
        rope=rope,
        family=family,
        attention_bias=family in ("qwen3", "llama") and bool(raw.get("attention_bias", False)),
    )


def _refuse_unsupported(raw: dict, family: str) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {raw['hidden_act']!r} is not supported; memrl runs 'silu'")
    if raw.get("quantization_config"):
        raise ValueError("the weights are quantised (quantization_config); use the unquantised checkpoint")
    if family == "llama" and raw.get("mlp_bias"):
        raise ValueError("mlp_bias is true, but biases in the feed-forward layers are not supported; only false is")
    if raw.get("partial_rotary_factor") not in (None, 1):
        found = raw["partial_rotary_factor"]
        raise ValueError(f"partial_rotary_factor {found!r} is not supported; memrl rotates whole heads (1.0)")
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if raw.get(key):
            raise ValueError(f"mixtures of experts are not supported ({key} is {raw[key]!r}); use a dense model")


def _parse_rope(raw: dict, max_positions: int) -> RopeConfig:
    # Qwen advises to add rope_scaling by hand for long texts, so it may stand beside transformers 5's key.
    settings: dict = {}
    for key in ("rope_parameters", "rope_scaling"):
        given = raw.get(key) or {}
        if not isinstance(given, dict):
            raise ValueError(f"{key} must be an object such as {{'rope_type': 'yarn', 'factor': 4.0}}, found {given!r}")
        found = {name: value for name, value in given.items() if value is not None}
        if "type" in found:
            found.setdefault("rope_type", found.pop("type"))
        settings |= found
    if "partial_rotary_factor" in settings:
        _refuse_unsupported({"partial_rotary_factor": settings.pop("partial_rotary_factor")}, "")
    kind = settings.get("rope_type", "default")
    theta = _number(settings, "rope_theta", _number(raw, "rope_theta", 10_000.0))  # as in transformers
    rope = RopeConfig(theta=theta, kind=kind)  # an unknown kind is named before its unknown settings are
    if unknown := sorted(settings.keys() - _ROPE_KEYS):
        supported = ", ".join(sorted(_ROPE_KEYS))
        raise ValueError(f"rope setting {', '.join(unknown)} is not supported; supported: {supported}")
    if kind == "default":
        return rope
    if "factor" not in settings:
        raise ValueError(f"rope type {kind!r} needs a factor, for example 4.0")
    factor = _number(settings, "factor", rope.factor)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=factor)
    original = _number(raw, "original_max_position_embeddings", max_positions)
    original = int(_number(settings, "original_max_position_embeddings", original))
    if original < 1:
        raise ValueError(f"original_max_position_embeddings must be a positive number of tokens, found {original}")
    scaled = RopeConfig(theta=theta, kind=kind, factor=factor, original_max_position_embeddings=original)
    if kind == "llama3":
        for key in ("low_freq_factor", "high_freq_factor"):
            if key not in settings:
                raise ValueError(f"rope type 'llama3' needs a {key}, for example {getattr(rope, key)}")
        return replace(
            scaled,
            low_freq_factor=_number(settings, "low_freq_factor", None),
            high_freq_factor=_number(settings, "high_freq_factor", None),
        )
    return replace(
        scaled,
        beta_fast=_number(settings, "beta_fast", rope.beta_fast),
        beta_slow=_number(settings, "beta_slow", rope.beta_slow),
        attention_factor=_number(settings, "attention_factor", None),
        truncate=bool(settings.get("truncate", True)),
    )


def _refuse_sliding_window(raw: dict, family: str, num_layers: int, longest: float) -> None:
    """ValueError where some layer's window is shorter than the longest text, `longest` tokens."""
    window = _number(raw, "sliding_window", None)
    if family == "llama" or window is None or window >= longest:  # transformers' Llama knows no windows
        return
    if family == "mistral":
        raise ValueError(
            f"sliding-window attention (window {window:.0f}, texts up to {longest:.0f} tokens) is not supported; "
            f"set max_position_embeddings to {window:.0f} to read shorter texts, or use a Mistral without a window (v0.2 on)"
        )
    if not raw.get("use_sliding_window"):
        return
    layer_types = raw.get("layer_types")
    if layer_types is not None:
        slides = "sliding_attention" in layer_types
    else:
        slides = _number(raw, "max_window_layers", 28) < num_layers
    if slides:
        raise ValueError(
            f"sliding-window attention (window {window:.0f}) is not supported; "
            "set use_sliding_window to false to attend to everything"
        )


def _size(raw: dict, key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        found = repr(value) if key in raw else "nothing"
        raise ValueError(f"{key} must be a positive whole number, found {found}")
    return value


def _number(raw: dict, key: str, default: float | None) -> float | None:
    value = raw.get(key)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{key} must be a number, got {value!r}")
    return float(value)


def config_to_json(config: TransformerConfig, dtype: str) -> dict:
    """What config.json should say of a model whose weights are stored as dtype ("bfloat16", ...)."""
    raw = {
        "architectures": [_ARCHITECTURES[config.family]],
        "model_type": config.family,
        **{theirs: getattr(config, ours) for theirs, ours in _SIZES.items()},
        "num_key_value_heads": config.num_kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_dropout": 0.0,
        "use_cache": True,
        **_family_to_json(config),
        "rope_theta": config.rope.theta,
        "rope_scaling": _rope_to_json(config.rope),
        "torch_dtype": dtype,
    }
    if config.head_size * config.num_heads != config.hidden_size or config.family == "qwen3":
        raw["head_dim"] = config.head_size
    return raw


def _family_to_json(config: TransformerConfig) -> dict:
    no_window = {"use_sliding_window": False, "sliding_window": None, "max_window_layers": config.num_layers}
    # transformers would otherwise fill in ids of Llama's own vocabulary, and generation would stop at its id 2.
    no_ids = {"bos_token_id": None, "eos_token_id": None}
    return {
        "qwen2": no_window,
        "qwen3": no_window | {"attention_bias": config.attention_bias},
        "llama": no_ids | {"attention_bias": config.attention_bias, "mlp_bias": False},
        "mistral": no_ids | {"sliding_window": None},
    }[config.family]


def _rope_to_json(rope: RopeConfig) -> dict | None:
    if rope.kind == "default":
        return None
    settings = {"rope_type": rope.kind, "type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        settings["original_max_position_embeddings"] = rope.original_max_position_embeddings
        settings["low_freq_factor"], settings["high_freq_factor"] = rope.low_freq_factor, rope.high_freq_factor
    if rope.kind == "yarn":
        settings["original_max_position_embeddings"] = rope.original_max_position_embeddings
        settings["beta_fast"], settings["beta_slow"] = rope.beta_fast, rope.beta_slow
        if rope.attention_factor is not None:
            settings["attention_factor"] = rope.attention_factor
        if not rope.truncate:
            settings["truncate"] = False
    return settings
