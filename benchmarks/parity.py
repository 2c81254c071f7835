"""memrl's logits beside transformers', for every model family and feature: the table of docs/parity.md.

    python benchmarks/parity.py [--config CONFIG.json ...] [--out docs/parity.md]

Small random models, on the CPU; --config adds a model of a real config.json's shape with random weights. Each line gives the
largest difference of two logits, and the largest logit to compare it with. In bf16 and fp16 two correct programs may round
differently; there the table also gives how far transformers itself is from its own fp32 result with the same weights.
"""

import argparse
import dataclasses
import datetime
import platform
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import transformers

from memrl.model import Transformer, TransformerConfig, describe_model, logits_of, read_config
from memrl.model.positions import RopeConfig
from memrl.model.transformer import FAMILIES, meta_model
from tests.peer import peer_logits

WINDOW = 128
PLAIN = TransformerConfig(
    vocab_size=1021,
    hidden_size=192,
    intermediate_size=512,
    num_layers=4,
    num_heads=6,
    num_kv_heads=2,
    head_size=32,
    max_position_embeddings=WINDOW,
    rope=RopeConfig(theta=10_000.0),
)
YARN = RopeConfig(theta=1e6, kind="yarn", factor=4.0, original_max_position_embeddings=WINDOW)
LLAMA3 = RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_position_embeddings=WINDOW)
LINEAR = RopeConfig(theta=1e4, kind="linear", factor=4.0)
FEATURES = {  # feature -> (what differs from PLAIN, tokens, dtype)
    "plain: grouped queries, untied": ({}, 100, torch.float32),
    "tied embeddings": ({"tie_word_embeddings": True}, 100, torch.float32),
    "a kv head per query head": ({"num_kv_heads": 6}, 100, torch.float32),
    "one kv head": ({"num_kv_heads": 1}, 100, torch.float32),
    "heads wider than hidden / heads": ({"head_size": 64}, 100, torch.float32),
    "biases on q, k, v and o": ({"attention_bias": True}, 100, torch.float32),
    "linear, 4 windows": ({"rope": LINEAR}, 4 * WINDOW, torch.float32),
    "YaRN, 4 windows": ({"rope": YARN}, 4 * WINDOW, torch.float32),
    "llama3, 8 windows": ({"rope": LLAMA3}, 8 * WINDOW, torch.float32),
    "bf16": ({}, 100, torch.bfloat16),
    "bf16, YaRN, 4 windows": ({"rope": YARN}, 4 * WINDOW, torch.bfloat16),
    "fp16": ({}, 100, torch.float16),
    "fp16, YaRN, 4 windows": ({"rope": YARN}, 4 * WINDOW, torch.float16),
}


@dataclass
class Line:
    family: str
    feature: str
    difference: float
    largest: float
    rounding: float | None  # of transformers, against fp32


