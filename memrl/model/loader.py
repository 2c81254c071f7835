"""Load Hugging Face model folders; safetensors only, nothing is unpickled.

Each tensor is read directly into its final memory, on its device, so loading needs the memory of the weights and one buffer of
`weights.BUFFER_BYTES`.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from memrl.model.attention_context import PackedContext
from memrl.model.hf_config import CheckpointError, dtype_named, read_config, read_object, read_raw_config
from memrl.model.saver import EMBEDDING, INDEX, OUTPUT, SINGLE, first_few
from memrl.model.transformer import Transformer, TransformerConfig, meta_model
from memrl.model.weights import AGAIN, StoredTensor, WeightReader, list_tensors
from memrl.utils.progress import Progress

PATIENCE_SECONDS = 2.0  # a progress bar appears if loading takes longer


def load_model(
    path: str | Path, dtype: str = "auto", device: torch.device | str = "cpu", progress: bool = False, yarn: float = 0.0
) -> Transformer:
    """The model in a Hugging Face folder, in evaluation mode; `device_map.load_dispatched` spreads it over several devices.

    Args:
        path: a folder with config.json and model.safetensors, or with shards and their index.
        dtype: dtype of the weights in memory, "float32", "bfloat16" or "float16"; "auto" uses config.json's.
        progress: show a progress bar on standard error if loading takes longer than two seconds.
        yarn: stretch the positions for longer texts, as in `read_config`; 0 leaves them unchanged.

    Raises:
        CheckpointError (a ValueError): one line that names the file or tensor at fault and the fix.
    """
    model, stored = empty_model(path, dtype, yarn)
    return fill_model(model, stored, lambda name: device, progress)


def empty_model(path: str | Path, dtype: str, yarn: float = 0.0) -> tuple[Transformer, dict[str, StoredTensor]]:
    """A model on the meta device, in its final dtype, and the location of each of its tensors on disk."""
    folder = Path(path)
    config = read_config(folder, yarn)
    target = dtype_named(dtype, read_raw_config(folder))
    model = meta_model(config, target)
    return model, _locate(folder, model)


def fill_model(
    model: Transformer,
    stored: dict[str, StoredTensor],
    device_of: Callable[[str], torch.device | str],
    progress: bool = False,
) -> Transformer:
    """Read the weights of an empty model; those whose device is "disk" are not read and stay on the meta device."""
    wanted = [tensor for name, tensor in stored.items() if device_of(name) != "disk"]
    tied = model.config.tie_word_embeddings
    state: dict[str, Tensor] = {}
    with _shown(sum(tensor.num_bytes for tensor in wanted), progress) as on_bytes:
        reader = WeightReader(on_bytes)
        for tensor in wanted:
            name = EMBEDDING if tied and tensor.name == OUTPUT else tensor.name
            value = reader.read(tensor, model.dtype, device_of(name))
            if name not in state:
                state[name] = value
            elif not torch.equal(state[name], value):
                raise CheckpointError(
                    f"{tensor.file.parent} ties its output layer to the embedding, but stores two different tensors for them; "
                    "set tie_word_embeddings to false in config.json if the model was trained untied"
                )
    if tied and EMBEDDING in state:
        state[OUTPUT] = state[EMBEDDING]
    model.load_state_dict(state, assign=True, strict=len(wanted) == len(stored))
    model.tie_weights()
    return model.eval()


def from_scratch(config: TransformerConfig, seed: int, dtype: str = "float32") -> Transformer:
    """A randomly initialised model; its weights depend on config and seed alone and are rounded to dtype."""
    model = meta_model(config)
    model.to_empty(device="cpu")
    model.tie_weights()  # to_empty gives every module a separate tensor
    model.init_weights(torch.Generator().manual_seed(seed))
    return model.to(dtype_named(dtype, {}))


@torch.no_grad()
def logits_of(model: Transformer, ids: list[int]) -> Tensor:
    """Next-token logits after every token of one sequence: fp32 [len(ids), V], without gradient."""
    vocab_size = model.config.vocab_size
    if not ids or min(ids) < 0 or max(ids) >= vocab_size:
        raise ValueError(f"ids must be one or more token ids from 0 to {vocab_size - 1}")
    return model(torch.tensor(ids, device=model.device), PackedContext([len(ids)], model.device))


def describe_model(model: Transformer, seconds: float | None = None) -> str:
    """One line for people: "qwen2 7.62 B parameters, bfloat16, 14.2 GiB"; with seconds, "loaded ... in 8.1 s".

    For a model on several devices it names the devices of the layers and the size of the offloaded part.
    """
    parameters = list(model.parameters())
    count = sum(p.numel() for p in parameters)
    scale, unit = next((pair for pair in ((1e9, "B"), (1e6, "M")) if count >= pair[0]), (1e3, "K"))
    text = f"{model.config.family} {count / scale:.3g} {unit} parameters, {str(model.dtype).removeprefix('torch.')}, "
    text += _size(sum(p.nbytes for p in parameters))
    offloaded = sum(p.nbytes for p in parameters if p.is_meta)
    if offloaded:
        text += f" ({_size(offloaded)} of it offloaded)"
    devices = Counter(map(str, model.layer_devices()))
    if len(devices) > 1:
        text += ", layers on " + " and ".join(f"{device} ({count})" for device, count in devices.items())
    return text if seconds is None else f"loaded {text} in {seconds:.1f} s"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


@contextmanager
def _shown(total_bytes: int, wanted: bool) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the size of every part read; shows a progress bar after PATIENCE_SECONDS."""
    done, began = 0, time.monotonic()
    with ExitStack() as stack:
        bar: Progress | None = None

        def count(num_bytes: int) -> None:
            nonlocal done, bar
            if wanted and bar is None and time.monotonic() - began >= PATIENCE_SECONDS:
                bar = stack.enter_context(Progress("loading", total_bytes >> 20, "MiB", start=done >> 20))
            done += num_bytes
            if bar is not None:
                bar.set(done >> 20)

        yield count


