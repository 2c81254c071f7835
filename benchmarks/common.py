"""What the sampler's benchmarks share: the model that is measured, both ways to run it, and parts in processes of their own.

A part is a function from keyword arguments to a dict of figures. `measure` calls each part in a fresh process, so its peak memory
is its own; one after the other, never two at once; and taking turns, so that a machine whose speed drifts slows all of them. The
weights are random, and the ids too: neither changes what has to be computed.
"""

import argparse
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

QWEN_0_5B = {
    "model_type": "qwen2",
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
}
SMALL = QWEN_0_5B | {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
Part = Callable[..., dict]


def make_parser(description: str, repeats: int = 3) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=Path, help="config.json, or a folder with one; default: Qwen2.5-0.5B")
    parser.add_argument("--small", action="store_true", help="a toy shape and toy lengths, to check the script itself")
    parser.add_argument("--repeats", type=int, default=repeats, help=f"of every part; medians are shown (default {repeats})")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
    parser.add_argument("--json", type=Path, help="write all runs, medians and the machine to this file")
    return parser


# The process that measures nothing itself.


@contextmanager
def model_folder(script: str, arguments: argparse.Namespace) -> Iterator[Path]:
    """A temporary folder with random bf16 weights, which both sides load; gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="memrl_benchmark_") as name:
        folder = Path(name)
        source = arguments.shape
        if source is None:
            raw = json.dumps(SMALL if arguments.small else QWEN_0_5B)
        else:
            raw = (source / "config.json" if source.is_dir() else source).read_text(encoding="utf-8")
        (folder / "config.json").write_text(raw, encoding="utf-8")
        report("weights: random, bfloat16 ...")
        figures = run_part(script, "prepare", arguments.threads, {"folder": name})
        if "error" in figures:
            raise SystemExit(f"error: the weights could not be made: {figures['error']}")
        report(
            f"weights: {figures['parameters']:,} parameters; memrl's logits are transformers' within "
            f"{figures['difference']:.3f} standard deviations"
        )
        yield folder / "model"


def run_part(script: str, part: str, threads: int, arguments: dict) -> dict:
    """The part's figures, or {"error": why there are none}."""
    request = json.dumps({"part": part, "threads": threads, "arguments": arguments})
    cores = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    environment = os.environ | cores | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, script, "--part", request]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    reason = done.stderr.strip().splitlines()
    killed = " (out of memory?)" if done.returncode == -9 else ""
    return {"error": f"exit code {done.returncode}{killed}" + (f": {reason[-1]}" if reason else "")}


def measure(script: str, threads: int, parts: dict[str, tuple[str, dict, int]]) -> dict[str, list[dict]]:
    """Run every part as often as it says, taking turns; a part that fails is not tried again.

    Args:
        parts: by the name that progress lines show: the part, its arguments, and how often it is run.
    """
    runs: dict[str, list[dict]] = {name: [] for name in parts}
    for turn in range(max(times for _, _, times in parts.values())):
        for name, (part, arguments, times) in parts.items():
            if turn >= times or any("error" in run for run in runs[name]):
                continue
            load = os.getloadavg()[0]
            began = time.perf_counter()
            run = run_part(script, part, threads, arguments)
            runs[name].append(run | {"load_before": round(load, 2)})
            figures = ", ".join(f"{key} {value:.4g}" for key, value in run.items() if isinstance(value, float))
            report(f"{name} {turn + 1}/{times}: {run.get('error') or figures}  [{time.perf_counter() - began:.0f} s in all]")
    return runs


def median(runs: Sequence[dict], key: str) -> float:
    """Over the runs that came to their end; nan where none did."""
    values = [run[key] for run in runs if key in run]
    return statistics.median(values) if values else float("nan")


def report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print("\n| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
    for row in rows:
        print("| " + " | ".join(row) + " |")


def shown(value: float, digits: int = 3) -> str:
    """Three digits, without exponents; "failed" for nan."""
    if value != value:
        return "failed"
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


class Bars:
    """Figures that have to clear a bar: the cell that shows it, and what was missed."""

    def __init__(self, enforced: bool):
        self.enforced = enforced
        self.missed: list[str] = []

    def cell(self, name: str, value: float, *, least: float | None = None, most: float | None = None) -> str:
        wanted = f">= {least:g}" if least is not None else f"<= {most:g}"
        failed = value != value
        if not self.enforced and not failed:
            return wanted
        passed = value >= least if least is not None else value <= most
        if not passed:
            self.missed.append(f"{name} failed" if failed else f"{name} is {shown(value)}, wanted {wanted}")
        return f"{wanted}: {'yes' if passed else 'NO'}"

    def close(self) -> int:
        """Print the verdict and return the exit code."""
        if self.missed:
            print("\nmissed: " + "; ".join(self.missed))
        else:
            print("\nall bars cleared" if self.enforced else "\nno verdict: bars are meant for the full lengths")
        return int(bool(self.missed))


def write_json(arguments: argparse.Namespace, results: dict) -> None:
    """Called after every workload, so that an interrupted benchmark keeps what it has."""
    if arguments.json is None:
        return
    from importlib.metadata import version

    cpu = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in cpu.read_text().splitlines() if "model name" in line] if cpu.exists() else []
    machine = {
        "cpu": names[0] if names else platform.processor(),
        "threads": arguments.threads,
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }
    options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    content = {"machine": machine, "options": options, "results": results}
    arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# The process of a part.


