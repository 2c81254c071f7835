"""Models out: Hugging Face folders that load_model and transformers read as they are.

Writing goes tensor by tensor and takes the memory of one shard.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from memrl.model.hf_config import CheckpointError, config_to_json, dtype_named, read_json
from memrl.model.transformer import Transformer, TransformerConfig, meta_model
from memrl.utils.files import sync_path, sync_tree

SHARD_BYTES = 5_000_000_000
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def save_model(
    model: Transformer,
    path: str | Path,
    tokenizer=None,
    max_shard_bytes: int = SHARD_BYTES,
    finish: Callable[[Path], None] | None = None,
) -> None:
    """Write a folder that `load_model` and transformers load as it is, in the model's own dtype.

    Args:
        tokenizer: a Hugging Face tokenizer or memrl's, saved along with its stop ids; None to leave it out.

    Arguments, guarantees and errors otherwise as for `save_state`.
    """
    save_state(model.state_dict(), model.config, str(model.dtype), path, tokenizer, max_shard_bytes, finish)


def save_state(
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    config: TransformerConfig,
    dtype: str,
    path: str | Path,
    tokenizer=None,
    max_shard_bytes: int = SHARD_BYTES,
    finish: Callable[[Path], None] | None = None,
) -> None:
    """Write a Hugging Face folder from parameters that come one at a time, say gathered from ZeRO-3 ranks.

    The folder appears whole or not at all: it is written under another name beside `path`, flushed to disk
    and renamed. A model that it replaces is moved aside to `.NAME.old` for that instant and deleted after it,
    so one of the two is complete whenever the machine stops.

    Args:
        tensors: every parameter by name, or (name, tensor) pairs in any order. Each is copied before the next
            is asked for. The output layer of a tied model is left out.
        dtype: "float32", "bfloat16" or "float16", what the weights are stored as.
        max_shard_bytes: one file's limit; more becomes several files and an index.
        finish: writes further files into the folder that it is given, before the folder appears under its name.

    Raises CheckpointError for a `path` that holds something other than a model, and for tensors that are not
    the config's; nothing has changed at `path` then.
    """
    target = Path(path).resolve()
    _refuse_to_replace(target)
    fresh, old = target.parent / f".{target.name}.new", target.parent / f".{target.name}.old"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
        stored = dtype_named(dtype, {})
        _write_weights(pairs, config, stored, fresh, max_shard_bytes)
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
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    try:
        fresh.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    sync_path(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def first_few(names: list[str], limit: int = 3) -> str:
    """The first few names and how many there are in all."""
    listed = ", ".join(names[:limit])
    return listed if len(names) <= limit else f"{listed}, ... ({len(names)} in all)"


def _refuse_to_replace(target: Path) -> None:
    if not target.exists():
        return
    entries = list(target.iterdir()) if target.is_dir() else [target]
    is_model = (target / "config.json").is_file() and all(entry.is_file() for entry in entries)
    if entries and not is_model:
        raise CheckpointError(f"{target} exists and is no model folder, so it is not replaced; choose another path")


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
            raise CheckpointError(f"{name} {list(tensor.shape)} is not a parameter of this config's model")
        size = tensor.numel() * dtype.itemsize
        if shard and shard_bytes + size > limit:
            write()
            shard_bytes = 0
        # Always a copy: the caller may free or reuse the tensor as soon as it hands over the next.
        shard[name] = torch.empty(tensor.shape, dtype=dtype).copy_(tensor.detach())
        shard_bytes, total_bytes = shard_bytes + size, total_bytes + size
    write()
    missing = sorted(expected.keys() - {name for names in shards for name in names})
    if missing:
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
    hf.save_pretrained(folder)
    _name_generic_class(folder / "tokenizer_config.json")
    ids = {"bos_token_id": hf.bos_token_id, "eos_token_id": hf.eos_token_id, "pad_token_id": hf.pad_token_id}
    ids = {name: value for name, value in ids.items() if value is not None}
    stop_ids = list(getattr(tokenizer, "stop_ids", ()))
    _write_json(folder / "generation_config.json", ids | ({"eos_token_id": stop_ids} if stop_ids else {}))
    return ids


def _name_generic_class(file: Path) -> None:
    """Write transformers 4's name of the class that tokenizer.json alone defines: version 5 knows both names, 4 only its own."""
    config = read_json(file)
    if config.get("tokenizer_class") == "TokenizersBackend":
        _write_json(file, config | {"tokenizer_class": "PreTrainedTokenizerFast"})


def _write_json(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
