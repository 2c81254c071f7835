"""Print the memory plan of a run as a table (`--dry_run`), and settings that would make it fit.

Only config.json and the tokenizer, if there is one, are read. The first call imports torch, so that --help stays quick.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memrl.config import AgentOptions, TrainConfig
from memrl.utils.bounds import MAX_GIB

if TYPE_CHECKING:
    from memrl.training.memory_plan import MemoryPlan, ModelSizes

DEFAULT_GPUS = "1,8,32"
DEFAULT_GPU_GIB = 79.1  # as PyTorch reports for an H100 or A100 of 80 GB
CHARACTERS_PER_TOKEN = 4  # estimate for English without a tokenizer
CHAT_TOKENS = 40  # estimate of a chat template around a message without a tokenizer
LORA_RANK = 16  # tried if the run does not fit
MAX_FIXES = 3
MAX_PLANS = 64
TITLE_WIDTH = 40
NO_FIX = "none of the settings tried makes it fit; take more GPUs or a smaller model"


def dry_run(config: TrainConfig, gpus: str | None, gpu_gib: float | None) -> int:
    """Print the plan for each number of GPUs; the exit code: 0 if the run fits for at least one of them, otherwise 2.

    Raises:
        ValueError: no usable config.json, or settings whose sizes the run itself would refuse.
    """
    from memrl.model.hf_config import read_config
    from memrl.training.memory_plan import GIB, count_sizes, plan_memory, weights_dtype

    counts, capacity = parse_gpus(DEFAULT_GPUS if gpus is None else gpus), DEFAULT_GPU_GIB if gpu_gib is None else gpu_gib
    if not 0 < capacity <= MAX_GIB:
        raise ValueError(f"gpu_gib is {capacity}; it must be positive and at most {MAX_GIB}")
    if config.model.path is None:
        raise ValueError("the dry run needs a model; give --model.path DIR, a folder with its config.json")
    sizes = count_sizes(read_config(config.model.path), weights_dtype(config.model), config.model.lora_rank)
    longest, source = longest_tokens(config.agent, config.model.path, config.rl.micro_batch_tokens)
    check_sizes(config, sizes, longest)
    plans = [plan_memory(config, sizes, count) for count in counts]
    print(describe(config, sizes, longest, source))
    print(table(plans))
    for plan in plans:
        fits = plan.peak <= capacity * GIB
        line = f"{_gpus(plan.world_size):>8}: {'fits' if fits else 'does not fit'}: {plan.peak / GIB:.1f} of {capacity:g} GiB"
        if not fits:
            fixes = find_fixes(config, sizes, longest, plan.world_size, capacity)
            ways = (" and ".join(f"{key} {'true' if value is True else value}" for key, value in fix.items()) for fix in fixes)
            advice = f"it would with {', or with '.join(ways)}" if fixes else NO_FIX
            line = f"{line}; {advice}"
        print(line, flush=True)
    return 0 if any(plan.peak <= capacity * GIB for plan in plans) else 2


def parse_gpus(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > MAX_PLANS or not all(re.fullmatch(r"0*[1-9]\d{0,5}", part, re.ASCII) for part in parts):
        most = f"at most {MAX_PLANS} numbers of GPUs below a million"
        raise ValueError(f"dry_gpus is {text!r}; it must be {most}, for example {DEFAULT_GPUS}")
    return [int(part) for part in parts]


def longest_tokens(options: AgentOptions, model_folder: str, bound: int) -> tuple[int, str]:
    """Tokens of the longest turn within the agent's limits, and how the template's part of them was counted.

    Args:
        bound: taken for an agent that does not say how long its turns can be.

    Raises:
        ValueError: it is longer than the model's window.
    """
    from memrl.agents import load_agent_function
    from memrl.agents.limits import prompt_sizes, turn_tokens
    from memrl.training.inputs import build_agent, check_window

    agent = build_agent(options)
    if any((Path(model_folder) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        from memrl.tokenizer import load_tokenizer

        sizes, source = prompt_sizes(load_tokenizer(model_folder), agent), "with the folder's tokenizer"
    else:
        system = agent.prompts.system or ""
        texts = {name: agent.prompts.text(name) for name, slots in load_agent_function(agent.function).texts.items() if slots}
        sizes = {name: CHAT_TOKENS + len(text + system) // CHARACTERS_PER_TOKEN for name, text in texts.items()}
        sizes |= dict.fromkeys(load_agent_function(agent.function).texts.keys() - sizes.keys(), 0)
        source = f"the prompt's words estimated, since {model_folder} holds no tokenizer"
    check_window(model_folder, sizes, agent)
    longest = turn_tokens(sizes, agent)
    return (bound, "rl.micro_batch_tokens, as the agent names no bound") if longest is None else (longest, source)


def check_sizes(config: TrainConfig, sizes: ModelSizes, longest: int) -> None:
    """Raise ValueError if a turn does not fit into the cache or into a micro-batch, as the run would at its start."""
    from memrl.training.memory_plan import cache_tokens

    room, bound = cache_tokens(config.rollout, sizes), config.rl.micro_batch_tokens
    for tokens, limit in (
        (room, f"rollout.cache_gib = {config.rollout.cache_gib:g} has room for {room}"),
        (bound, f"rl.micro_batch_tokens is {bound}"),
    ):
        if longest > tokens:
            raise ValueError(f"the agent's limits allow turns of {longest} tokens, and {limit}; raise it, or lower the limits")


def describe(config: TrainConfig, sizes: ModelSizes, longest: int, source: str) -> str:
    """The sizes that were planned with."""
    from memrl.sampler.kv_cache import KVCache
    from memrl.training.memory_plan import GIB, cache_tokens

    rows = config.rollout.max_rows
    unshared = rows * longest * KVCache.bytes_per_token(sizes.config, sizes.dtype) / GIB
    trained = f", {sum(sizes.trained):,} of adapters trained" if config.model.lora_rank else ""
    layers = "" if config.model.checkpoint_layers else ", layers not recomputed"
    return (
        f"{sizes.base:,} parameters of {sizes.dtype.itemsize} bytes{trained}; ZeRO-{config.engine.zero_stage}\n"
        f"micro-batches of {config.rl.micro_batch_tokens:,} tokens{layers}; longest turn {longest:,} tokens ({source})\n"
        f"key/value cache for {cache_tokens(config.rollout, sizes):,} tokens; {rows} rows of the longest turn that share nothing "
        f"would take {unshared:.1f} GiB\n"
        "By arithmetic, not measured on a GPU: docs/memory.md"
    )


def table(plans: list[MemoryPlan]) -> str:
    """A column per plan, in GiB."""
    from memrl.training.memory_plan import GIB, MACHINE_GPUS

    def row(title: str, values: Iterable[int]) -> str:
        return title.ljust(TITLE_WIDTH) + "".join((f"{value / GIB:.1f}" if value else "-").rjust(10) for value in values)

    def section(heading: str, *names: str) -> list[str]:
        parts = [{key: size for name in names for key, size in getattr(plan, name).items()} for plan in plans]
        return [heading, *(row(f"  {key}", (part[key] for part in parts)) for key in parts[0])]

    lines = [
        "",
        "GiB on each GPU".ljust(TITLE_WIDTH) + "".join(_gpus(plan.world_size).rjust(10) for plan in plans),
        *section("all the time", "always"),
        *section("while sampling", "sampling"),
        row("  together with the above", (plan.sampling_peak for plan in plans)),
        *section("while updating, the cache released", "backward", "step"),
        row("  together, the step or all the others", (plan.updating_peak for plan in plans)),
        row("total, the larger of both", (plan.peak for plan in plans)),
    ]
    if plans[0].cpu:
        lines += section("CPU memory for each GPU", "cpu")
        lines.append(row(f"  of a machine of {MACHINE_GPUS} GPUs", (plan.cpu_per_machine for plan in plans)))
    return "\n".join([*lines, ""])


def find_fixes(config: TrainConfig, sizes: ModelSizes, longest: int, world_size: int, gpu_gib: float) -> list[dict[str, Any]]:
    """The smallest sets of changes that bring the plan within `gpu_gib`, at most MAX_FIXES, each with its mildest values."""
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
            fixes += itertools.islice(filter(fits, changes), 1)
        if fixes:
            return fixes[:MAX_FIXES]
    return []


def _candidates(config: TrainConfig, sizes: ModelSizes, longest: int) -> dict[str, list[Any]]:
    """Settings to try, cheapest first, each with its values, mildest first."""
    from memrl.training.memory_plan import cache_tokens

    rl, engine, model = config.rl, config.engine, config.model
    caches = [config.rollout.cache_gib / divisor for divisor in (2, 4, 8)]
    batches = {rl.micro_batch_tokens // divisor for divisor in (2, 4, 8)} | {-(-longest // 256) * 256}
    # Of each setting: whether it can still be changed, and its values.
    found: dict[str, tuple[bool, list[Any]]] = {
        "rl.reference": (rl.reference == "device" and rl.kl_coef > 0 and not model.lora_rank, ["cpu"]),
        "rollout.cache_gib": (True, [g for g in caches if cache_tokens(replace(config.rollout, cache_gib=g), sizes) >= longest]),
        "rl.micro_batch_tokens": (True, [n for n in sorted(batches, reverse=True) if longest <= n < rl.micro_batch_tokens]),
        "model.checkpoint_layers": (not model.checkpoint_layers, [True]),
        "engine.offload_optimizer": (not engine.offload_optimizer, [True]),
        "engine.offload_params": (engine.zero_stage == 3 and not engine.offload_params, [True]),
        "engine.zero_stage": (engine.zero_stage < 3, [3]),
        "model.lora_rank": (not model.lora_rank, [LORA_RANK]),
    }
    return {key: values for key, (is_free, values) in found.items() if is_free and values}


def _changed(config: TrainConfig, change: dict[str, Any]) -> TrainConfig:
    for key, value in change.items():
        section, _, name = key.partition(".")
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return config


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' if count > 1 else ''}"
