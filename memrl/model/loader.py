"""Hugging Face model folders in and out; safetensors only, nothing is ever unpickled.

Reading and writing go tensor by tensor: loading takes the memory of the weights themselves, saving that of
one shard.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from memrl.files import sync_path, sync_tree
from memrl.model.attention import PackedContext
from memrl.model.hf_config import CheckpointError, config_to_json, read_config, read_json, read_raw_config
from memrl.model.transformer import Transformer, TransformerConfig

__all__ = [
    "CheckpointError",
    "from_scratch",
    "load_model",
    "logits_of",
    "read_config",
    "save_model",
    "save_state",
]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHARD_BYTES = 5_000_000_000
_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_AGAIN = "download or copy it again"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def load_model(path: str | Path, dtype: str = "auto", device: torch.device | str = "cpu") -> Transformer:
    """The model in a Hugging Face folder, in evaluation mode.

    Args:
        path: a folder with config.json and model.safetensors, or with shards and their index.
        dtype: of the weights in memory, "float32", "bfloat16" or "float16"; "auto" for config.json's.

    Raises CheckpointError (a ValueError): one line that names the file or tensor at fault and the fix.
    """
    folder = Path(path)
    config = read_config(folder)
    target = _dtype_named(dtype, read_raw_config(folder))
    with torch.device("meta"):
        model = Transformer(config)
    files = _locate(folder, model)
    state: dict[str, Tensor] = {}
    for file, names in files.items():
        with _open(file) as source:
            for name in names:
                # A copy, never the mapped file itself: who replaces the file later must not change the model.
                tensor = source.get_tensor(name)
                wanted = _EMBEDDING if config.tie_word_embeddings and name == _OUTPUT else name
                if wanted in state:
                    _check_tie(folder, state[wanted], tensor)
                    continue
                state[wanted] = torch.empty(tensor.shape, dtype=target, device=device).copy_(tensor)
    if config.tie_word_embeddings:
        state[_OUTPUT] = state[_EMBEDDING]
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    return model.eval()


def from_scratch(config: TransformerConfig, seed: int, dtype: str = "float32") -> Transformer:
    """A randomly initialised model; the weights are a function of config and seed alone, rounded to dtype."""
    with torch.device("meta"):
        model = Transformer(config)
    model.to_empty(device="cpu")
    model.tie_weights()  # to_empty gives every module a tensor of its own
    model.init_weights(torch.Generator().manual_seed(seed))
    return model.to(_dtype_named(dtype, {}))


@torch.no_grad()
def logits_of(model: Transformer, ids: list[int]) -> Tensor:
    """Next-token logits after every token of one sequence: fp32 [len(ids), V], without gradient."""
    vocab_size = model.config.vocab_size
    if not ids or min(ids) < 0 or max(ids) >= vocab_size:
        raise ValueError(f"ids must be one or more token ids from 0 to {vocab_size - 1}")
    return model(torch.tensor(ids, device=model.device), PackedContext([len(ids)], model.device))


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
        stored = _dtype_named(dtype, {})
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


def _dtype_named(dtype: str, raw: dict) -> torch.dtype:
    name = dtype
    if dtype == "auto":
        name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    name = str(name).removeprefix("torch.")
    if name not in DTYPES:
        where = "config.json's dtype" if dtype == "auto" else "dtype"
        raise CheckpointError(f"{where} {name!r} is not supported; allowed: {', '.join(DTYPES)}")
    return DTYPES[name]


def _open(file: Path):
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        with file.open("rb") as start:
            if start.read(40).startswith(b"version https://git-lfs"):
                raise CheckpointError(
                    f"{file} is a Git LFS pointer, not weights; run `git lfs pull`"
                ) from None
        raise CheckpointError(f"{file} is damaged or cut short ({error}); {_AGAIN}") from None


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if (folder / _INDEX).is_file():
        weight_map = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{folder / _INDEX} has no weight_map; {_AGAIN}")
        files = sorted({folder / str(name) for name in weight_map.values()})
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise CheckpointError(f"{folder} lacks {_some(missing)}, which {_INDEX} names; {_AGAIN}")
        return files
    pickles = sorted(file.name for suffix in ("*.bin", "*.pt", "*.pth") for file in folder.glob(suffix))
    if pickles:
        raise CheckpointError(
            f"{folder} holds {_some(pickles)} but no {_SINGLE}; memrl reads safetensors only: convert with "
            "transformers (AutoModelForCausalLM.from_pretrained, then save_pretrained into another folder)"
        )
    found = sorted(file.name for file in folder.glob("*.safetensors"))
    beside = f" (only {_some(found)})" if found else ""
    raise CheckpointError(f"{folder} holds neither {_SINGLE} nor {_INDEX}{beside}; {_AGAIN}")


def _locate(folder: Path, model: Transformer) -> dict[Path, list[str]]:
    """Which tensors to take from which file; CheckpointError unless they are exactly the model's."""
    expected = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    found: dict[str, list[int]] = {}
    files: dict[Path, list[str]] = {}
    for file in _weight_files(folder):
        with _open(file) as source:
            names = [name for name in source.keys() if name not in found]
            # Frequencies are computed; old checkpoints store them as well.
            files[file] = [name for name in names if not name.endswith("rotary_emb.inv_freq")]
            found |= {name: list(source.get_slice(name).get_shape()) for name in files[file]}
    missing = expected.keys() - found.keys()
    if model.config.tie_word_embeddings and len(missing & {_EMBEDDING, _OUTPUT}) == 1:
        missing -= {_EMBEDDING, _OUTPUT}
    wrong = [
        f"{name} (found {shape}, expected {expected[name]})"
        for name, shape in sorted(found.items())
        if name in expected and shape != expected[name]
    ]
    problems = [
        f"{what} {_some(names)}"
        for what, names in (
            ("missing", sorted(missing)),
            ("unexpected", sorted(found.keys() - expected.keys())),
            ("wrong shape of", wrong),
        )
        if names
    ]
    if problems:
        raise CheckpointError(f"the weights in {folder} do not fit its config.json: {'; '.join(problems)}")
    return files


