"""Model folders out: round trips with transformers in both directions, and saves that go wrong halfway."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from memrl.model import Transformer, load_model, logits_of, save_model
from memrl.model.hf_config import CheckpointError
from memrl.model.positions import RopeConfig
from memrl.model.saver import save_state

IDS = [5, 0, 511, 17, 17, 300, 42, 9]
YARN = RopeConfig(theta=5e5, kind="yarn", factor=4.0, original_max_position_embeddings=128, beta_fast=16.0)
OUTPUT, BIAS = "lm_head.weight", "model.layers.1.self_attn.k_proj.bias"


def same_weights(a: Transformer, b: Transformer) -> bool:
    mine, theirs = a.state_dict(), b.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_saved_model_loads_as_it_was(tied, dtype, tiny_model, untied_model, tmp_path):
    model = (tiny_model if tied else untied_model).to(getattr(torch, dtype))
    save_model(model, tmp_path / "a" / "model")
    loaded = load_model(tmp_path / "a" / "model")
    assert loaded.config == model.config and loaded.dtype == model.dtype and not loaded.training
    assert same_weights(loaded, model)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert all(p.requires_grad and p.is_contiguous() for p in loaded.parameters())
    assert (OUTPUT in load_file(tmp_path / "a" / "model" / "model.safetensors")) != tied
    with safe_open(tmp_path / "a" / "model" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("rope", [RopeConfig(theta=12_345.0), RopeConfig(kind="linear", factor=2.0), YARN])
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_what_memrl_saves(rope, tied, tiny_config, randomize, tmp_path):
    from transformers import AutoModelForCausalLM

    config = dataclasses.replace(
        tiny_config,
        tie_word_embeddings=tied,
        rope=rope,
        head_size=24,
        rms_norm_eps=1e-5,
        max_position_embeddings=128,
    )
    model = Transformer(config).eval()
    randomize(model, seed=8)
    save_model(model, tmp_path / "model", max_shard_bytes=100_000)
    assert len(list((tmp_path / "model").glob("model-*-of-*.safetensors"))) > 1
    peer = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(peer).__name__ == "Qwen2ForCausalLM" and peer.dtype == torch.float32
    assert peer.config.rope_parameters["rope_type"] == rope.kind
    assert peer.config.rope_parameters["rope_theta"] == rope.theta
    assert peer.config.tie_word_embeddings == tied
    ids = IDS * 20  # 160 tokens, beyond the window of 128
    with torch.no_grad():
        theirs = peer(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits_of(model, ids), theirs, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits_of(load_model(tmp_path / "model"), ids), theirs, rtol=0, atol=1e-5)
    assert load_model(tmp_path / "model").config == config


def test_transformers_keeps_the_dtype_that_memrl_saved(tiny_model, tmp_path):
    from transformers import AutoModelForCausalLM

    save_model(tiny_model.bfloat16(), tmp_path / "model")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").dtype == torch.bfloat16
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto").dtype == torch.bfloat16


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard", ["1GB", "60KB"])
def test_memrl_loads_what_transformers_saves(tied, shard, randomize, tmp_path):
    from transformers import Qwen2Config as PeerConfig
    from transformers import Qwen2ForCausalLM

    peer = Qwen2ForCausalLM(
        PeerConfig(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=1,
            tie_word_embeddings=tied,
            max_position_embeddings=256,
            rope_parameters={"rope_type": "yarn", "rope_theta": 7e5, "factor": 2.0},
        )
    ).eval()
    randomize(peer, seed=6)
    peer.save_pretrained(tmp_path / "peer", max_shard_size=shard)
    assert (tmp_path / "peer" / "model.safetensors.index.json").exists() == (shard == "60KB")
    model = load_model(tmp_path / "peer")
    assert model.config.rope == RopeConfig(theta=7e5, kind="yarn", factor=2.0, original_max_position_embeddings=256)
    with torch.no_grad():
        theirs = peer(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(logits_of(model, IDS), theirs, rtol=0, atol=1e-5)


def test_shards_stay_below_the_limit_and_the_index_names_them(untied_model, tmp_path):
    limit = 40_000
    save_model(untied_model, tmp_path / "model", max_shard_bytes=limit)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    state = untied_model.state_dict()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in state.values())
    assert set(index["weight_map"]) == set(state) and set(index["weight_map"].values()) == {f.name for f in files}
    for number, file in enumerate(files):
        assert file.name == f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        tensors = load_file(file)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= limit
        assert all(index["weight_map"][name] == file.name for name in tensors)
    assert same_weights(load_model(tmp_path / "model"), untied_model)


# ---- saving safely


def test_replacing_a_model_leaves_the_new_one_alone(model_folder, tiny_model, untied_model):
    (model_folder / "notes.txt").write_text("of the old model")
    save_model(untied_model, model_folder)
    assert same_weights(load_model(model_folder), untied_model)
    assert not (model_folder / "notes.txt").exists()
    assert [path.name for path in model_folder.parent.iterdir()] == [model_folder.name]


def test_failed_save_leaves_the_old_model_alone(model_folder, tiny_model):
    pairs = list(tiny_model.state_dict().items())

    def dying():
        yield from pairs[:5]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_state(dying(), tiny_model.config, "float32", model_folder)
    assert same_weights(load_model(model_folder), tiny_model)
    assert [path.name for path in model_folder.parent.iterdir()] == [model_folder.name]


@pytest.mark.parametrize("failing", [".new", ".old"])
def test_failed_rename_leaves_the_old_model_in_place(failing, model_folder, tiny_model, untied_model, monkeypatch):
    rename = Path.rename

    def broken(self, target):
        if self.name.endswith(failing) or Path(target).name.endswith(failing):
            raise OSError("disk")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", broken)
    with pytest.raises(OSError, match="disk"):
        save_model(untied_model, model_folder)
    monkeypatch.undo()
    assert same_weights(load_model(model_folder), tiny_model)
    save_model(untied_model, model_folder)
    assert [path.name for path in model_folder.parent.iterdir()] == [model_folder.name]


def test_save_cut_off_between_the_renames_is_explained_and_repaired(model_folder, tiny_model, untied_model):
    old = model_folder.parent / ".model.old"
    model_folder.rename(old)
    with pytest.raises(CheckpointError, match=re.escape(f"rename {old} to {model_folder}")):
        load_model(model_folder)
    save_model(untied_model, model_folder)
    assert same_weights(load_model(model_folder), untied_model) and not old.exists()


def test_folder_of_something_else_is_not_replaced(tmp_path, tiny_model):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text("{}")
    (tmp_path / "file").write_text("mine")
    for name in ("run", "file"):
        with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / name))):
            save_model(tiny_model, tmp_path / name)
    assert (tmp_path / "run" / "checkpoints").is_dir() and (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_streamed_tensors_may_be_reused_by_the_caller(dtype, tiny_model, tmp_path):
    def gathered():
        for name, tensor in reversed(tiny_model.state_dict().items()):
            buffer = tensor.clone()
            yield name, buffer
            buffer.zero_()

    save_state(gathered(), tiny_model.config, dtype, tmp_path / "model", max_shard_bytes=90_000)
    assert same_weights(load_model(tmp_path / "model"), tiny_model.to(getattr(torch, dtype)))


def test_incomplete_or_foreign_tensors_are_not_saved(tiny_model, tmp_path):
    state = tiny_model.state_dict()
    for change, named in (
        ({BIAS: None}, BIAS),
        ({"model.extra": torch.ones(1)}, "model.extra"),
        ({BIAS: torch.ones(31)}, r"\[31\]"),
    ):
        bad = {name: tensor for name, tensor in (state | change).items() if tensor is not None}
        with pytest.raises(CheckpointError, match=named):
            save_state(bad.items(), tiny_model.config, "float32", tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_tokenizer_and_stop_ids_are_saved_along(shared_data, tiny_config, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(shared_data / "tokenizer" / "qwen2.5-instruct")
    model = Transformer(dataclasses.replace(tiny_config, hidden_size=8, vocab_size=len(tokenizer)))

    class WithStopIds:
        hf, stop_ids = tokenizer, (151643, 151645)

    for given, eos in ((tokenizer, 151645), (WithStopIds(), [151643, 151645])):
        save_model(model, tmp_path / "model", given)
        peer = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        assert peer.generation_config.eos_token_id == eos and peer.config.eos_token_id == 151645
    reread = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert reread.encode("a chunk <|im_end|>") == tokenizer.encode("a chunk <|im_end|>")
    assert reread.chat_template == tokenizer.chat_template
    assert load_model(tmp_path / "model").config == model.config


def test_generic_tokenizer_is_saved_under_the_name_that_every_version_knows(tiny_model, tmp_path):
    from memrl.tokenizer import load_tokenizer
    from tests.test_tokenizer import character_tokenizer

    tokenizer = character_tokenizer()
    save_model(tiny_model, tmp_path / "model", tokenizer)
    raw = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    assert raw["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert load_tokenizer(tmp_path / "model").encode("a chunk") == tokenizer.encode("a chunk")
