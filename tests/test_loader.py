"""Loading model folders: both config dialects, every accepted layout of weights, and every error."""

import io
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from memrl.model import Transformer, TransformerConfig, describe_model, load_model, loader, read_config, save_model, weights
from memrl.model.loader import CheckpointError
from memrl.model.positions import RopeConfig
from memrl.model.saver import save_state

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
BIAS = "model.layers.1.self_attn.k_proj.bias"


def same_weights(a: Transformer, b: Transformer) -> bool:
    mine, theirs = a.state_dict(), b.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def rewrite_config(folder: Path, drop: tuple = (), **changes) -> None:
    raw = json.loads((folder / "config.json").read_text())
    raw = {key: value for key, value in (raw | changes).items() if key not in drop}
    (folder / "config.json").write_text(json.dumps(raw))


def rewrite_weights(folder: Path, change) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def refused(folder: Path, *parts: str, **kwargs) -> str:
    """The one-line message of load_model's refusal, in which every part stands."""
    with pytest.raises(ValueError) as caught:
        load_model(folder, **kwargs)
    message = str(caught.value)
    assert isinstance(caught.value, CheckpointError) and "\n" not in message
    for part in parts:
        assert part in message, f"{part!r} is not in {message!r}"
    return message


@pytest.mark.parametrize(
    ("file", "expected"),
    {
        "Qwen2.5-0.5B-Instruct.config.json": (896, 24, 14, 2, 64, True, 1e-6, 32768),
        "Qwen2.5-1.5B-Instruct.tf5.config.json": (1536, 28, 12, 2, 128, True, 1e-6, 32768),
        "Qwen2.5-7B-Instruct.config.json": (3584, 28, 28, 4, 128, False, 1e-6, 32768),
        "Qwen2.5-14B.config.json": (5120, 48, 40, 8, 128, False, 1e-5, 131072),
    }.items(),
)
def test_real_configs_are_read_in_both_dialects(file, expected, shared_data, tmp_path):
    (tmp_path / "config.json").write_bytes((shared_data / "qwen_configs" / file).read_bytes())
    c = read_config(tmp_path)
    sizes = (c.hidden_size, c.num_layers, c.num_heads, c.num_kv_heads, c.head_size)
    assert (*sizes, c.tie_word_embeddings, c.rms_norm_eps, c.max_position_embeddings) == expected
    assert c.rope == RopeConfig(theta=1e6)


def test_real_shard_index_names_the_tensors_of_its_model(shared_data):
    index = json.loads((shared_data / "qwen_configs" / "Qwen2.5-3B.model.safetensors.index.json").read_text())
    names = set(index["weight_map"])
    with torch.device("meta"):  # only the number of layers matters for the names
        model = Transformer(TransformerConfig(16, 16, 16, 36, 2, 2, 8, tie_word_embeddings=True))
    assert names == set(dict(model.named_parameters()))


@pytest.mark.parametrize(
    "dialect",
    [
        {"rope_theta": 3e5, "rope_scaling": {"type": "yarn", "factor": 4}},
        {"rope_theta": 3e5, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": None}},
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 3e5,
                "factor": 4,
                "partial_rotary_factor": 1,
            }
        },
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 3e5},
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        },
    ],
)
def test_rope_scaling_is_read_in_every_dialect(dialect, model_folder):
    rewrite_config(model_folder, drop=() if "rope_theta" in dialect else ("rope_theta",))
    rewrite_config(model_folder, **dialect)
    expected = RopeConfig(theta=3e5, kind="yarn", factor=4.0, original_max_position_embeddings=32768)
    assert read_config(model_folder).rope == expected


def test_left_out_settings_default_as_in_transformers(model_folder):
    rewrite_config(model_folder, drop=("rope_theta", "rope_scaling", "rms_norm_eps", "tie_word_embeddings", "use_cache"))
    rewrite_config(model_folder, num_key_value_heads=None)
    config = read_config(model_folder)
    assert config.rope == RopeConfig(theta=10_000.0)
    assert (config.rms_norm_eps, config.tie_word_embeddings, config.num_kv_heads) == (1e-6, False, 4)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_auto_dtype_is_the_configs(key, model_folder):
    rewrite_config(model_folder, drop=("torch_dtype",))
    assert load_model(model_folder).dtype == torch.float32
    rewrite_config(model_folder, **{key: "bfloat16"})
    assert load_model(model_folder).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_requested_dtype_is_the_stored_weights_rounded(dtype, model_folder, tiny_model):
    loaded = load_model(model_folder, dtype=dtype)
    assert same_weights(loaded, tiny_model.to(getattr(torch, dtype)))
    assert torch.equal(loaded.inverse_frequencies, tiny_model.inverse_frequencies)
    assert loaded.inverse_frequencies.dtype == torch.float32


