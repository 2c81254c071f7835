"""Convert a Hugging Face `config.json` to a `TransformerConfig`, and back.

Two dialects exist: transformers 4 wrote `rope_theta`, `rope_scaling` and `torch_dtype`, transformers 5 writes `rope_parameters`
and `dtype`. Both are read; the first is written, because every version reads it.
"""

import math
import os
from pathlib import Path
from typing import Any

import torch

from memrl.model.positions import RopeConfig
from memrl.model.transformer import FAMILIES, TransformerConfig
from memrl.utils.bounded_files import read_json

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FAMILY_DEFAULTS = {  # transformers' defaults of missing keys, as far as they depend on the family
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
# Far above every published model, so that a damaged or hostile file is refused before anything is built in its size. The largest
# so far: Llama 3.1 405B with 126 layers, 128 heads, widths of 16,384 and 53,248; vocabularies of 262,208 (Gemma 3); 10,485,760
# positions (Llama 4 Scout).
_LARGEST = {"num_hidden_layers": 1024, "num_attention_heads": 4096, "num_key_value_heads": 4096, "head_dim": 4096}
_LARGEST_OTHER = 2**24
_LARGEST_POSITIONS = 2**31 - 1
_ORIGINAL = "original_max_position_embeddings"
_ROPE_SETTINGS = {  # rope type -> its settings; the same names as in `RopeConfig`
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor", _ORIGINAL, "beta_fast", "beta_slow", "attention_factor", "truncate"),
    "llama3": ("factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"),
}
_ROPE_REQUIRED = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}  # with example values
_ROPE_OPTIONAL = {"attention_factor": None, "truncate": True}  # not written if they have these values


class CheckpointError(ValueError):
    """A model folder that cannot be read or written; the one-line message names the fault and the fix."""


def read_object(path: Path) -> dict:
    """The JSON object in a file; CheckpointError if there is none, or if it is absurdly large."""
    try:
        content = read_json(path)
    except ValueError as error:
        raise CheckpointError(f"{error}; download or copy it again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object; download or copy it again")
    return content


def read_raw_config(path: str | Path) -> dict:
    """The unchanged contents of a model folder's config.json."""
    folder = Path(path)
    if not folder.is_dir():
        hint = "memrl reads local folders only; download a model with `hf download NAME --local-dir FOLDER`"
        replaced = folder.parent / f".{folder.name}.old"
        if replaced.is_dir():
            hint = f"a save was interrupted while replacing it; rename {replaced} to {folder}"
        raise CheckpointError(f"model folder {folder} does not exist; {hint}")
    if not os.path.lexists(folder / "config.json"):
        raise CheckpointError(f"{folder} holds no config.json, so it is not a Hugging Face model folder")
    return read_object(folder / "config.json")


