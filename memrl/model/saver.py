"""Save models as Hugging Face folders that `load_model` and transformers can load.

Tensors are written one by one; saving needs the memory of one shard.
"""

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from memrl.model.hf_config import CheckpointError, config_to_json, dtype_named
from memrl.model.transformer import Transformer, TransformerConfig, meta_model
from memrl.tokenizer import Tokenizer, name_generic_class
from memrl.utils.atomic_dirs import aside, swap_in
from memrl.utils.files import sync_tree

SHARD_BYTES = 5_000_000_000
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def save_model(model: Transformer, path: str | Path, tokenizer=None, **options: Any) -> None:
    """Write a folder that `load_model` and transformers can load, in the model's own dtype; the rest as in `save_state`."""
    save_state(model.state_dict().items(), model.config, str(model.dtype), path, tokenizer, **options)


def save_state(
    tensors: Iterable[tuple[str, Tensor]],
    config: TransformerConfig,
    dtype: str,
    path: str | Path,
    tokenizer=None,
    max_shard_bytes: int = SHARD_BYTES,
    finish: Callable[[Path], None] | None = None,
) -> None:
    """Write a Hugging Face folder from an iterator of parameters, for example gathered from ZeRO-3 ranks.

    The folder appears whole or not at all: it is written under another name next to `path`, flushed to disk and renamed. A model
    that it replaces is moved to `.NAME.old` before the rename and deleted after it, so one of the two is complete whenever the
    machine stops.

    Args:
        tensors: (name, tensor) pairs of all parameters, in any order. Each is copied before the next iteration. The output layer
            of a tied model is skipped.
        dtype: dtype of the stored weights, "float32", "bfloat16" or "float16".
        tokenizer: a Hugging Face tokenizer or memrl's, saved with its stop ids; None saves no tokenizer.
        max_shard_bytes: size limit of one file; larger models become several files and an index.
        finish: called with the temporary folder before the rename, to write further files into it.

    Raises:
        CheckpointError: `path` holds something other than a model, or the tensors are not the config's, or not finite. `path` is
            unchanged then.
    """
    target = Path(path).resolve()
    _refuse_to_replace(target)
    fresh = aside(target, "new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        stored = dtype_named(dtype, {})
        _write_weights(tensors, config, stored, fresh, max_shard_bytes)
        raw = config_to_json(config, str(stored).removeprefix("torch."))
        if tokenizer is not None:
            raw |= _write_tokenizer(tokenizer, fresh)
        _write_json(fresh / "config.json", raw)
        if finish is not None:
            finish(fresh)
        sync_tree(fresh)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    swap_in(fresh, target)


def first_few(names: list[str], limit: int = 3) -> str:
    """The first few names, and their total number if there are more."""
    listed = ", ".join(names[:limit])
    return listed if len(names) <= limit else f"{listed}, ... ({len(names)} in all)"


def _refuse_to_replace(target: Path) -> None:
    if not target.exists():
        return
    entries = list(target.iterdir()) if target.is_dir() else [target]
    is_model = (target / "config.json").is_file() and all(entry.is_file() for entry in entries)
    if entries and not is_model:
        raise CheckpointError(f"{target} exists and is not a model folder, so it is not replaced; choose another path")


def _write_weights(
    pairs: Iterable[tuple[str, Tensor]], config: TransformerConfig, dtype: torch.dtype, folder: Path, limit: int
) -> None:
    expected = {name: tensor.shape for name, tensor in meta_model(config).state_dict().items()}
    if config.tie_word_embeddings:
        del expected[OUTPUT]
    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    shard_bytes = total_bytes = 0

    def write() -> None:
        save_file(shard, folder / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    for name, tensor in pairs:
        if config.tie_word_embeddings and name == OUTPUT:
            continue
        if expected.get(name) != tensor.shape:
            raise CheckpointError(f"{name} {list(tensor.shape)} is not a parameter of a model with this config")
        if not torch.stack(torch.aminmax(tensor.detach())).isfinite().all():
            raise CheckpointError(f"{name} holds values that are not finite, so the model is not saved")
        size = tensor.numel() * dtype.itemsize
        if shard and shard_bytes + size > limit:
            write()
            shard_bytes = 0
        # Always a copy: the caller may free or reuse the tensor in its next iteration.
        shard[name] = torch.empty(tensor.shape, dtype=dtype).copy_(tensor.detach())
        shard_bytes, total_bytes = shard_bytes + size, total_bytes + size
    write()
    if missing := sorted(expected.keys() - {name for names in shards for name in names}):
        raise CheckpointError(f"the model cannot be saved without {first_few(missing)}")
    _name_shards(folder, shards, total_bytes)


def _name_shards(folder: Path, shards: list[list[str]], total_bytes: int) -> None:
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / SINGLE)
        return
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{number}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / INDEX, index)


def _write_tokenizer(tokenizer, folder: Path) -> dict:
    """Write the tokenizer's files and generation_config.json; returns the special ids for config.json."""
    hf = getattr(tokenizer, "hf", tokenizer)
    if isinstance(tokenizer, Tokenizer):
        tokenizer.save(folder)
    else:
        hf.save_pretrained(folder)
        name_generic_class(folder)
    ids = {"bos_token_id": hf.bos_token_id, "eos_token_id": hf.eos_token_id, "pad_token_id": hf.pad_token_id}
    ids = {name: value for name, value in ids.items() if value is not None}
    stop_ids = list(getattr(tokenizer, "stop_ids", ()))
    _write_json(folder / "generation_config.json", ids | ({"eos_token_id": stop_ids} if stop_ids else {}))
    return ids


def _write_json(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