@pytest.mark.parametrize("stored", [(EMBEDDING,), (OUTPUT,), (EMBEDDING, OUTPUT)])
def test_tied_checkpoint_may_store_either_name_or_both(stored, model_folder, tiny_model):
    def change(state):
        tied = state.pop(EMBEDDING)
        state.update({name: tied.clone() for name in stored})

    rewrite_weights(model_folder, change)
    loaded = load_model(model_folder)
    assert same_weights(loaded, tiny_model)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_leftover_rotary_frequencies_are_ignored(model_folder, tiny_model):
    rewrite_weights(model_folder, lambda s: s.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert same_weights(load_model(model_folder), tiny_model)


def test_loaded_weights_do_not_follow_the_file(model_folder, tiny_model):
    loaded = load_model(model_folder)
    with (model_folder / "model.safetensors").open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(size // 2)
        file.write(bytes(size - size // 2))
    assert same_weights(loaded, tiny_model)


@pytest.mark.parametrize(
    "window",
    [
        {"sliding_window": None},
        {"sliding_window": 32768},
        {"sliding_window": 16, "max_window_layers": None},
        {"sliding_window": 16, "max_window_layers": 2},
        {"sliding_window": 16, "layer_types": ["full_attention", "full_attention"], "max_window_layers": 0},
    ],
)
def test_sliding_window_that_never_slides_is_accepted(window, model_folder, tiny_model):
    rewrite_config(model_folder, use_sliding_window=True, **window)
    assert same_weights(load_model(model_folder), tiny_model)


# ---- memory and time

SHARD_BYTES, SLACK_BYTES = 48 * 2**20, 20 * 2**20
MEASURE = """
import sys, torch
from memrl.model import load_model
torch.set_num_threads(1)

def memory(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) * 1024

torch.ones(10).bfloat16().float().sum()  # what the first operation allocates is not the loader's
before = memory("VmRSS")
model = load_model(sys.argv[1], dtype=sys.argv[2])
weights = sum(p.nbytes for p in model.parameters())
print(memory("VmHWM") - before - weights, weights)
"""


@pytest.fixture(scope="module")
def sharded_folder(tmp_path_factory) -> Path:
    """220 MiB of bf16 in six files."""
    config = TransformerConfig(8192, 1024, 4096, 6, 8, 2, 128)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Transformer(config).named_parameters()}
    folder = tmp_path_factory.mktemp("sharded") / "model"
    tensors = ((name, torch.full(shape, 0.01 * number)) for number, (name, shape) in enumerate(shapes.items()))
    save_state(tensors, config, "bfloat16", folder, max_shard_bytes=SHARD_BYTES)
    return folder


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell a process its peak memory")
@pytest.mark.parametrize(
    ("dtype", "buffer"), [("bfloat16", 0), pytest.param("float32", weights.BUFFER_BYTES, marks=pytest.mark.slow)]
)
def test_loading_shards_takes_the_memory_of_the_weights_and_less_than_a_shard(dtype, buffer, sharded_folder):
    """A copy of each shard, or maps that stay until the end, would show as one shard or 220 MiB too much."""
    assert len(list(sharded_folder.glob("*.safetensors"))) >= 5
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(sharded_folder), dtype],
        cwd=Path(__file__).parent.parent,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    extra, size = map(int, done.stdout.split())
    assert size > 200 * 2**20
    assert extra <= min(buffer, SHARD_BYTES) + SLACK_BYTES, f"{extra / 2**20:.0f} MiB more than the weights"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_longer_than_the_buffer_are_read_in_pieces(dtype, tiny_model, model_folder, monkeypatch):
    monkeypatch.setattr(weights, "BUFFER_BYTES", 1000)
    assert same_weights(load_model(model_folder, dtype), tiny_model.to(getattr(torch, dtype)))


def test_file_that_shrinks_while_it_is_read_is_named(model_folder, monkeypatch):
    whole = loader.list_tensors

    def then_cut(file):
        found = whole(file)
        os.truncate(file, file.stat().st_size - 100)
        return found

    monkeypatch.setattr(loader, "list_tensors", then_cut)
    refused(model_folder, "model.safetensors ended within", "again")


def test_progress_is_shown_on_request_and_only_where_loading_takes_long(model_folder, monkeypatch, capsys):
    load_model(model_folder, progress=True)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(loader, "PATIENCE_SECONDS", 0.0)
    load_model(model_folder)
    assert capsys.readouterr() == ("", "")
    load_model(model_folder, progress=True)
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("loading  ") and "MiB  100%" in err


def test_progress_tells_the_time_left_from_the_bytes_read(monkeypatch):
    ticks = itertools.count(0.0, 3.0)  # every look at the clock is three seconds later
    stream = io.StringIO()
    monkeypatch.setattr(loader.time, "monotonic", lambda: next(ticks))
    plain = loader.Progress
    monkeypatch.setattr(
        loader, "Progress", lambda *args, **kwargs: plain(*args, **kwargs, stream=stream, every=1, clock=lambda: next(ticks))
    )
    with loader._shown(100 << 20, True) as on_bytes:
        for _ in range(10):
            on_bytes(10 << 20)
    lines = stream.getvalue().splitlines()
    assert "loading  10/100 MiB  10%" in lines[0] and "left" in lines[0]
    assert "100/100 MiB  100%" in lines[-1]


def test_description_gives_family_size_type_and_time(tiny_model):
    with torch.device("meta"):
        large = Transformer(TransformerConfig(152064, 3584, 18944, 28, 28, 4, 128)).bfloat16()
    assert "qwen2 7.62 B parameters, bfloat16, 14.2 GiB" in describe_model(large)
    assert describe_model(tiny_model) == "qwen2 107 K parameters, float32, 0.4 MiB"
    assert describe_model(tiny_model, 8.06) == "loaded qwen2 107 K parameters, float32, 0.4 MiB in 8.1 s"
    tiny_model.placement = [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert describe_model(tiny_model).endswith("MiB, layers on cuda:0 (1) and cuda:1 (1)")


# ---- what is refused


def test_missing_folder_is_named(tmp_path):
    refused(tmp_path / "nowhere", "nowhere", "does not exist", "hf download")


def test_folder_without_config_is_named(model_folder):
    (model_folder / "config.json").unlink()
    refused(model_folder, str(model_folder), "config.json")


@pytest.mark.parametrize("content", [b"{", b"", b"[1, 2]", b"\xff\xfe{}"])
def test_broken_config_is_named(content, model_folder):
    (model_folder / "config.json").write_bytes(content)
    refused(model_folder, str(model_folder / "config.json"), "JSON", "again")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"model_type": "qwen3_moe"}, ["model_type 'qwen3_moe'", "qwen2, qwen3, llama, mistral"]),
        ({"model_type": None}, ["model_type None", "qwen2"]),
        ({"model_type": "llama", "mlp_bias": True}, ["mlp_bias", "feed-forward"]),
        ({"num_experts": 64}, ["num_experts is 64", "dense"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5", "whole heads"]),
        ({"rope_scaling": {"type": "linear", "factor": 2, "partial_rotary_factor": 0.5}}, ["partial_rotary_factor 0.5"]),
        ({"hidden_act": "gelu"}, ["hidden_act 'gelu'", "silu"]),
        ({"quantization_config": {"bits": 4}}, ["quantised", "unquantised"]),
        ({"hidden_size": "64"}, ["hidden_size", "'64'"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ({"hidden_size": 66}, ["66", "4"]),
        ({"head_dim": 15}, ["15", "even"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads (4)", "num_key_value_heads (3)"]),
        ({"rope_theta": "big"}, ["rope_theta", "'big'"]),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1]}}, ["longrope", "default, linear, yarn"]),
        ({"rope_scaling": {"type": "yarn"}}, ["yarn", "factor"]),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 0}}, ["original_max", "0"]),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0, "high_freq_factor": 4}}, ["llama3", "low_freq_factor"]),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4}},
            ["low_freq_factor (4.0)", "high_freq_factor (4.0)"],
        ),
        ({"rope_scaling": "yarn"}, ["rope_scaling", "'yarn'"]),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 0.7}}, ["mscale"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, ["full_attention"]),
        (
            {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 1},
            ["512", "use_sliding_window"],
        ),
        (
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention"] * 2},
            ["window 8"],
        ),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
            ["window 8"],
        ),
        ({"model_type": "mistral", "sliding_window": 4096}, ["window 4096", "texts up to 32768", "max_position_embeddings"]),
        ({"torch_dtype": "int8"}, ["int8", "float32, bfloat16, float16"]),
    ],
)
def test_unsupported_config_names_the_setting(changes, parts, model_folder):
    rewrite_config(model_folder, **changes)
    refused(model_folder, *parts)