@torch.no_grad()
def randomize(model: Transformer) -> None:
    """Random norms and biases too, so that leaving one out would show; one stretch of draws, repeated."""
    draws = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0))
    for name, p in model.named_parameters():
        noise = draws.repeat(p.numel() // draws.numel() + 1)[: p.numel()].view_as(p)
        p.copy_(1 + 0.1 * noise if "norm" in name else noise * (0.1 if p.dim() == 1 else p.shape[-1] ** -0.5))


def compare(config: TransformerConfig, feature: str, tokens: int, dtype: torch.dtype) -> Line:
    model = meta_model(config)
    model.to_empty(device="cpu").eval()
    model.tie_weights()
    randomize(model)
    ids = torch.randint(config.vocab_size, (tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    rounding = None
    if dtype != torch.float32:
        exact = peer_logits(model.to(dtype).float(), ids)
        model.to(dtype)
    ours, theirs = logits_of(model, ids), peer_logits(model, ids)
    if dtype != torch.float32:
        rounding = (theirs - exact).abs().max().item()
    difference = (ours - theirs).abs().max().item()
    return Line(config.family, feature, difference, theirs.abs().max().item(), rounding)


def measure_all() -> list[Line]:
    lines = []
    for family in FAMILIES:
        for feature, (changes, tokens, dtype) in FEATURES.items():
            if changes.get("attention_bias") and family not in ("qwen3", "llama"):
                continue
            lines.append(compare(dataclasses.replace(PLAIN, family=family, **changes), feature, tokens, dtype))
            print(row(lines[-1]), flush=True)
    return lines


def control() -> Line:
    """memrl leaves YaRN's scaling out, transformers does not: what a mistake looks like in this table."""
    scaled = Transformer(dataclasses.replace(PLAIN, rope=YARN)).eval()
    randomize(scaled)
    left_out = Transformer(dataclasses.replace(PLAIN, rope=RopeConfig(theta=YARN.theta))).eval()
    left_out.load_state_dict(scaled.state_dict())
    ids = torch.randint(PLAIN.vocab_size, (4 * WINDOW,), generator=torch.Generator().manual_seed(1)).tolist()
    theirs = peer_logits(scaled, ids)
    difference = (logits_of(left_out, ids) - theirs).abs().max().item()
    return Line("qwen2", "control: YaRN left out on purpose", difference, theirs.abs().max().item(), None)


def measure_shape(file: Path) -> Line:
    """The shape of a real config.json, any name."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(file, Path(folder) / "config.json")
        config = read_config(folder)
    size = describe_model(meta_model(config)).split(",")[0].split(" ", 1)[1]
    return compare(config, f"{file.name.removesuffix('.config.json')}'s shape, {size}, fp32", 24, torch.float32)


def row(line: Line) -> str:
    rounding = "" if line.rounding is None else f"{line.rounding:.1e}"
    return f"| {line.family} | {line.feature} | {line.difference:.1e} | {line.largest:.1f} | {rounding} |"


def report(lines: list[Line], command: str, seconds: float) -> str:
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    single = max(line.difference for line in lines[:-1] if line.rounding is None)
    half = max(line.difference / line.rounding for line in lines if line.rounding is not None)
    table = "\n".join(map(row, lines))
    return f"""# Parity with transformers

The largest difference between a logit of memrl and the same logit of transformers, with the same weights and tokens. Written by

    {command}

on {datetime.date.today()} with {versions}, on a CPU with one thread, in {seconds:.0f} s.

Small random models of four layers read 100 tokens; rows named by windows read texts longer than the {WINDOW} tokens that the
model was made for, where the scaling of the positions matters. "Largest logit" is the scale to compare with; "rounding" is how
far transformers in that type is from transformers in fp32, with the very same (rounded) weights. The last row is a control.

In fp32 the largest difference of the table is {single:.1e}. In bf16 and fp16 it is at most {half:.2f} times the rounding that
transformers' own result has. Both are zero where the two programs run the same operations in the same order, which is how this
model is written; that is this machine's result, and other kernels may round differently. So tests/test_families.py allows 1e-5 in
fp32, and in the others twice that rounding: two correct programs may each be off by it in opposite directions.

| family | feature | largest difference | largest logit | rounding |
|---|---|---|---|---|
{table}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, nargs="*", default=[], help="config.json files of real shapes to add")
    parser.add_argument("--out", type=Path, help="Markdown file to write; without it the table is only printed")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    began = time.monotonic()
    lines = measure_all()
    for file in args.config:
        lines.append(measure_shape(file))
        print(row(lines[-1]), flush=True)
    lines.append(control())
    print(row(lines[-1]), flush=True)
    if args.out:
        shown = [f"--config {' '.join(file.name for file in args.config)}"] if args.config else []
        shown += [f"--out {args.out}"]
        command = " ".join(["python benchmarks/parity.py", *shown])
        args.out.write_text(report(lines, command, time.monotonic() - began), encoding="utf-8")


if __name__ == "__main__":
    main()
