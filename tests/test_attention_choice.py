"""The choice of the attention backend, the reason given for it, and the backends' page sizes."""

import sys

import pytest
import torch

from memrl.kernels.attention import BACKENDS, pick_attention
from memrl.kernels.attention.flash import FlashAttention
from tests.fake_flash_attn import fake_flash_attn


@pytest.fixture
def gpu(monkeypatch):
    """gpu(capability): from now on there seems to be a GPU of that compute capability."""

    def gpu(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    gpu((8, 0))
    return gpu


@pytest.fixture
def flash_attn(monkeypatch):
    """flash_attn(module): what `import flash_attn` finds from now on; None for nothing."""

    def flash_attn(module) -> None:
        monkeypatch.setitem(sys.modules, "flash_attn", module)

    flash_attn(fake_flash_attn())
    return flash_attn


@pytest.mark.usefixtures("flash_attn")
def test_auto_on_a_cpu_is_sdpa():
    backend, reason = pick_attention("auto", "cpu", torch.bfloat16)
    assert backend.name == "sdpa"
    assert reason == "PyTorch's fused attention; flash-attn and Triton need a GPU"


@pytest.mark.usefixtures("flash_attn", "gpu")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_auto_on_a_gpu_with_flash_attn_is_flash_for_16_bits(dtype):
    assert pick_attention("auto", "cuda:0", dtype)[0].name == "flash"


def test_auto_on_a_gpu_without_all_that_flash_attn_needs_says_what_is_missing(gpu, flash_attn, tmp_path, monkeypatch):
    def picked(dtype=torch.bfloat16):
        backend, reason = pick_attention("auto", "cuda", dtype)
        assert backend.name == "sdpa"
        return reason

    assert picked(torch.float32).endswith("flash-attn needs float16 or bfloat16, not float32")
    gpu((7, 5))
    assert picked().endswith("a GPU of compute capability 8.0 or above, this GPU has 7.5")
    gpu((9, 0))
    flash_attn(None)
    assert picked().endswith("flash-attn is not installed; pip install --no-build-isolation -r requirements-gpu.txt")
    monkeypatch.delitem(sys.modules, "flash_attn")
    (tmp_path / "flash_attn.py").write_text("raise ImportError('undefined symbol: c10')")
    monkeypatch.syspath_prepend(tmp_path)
    assert "flash-attn cannot be imported (undefined symbol: c10)" in picked()
    (tmp_path / "flash_attn.py").write_text("import no_such_module_of_flash_attn")
    assert "flash-attn cannot be imported (No module named 'no_such_module_of_flash_attn')" in picked()


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_what_runs_everywhere_is_taken_when_asked_for(name):
    backend, reason = pick_attention(name, "cpu", torch.float32)
    assert (backend.name, reason) == (name, "chosen by the settings")


@pytest.mark.usefixtures("flash_attn", "gpu")
def test_what_cannot_run_here_is_refused_in_one_line(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert pick_attention("flash", "cuda", torch.bfloat16)[0].name == "flash"
    for name, device, dtype, complaint in (
        ("flash", "cpu", torch.bfloat16, "flash-attn needs a CUDA device, not cpu"),
        ("flash", "cuda", torch.float32, "flash-attn needs float16 or bfloat16, not float32"),
        ("triton", "cpu", torch.float32, "Triton needs a CUDA device, not cpu"),
        ("triton", "cuda", torch.float64, "need float16, bfloat16 or float32, not float64"),
    ):
        with pytest.raises(ValueError, match=f"^attention '{name}' cannot run here: .*{complaint}.*'auto'") as error:
            pick_attention(name, device, dtype)
        assert "\n" not in str(error.value)


def test_triton_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ValueError, match="Triton is not installed"):
        pick_attention("triton", "cuda", torch.bfloat16)


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'flex' is unknown; allowed: auto, eager, sdpa, flash, triton"):
        pick_attention("flex", "cpu", torch.float32)


def test_backends_say_what_pages_they_want_and_whether_graphs_can_hold_them():
    wants = {name: (b.preferred_page_size, b.page_size_multiple, b.graphable) for name, b in BACKENDS.items()}
    assert wants == {
        "eager": (64, 1, False),
        "sdpa": (64, 1, False),
        "flash": (256, 256, True),
        "triton": (64, 1, True),
    }


@pytest.mark.parametrize(
    ("version", "graphable"),
    [("2.8.0", True), ("2.8.3.post2", True), ("2.8.3+cu12torch2.8", True), ("2.8.4", False), ("2.10.0", False)],
)
def test_flash_attn_that_waits_for_the_gpu_is_kept_out_of_graphs(flash_attn, version, graphable):
    flash_attn(fake_flash_attn(version))
    assert FlashAttention().graphable is graphable