def test_mistral_without_the_key_has_a_window_as_in_transformers(model_folder):
    rewrite_config(model_folder, drop=("sliding_window", "use_sliding_window"), model_type="mistral")
    refused(model_folder, "window 4096")
    rewrite_config(model_folder, sliding_window=None)
    assert read_config(model_folder).family == "mistral"
    rewrite_config(model_folder, sliding_window=32768)
    assert read_config(model_folder).family == "mistral"


def test_missing_setting_is_named(model_folder):
    rewrite_config(model_folder, drop=("vocab_size",))
    refused(model_folder, "config.json", "vocab_size", "missing")


def test_unknown_dtype_argument_lists_the_allowed_ones(model_folder):
    refused(model_folder, "'float64'", "float32, bfloat16, float16", dtype="float64")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_refused_with_the_way_out(name, model_folder):
    (model_folder / "model.safetensors").rename(model_folder / name)
    refused(model_folder, str(model_folder), name, "safetensors only", "save_pretrained")


def test_folder_without_weights_is_named(model_folder):
    (model_folder / "model.safetensors").unlink()
    refused(model_folder, str(model_folder), "model.safetensors", "model.safetensors.index.json")


def test_shards_without_their_index_are_named(model_folder):
    (model_folder / "model.safetensors").rename(model_folder / "model-00001-of-00002.safetensors")
    refused(model_folder, "model-00001-of-00002.safetensors", "model.safetensors.index.json")


