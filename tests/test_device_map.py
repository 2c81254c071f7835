"""Models spread over devices: the same logits as on one device, for every placement."""

import re

import pytest
import torch

from memrl.model import PackedContext, describe_model, load_dispatched, load_model, logits_of, save_model
from memrl.model.loader import CheckpointError
from memrl.model.saver import EMBEDDING, OUTPUT

IDS = [5, 0, 511, 17, 17, 300, 42, 9]
HALF = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu", "lm_head": "cpu"}
MAPS = {
    "one layer on disk": HALF,
    "all on disk": {"": "disk"},
    "layers on disk": {"": "cpu", "model.layers": "disk"},
    "ends on disk": {"model.layers": "cpu", "model.norm": "disk", "model.embed_tokens": "disk", "lm_head": "disk"},
    "all on the cpu": {"": "cpu"},
}


@pytest.fixture(params=["tied", "untied"])
def model(request, tiny_model, untied_model):
    return tiny_model if request.param == "tied" else untied_model


@pytest.fixture
def folder(model, tmp_path):
    save_model(model, tmp_path / "model", max_shard_bytes=100_000)
    return tmp_path / "model"


def weights_on_meta(model) -> set[str]:
    return {name for name, p in model.named_parameters(remove_duplicate=False) if p.is_meta}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MAPS)
def test_logits_equal_those_of_the_model_in_one_piece(name, dtype, folder):
    whole = load_model(folder, dtype)
    spread = load_dispatched(folder, dtype, MAPS[name])
    assert bool(weights_on_meta(spread)) == ("disk" in MAPS[name].values())
    assert spread.dtype == whole.dtype and spread.device == torch.device("cpu") and not spread.training
    for _ in range(2):  # offloaded weights leave after each use and must come back
        assert torch.equal(logits_of(spread, IDS), logits_of(whole, IDS))
    with torch.no_grad():
        chosen, targets = torch.tensor([1, 6]), torch.tensor([0, 500])
        ours, theirs = (m(torch.tensor(IDS), PackedContext([5, 3]), chosen, targets, 0.7) for m in (spread, whole))
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


def test_what_does_not_fit_into_memory_stays_on_disk(folder, model):
    largest = max(p.nbytes for p in model.parameters())
    spread = load_dispatched(folder, max_memory={"cpu": largest + 150_000})
    offloaded = weights_on_meta(spread)
    assert offloaded and EMBEDDING not in offloaded
    assert torch.equal(logits_of(spread, IDS), logits_of(load_model(folder), IDS))


def test_auto_keeps_a_model_that_fits_in_one_piece(folder, model):
    spread = load_dispatched(folder)
    assert not weights_on_meta(spread) and not hasattr(spread, "_hf_hook")
    assert (spread.lm_head.weight is spread.model.embed_tokens.weight) == model.config.tie_word_embeddings
    assert torch.equal(logits_of(spread, IDS), logits_of(model, IDS))


def test_auto_keeps_tied_weights_together(model_folder, tiny_model, monkeypatch):
    """On one place they take the memory of one tensor, even where accelerate would part them."""
    import accelerate

    parted = {"model.embed_tokens": "cpu", "model.layers": "cpu", "model.norm": "disk", "lm_head": "disk"}
    monkeypatch.setattr(accelerate, "infer_auto_device_map", lambda *args, **kwargs: parted)
    spread = load_dispatched(model_folder)
    assert weights_on_meta(spread) == {"model.norm.weight"}
    assert spread.lm_head.weight is spread.model.embed_tokens.weight
    assert torch.equal(logits_of(spread, IDS), logits_of(tiny_model, IDS))


def test_every_layer_gets_the_very_same_context(folder):
    """A context that a hook had copied would leave the sampler's cache empty."""
    seen = []

    class Spy(PackedContext):
        def attend(self, layer, q, k, v):
            seen.append((self, layer, q.device))
            return super().attend(layer, q, k, v)

    spread, context = load_dispatched(folder, device_map=HALF), Spy([len(IDS)])
    spread(torch.tensor(IDS), context)
    assert [(one is context, layer) for one, layer, _ in seen] == [(True, 0), (True, 1)]
    assert [device for *_, device in seen] == spread.layer_devices() == [torch.device("cpu")] * 2


def test_layer_devices_of_a_model_in_one_piece_are_its_device(tiny_model):
    assert tiny_model.layer_devices() == [tiny_model.device] * 2


@pytest.mark.parametrize("stored", [(EMBEDDING,), (OUTPUT,), (EMBEDDING, OUTPUT)])
def test_tied_weights_on_disk_are_found_under_either_name(stored, tiny_model, model_folder):
    from safetensors.torch import load_file, save_file

    state = load_file(model_folder / "model.safetensors")
    tied = state.pop(EMBEDDING)
    save_file(state | {name: tied.clone() for name in stored}, model_folder / "model.safetensors", metadata={"format": "pt"})
    for device_map in ({"": "disk"}, MAPS["layers on disk"]):
        spread = load_dispatched(model_folder, device_map=device_map)
        assert torch.equal(logits_of(spread, IDS), logits_of(tiny_model, IDS))
    assert spread.lm_head.weight is spread.model.embed_tokens.weight


def test_description_says_how_much_is_offloaded(tiny_model, model_folder):
    layer = sum(p.nbytes for p in tiny_model.model.layers[1].parameters()) / 2**20
    text = describe_model(load_dispatched(model_folder, device_map=HALF))
    assert f"({layer:.1f} MiB of it offloaded)" in text


# ---- what is refused


@pytest.mark.parametrize(
    ("device_map", "parts"),
    [
        ("balanced", ["'balanced'", "'auto'"]),
        ({"": "gpu"}, ["''", "'gpu'", "cuda:1"]),
        ({"": None}, ["None"]),
        ({"": "cpu", "model.layers.7": "disk"}, ["model.layers.7", "this model lacks"]),
        ({"": "cpu", "model.layers.0.mlp": "disk"}, ["model.layers.0.mlp", "one place for each"]),
        ({"model": "cpu"}, ["no place", "lm_head"]),
        ({"": "cpu", "lm_head": "disk"}, ["lm_head", "model.embed_tokens", "same place"]),
        ({"": 99}, ["cuda:99", "GPUs"]),
    ],
)
def test_map_that_does_not_fit_names_what_is_wrong(device_map, parts, model_folder):
    with pytest.raises(ValueError) as caught:
        load_dispatched(model_folder, device_map=device_map)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, f"{part!r} is not in {message!r}"


def test_unreadable_memory_size_is_named(model_folder):
    with pytest.raises(ValueError, match=re.escape("{'cpu': 'much'}")):
        load_dispatched(model_folder, max_memory={"cpu": "much"})


def test_broken_checkpoint_is_refused_as_by_load_model(model_folder):
    (model_folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="damaged or cut short"):
        load_dispatched(model_folder, device_map=HALF)
