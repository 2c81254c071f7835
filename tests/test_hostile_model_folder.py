"""Model folders from anywhere: each fault is one line that names the file, at once, and nothing is built in absurd sizes."""

import importlib
import json
import math
import os
import shutil
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from memrl.model import load_model, read_config, save_model
from memrl.model.hf_config import CheckpointError, dtype_named, longest_text, read_raw_config, yarn_for
from memrl.model.transformer import meta_model
from tests.tiny_folder import make_folder

NASTY = [
    *(0, -1, 1, 2, 1.5, -0.0, 2**31, 10**7, 10**18, -(10**18), 10**299, 1e308, 5e-324, math.nan, math.inf, -math.inf),
    *(
        True,
        False,
        None,
        "",
        "1",
        "false",
        "yarn",
        "a\nb" * 1000,
        "\x1b[31m",
        "\ud800",
        [],
        [1],
        [[[]]],
        [None, "x"],
        {},
        {"a": {}},
    ),
    *(
        {"rope_type": kind, "factor": factor}
        for kind in ("yarn", "linear", "llama3", [])
        for factor in (0, 2, 1e308, math.nan, "2", {})
    ),
    *(
        {"rope_type": "yarn", "factor": 2, "beta_fast": fast, "beta_slow": slow}
        for fast, slow in ((0, 1), (1e-308, 1e308), (-1, 2))
    ),
    {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 1e300, "attention_factor": 1e308, "truncate": "no"},
    {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1e300, "high_freq_factor": 2e300},
    {"rope_theta": 0},
    {"rope_theta": 1.0000000000000002, "rope_type": "yarn", "factor": 2},
    ["sliding_attention", 3],
]
KEYS = (
    "model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "hidden_act rms_norm_eps initializer_range tie_word_embeddings max_position_embeddings use_sliding_window sliding_window "
    "max_window_layers layer_types rope_theta rope_scaling rope_parameters torch_dtype dtype attention_bias mlp_bias "
    "partial_rotary_factor quantization_config num_experts original_max_position_embeddings"
).split()


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("sound") / "model")


@pytest.fixture
def folder(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "model")


def change_config(folder, **changes) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refusal(folder, **how) -> str:
    with pytest.raises(CheckpointError) as error:
        load_model(folder, **how)
    return str(error.value)


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(
    st.sampled_from(("qwen2", "qwen3", "llama", "mistral")),
    st.dictionaries(st.sampled_from(KEYS), st.sampled_from(NASTY), min_size=1, max_size=3),
)
def test_any_config_is_a_model_or_one_refusal(sound, family, changes):
    folder = sound.parent / "fuzzed"
    folder.mkdir(exist_ok=True)
    plain = {"model_type": family, "sliding_window": None}
    raw = json.loads((sound / "config.json").read_text()) | plain | changes
    (folder / "config.json").write_text(json.dumps(raw))
    try:
        config = read_config(folder)
        dtype_named("auto", read_raw_config(folder))
        meta_model(config)
        assert longest_text(config) >= 1
        yarn_for(folder, 10**6)
    except CheckpointError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": 10**18}, "hidden_size must be at most 16777216"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers must be at most 1024"),
        ({"max_position_embeddings": 10**18}, "max_position_embeddings must be at most 2147483647"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, found 'false'"),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": 5}, "layer_types must be a list"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a number"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps must be between 0 and 1"),
        ({"rope_theta": 0}, "rope theta must be above 1"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 1e308}}, "rope factor must be positive and at most 10000"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_fast": 0}}, "rope beta_fast must be between"),
    ],
)
def test_absurd_values_are_named(folder, changes, named):
    change_config(folder, **changes)
    assert named in refusal(folder) and "config.json" in refusal(folder)


def test_the_largest_published_shapes_are_read(folder):
    largest = {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128}
    change_config(folder, **largest, num_key_value_heads=8, vocab_size=262_208, max_position_embeddings=10_485_760)
    assert read_config(folder).num_layers == 126
    assert "the weights in" in refusal(folder)  # and found missing in time


def make_special(path, kind: str) -> None:
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "/dev/zero":
        path.symlink_to("/dev/zero")
    elif kind == "1 GB":
        with path.open("wb") as file:
            file.truncate(10**9)
    else:
        path.write_text(kind)