def test_quantised_tensors_are_named(model_folder):
    rewrite_weights(model_folder, lambda state: state.update({BIAS: state[BIAS].to(torch.float8_e4m3fn)}))
    refused(model_folder, BIAS, "F8_E4M3", "unquantised")


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_weights_name_the_file(keep, model_folder):
    file = model_folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(model_folder, str(file), "damaged or cut short")


def test_git_lfs_pointer_is_recognised(model_folder):
    (model_folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    refused(model_folder, "model.safetensors", "git lfs pull")


def test_missing_shard_is_named(tiny_model, tmp_path):
    save_model(tiny_model, tmp_path / "model", max_shard_bytes=100_000)
    victim = sorted((tmp_path / "model").glob("model-*.safetensors"))[1]
    victim.unlink()
    message = refused(tmp_path / "model", victim.name, "index.json")
    assert "model-00001" not in message


def test_index_without_a_map_is_named(tiny_model, tmp_path):
    save_model(tiny_model, tmp_path / "model", max_shard_bytes=100_000)
    (tmp_path / "model" / "model.safetensors.index.json").write_text("{}")
    refused(tmp_path / "model", "model.safetensors.index.json", "weight_map")


def test_missing_tensor_is_named(model_folder):
    rewrite_weights(model_folder, lambda state: state.pop(BIAS))
    message = refused(model_folder, str(model_folder), f"missing {BIAS}")
    assert "unexpected" not in message and "shape" not in message


def test_tied_checkpoint_without_embedding_or_output_is_refused(model_folder):
    rewrite_weights(model_folder, lambda state: state.pop(EMBEDDING))
    refused(model_folder, "missing", EMBEDDING, OUTPUT)


def test_untied_checkpoint_without_output_is_refused(model_folder):
    rewrite_config(model_folder, tie_word_embeddings=False)
    refused(model_folder, f"missing {OUTPUT}")


def test_many_missing_tensors_are_counted(model_folder):
    rewrite_config(model_folder, num_hidden_layers=4)
    refused(model_folder, "missing model.layers.2.", "(24 in all)")


def test_unexpected_tensor_is_named(model_folder):
    rewrite_weights(model_folder, lambda state: state.update({"model.layers.0.self_attn.o_proj.bias": torch.ones(64)}))
    refused(model_folder, "unexpected model.layers.0.self_attn.o_proj.bias")


def test_wrong_shape_names_tensor_found_and_expected(model_folder):
    rewrite_weights(model_folder, lambda state: state.update({BIAS: torch.ones(31)}))
    refused(model_folder, BIAS, "found [31]", "expected [32]")


def test_tied_checkpoint_with_two_different_tensors_is_refused(model_folder):
    rewrite_weights(model_folder, lambda state: state.update({OUTPUT: state[EMBEDDING] + 1}))
    refused(model_folder, str(model_folder), "tie_word_embeddings")
