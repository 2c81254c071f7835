"""The road of a real run, in small: HotpotQA, the real Qwen2.5 tokenizer, a small random Qwen2.5, two ranks, two GRPO steps.

    python benchmarks/real_path.py --hotpotqa FILE.json[.gz] --tokenizer DIR [--out runs/real_path]

It builds the custom JSON lines from HotpotQA's official layout, trains under torchrun, loads the exported folder in transformers,
compares logits, and asks it a question through infer.py. The weights are random, so no answer is right and no reward is earned;
what is shown is that every part meets real input.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from memrl.model import TransformerConfig, load_model, logits_of, save_model
from memrl.model.loader import from_scratch
from memrl.tokenizer import load_tokenizer


def call(*command: object) -> None:
    print("+", *command, flush=True)
    subprocess.run([str(part) for part in command], check=True, cwd=ROOT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hotpotqa", type=Path, required=True, help="official HotpotQA JSON, gzipped or not")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of the Qwen2.5 tokenizer")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "real_path")
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)

    data = out / "hotpotqa.jsonl"
    hotpotqa = arguments.hotpotqa.absolute()
    call(sys.executable, "-m", "memrl", "data", "hotpotqa", hotpotqa, "--out", data, "--documents", 20, "--limit", 32)

    tokenizer = load_tokenizer(arguments.tokenizer)
    config = TransformerConfig(151_936, 64, 128, 2, 4, 2, 16, tie_word_embeddings=True)
    save_model(from_scratch(config, seed=0), out / "start", tokenizer=tokenizer)

    limits = {"chunk_tokens": 1000, "memory_tokens": 32, "answer_tokens": 32, "question_tokens": 128}
    settings = {
        "run_dir": out / "run", "model.path": out / "start", "data.path": data,
        **{f"agent.{name}": value for name, value in limits.items()},
        "device": "auto", "rl.steps": 2, "rl.prompts_per_step": 4, "rl.group_size": 2, "rl.updates_per_step": 2,
        "checkpoint.every": 1,
    }  # fmt: skip
    options = [part for name, value in settings.items() for part in (f"--{name}", value)]
    config_file = ROOT / "configs" / "memagent_0.5b.yaml"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={arguments.ranks}"]
    call(*launcher, "train.py", "--config", config_file, *options, "--model.dtype", "float32")
    print((out / "run" / "metrics.jsonl").read_text())

    from transformers import AutoModelForCausalLM

    first = json.loads(data.read_text(encoding="utf-8").splitlines()[0])
    ids = tokenizer.encode(first["context"])[:512]
    theirs = AutoModelForCausalLM.from_pretrained(out / "run" / "model")(torch.tensor([ids])).logits[0]
    difference = (theirs - logits_of(load_model(out / "run" / "model"), ids)).abs().max()
    print(f"exported model in transformers: max |logit difference| {difference:.1e} over {len(ids)} tokens")
    assert difference <= 1e-5

    (out / "document.txt").write_text(first["context"], encoding="utf-8")
    call(sys.executable, "infer.py", out / "document.txt", "-q", first["question"], "--model", out / "run" / "model")


if __name__ == "__main__":
    main()
