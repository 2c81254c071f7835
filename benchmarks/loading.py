"""How long does load_model take for a 7B checkpoint, and how much memory besides the weights?

    python benchmarks/loading.py [--layers 28] [--dtype bfloat16] [--folder DIR]

Writes a checkpoint of Qwen2.5-7B's shape in bf16 with shards of 5 GB (as many layers as fit into 80 % of the free memory and
disk, unless --layers says how many), loads it in a fresh process and deletes it. Prints the seconds, once with the files in the
system's cache as far as they fit and once after asking the system to drop them from there, and the peak memory above the weights'
own size.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch

from memrl.model import TransformerConfig, describe_model, load_model
from memrl.model.saver import SHARD_BYTES, save_state
from memrl.model.transformer import meta_model

SEVEN_B = TransformerConfig(152064, 3584, 18944, 28, 28, 4, 128)
DTYPES = ("bfloat16", "float16", "float32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, help="layers of the model; 28 is the whole")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="type to load the weights in")
    parser.add_argument("--folder", type=Path, help="where to write the checkpoint; the system's temporary folder by default")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        return measure(args.measure, args.dtype)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        config = replace(SEVEN_B, num_layers=args.layers or layers_that_fit(Path(folder), args.dtype))
        began = time.monotonic()
        save_state(constant_tensors(config), config, "bfloat16", Path(folder) / "model")
        files = sorted((Path(folder) / "model").glob("*.safetensors"))
        size = sum(file.stat().st_size for file in files)
        seconds = time.monotonic() - began
        print(f"wrote {config.num_layers} layers, {len(files)} shards, {size / 2**30:.1f} GiB in {seconds:.0f} s")
        for cached in (True, False):
            if not cached:
                drop_from_cache(files)
            print("files just written:" if cached else "files dropped from the cache:", flush=True)
            command = [sys.executable, __file__, "--measure", str(Path(folder) / "model"), "--dtype", args.dtype]
            subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def constant_tensors(config: TransformerConfig):
    for number, (name, p) in enumerate(meta_model(config).named_parameters()):
        yield name, torch.full(p.shape, 0.001 * number, dtype=torch.bfloat16)


def layers_that_fit(folder: Path, dtype: str) -> int:
    def size(layers: int, dtype: str) -> int:
        model = meta_model(replace(SEVEN_B, num_layers=layers), getattr(torch, dtype))
        return sum(p.nbytes for p in model.parameters())

    memory, disk = 0.8 * available_memory(), 0.8 * shutil.disk_usage(folder).free
    for layers in range(SEVEN_B.num_layers, 0, -1):
        if max(size(layers, dtype), 2 * SHARD_BYTES) <= memory and size(layers, "bfloat16") <= disk:
            return layers
    raise SystemExit(f"{memory / 2**30:.1f} GiB of memory are too few even for one layer and the embeddings")


def available_memory() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) * 1024


def drop_from_cache(files: list[Path]) -> None:
    os.sync()
    for file in files:
        with file.open("rb") as source:
            os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(folder: Path, dtype: str) -> None:
    def memory(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024

    before, began = memory("VmRSS"), time.monotonic()
    model = load_model(folder, dtype=dtype, progress=True)
    seconds = time.monotonic() - began
    extra = memory("VmHWM") - before - sum(p.nbytes for p in model.parameters())
    print(f"  {describe_model(model, seconds)}; peak memory {extra / 2**20:.0f} MiB above the weights", flush=True)


if __name__ == "__main__":
    main()
