"""How close the sampler's prefill and decoding come to what the machine can do, beside transformers; random bf16 weights.

    python benchmarks/engine.py [--repeats 3] [--json OUT] [--parts prefill decode]

Limits, measured with plain PyTorch, no model:

    matmul      GFLOP/s of bf16 F.linear: squares of 2,048 and 4,096, and the shape of every linear map of a layer at 512 tokens
    read        GB/s of one pass over a tensor as large as what a decoding step reads, by the fastest of several ways

Prefill: prompts in, one token out. With T tokens, N of them followed by a sampled one, H heads of D units, L layers, P weights in
the layers' linear maps (biases and norms left out), hidden size E and vocabulary V, the work is counted as

    2 P T  +  4 H D L sum over prompts of n (n + 1) / 2  +  2 E V N     FLOP

The first share is of the fastest matmul of all, which is the strictest measure; the second is of the rate at which the model's
own shapes run when each gets its part of the work; the third is of a square matmul of 4,096 that the same process runs right
before and right after, because a shared machine's speed drifts between processes. transformers does the same by
forward(use_cache=True, logits_to_keep=1), without sampling.

Decode: unrelated prompts of 128 tokens. The time of a step is that of 65 new tokens less that of 1, divided by 64. The share is
the time of reading the weights once, by the fastest way above, over a step's. Keys and values are not counted as read, nor is an
untied embedding, of which a step reads one row per sequence.
"""

import math
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import (
    SIDES,
    Bars,
    Peer,
    answer,
    make_parser,
    make_prompts,
    measure,
    median,
    model_folder,
    print_table,
    shown,
    timed,
    write_json,
)

MIN_CALLS, MIN_SECONDS = 7, 0.5  # of every limit: small matmuls take well under a millisecond
BESIDE, BESIDE_FROM = 4096, 512  # size of the square matmul beside a prefill; a quick check's short prompts get a small one


def linear_shapes(config) -> dict[str, tuple[int, int, int]]:
    """Of the layers' linear maps by name: output size, input size, and how many a layer has."""
    q, kv = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    hidden, wide = config.hidden_size, config.intermediate_size
    return {
        "q": (q, hidden, 1),
        "k, v": (kv, hidden, 2),
        "o": (hidden, q, 1),
        "gate, up": (wide, hidden, 2),
        "down": (hidden, wide, 1),
    }


def prefill_flop(config, rows: int, tokens: int) -> int:
    """Of `rows` prompts of `tokens` each, one sampled token a prompt; the formula is above."""
    weights = config.num_layers * sum(n * outputs * inputs for outputs, inputs, n in linear_shapes(config).values())
    pairs = rows * tokens * (tokens + 1) // 2
    attention = 4 * config.num_heads * config.head_size * config.num_layers * pairs
    return 2 * weights * rows * tokens + attention + 2 * config.hidden_size * config.vocab_size * rows


def decode_bytes(folder: str) -> int:
    """Of the weights that a decoding step reads, whatever their number of rows."""
    from safetensors import safe_open

    from memrl.model import read_config

    unread = set() if read_config(folder).tie_word_embeddings else {"model.embed_tokens.weight"}
    total = 0
    for file in Path(folder).glob("*.safetensors"):
        with safe_open(file, "pt") as source:
            slices = [source.get_slice(name) for name in source.keys() if name not in unread]
            total += 2 * sum(math.prod(each.get_shape()) for each in slices)  # bf16
    return total


# Parts.