def dtype_named(name: str, raw: dict) -> torch.dtype:
    """The dtype of that name; "auto" is the dtype in `raw`, the contents of a config.json."""
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
        yarn: stretch the positions by YaRN by this factor over config.json's max_position_embeddings, exactly as if that file
            were edited by hand; 0 leaves them unchanged.

    Raises:
        CheckpointError (a ValueError): the folder or its config.json is missing or broken, or the model is not supported
            (another architecture, sliding windows, quantised weights, another rope type); or yarn is not above 1, or the
            positions are stretched already.
    """
    raw = read_raw_config(path)
    try:
        return _parse(_with_yarn(raw, yarn) if yarn else raw)
    except ValueError as error:
        raise CheckpointError(f"{Path(path) / 'config.json'}: {error}") from None


def longest_text(config: TransformerConfig) -> int:
    """The model's context window in tokens, including the stretching of its positions.

    max_position_embeddings includes the stretching for llama3 but not for linear; YaRN has a separate number.
    """
    rope = config.rope
    if rope.kind == "yarn":
        return int(rope.factor * rope.original_max_position_embeddings)
    return int(config.max_position_embeddings * (rope.factor if rope.kind == "linear" else 1))


def yarn_for(path: str | Path, tokens: int) -> float | None:
    """The smallest factor of YaRN, to two decimals, that makes the window at least this long; None if none can."""
    factor = math.ceil(100 * tokens / longest_text(read_config(path))) / 100
    try:
        return factor if longest_text(read_config(path, factor)) >= tokens else None
    except CheckpointError:  # the positions are stretched already, or by more than is allowed
        return None


def _with_yarn(raw: dict, factor: float) -> dict:
    """config.json's contents with YaRN added as described in Qwen's model cards."""
    if not 1 < factor < math.inf:
        raise ValueError(f"yarn is {factor:g}; it must be above 1, or 0 for the positions of config.json")
    if raw.get("max_position_embeddings") is None:
        raise ValueError("yarn stretches max_position_embeddings, which is missing; add it, the longest text of pretraining")
    window = _size(raw, "max_position_embeddings")
    rope = _parse_rope(raw, window)
    if rope.kind != "default":
        raise ValueError(
            f"yarn is {factor:g}, but the positions are stretched already (rope type {rope.kind!r}, factor {rope.factor:g}); "
            "leave yarn out"
        )
    original = raw.get(_ORIGINAL) or window
    if original != window:
        raise ValueError(
            f"yarn is {factor:g}, but {_ORIGINAL} {original!r} differs from max_position_embeddings "
            f"{window}, so the window is stretched already; leave yarn out"
        )
    yarn = {"rope_type": "yarn", "factor": factor, _ORIGINAL: window}
    return raw | {"rope_scaling": (raw.get("rope_scaling") or {}) | yarn}


def _parse(raw: dict) -> TransformerConfig:
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}")
    raw = _FAMILY_DEFAULTS[family] | raw
    _refuse_unsupported(raw, family)
    sizes = {ours: _size(raw, theirs) for theirs, ours in _SIZES.items()}
    heads = sizes["num_heads"]
    kv_heads = heads if raw.get("num_key_value_heads") is None else _size(raw, "num_key_value_heads")
    if raw.get("head_dim") is not None:
        head_size = _size(raw, "head_dim")
    elif sizes["hidden_size"] % heads:
        raise ValueError(f"hidden_size {sizes['hidden_size']} is not a multiple of num_attention_heads {heads}")
    else:
        head_size = sizes["hidden_size"] // heads
    if head_size % 2:
        raise ValueError(f"the head size is {head_size}; it must be even for rotary positions")
    max_positions = _size({"max_position_embeddings": 32768} | raw, "max_position_embeddings")
    rope = _parse_rope(raw, max_positions)
    _refuse_sliding_window(raw, family, sizes["num_layers"], max_positions * rope.factor)
    return TransformerConfig(
        **sizes,
        num_kv_heads=kv_heads,
        head_size=head_size,
        rms_norm_eps=_eps(raw),
        tie_word_embeddings=_flag(raw, "tie_word_embeddings"),
        max_position_embeddings=max_positions,
        initializer_range=_number(raw, "initializer_range", 0.02),
        rope=rope,
        family=family,
        attention_bias=family in ("qwen3", "llama") and _flag(raw, "attention_bias"),
    )


def _refuse_unsupported(raw: dict, family: str) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {raw['hidden_act']!r} is not supported; supported: 'silu'")
    if raw.get("quantization_config"):
        raise ValueError("the weights are quantised (quantization_config); use the unquantised checkpoint")
    if family == "llama" and _flag(raw, "mlp_bias"):
        raise ValueError("mlp_bias true is not supported; supported: feed-forward layers without biases")
    if raw.get("partial_rotary_factor") not in (None, 1):
        found = raw["partial_rotary_factor"]
        raise ValueError(f"partial_rotary_factor {found!r} is not supported; supported: rotating whole heads (1.0)")
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if raw.get(key):
            raise ValueError(f"mixtures of experts are not supported ({key} is {raw[key]!r}); use a dense model")


def _parse_rope(raw: dict, max_positions: int) -> RopeConfig:
    # Qwen's model cards advise to add rope_scaling for long texts, so it may occur besides transformers 5's key.
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
    RopeConfig(theta=theta, kind=kind)  # reports an unknown kind before its unknown settings
    known = {"rope_theta", "rope_type"}.union(*_ROPE_SETTINGS.values())
    if unknown := sorted(settings.keys() - known):
        supported = ", ".join(sorted(known))
        raise ValueError(f"rope setting {', '.join(unknown)} is not supported; supported: {supported}")
    values: dict[str, Any] = {}
    for name in _ROPE_SETTINGS[kind]:
        if name in settings:
            values[name] = _flag(settings, name) if name == "truncate" else _number(settings, name)
        elif name in _ROPE_REQUIRED:
            raise ValueError(f"rope type {kind!r} needs a {name}, for example {_ROPE_REQUIRED[name]}")
    if _ORIGINAL in _ROPE_SETTINGS[kind]:
        values[_ORIGINAL] = int(values.get(_ORIGINAL, _number(raw, _ORIGINAL, max_positions)))
        if not 1 <= values[_ORIGINAL] <= _LARGEST_POSITIONS:
            raise ValueError(
                f"{_ORIGINAL} must be a number of tokens from 1 to {_LARGEST_POSITIONS}, found {values[_ORIGINAL]:g}"
            )
    return RopeConfig(theta=theta, kind=kind, **values)


def _refuse_sliding_window(raw: dict, family: str, num_layers: int, longest: float) -> None:
    """ValueError if a layer's window is shorter than the longest text, `longest` tokens."""
    layer_types = raw.get("layer_types")
    if layer_types is not None and not (isinstance(layer_types, list) and all(isinstance(word, str) for word in layer_types)):
        raise ValueError(f"layer_types must be a list with a word for each layer, found {layer_types!r}")
    window = _number(raw, "sliding_window", math.inf)
    if family == "llama" or window >= longest:  # transformers' Llama ignores sliding_window
        return
    if family == "mistral":
        raise ValueError(
            f"sliding-window attention (window {window:.0f}, texts up to {longest:.0f} tokens) is not supported; "
            f"set max_position_embeddings to {window:.0f} to read shorter texts, or use a Mistral without a window (v0.2 on)"
        )
    if not _flag(raw, "use_sliding_window"):
        return
    if layer_types is None:
        has_window = _number(raw, "max_window_layers", 28) < num_layers
    else:
        has_window = "sliding_attention" in layer_types
    if has_window:
        raise ValueError(
            f"sliding-window attention (window {window:.0f}) is not supported; "
            "set use_sliding_window to false to attend to everything"
        )