def _weight_files(folder: Path) -> list[Path]:
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        weight_map = read_object(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{folder / INDEX} has no weight_map; {AGAIN}")
        for name in weight_map.values():
            if not isinstance(name, str) or Path(name).name != name:
                raise CheckpointError(f"{folder / INDEX} names {name!r}, which is not the name of a file in its folder; {AGAIN}")
        files = sorted({folder / name for name in weight_map.values()})
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise CheckpointError(f"{folder} lacks {first_few(missing)}, which {INDEX} names; {AGAIN}")
        return files
    pickles = sorted(file.name for suffix in ("*.bin", "*.pt", "*.pth") for file in folder.glob(suffix))
    if pickles:
        raise CheckpointError(
            f"{folder} holds {first_few(pickles)} but no {SINGLE}; memrl reads safetensors only: convert with "
            "transformers (AutoModelForCausalLM.from_pretrained, then save_pretrained into another folder)"
        )
    found = sorted(file.name for file in folder.glob("*.safetensors"))
    beside = f" (only {first_few(found)})" if found else ""
    raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}{beside}; {AGAIN}")


def _locate(folder: Path, model: Transformer) -> dict[str, StoredTensor]:
    """The stored tensors by name, in file order; CheckpointError unless names and shapes are exactly the model's."""
    expected = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    stored: dict[str, StoredTensor] = {}
    for file in _weight_files(folder):
        for tensor in list_tensors(file):
            if tensor.name.endswith("rotary_emb.inv_freq"):  # in old checkpoints; computed here
                continue
            if tensor.name in stored:
                raise CheckpointError(f"{stored[tensor.name].file} and {file.name} both hold {tensor.name}; {AGAIN}")
            stored[tensor.name] = tensor
    missing = expected.keys() - stored.keys()
    if model.config.tie_word_embeddings and len(missing & {EMBEDDING, OUTPUT}) == 1:
        missing -= {EMBEDDING, OUTPUT}
    wrong = [
        f"{name} (found {list(tensor.shape)}, expected {expected[name]})"
        for name, tensor in sorted(stored.items())
        if name in expected and list(tensor.shape) != expected[name]
    ]
    unexpected = sorted(stored.keys() - expected.keys())
    faults = (("missing", sorted(missing)), ("unexpected", unexpected), ("wrong shape of", wrong))
    if problems := [f"{what} {first_few(names)}" for what, names in faults if names]:
        raise CheckpointError(f"the weights in {folder} do not fit its config.json: {'; '.join(problems)}")
    return stored