def limits(folder: str, squares: list[int]) -> dict:
    """Medians, under names that the tables show: GFLOP/s, and GB/s by way of reading."""
    import torch
    import torch.nn.functional as F

    from memrl.model import read_config

    def seconds(call: Callable[[], object]) -> float:
        call()
        taken: list[float] = []
        while len(taken) < MIN_CALLS or sum(taken) < MIN_SECONDS:
            taken.append(timed(call))
        return statistics.median(taken)

    def gflops(rows: int, inputs: int, outputs: int) -> float:
        x, weight = (torch.randn(n, inputs, dtype=torch.bfloat16) for n in (rows, outputs))
        return 2 * rows * inputs * outputs / seconds(lambda: F.linear(x, weight)) / 1e9

    config = read_config(folder)
    square = {f"square {n:,}": gflops(n, n, n) for n in squares}
    layers = {f"{name}, T = 512": gflops(512, n_in, n_out) for name, (n_out, n_in, _) in linear_shapes(config).items()}
    work = [n_in * n_out * n for n_out, n_in, n in linear_shapes(config).values()]
    own = sum(work) / sum(part / rate for part, rate in zip(work, layers.values(), strict=True))

    # Written to, because untouched pages are all the same page of zeros; with ones, because some numbers are slow to add.
    memory = torch.ones(decode_bytes(folder) // 2, dtype=torch.bfloat16)
    width = next(n for n in (4096, 2048, 1024, 512, 256, 128) if memory.numel() >= n * n or n == 128)
    rows = memory[: memory.numel() // width * width]
    words, vector = rows.view(torch.int32), torch.ones(width, dtype=torch.bfloat16)
    ways = {
        "sum of float32": lambda: words.view(torch.float32).sum(),
        "norm of float32": lambda: torch.linalg.vector_norm(words.view(torch.float32)),
        "max of int32": lambda: words.max(),
        "sum of int64": lambda: words.view(torch.int64).sum(),
        f"bf16 matrix of {width:,} columns times a vector": lambda: torch.mv(rows.view(-1, width), vector),
    }
    size = 2 * rows.numel()
    return {**square, **layers, "own": own, **{name: size / seconds(way) / 1e9 for name, way in ways.items()}}


def prefill(side: str, folder: str, rows: int, tokens: int) -> dict:
    import torch

    engine = SIDES[side](folder)

    def call(prompts: list[list[int]]) -> None:
        if isinstance(engine, Peer):
            with torch.inference_mode():
                engine.model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        else:
            engine.generate(prompts, [1] * len(prompts))

    call(make_prompts(engine.vocab_size, 2, 0, 16, seed=1))
    prompts = make_prompts(engine.vocab_size, rows, 0, tokens, seed=2)
    side_by_side = BESIDE if tokens >= BESIDE_FROM else 64
    a, b = (torch.randn(side_by_side, side_by_side).bfloat16() for _ in range(2))

    def matmul_rate() -> float:
        seconds = [timed(lambda: torch.nn.functional.linear(a, b)) for _ in range(MIN_CALLS)]
        return 2 * side_by_side**3 / statistics.median(seconds) / 1e9

    before, seconds, after = matmul_rate(), timed(lambda: call(prompts)), matmul_rate()
    return {"seconds": seconds, "beside_gflops": (before + after) / 2}


def decode(side: str, folder: str, rows: int, tokens: int, steps: int) -> dict:
    engine = SIDES[side](folder)
    engine.generate(make_prompts(engine.vocab_size, 2, 0, 8, seed=1), [2, 2])
    # Other prompts each time, or the second call could find the first one's keys and values.
    calls = [(make_prompts(engine.vocab_size, rows, 0, tokens, seed=2 + n), [n] * rows) for n in (1, 1 + steps)]
    short, long = (timed(lambda call=call: engine.generate(*call)) for call in calls)
    return {"step_ms": 1000 * (long - short) / steps, "prefill_seconds": short}


# The process that measures nothing itself.


def sizes(small: bool) -> dict[str, list[dict]]:
    if small:
        prompts, batches, decoding = ((8, 16), (1, 64), (1, 128)), (1, 4), {"tokens": 16, "steps": 8}
    else:
        prompts, batches, decoding = ((8, 512), (1, 2048), (1, 4096)), (1, 16), {"tokens": 128, "steps": 64}
    return {
        "prefill": [{"rows": rows, "tokens": tokens} for rows, tokens in prompts],
        "decode": [{"rows": rows, **decoding} for rows in batches],
    }


def title(part: str, size: dict) -> str:
    return f"{size['rows']} x {size['tokens']:,}" if part == "prefill" else f"batch {size['rows']}"


def run(folder: Path, arguments: Namespace) -> dict[str, list[dict]]:
    """All runs by name; the limits are measured anew in each turn, for they drift with the rest."""
    squares = [64, 128] if arguments.small else [2048, 4096]
    common = {"folder": str(folder)}
    parts = {"limits": ("limits", common | {"squares": squares}, arguments.repeats)}
    for part in arguments.parts:
        for size in sizes(arguments.small)[part]:
            for side in SIDES:
                request = common | size | {"side": side}
                parts[f"{part} {title(part, size)}, {side}"] = (part, request, arguments.repeats)
    return measure(__file__, arguments.threads, parts)


def summarise(config, weight_bytes: int, arguments: Namespace, runs: dict[str, list[dict]]) -> dict:
    """Medians of the runs, and the shares of the limits."""
    best = {name: median(runs["limits"], name) for name in runs["limits"][0] if name not in ("load_before", "error")}
    matmul = {name: rate for name, rate in best.items() if name.startswith("square") or ", T =" in name}
    read = {name: rate for name, rate in best.items() if name not in matmul and name != "own"}
    fastest, way = (max(rates, key=rates.get, default="") for rates in (matmul, read))
    peak, own, bandwidth = matmul.get(fastest, math.nan), best.get("own", math.nan), read.get(way, math.nan)
    summary = {
        "matmul_gflops": matmul, "fastest": fastest, "own_gflops": own,
        "read_gb_per_s": read, "way": way, "weight_bytes": weight_bytes,
    }  # fmt: skip
    for part in arguments.parts:
        summary[part] = {}
        for size in sizes(arguments.small)[part]:
            figures = summary[part][title(part, size)] = {}
            for side in SIDES:
                found = runs[f"{part} {title(part, size)}, {side}"]
                if part == "prefill":
                    seconds = median(found, "seconds")
                    rate = prefill_flop(config, **size) / seconds / 1e9
                    tokens = size["rows"] * size["tokens"]
                    figures[side] = {
                        "seconds": seconds, "tokens_per_s": tokens / seconds, "gflops": rate,
                        "share": rate / peak, "share_of_own": rate / own, "share_beside": rate / median(found, "beside_gflops"),
                    }  # fmt: skip
                else:
                    step = median(found, "step_ms")
                    floor = weight_bytes / bandwidth / 1e6
                    figures[side] = {"step_ms": step, "floor_ms": floor, "share": floor / step}
    return summary


def print_summary(summary: dict, bars: Bars) -> None:
    rows = [[name, f"{shown(rate)} GFLOP/s"] for name, rate in summary["matmul_gflops"].items()]
    rows.append(["the model's own shapes together", f"{shown(summary['own_gflops'])} GFLOP/s"])
    rows += [[f"read: {name}", f"{shown(rate)} GB/s"] for name, rate in summary["read_gb_per_s"].items()]
    print_table([f"limit (fastest: {summary['fastest']}; {summary['way']})", "median"], rows)
    for part, columns in (
        (
            "prefill",
            {
                "tokens/s": "tokens_per_s",
                "GFLOP/s": "gflops",
                "share": "share",
                "share of own": "share_of_own",
                "share of the square beside": "share_beside",
            },
        ),
        ("decode", {"ms/step": "step_ms", "share": "share"}),
    ):
        if part not in summary:
            continue
        rows = []
        for name, sides in summary[part].items():
            peer, ours = (sides[side] for side in SIDES)
            cells = [shown(each[key]) for each in (peer, ours) for key in columns.values()]
            if part == "prefill":
                speed = ours["tokens_per_s"] / peer["tokens_per_s"]
                rows.append([name, *cells, shown(speed), bars.cell(f"prefill {name}, share", ours["share_beside"], least=0.75)])
            else:
                rows.append([name, *cells, shown(peer["step_ms"] / ours["step_ms"]), f"read alone {shown(ours['floor_ms'])} ms"])
        header = [f"{side} {name}" for side in SIDES for name in columns]
        print_table([part, *header, "times faster", "share beside wanted" if part == "prefill" else "limit"], rows)


def main() -> int:
    answer({"limits": limits, "prefill": prefill, "decode": decode})
    parser = make_parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=["prefill", "decode"], default=["prefill", "decode"])
    arguments = parser.parse_args()
    from memrl.model import read_config

    with model_folder(__file__, arguments) as folder:
        config, weight_bytes = read_config(folder), decode_bytes(str(folder))
        runs = run(folder, arguments)
    bars = Bars(enforced=not arguments.small)
    summary = summarise(config, weight_bytes, arguments, runs)
    write_json(arguments, {"runs": runs, "medians": summary})
    print_summary(summary, bars)
    return bars.close()


if __name__ == "__main__":
    sys.exit(main())