def _size(raw: dict, key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        found = f"found {value!r}" if key in raw else "but it is missing"
        raise ValueError(f"{key} must be a positive whole number, {found}")
    most = _LARGEST_POSITIONS if key == "max_position_embeddings" else _LARGEST.get(key, _LARGEST_OTHER)
    if value > most:
        raise ValueError(f"{key} must be at most {most}, found {value}")
    return value


def _number(raw: dict, key: str, default: float = 0.0) -> float:
    value = raw.get(key)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{key} must be a number, got {value!r}")
    return float(value)


def _eps(raw: dict) -> float:
    eps = _number(raw, "rms_norm_eps", 1e-6)
    if not 0 < eps < 1:
        raise ValueError(f"rms_norm_eps must be between 0 and 1, found {eps}")
    return eps


def _flag(raw: dict, key: str) -> bool:
    value = raw.get(key)
    if not isinstance(value, bool | None):  # the text "false" would count as true
        raise ValueError(f"{key} must be true or false, found {value!r}")
    return bool(value)


def config_to_json(config: TransformerConfig, dtype: str) -> dict:
    """The contents of config.json for a model whose weights are stored as dtype ("bfloat16", ...)."""
    no_window = {"use_sliding_window": False, "sliding_window": None, "max_window_layers": config.num_layers}
    # Otherwise transformers uses the ids of Llama's vocabulary, and generation stops at id 2.
    no_ids = {"bos_token_id": None, "eos_token_id": None}
    by_family = {
        "qwen2": no_window,
        "qwen3": no_window | {"attention_bias": config.attention_bias},
        "llama": no_ids | {"attention_bias": config.attention_bias, "mlp_bias": False},
        "mistral": no_ids | {"sliding_window": None},
    }
    raw = {
        "architectures": [f"{config.family.capitalize()}ForCausalLM"],
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
        **by_family[config.family],
        "rope_theta": config.rope.theta,
        "rope_scaling": _rope_to_json(config.rope),
        "torch_dtype": dtype,
    }
    if config.head_size * config.num_heads != config.hidden_size or config.family == "qwen3":
        raw["head_dim"] = config.head_size
    return raw


def _rope_to_json(rope: RopeConfig) -> dict | None:
    if rope.kind == "default":
        return None
    values = {name: getattr(rope, name) for name in _ROPE_SETTINGS[rope.kind]}
    written = {name: value for name, value in values.items() if name not in _ROPE_OPTIONAL or value != _ROPE_OPTIONAL[name]}
    return {"rope_type": rope.kind, "type": rope.kind} | written
