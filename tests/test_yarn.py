"""YaRN by flag gives the same model as a config.json edited by hand."""

import importlib
import json

import pytest
import torch

from memrl.model import Transformer, TransformerConfig, load_dispatched, load_model, logits_of, read_config, save_model
from memrl.model.hf_config import CheckpointError, longest_text
from memrl.model.positions import RopeConfig
from memrl.reading.open_model import ReaderOptions, load_settings, model_window, open_llm
from tests.tiny_folder import make_folder

WINDOW, FACTOR = 64, 4.0
HAND = {"rope_type": "yarn", "factor": FACTOR, "original_max_position_embeddings": WINDOW}
IDS = torch.randint(211, (3 * WINDOW,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(params=["qwen2", "llama"])
def folder(request, tmp_path, randomize):
    """A checkpoint of a model with a window of 64 tokens."""
    config = TransformerConfig(
        vocab_size=211,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_size=16,
        tie_word_embeddings=True,
        max_position_embeddings=WINDOW,
        rope=RopeConfig(theta=1e4),
        family=request.param,
    )
    model = Transformer(config).eval()
    randomize(model, seed=3, std=0.15)
    save_model(model, tmp_path / "model")
    return tmp_path / "model"


def edit(folder, **change):
    """Change config.json by hand; None removes a key."""
    path = folder / "config.json"
    content = json.loads(path.read_text()) | change
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def transformers_logits(folder):
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return peer(torch.tensor([IDS])).logits[0]


DIALECTS = {
    "rope_scaling left out": ({"rope_scaling": None}, {"rope_scaling": HAND}),
    "transformers 5": (
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 2e4}},
        {"rope_parameters": HAND | {"rope_theta": 2e4}},
    ),
    "an explicit default kind": ({"rope_scaling": {"type": "default"}}, {"rope_scaling": HAND}),
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_logits_are_those_of_a_checkpoint_edited_by_hand(dialect, folder):
    before, after = DIALECTS[dialect]
    edit(folder, **before)
    plain, flagged = logits_of(load_model(folder), IDS), logits_of(load_model(folder, yarn=FACTOR), IDS)
    spread = logits_of(load_dispatched(folder, device_map={"": "cpu"}, yarn=FACTOR), IDS)
    config = read_config(folder, FACTOR)
    edit(folder, **after)
    assert read_config(folder) == config and longest_text(config) == FACTOR * WINDOW
    by_hand = logits_of(load_model(folder), IDS)
    assert torch.equal(flagged, by_hand) and torch.equal(spread, by_hand)
    assert (flagged - transformers_logits(folder)).abs().max() <= 1e-5
    assert (flagged - plain).abs().max() > 0.1


def test_without_the_flag_nothing_changes(folder):
    assert read_config(folder, 0.0) == read_config(folder) and read_config(folder).rope.kind == "default"
    assert (logits_of(load_model(folder), IDS) - transformers_logits(folder)).abs().max() <= 1e-5


@pytest.mark.parametrize("factor", [1.0, 0.5, -4.0, float("inf"), float("nan")])
def test_a_factor_that_does_not_stretch_is_refused(folder, factor):
    with pytest.raises(CheckpointError, match=r"config.json: yarn is .*; it must be above 1, or 0"):
        read_config(folder, factor)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": HAND}, r"stretched already \(rope type 'yarn', factor 4\); leave yarn out"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, r"stretched already \(rope type 'linear', factor 2\)"),
        ({"rope_parameters": HAND | {"rope_theta": 1e4}}, "stretched already"),
        ({"original_max_position_embeddings": 32}, "original_max_position_embeddings 32 differs from max_position_embeddings 64"),
        ({"max_position_embeddings": None}, "yarn stretches max_position_embeddings, which is missing; add it"),
        ({"max_position_embeddings": "64"}, "max_position_embeddings must be a positive whole number, found '64'"),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be a positive whole number, found 0"),
    ],
)
def test_a_checkpoint_that_cannot_be_stretched_is_refused(folder, change, message):
    edit(folder, **change)
    with pytest.raises(CheckpointError, match=message) as raised:
        load_model(folder, yarn=2.0)
    assert "\n" not in str(raised.value)


def test_a_window_of_attention_shorter_than_the_stretched_texts_is_refused(folder):
    edit(folder, model_type="mistral", sliding_window=2 * WINDOW)
    assert longest_text(read_config(folder, 2.0)) == 2 * WINDOW
    with pytest.raises(CheckpointError, match="sliding-window attention"):
        read_config(folder, 2.5)


@pytest.mark.parametrize(
    ("scaling", "positions", "expected"),
    [
        (None, 32768, 32768),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 32768, 131072),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072, 131072),
        ({"rope_type": "yarn", "factor": 2.5}, 1001, 2502),
        ({"rope_type": "linear", "factor": 4.0}, 4096, 16384),
        (
            {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            131072,
            131072,
        ),
    ],
)
def test_the_longest_text_by_kind_of_stretching(folder, scaling, positions, expected):
    edit(folder, rope_scaling=scaling, max_position_embeddings=positions)
    assert longest_text(read_config(folder)) == expected


def test_the_option_reaches_settings_window_and_model(tmp_path):
    folder = make_folder(tmp_path / "model")
    positions = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    plain, stretched = ReaderOptions(), ReaderOptions(yarn=FACTOR)
    assert model_window(folder, plain) == positions and model_window(folder, stretched) == 4 * positions
    for options in (stretched, ReaderOptions(yarn=FACTOR, device="map")):
        agent, tokenizer = load_settings(folder, options)
        llm = open_llm(folder, tokenizer, agent, options)
        assert llm.sampler.model.config.rope == read_config(folder, FACTOR).rope
        assert any(line == f"positions: YaRN, factor 4, for texts of {4 * positions:,} tokens" for line in llm.about)
    assert not any("YaRN" in line for line in open_llm(folder, tokenizer, agent, plain).about)


def test_mistakes_are_found_before_the_weights_are_read(tmp_path):
    folder = make_folder(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="yarn is 1; it must be above 1"):
        load_settings(folder, ReaderOptions(yarn=1.0))


def test_infer_takes_the_flag(tmp_path, capsys):
    folder, file = make_folder(tmp_path / "model"), tmp_path / "text.txt"
    file.write_text("red blue green stone river " * 5)
    arguments = [str(file), "-q", "name ?", "--model", str(folder), "--yarn"]
    infer = importlib.import_module("memrl.commands.infer")
    assert infer.main([*arguments, "4"]) == 0
    assert "positions: YaRN, factor 4" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        infer.main([*arguments, "0.5"])
    assert stop.value.code == 2 and "error: " in (shown := capsys.readouterr().err) and "yarn is 0.5" in shown