@pytest.mark.parametrize("kind", ["folder", "pipe", "/dev/zero", "1 GB", "[" * 100_000, '{"vocab_size": 1, "vocab_size": 2}'])
def test_a_config_that_is_no_small_regular_file_is_refused_by_every_command(folder, tmp_path, capsys, kind):
    make_special(folder / "config.json", kind)
    (tmp_path / "a.txt").write_text("red blue")
    for command, arguments in (
        ("infer", [tmp_path / "a.txt", "-q", "name ?", "--model", folder]),
        ("eval", ["--model", folder, "--out", tmp_path / "out"]),
        ("train", ["--dry_run", "--config", "configs/memagent_7b.yaml", "--model.path", folder]),
    ):
        with pytest.raises(SystemExit) as stop:
            importlib.import_module(f"memrl.commands.{command}").main(list(map(str, arguments)))
        errors = capsys.readouterr().err
        assert stop.value.code == 2 and errors.count("\n") == 1 and "config.json" in errors and len(errors) < 600


@pytest.mark.parametrize(
    ("weight_map", "named"),
    [
        (
            {"a": "../../other/model.safetensors"},
            "'../../other/model.safetensors', which is not the name of a file in",
        ),
        ({"a": "/etc/passwd"}, "'/etc/passwd', which is not"),
        ({"a": ".."}, "lacks .."),
        ({"a": ""}, "lacks model"),
        ({"a": 5}, "names 5, which is not"),
        ({"a": ["x"]}, "which is not"),
        ({"a": "nowhere.safetensors"}, "lacks nowhere.safetensors"),
        ([], "has no weight_map"),
        ("x", "has no weight_map"),
        (None, "has no weight_map"),
    ],
)
def test_an_index_names_files_of_its_own_folder_only(folder, weight_map, named):
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert named in refusal(folder)


def test_an_index_nested_deeply_is_refused(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map":' * 50_000)
    assert "model.safetensors.index.json is nested too deeply" in refusal(folder)


def test_a_tensor_in_two_shards_is_refused(tiny_model, tmp_path):
    save_model(tiny_model, tmp_path / "model", max_shard_bytes=100_000)
    first, second, *_ = sorted((tmp_path / "model").glob("*.safetensors"))
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: tensor + 1}, second)
    assert f"both hold {name}" in refusal(tmp_path / "model")


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_a_damaged_header_is_one_refusal(sound, data):
    folder = sound.parent / "damaged"
    shutil.copytree(sound, folder, dirs_exist_ok=True)
    content = bytearray((sound / "model.safetensors").read_bytes())
    end = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    (folder / "model.safetensors").write_bytes(content)
    try:
        load_model(folder)
    except CheckpointError as error:
        assert str(error)


@pytest.mark.parametrize("size", [17 * 2**20, 2**63, 2**64 - 1])
def test_a_header_of_absurd_size_is_not_read(folder, size):
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", size))
        file.truncate(18 * 2**20)
    assert f"its header would have {size} bytes" in refusal(folder)


@pytest.mark.parametrize(
    "header", [{"x": {"dtype": "F32", "shape": [2**62, 8], "data_offsets": [0, 4]}}, {"x": 5}, [], "{" * 5000]
)
def test_a_header_that_lies_is_refused(folder, header):
    text = header if isinstance(header, str) else json.dumps(header)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text.encode() + b"1234")
    assert "model.safetensors is damaged" in refusal(folder)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_weight_that_is_not_finite_is_named(folder, value, dtype):
    name = "model.layers.1.mlp.up_proj.weight"
    state = load_file(folder / "model.safetensors")
    state[name].view(-1)[-1] = value
    save_file(state, folder / "model.safetensors")
    assert f"holds a weight in {name} that is not a finite {dtype} number" in refusal(folder, dtype=dtype)


def test_a_weight_too_large_for_the_dtype_is_named(folder):
    state = load_file(folder / "model.safetensors")
    state["model.norm.weight"][0] = 1e6
    save_file(state, folder / "model.safetensors")
    assert torch.isfinite(load_model(folder).model.norm.weight).all()
    assert "not a finite float16 number" in refusal(folder, dtype="float16")
