"""`train.py --dry_run`: the memory plan of a run as a table, and what would make it fit where it does not.

Only config.json is read, and the tokenizer where there is one. Torch comes with the first call, so that --help stays quick.
"""

from __future__ import annotations

import copy
import itertools
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memrl.config import TrainConfig

if TYPE_CHECKING:
    from memrl.training.memory_plan import MemoryPlan, ModelSizes

DEFAULT_GPUS = "1,8,32"
DEFAULT_GPU_GIB = 79.1  # what PyTorch reports of an H100 or A100 that is sold as 80 GB
CHARACTERS_PER_TOKEN = 4  # of English, where no tokenizer is at hand
CHAT_TOKENS = 40  # of a chat template around a message, likewise
LORA_RANK = 16  # that is tried where the run does not fit
MAX_FIXES = 3


def dry_run(config: TrainConfig, gpus: str | None = None, gpu_gib: float | None = None) -> int:
    """Print the plan for each number of GPUs; the exit code: 0 if the run fits for at least one of them, otherwise 2.

    Args:
        gpus: numbers of GPUs, "1,8,32"; None for these.
        gpu_gib: memory of each; None for a GPU of 80 GB.

    Raises:
        ValueError: no usable config.json, or settings that the run itself would refuse for their size.
    """
    from memrl.model.hf_config import read_config
    from memrl.training.memory_plan import GIB, count_sizes, plan_memory, weights_dtype

    counts, capacity = parse_gpus(DEFAULT_GPUS if gpus is None else gpus), DEFAULT_GPU_GIB if gpu_gib is None else gpu_gib
    if not 0 < capacity < math.inf:
        raise ValueError(f"gpu_gib is {capacity}; it must be positive")
    if config.model.path is None:
        raise ValueError("the dry run plans a model of your own; give --model.path DIR, a folder with its config.json")
    sizes = count_sizes(read_config(config.model.path), weights_dtype(config), config.model.lora_rank)
    longest, source = longest_tokens(config)
    check_sizes(config, sizes, longest)
    plans = [plan_memory(config, sizes, count) for count in counts]
    print(describe(config, sizes, longest, source))
    print(table(plans))
    fitting = []
    for plan in plans:
        need, fits = plan.peak / GIB, plan.peak <= capacity * GIB
        fitting.append(fits)
        line = f"{_gpus(plan.world_size):>8}: {'fits' if fits else 'does not fit'}: {need:.1f} of {capacity:g} GiB"
        if not fits:
            line += f"; {advice(config, sizes, longest, plan.world_size, capacity)}"
        print(line)
    sys.stdout.flush()
    return 0 if any(fitting) else 2


