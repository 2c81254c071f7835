"""Models larger than one device: layers spread over several GPUs, and what does not fit kept in CPU memory or on disk.

accelerate decides where the layers go and moves the activations between them with hooks; it is for inference. Every layer gets
the attention context as the same object wherever it runs, so a context has to keep what belongs to a layer on the layer's device
(`Transformer.layer_devices()`). It must not have a method `to`, or accelerate would take it for a tensor and copy it.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from memrl.model.loader import empty_model, fill_model
from memrl.model.saver import EMBEDDING, OUTPUT, first_few
from memrl.model.transformer import Transformer
from memrl.model.weights import StoredTensor

_EMBEDDING_MODULE, _OUTPUT_MODULE = EMBEDDING.removesuffix(".weight"), OUTPUT.removesuffix(".weight")
Place = torch.device | str | int


def load_dispatched(
    path: str | Path,
    dtype: str = "auto",
    device_map: str | Mapping[str, Place] = "auto",
    max_memory: Mapping[int | str, int | str] | None = None,
    progress: bool = False,
    yarn: float = 0.0,
) -> Transformer:
    """The model in a Hugging Face folder, spread over devices, in evaluation mode.

    Token ids and positions may be on any device; logits come back to the ids' device.

    Args:
        path, dtype, progress, yarn: as for `load_model`.
        device_map: "auto" shares the layers out among all GPUs, as evenly as they have room, and what is left goes to CPU memory
            and then to disk. Or a place for every module: {"model.embed_tokens": 0, "model.layers": 1, "model.norm": 1,
            "lm_head": "cpu"}; a place is a GPU's number, a device, "cpu", or "disk". Layers stay whole. Where there is a GPU in
            the map, modules on "cpu" are computed on the first one; modules on "disk" are read from the checkpoint's own files
            at every use, so those have to stay as they are.
        max_memory: how much of each may hold weights, for "auto": {0: "70GiB", 1: "70GiB", "cpu": "100GiB"}. What is not named is
            not used. None for all the free memory.

    Raises ValueError for a map that does not fit the model or this machine, and CheckpointError as `load_model` does.
    """
    model, stored = empty_model(path, dtype, yarn)
    if device_map == "auto":
        given = _share_out(model, max_memory)
    elif isinstance(device_map, Mapping):
        given = dict(device_map)
    else:
        raise ValueError(f"device_map is {device_map!r}; allowed are 'auto' and a mapping from modules to devices")
    places = _place_units(model, given)
    if device_map == "auto" and model.config.tie_word_embeddings:
        places[_OUTPUT_MODULE] = places[_EMBEDDING_MODULE]  # one tensor, so one place
    _check_tie(model, places)
    fill_model(model, stored, lambda name: _place_of(name, places), progress)
    if len(set(places.values())) == 1 and "disk" not in places.values():
        return model
    main = next((place for place in places.values() if place not in ("cpu", "disk")), "cpu")
    _attach_hooks(model, places, main, stored)
    homes = [places[f"model.layers.{layer}"] for layer in range(model.config.num_layers)]
    model.placement = [torch.device(main if home in ("cpu", "disk") else home) for home in homes]
    return model


def _share_out(model: Transformer, max_memory: Mapping | None) -> dict:
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    whole = ["Layer"]
    try:
        room = get_balanced_memory(model, max_memory=dict(max_memory) if max_memory else None, no_split_module_classes=whole)
        return infer_auto_device_map(model, max_memory=room, no_split_module_classes=whole)
    except (ValueError, TypeError) as error:
        raise ValueError(f"max_memory {max_memory!r} cannot be used: {str(error).splitlines()[0]}") from None


def _checked_place(module: str, place: Place) -> str:
    """ "cpu", "disk" or a device's full name."""
    if str(place) in ("cpu", "disk"):
        return str(place)
    try:
        device = torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
    except (RuntimeError, TypeError):
        raise ValueError(
            f"device_map puts {module!r} on {place!r}; allowed are a GPU's number, a device such as 'cuda:1', 'cpu' and 'disk'"
        ) from None
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if device.index >= count:
            raise ValueError(f"device_map puts {module!r} on {device}, but PyTorch finds {count} GPUs here; use 'cpu' or 'disk'")
    return str(device)


def _place_units(model: Transformer, given: Mapping[str, Place]) -> dict[str, str]:
    """The place of the embedding, of every layer, the norm and the output layer; ValueError where the map given does not fit."""
    if unknown := sorted(map(str, given.keys() - {name for name, _ in model.named_modules()})):
        raise ValueError(f"device_map names {first_few(unknown)}, which this model has not; say model.layers.0 or lm_head")
    if inside := sorted(key for key in given if re.match(r"model\.layers\.\d+\.", key)):
        raise ValueError(f"device_map cuts a layer in pieces ({first_few(inside)}); give one place for each model.layers.N")
    places = {module: _checked_place(module, place) for module, place in given.items()}
    layers = [f"model.layers.{layer}" for layer in range(model.config.num_layers)]
    units = {unit: _place_of(unit, places) for unit in (_EMBEDDING_MODULE, *layers, "model.norm", _OUTPUT_MODULE)}
    if missing := [unit for unit, place in units.items() if place is None]:
        raise ValueError(f"device_map has no place for {first_few(missing)}; name every module, or '' for all the others")
    return units


def _check_tie(model: Transformer, places: Mapping[str, str]) -> None:
    if model.config.tie_word_embeddings and places[_EMBEDDING_MODULE] != places[_OUTPUT_MODULE]:
        raise ValueError(
            f"device_map puts {_OUTPUT_MODULE} and {_EMBEDDING_MODULE} on different devices, but this model ties them to one "
            "tensor; give both the same place"
        )


def _place_of(name: str, places: Mapping[str, str]) -> str | None:
    """The place of the module, or of the closest one around it that has a place; None where there is none."""
    while name not in places:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return places[name]


def _attach_hooks(model: Transformer, places: dict[str, str], main: str, stored: dict[str, StoredTensor]) -> None:
    import logging

    from accelerate import dispatch_model

    on_disk = {
        name: {"safetensors_file": str(tensor.file), "weight_name": tensor.name}
        for name, tensor in stored.items()
        if _place_of(name, places) == "disk"
    }
    if model.config.tie_word_embeddings:  # either name, or both, may be stored
        for name, other in ((EMBEDDING, OUTPUT), (OUTPUT, EMBEDDING)):
            if other in on_disk:
                on_disk.setdefault(name, on_disk[other])
    logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)  # it warns of what was asked for
    dispatch_model(model, places, main_device=main, offload_index=on_disk or None)