def answer(parts: dict[str, Part]) -> None:
    """In a process that `run_part` started, run the part, print its figures and leave; in others do nothing."""
    if sys.argv[1:2] != ["--part"]:
        return
    import torch

    request = json.loads(sys.argv[2])
    torch.set_num_threads(request["threads"])
    figures = (parts | {"prepare": prepare})[request["part"]](**request["arguments"])
    print(json.dumps(figures))
    sys.exit(0)


def prepare(folder: str) -> dict:
    """Make FOLDER/model of FOLDER/config.json, and see that both sides load the same model from it."""
    import torch

    from memrl.model import load_model, logits_of, read_config, save_model
    from memrl.model.loader import from_scratch

    model = from_scratch(read_config(folder), seed=0, dtype="bfloat16")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    save_model(model, Path(folder) / "model")
    del model
    [ids] = make_prompts(read_config(folder).vocab_size, rows=1, shared=0, own=16, seed=0)
    ours = logits_of(load_model(Path(folder) / "model"), ids)
    with torch.inference_mode():
        theirs = Peer(Path(folder) / "model").model(torch.tensor([ids])).logits[0].float()
    difference = float((ours - theirs).abs().max() / theirs.std())
    if not difference < 0.2:  # bf16 rounding stays well below, other weights give 2 and more
        raise SystemExit(f"the two sides' logits differ by {difference:.3f} standard deviations: they run different models")
    return {"parameters": parameters, "difference": difference}


class Peer:
    """transformers' own generation, as it comes: SDPA attention, a dynamic cache, the batch in one call."""

    def __init__(self, folder: str | Path):
        from transformers import GenerationConfig, Qwen2ForCausalLM

        self.model = Qwen2ForCausalLM.from_pretrained(folder, local_files_only=True).eval()
        self.model.generation_config = GenerationConfig(
            do_sample=True, temperature=1.0, top_p=1.0, top_k=0, eos_token_id=None, pad_token_id=0, use_cache=True
        )
        self.vocab_size = self.model.config.vocab_size

    def generate(self, prompts: list[list[int]], new_tokens: list[int]) -> None:
        """Prompts of equal lengths. A row with fewer new tokens than another is done earlier, but still computed."""
        import torch
        from transformers import StoppingCriteria

        ids, limits = torch.tensor(prompts), torch.tensor(new_tokens)

        class RowLimits(StoppingCriteria):
            def __call__(self, input_ids, scores, **_):
                return input_ids.shape[1] - ids.shape[1] >= limits

        torch.manual_seed(0)
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": max(new_tokens)}
        if len(set(new_tokens)) > 1:
            options["stopping_criteria"] = [RowLimits()]
        with torch.inference_mode():
            output = self.model.generate(ids, **options)
        assert output.shape == (len(prompts), ids.shape[1] + max(new_tokens)), output.shape


class Ours:
    def __init__(self, folder: str | Path):
        from memrl.model import load_model
        from memrl.model.packed_weights import pack_weights
        from memrl.sampler import Sampler

        model = load_model(folder)
        pack_weights(model)  # as infer.py and eval.py do
        self.sampler = Sampler(model)
        self.vocab_size = self.sampler.model.config.vocab_size

    def generate(self, prompts: list[list[int]], new_tokens: list[int]) -> None:
        from memrl.sampler import SamplingParams

        params = [SamplingParams(limit, seed=row) for row, limit in enumerate(new_tokens)]
        completions = self.sampler.generate(prompts, params)
        lengths = [len(completion.ids) for completion in completions]
        assert lengths == new_tokens, lengths


SIDES = {"transformers": Peer, "memrl": Ours}


def make_prompts(vocab_size: int, rows: int, shared: int, own: int, seed: int) -> list[list[int]]:
    """Random ids: `shared` tokens that all rows begin with, then `own` tokens of each row's own."""
    rng = random.Random(seed)
    beginning = rng.choices(range(vocab_size), k=shared)
    return [beginning + rng.choices(range(vocab_size), k=own) for _ in range(rows)]


def generate(side: str, folder: str, rows: int, shared: int, own: int, new_tokens: list[int]) -> dict:
    """A part: seconds and peak memory of one call, after a short one on other prompts to warm up."""
    engine = SIDES[side](folder)
    loaded = peak_gib()
    engine.generate(make_prompts(engine.vocab_size, rows=2, shared=8, own=8, seed=1), [2, 2])
    prompts = make_prompts(engine.vocab_size, rows, shared, own, seed=2)
    seconds = timed(lambda: engine.generate(prompts, new_tokens))
    return {"seconds": seconds, "peak_gib": peak_gib(), "loaded_gib": loaded}


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def peak_gib() -> float:
    """The most memory that this process held so far: loading the weights, warming up and the measured call.

    From VmHWM where there is one, because ru_maxrss begins with what the parent held when it started the process.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)