def parse_gpus(text: str) -> list[int]:
    """ "1,8,32" to [1, 8, 32]; ValueError for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise ValueError(f"dry_gpus is {text!r}; it must be numbers of GPUs, for example {DEFAULT_GPUS}")
    return [int(part) for part in parts]


def longest_tokens(config: TrainConfig) -> tuple[int, str]:
    """Tokens of the longest turn that the agent's limits allow, and how the template's part of them is known."""
    from memrl.agents import AgentConfig
    from memrl.agents.limits import longest_turn
    from memrl.prompts import load_prompts

    agent, folder = config.agent, Path(config.model.path)
    prompts = load_prompts(agent.prompts)
    limits = {name: getattr(agent, name) for name in ("chunk_tokens", "memory_tokens", "answer_tokens", "question_tokens")}
    if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        from memrl.tokenizer import load_tokenizer

        return longest_turn(load_tokenizer(folder), AgentConfig(prompts, **limits)), "with the folder's tokenizer"

    def estimate(text: str) -> int:
        return CHAT_TOKENS + len(text + (prompts.system or "")) // CHARACTERS_PER_TOKEN

    update = estimate(prompts.memory) + agent.chunk_tokens + agent.memory_tokens
    longest = max(update, estimate(prompts.answer) + agent.answer_tokens) + agent.question_tokens + agent.memory_tokens
    return longest, f"the prompt's words estimated, since {folder} holds no tokenizer"


def check_sizes(config: TrainConfig, sizes: ModelSizes, longest: int) -> None:
    """ValueError where the run would refuse to start because a turn does not fit into the cache or into a micro-batch."""
    from memrl.training.memory_plan import cache_tokens

    if longest > (room := cache_tokens(config, sizes)):
        raise ValueError(
            f"the agent's limits allow turns of {longest} tokens, and rollout.cache_gib = {config.rollout.cache_gib:g} has room "
            f"for {room}; raise it, or lower the limits"
        )
    if longest > config.rl.micro_batch_tokens:
        raise ValueError(
            f"the agent's limits allow turns of {longest} tokens, and rl.micro_batch_tokens is {config.rl.micro_batch_tokens}; "
            "raise it, or lower the limits"
        )


def describe(config: TrainConfig, sizes: ModelSizes, longest: int, source: str) -> str:
    """What was planned for, in some lines."""
    from memrl.training.memory_plan import GIB, cache_tokens, kv_bytes_per_token

    rl, rows = config.rl, config.rollout.max_rows
    trained = f", {sum(sizes.trained):,} of adapters trained" if config.model.lora_rank else ""
    layers = "" if config.model.checkpoint_layers else ", layers not recomputed"
    return "\n".join(
        (
            f"{sizes.base:,} parameters of {sizes.itemsize} bytes{trained}; ZeRO-{config.engine.zero_stage}",
            f"micro-batches of {rl.micro_batch_tokens:,} tokens{layers}; longest turn {longest:,} tokens ({source})",
            f"key/value cache for {cache_tokens(config, sizes):,} tokens; {rows} rows of the longest turn that share nothing "
            f"would take {rows * longest * kv_bytes_per_token(sizes) / GIB:.1f} GiB",
            "By arithmetic, not measured on a GPU: docs/memory.md",
        )
    )


def table(plans: list[MemoryPlan]) -> str:
    """One column for each plan, GiB."""
    from memrl.training.memory_plan import MACHINE_GPUS

    width = 40
    lines = ["", "GiB on each GPU".ljust(width) + "".join(_gpus(plan.world_size).rjust(10) for plan in plans)]

    def add(title: str, values: list[int]) -> None:
        lines.append(title.ljust(width) + "".join(_cell(value) for value in values))

    def section(title: str, names: tuple[str, ...]) -> None:
        lines.append(title)
        parts = [{key: size for name in names for key, size in getattr(plan, name).items()} for plan in plans]
        for key in parts[0]:
            add(f"  {key}", [part[key] for part in parts])

    section("all the time", ("always",))
    section("while sampling", ("sampling",))
    add("  together with the above", [plan.sampling_peak for plan in plans])
    section("while updating, the cache released", ("backward", "step"))
    add("  together, the step or all the others", [plan.updating_peak for plan in plans])
    add("total, the larger of both", [plan.peak for plan in plans])
    if plans[0].cpu:
        lines.append("CPU memory for each GPU")
        for key in plans[0].cpu:
            add(f"  {key}", [plan.cpu[key] for plan in plans])
        add(f"  of a machine of {MACHINE_GPUS} GPUs", [plan.cpu_per_machine for plan in plans])
    return "\n".join([*lines, ""])


def advice(config: TrainConfig, sizes: ModelSizes, longest: int, world_size: int, gpu_gib: float) -> str:
    """What would make the run fit, found by planning it: the fewest settings to change, several ways where there are."""
    fixes = find_fixes(config, sizes, longest, world_size, gpu_gib)
    if not fixes:
        return "no change of settings that was tried makes it fit; take more GPUs or a smaller model"
    return "it would with " + ", or with ".join(
        " and ".join(f"{key} {str(value).lower() if isinstance(value, bool) else value}" for key, value in fix.items())
        for fix in fixes
    )


def find_fixes(config: TrainConfig, sizes: ModelSizes, longest: int, world_size: int, gpu_gib: float) -> list[dict[str, Any]]:
    """The smallest sets of changes with which the plan is within `gpu_gib`, at most MAX_FIXES, each with its mildest values."""
    from memrl.training.memory_plan import GIB, count_sizes, plan_memory

    candidates = _candidates(config, sizes, longest)
    adapted = count_sizes(sizes.config, sizes.dtype, LORA_RANK)

    def fits(change: dict[str, Any]) -> bool:
        plan = plan_memory(_changed(config, change), adapted if "model.lora_rank" in change else sizes, world_size)
        return plan.peak <= gpu_gib * GIB

    for number in range(1, len(candidates) + 1):
        fixes = []
        for keys in itertools.combinations(candidates, number):
            changes = (dict(zip(keys, values, strict=True)) for values in itertools.product(*(candidates[key] for key in keys)))
            fixes += list(itertools.islice(filter(fits, changes), 1))
        if fixes:
            return fixes[:MAX_FIXES]
    return []


def _candidates(config: TrainConfig, sizes: ModelSizes, longest: int) -> dict[str, list[Any]]:
    """What may be changed, in the order of how little it costs, and to which values, mildest first."""
    from memrl.training.memory_plan import cache_tokens

    rl, engine, lora = config.rl, config.engine, config.model.lora_rank

    def holds_a_turn(gib: float) -> bool:
        return cache_tokens(_changed(config, {"rollout.cache_gib": gib}), sizes) >= longest

    tokens = {size for size in _halves(rl.micro_batch_tokens) if size >= longest}
    if (least := -(-longest // 256) * 256) < rl.micro_batch_tokens:
        tokens.add(least)
    found = {
        "rl.reference": ["cpu"] if rl.reference == "device" and rl.kl_coef > 0 and not lora else [],
        "rollout.cache_gib": [gib for gib in _halves(config.rollout.cache_gib) if holds_a_turn(gib)],
        "rl.micro_batch_tokens": sorted(tokens, reverse=True),
        "model.checkpoint_layers": [] if config.model.checkpoint_layers else [True],
        "engine.offload_optimizer": [] if engine.offload_optimizer else [True],
        "engine.offload_params": [True] if engine.zero_stage == 3 and not engine.offload_params else [],
        "engine.zero_stage": [3] if engine.zero_stage < 3 else [],
        "model.lora_rank": [] if lora else [LORA_RANK],
    }
    return {key: values for key, values in found.items() if values}


def _halves(value: int | float) -> Iterator[int | float]:
    for divisor in (2, 4, 8):
        yield value // divisor if isinstance(value, int) else value / divisor


def _changed(config: TrainConfig, change: dict[str, Any]) -> TrainConfig:
    changed = copy.deepcopy(config)
    for key, value in change.items():
        section, _, name = key.partition(".")
        setattr(getattr(changed, section), name, value)
    return changed


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' if count > 1 else ''}"


def _cell(size: int) -> str:
    return ("-" if not size else f"{size / 2**30:.1f}").rjust(10)