def _check_tie(folder: Path, first: Tensor, second: Tensor) -> None:
    if not torch.equal(first, second.to(first.device, first.dtype)):
        raise CheckpointError(
            f"{folder} ties its output layer to the embedding, but stores two different tensors for them; "
            "set tie_word_embeddings to false in config.json if the model was trained untied"
        )


def _some(names: list[str], limit: int = 3) -> str:
    """The first few names and how many there are in all."""
    listed = ", ".join(names[:limit])
    return listed if len(names) <= limit else f"{listed}, ... ({len(names)} in all)"


def _refuse_to_replace(target: Path) -> None:
    if not target.exists():
        return
    entries = list(target.iterdir()) if target.is_dir() else [target]
    is_model = (target / "config.json").is_file() and all(entry.is_file() for entry in entries)
    if entries and not is_model:
        raise CheckpointError(
            f"{target} exists and is no model folder, so it is not replaced; choose another path"
        )


def _write_weights(
    pairs: Iterable[tuple[str, Tensor]], config: TransformerConfig, dtype: torch.dtype, folder: Path, limit: int
) -> None:
    with torch.device("meta"):
        expected = {name: tensor.shape for name, tensor in Transformer(config).state_dict().items()}
    if config.tie_word_embeddings:
        del expected[_OUTPUT]
    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    shard_bytes = total_bytes = 0

    def write() -> None:
        save_file(shard, folder / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    for name, tensor in pairs:
        if config.tie_word_embeddings and name == _OUTPUT:
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
        raise CheckpointError(f"the model cannot be saved without {_some(missing)}")
    _name_shards(folder, shards, total_bytes)


def _name_shards(folder: Path, shards: list[list[str]], total_bytes: int) -> None:
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / _SINGLE)
        return
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{number}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / _INDEX, index)


def _write_tokenizer(tokenizer, folder: Path) -> dict:
    """Write the tokenizer's files and generation_config.json; returns the special ids for config.json."""
    hf = getattr(tokenizer, "hf", tokenizer)
    hf.save_pretrained(folder)
    ids = {"bos_token_id": hf.bos_token_id, "eos_token_id": hf.eos_token_id, "pad_token_id": hf.pad_token_id}
    ids = {name: value for name, value in ids.items() if value is not None}
    stop_ids = list(getattr(tokenizer, "stop_ids", ()))
    _write_json(folder / "generation_config.json", ids | ({"eos_token_id": stop_ids} if stop_ids else {}))
    return ids


def _write_json(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
