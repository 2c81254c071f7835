"""Load a model larger than one device: layers spread over several GPUs, and the rest in CPU memory or on disk.

accelerate assigns the layers to devices and moves the activations between them with hooks; for inference only. Every layer gets
the same attention context object, so the context has to keep each layer's data on that layer's device
(`Transformer.layer_devices()`). It must not have a method `to`, because accelerate would treat it as a tensor and copy it.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
        device_map: "auto" distributes the layers evenly over all GPUs; the rest goes to CPU memory and then to disk. Or a
            place for every module: {"model.embed_tokens": 0, "model.layers": 1, "model.norm": 1, "lm_head": "cpu"}, where a place
            is a GPU's number, a device, "cpu", or "disk". Layers cannot be split. If the map has a GPU, modules on "cpu" are
            computed on the first one. Modules on "disk" are read from the checkpoint's files at every use, so those must not
            change.
        max_memory: memory for weights per device, for "auto": {0: "70GiB", 1: "70GiB", "cpu": "100GiB"}; other devices are not
            used. None uses all free memory.

    Raises:
        ValueError: the map does not fit the model or this machine.
        CheckpointError: as for `load_model`.
    """
    model, stored = empty_model(path, dtype, yarn)
    if device_map == "auto":
        given = _automatic_map(model, max_memory)
    elif isinstance(device_map, Mapping):
        given = dict(device_map)
    else:
        raise ValueError(f"device_map is {device_map!r}; allowed are 'auto' and a mapping from modules to devices")
    places = _checked_places(model, given)
    if device_map == "auto" and model.config.tie_word_embeddings:
        places[_OUTPUT_MODULE] = places[_EMBEDDING_MODULE]  # the same tensor
    if model.config.tie_word_embeddings and places[_EMBEDDING_MODULE] != places[_OUTPUT_MODULE]:
        raise ValueError(
            f"device_map puts {_OUTPUT_MODULE} and {_EMBEDDING_MODULE} on different devices, but this model ties them to one "
            "tensor; give both the same place"
        )
    fill_model(model, stored, lambda name: _place_of(name, places), progress)
    if len(set(places.values())) == 1 and "disk" not in places.values():
        return model
    main = next((place for place in places.values() if place not in ("cpu", "disk")), "cpu")
    _attach_hooks(model, places, main, stored)
    homes = [places[f"model.layers.{layer}"] for layer in range(model.config.num_layers)]
    model.placement = [torch.device(main if home in ("cpu", "disk") else home) for home in homes]
    return model


def _automatic_map(model: Transformer, max_memory: Mapping | None) -> dict:
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    unsplit = ["Layer"]
    try:
        limits = get_balanced_memory(model, max_memory=dict(max_memory) if max_memory else None, no_split_module_classes=unsplit)
        return infer_auto_device_map(model, max_memory=limits, no_split_module_classes=unsplit)
    except (ValueError, TypeError) as error:
        raise ValueError(f"max_memory {max_memory!r} cannot be used: {str(error).splitlines()[0]}") from None


def _checked_place(module: str, place: Place) -> str:
    """The place as "cpu", "disk" or a device's full name."""
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
            raise ValueError(f"device_map puts {module!r} on {device}, but PyTorch finds {count} GPUs; use 'cpu' or 'disk'")
    return str(device)


def _checked_places(model: Transformer, given: Mapping[str, Place]) -> dict[str, str]:
    """The place of the embedding, every layer, the norm and the output layer; ValueError if the map does not fit the model."""
    if unknown := sorted(map(str, given.keys() - {name for name, _ in model.named_modules()})):
        raise ValueError(f"device_map names {first_few(unknown)}, which this model lacks; use names like model.layers.0")
    if inside := sorted(key for key in given if re.match(r"model\.layers\.\d+\.", key)):
        raise ValueError(f"device_map splits a layer ({first_few(inside)}); give one place for each model.layers.N")
    places = {module: _checked_place(module, place) for module, place in given.items()}
    layers = [f"model.layers.{layer}" for layer in range(model.config.num_layers)]
    units = {unit: _place_of(unit, places) for unit in (_EMBEDDING_MODULE, *layers, "model.norm", _OUTPUT_MODULE)}
    if missing := [unit for unit, place in units.items() if not place]:
        raise ValueError(f"device_map has no place for {first_few(missing)}; name every module, or use '' for all others")
    return units


def _place_of(name: str, places: Mapping[str, str]) -> str:
    """The place of a module or tensor, or else of the closest module around it; "" if none has a place."""
    while name and name not in places:
        name = name.rpartition(".")[0]
    return places.get(name, "")


def _attach_hooks(model: Transformer, places: dict[str, str], main: str, stored: dict[str, StoredTensor]) -> None:
    import logging

    from accelerate import dispatch_model

    on_disk: dict[str, Any] = {  # accelerate's annotation of offload_index is too narrow
        name: {"safetensors_file": str(tensor.file), "weight_name": tensor.name}
        for name, tensor in stored.items()
        if _place_of(name, places) == "disk"
    }
    if model.config.tie_word_embeddings:  # the files may hold either name or both
        for name, other in ((EMBEDDING, OUTPUT), (OUTPUT, EMBEDDING)):
            if other in on_disk:
                on_disk.setdefault(name, on_disk[other])
    logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)  # it warns about offloading, which was requested
    main_device: Any = main  # annotated as a torch.device, but handed on to safetensors, which takes only names
    dispatch_model(model, {**places}, main_device=main_device, offload_index=on_disk or None)
