"""The sampler against transformers' generate, in a memory agent's three kinds of batch; random bf16 weights, nothing stops early.

    python benchmarks/rollouts.py [group] [ragged] [questions] [--repeats 3] [--peer_repeats 1] [--json OUT]

    group       16 rollouts of one 4,096-token prompt, 128 new tokens each: a GRPO group's turn with the section-first prompt
    ragged      16 unrelated prompts of 512 tokens; 16, 32, ..., 256 new tokens
    questions   8 questions on one 4,096-token section, 200 tokens of their own each, 128 new tokens, against one of them
                (memrl against itself)

Both sides load the same folder and sample at temperature 1 without truncation. transformers gets all rows in one batch; for
`ragged` a stopping criterion marks rows as finished one by one, but it goes on computing them until the longest is done. Seconds
are of the one generating call; GiB is the process's peak, weights and their loading included.
"""

import sys
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import Bars, answer, generate, make_parser, measure, median, model_folder, print_table, shown, write_json


def sizes(small: bool) -> dict[str, dict]:
    """The arguments of `generate` by workload."""
    scale, rows, step = (32, 4, 4) if small else (1, 16, 16)
    return {
        "group": {"rows": rows, "shared": 4096 // scale, "own": 0, "new_tokens": [128 // scale] * rows},
        "ragged": {"rows": rows, "shared": 0, "own": 512 // scale, "new_tokens": [step * (i + 1) for i in range(rows)]},
        "questions": {"rows": 8, "shared": 4096 // scale, "own": 200 // scale, "new_tokens": [128 // scale] * 8},
    }


def run(workload: str, folder: Path, arguments: Namespace) -> dict[str, list[dict]]:
    size = sizes(arguments.small)[workload]
    repeats, peer_repeats = arguments.repeats, arguments.peer_repeats or arguments.repeats
    if workload == "questions":
        single = size | {"rows": 1, "new_tokens": size["new_tokens"][:1]}
        variants = {"1 question": ("memrl", single, repeats), "8 questions": ("memrl", size, repeats)}
    else:
        variants = {"transformers": ("transformers", size, peer_repeats), "memrl": ("memrl", size, repeats)}
    parts = {
        f"{workload}, {name}": ("generate", {"side": side, "folder": str(folder), **kwargs}, times)
        for name, (side, kwargs, times) in variants.items()
    }
    runs = measure(__file__, arguments.threads, parts)
    return {name: runs[f"{workload}, {name}"] for name in variants}


def table_rows(workload: str, runs: dict[str, list[dict]], bars: Bars) -> list[list[str]]:
    (first, first_runs), (second, second_runs) = runs.items()
    seconds = [median(each, "seconds") for each in (first_runs, second_runs)]
    peaks = [median(each, "peak_gib") for each in (first_runs, second_runs)]
    rows = []
    if workload == "questions":
        ratio = seconds[1] / seconds[0]
        rows.append(["seconds", *map(shown, seconds), f"{shown(ratio)} x the time", bars.cell(workload, ratio, most=1.6)])
    else:
        ratio = seconds[0] / seconds[1]
        wanted = bars.cell(f"{workload}, speed", ratio, least=6.0 if workload == "group" else 1.5)
        rows.append(["seconds", *map(shown, seconds), f"{shown(ratio)} x as fast", wanted])
    share = peaks[1] / peaks[0]
    wanted = bars.cell(f"{workload}, memory", share, most=0.5) if workload == "group" else ""
    rows.append(["peak GiB", *map(shown, peaks), f"{shown(share)} x the memory", wanted])
    loaded = [median(each, "loaded_gib") for each in (first_runs, second_runs)]
    rows.append(["of it after loading", *map(shown, loaded), "", ""])
    return [[f"{workload}: {first}, {second}", *row] for row in rows]


def main() -> int:
    answer({"generate": generate})
    parser = make_parser(__doc__)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help="of group, ragged and questions; default: all")
    parser.add_argument("--peer_repeats", "--peer-repeats", type=int, help="of transformers' parts; default: as --repeats")
    arguments = parser.parse_args()
    workloads = arguments.workloads or list(sizes(arguments.small))
    if unknown := sorted(set(workloads) - set(sizes(arguments.small))):
        parser.error(f"there is no workload {unknown[0]!r}; there are {', '.join(sizes(arguments.small))}")
    bars = Bars(enforced=not arguments.small)
    results: dict[str, dict] = {}
    rows: list[list[str]] = []
    with model_folder(__file__, arguments) as folder:
        for workload in workloads:
            results[workload] = run(workload, folder, arguments)
            rows += table_rows(workload, results[workload], bars)
            write_json(arguments, results)
    print_table(["workload", "median of", "first", "second", "second to first", "wanted"], rows)
    return bars.close()


if __name__ == "__main__":
    sys.exit(main())
