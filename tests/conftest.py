"""Fixtures for every test file. Only torch is imported here; heavier things wait for their first use."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_config():
    """A Qwen2.5 in miniature: two layers, two query heads to a key/value head, tied embeddings."""
    from memrl.model import TransformerConfig

    return TransformerConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_size=16,
        tie_word_embeddings=True,
    )


@pytest.fixture
def tiny_model(tiny_config, randomize):
    """A fresh random model of `tiny_config` in evaluation mode, the same weights in every test.

    Biases and norm weights are random too, so that leaving one out changes the output.
    """
    from memrl.model import Transformer

    model = Transformer(tiny_config).eval()
    randomize(model, seed=0)
    return model


@pytest.fixture
def untied_model(tiny_config, randomize):
    """`tiny_model` with an output layer of its own and other weights."""
    from memrl.model import Transformer

    model = Transformer(replace(tiny_config, tie_word_embeddings=False)).eval()
    randomize(model, seed=4)
    return model


@pytest.fixture
def model_folder(tiny_model, tmp_path) -> Path:
    """`tiny_model` as a saved Hugging Face folder, to be read or spoilt."""
    from memrl.model import save_model

    save_model(tiny_model, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of public data beside the checkout; tests that want it skip where it is absent."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no public test data at {folder}")
    return folder


@pytest.fixture(scope="session")
def randomize():
    """randomize(model, seed, std=0.1): random values for every parameter, norm weights around 1.

    They are drawn in the order of the parameters' names, so models that share names get the same weights.
    """

    @torch.no_grad()
    def randomize(model: torch.nn.Module, seed: int, std: float = 0.1) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator) * std
            parameter.copy_(noise + 1 if "norm" in name else noise)

    return randomize


@pytest.fixture
def no_signals(monkeypatch):
    """Runs in this process do not take its signals: what they install lasts as long as the process, and ends it at Ctrl-C."""
    from tests.recorded_run import NoSignals

    monkeypatch.setattr("memrl.training.run.GracefulStop", NoSignals)
