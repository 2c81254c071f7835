"""Open a model folder for reading: the options of `memrl infer` and `memrl eval`, the device, the weights, the sampler.

Importing this module is cheap; torch is imported by the first call that needs it. Annotations are not postponed here: see
`memrl.utils.command_line`.
"""

import os
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from memrl.utils.bounds import MAX_GIB, MAX_ROWS, MAX_THREADS, bounded, check_options
from memrl.utils.devices import pick_device, set_threads

if TYPE_CHECKING:
    from memrl.agents import AgentConfig
    from memrl.llm import Decoding, LocalLLM
    from memrl.model import Transformer
    from memrl.tokenizer import Tokenizer


@dataclass
class AgentOverrides:
    """How to read documents; the model's memrl_agent.yaml, or else the default, applies if an option is not given."""

    function: str | None = None
    """The agent: a name in memrl/agents, or FILE.py:NAME, which is run."""
    prompts: str | None = None
    """Prompt file: a path, or the name of one in memrl/prompts."""
    chunk_tokens: int | None = bounded(None, 1)
    """Document tokens in a chunk."""
    memory_tokens: int | None = bounded(None, 1)
    """Largest number of tokens of the memory."""
    answer_tokens: int | None = bounded(None, 1)
    """Largest number of tokens of the answer turn."""
    question_tokens: int | None = bounded(None, 1)
    """Largest number of tokens of a question; longer ones are refused."""
    caps: dict[str, int] | None = None
    """Largest number of tokens of turns of further kinds, by kind."""
    options: dict[str, Any] | None = None
    """The agent's own options."""


@dataclass
class ReaderOptions:
    """How to run the model."""

    temperature: float = bounded(0.0, at_least=0)
    """Sampling temperature; 0 is greedy decoding."""
    top_p: float = bounded(1.0, above=0, at_most=1)
    """Sample from the smallest set of most likely tokens that reaches this probability."""
    top_k: int = bounded(0, at_least=0)
    """Sample from this many of the most likely tokens; 0: off."""
    min_p: float = bounded(0.0, 0, 1)
    """Drop tokens less likely than this times the most likely one; 0: off."""
    max_rows: int = bounded(128, 1, MAX_ROWS)
    """Documents read at the same time; changes the speed, not the results. Up to this many unfinished documents restart after an
    interruption."""
    cache_gib: float = bounded(4.0, above=0, at_most=MAX_GIB)
    """Largest size of the key/value cache in GiB."""
    attention: Literal["auto", "eager", "sdpa", "flash", "triton"] = "auto"
    """Attention backend; auto: the best one that runs on this machine, named at the start."""
    max_step_tokens: int = bounded(0, at_least=0)
    """Largest number of prompt and response tokens in one forward pass; 0: chosen for the model and the device."""
    share_prefixes: bool = True
    """Compute and cache the common beginning of prompts only once."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights; auto: as in the checkpoint."""
    yarn: float = bounded(0.0, 0, 1000, why="the largest published factor is 64")
    """Stretch positions by YaRN for texts this many times longer than the checkpoint's window, for example 4; 0: off."""
    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda, cuda:N, or map: layers spread over all GPUs, the rest in CPU memory."""
    max_memory: str | None = None
    """Memory of each device for weights, with --device map: for example 0=70GiB,1=70GiB,cpu=100GiB; all of it if not given."""
    threads: int = bounded(0, 0, MAX_THREADS)
    """CPU threads; 0: all cores."""
    agent: AgentOverrides = field(default_factory=AgentOverrides)


def load_settings(model: str | Path, options: ReaderOptions) -> "tuple[AgentConfig, Tokenizer]":
    """Agent settings and tokenizer of a model folder; ValueError if the folder, a file in it or an option is not usable."""
    from memrl.agents.agent_file import load_agent
    from memrl.tokenizer import load_tokenizer

    if not Path(model).is_dir():
        raise ValueError(f"there is no model folder {model}; give a Hugging Face folder (config.json, safetensors)")
    check_options(options)
    if os.path.lexists(Path(model) / "config.json"):  # before transformers reads it without bounds
        from memrl.model.hf_config import read_raw_config

        read_raw_config(model)
    agent = load_agent(model, **asdict(options.agent))
    if options.yarn:
        model_window(model, options)
    return agent, load_tokenizer(model)


def model_window(model: str | Path, options: ReaderOptions) -> int:
    """Most tokens of a prompt and its response: the model's window, stretched by YaRN; ValueError if it cannot be."""
    from memrl.model.hf_config import longest_text, read_config

    return longest_text(read_config(model, options.yarn))


def check_reading(
    model: str | Path,
    options: ReaderOptions,
    tokenizer: "Tokenizer",
    agent: "AgentConfig",
    *,
    document_tokens: int | None = None,
    question_tokens: int | None = None,
) -> None:
    """Raise ValueError if a turn can be longer than the model's window; lengths as in `memrl.agents.limits.longest_turn`."""
    from memrl.agents.limits import check_agent, prompt_sizes

    measured = {"document_tokens": document_tokens, "question_tokens": question_tokens}
    check_agent(model_window(model, options), prompt_sizes(tokenizer, agent), agent, stretch(model), **measured)


def stretch(model: str | Path) -> Callable[[int], str]:
    """What makes the model's window at least `tokens` long, in words; "" if nothing does."""
    from memrl.model.hf_config import yarn_for

    def words(tokens: int) -> str:
        factor = yarn_for(model, tokens)
        return "" if factor is None else f"--yarn {factor:g}"

    return words


def open_llm(model: str | Path, tokenizer: "Tokenizer", agent: "AgentConfig", options: ReaderOptions) -> "LocalLLM":
    """Load the weights and build the sampler; the llm's `about` lists what was loaded, and the attention backend.

    Whether its cache is large enough depends on the documents: see `memrl.agents.limits.check_turn`.

    Raises:
        ValueError: the device or the attention backend is not available, or the folder holds no usable weights.
    """
    import torch

    from memrl.kernels.attention import pick_attention
    from memrl.kernels.logprob import multiplies_bf16
    from memrl.llm import LocalLLM
    from memrl.model.hf_config import dtype_named, read_raw_config
    from memrl.model.loader import describe_model
    from memrl.model.packed_weights import pack_weights
    from memrl.sampler import Sampler

    set_threads(options.threads)
    device = pick_device("auto" if options.device == "map" else options.device)
    # Before the weights are read, which can take minutes.
    attention, reason = pick_attention(options.attention, device, dtype_named(options.dtype, read_raw_config(model)))
    began = time.monotonic()
    weights = _load_weights(model, options)
    about = [describe_model(weights, time.monotonic() - began), f"attention: {attention.name} ({reason})"]
    if options.yarn:
        about.append(f"positions: YaRN, factor {options.yarn:g}, for texts of {model_window(model, options):,} tokens")
    if weights.dtype == torch.bfloat16 and not multiplies_bf16(device):
        about.append("this CPU has no bfloat16 arithmetic: --dtype float32 is several times faster and needs twice the memory")
    if weights.placement is None:
        pack_weights(weights)
    sampler = Sampler(
        weights,
        tokenizer,
        max_rows=options.max_rows,
        max_step_tokens=options.max_step_tokens or None,
        cache_gib=options.cache_gib,
        share_prefixes=options.share_prefixes,
        attention=attention,
    )
    return LocalLLM(sampler, tokenizer, decoding(options), agent.prompts.system, about, model_window(model, options))


def decoding(options: ReaderOptions) -> "Decoding":
    from memrl.llm import Decoding

    return Decoding(options.temperature, options.top_p, options.top_k, options.min_p)


def _load_weights(model: str | Path, options: ReaderOptions) -> "Transformer":
    if options.device == "map":
        from memrl.model.device_map import load_dispatched

        return load_dispatched(model, options.dtype, "auto", parse_max_memory(options.max_memory), True, options.yarn)
    if options.max_memory is not None:
        raise ValueError(f"max_memory is {options.max_memory!r}, which only --device map uses; the device is {options.device!r}")
    from memrl.model import load_model

    return load_model(model, options.dtype, pick_device(options.device), progress=True, yarn=options.yarn)


def parse_max_memory(text: str | None) -> dict[int | str, str] | None:
    """ "0=70GiB,cpu=100GiB" to {0: "70GiB", "cpu": "100GiB"}; ValueError for anything else."""
    if text is None:
        return None
    import torch

    limits: dict[int | str, str] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(?:(\d+)|cpu)\s*=\s*(\S.*)", part, re.ASCII)
        if match is None:
            raise ValueError(f"max_memory holds {part!r}; give for example 0=70GiB,1=70GiB,cpu=100GiB")
        place = int(match[1]) if match[1] else "cpu"
        if isinstance(place, int) and place >= torch.cuda.device_count():
            raise ValueError(f"max_memory names GPU {place}, but PyTorch finds {torch.cuda.device_count()} GPUs here")
        if place in limits:
            raise ValueError(f"max_memory names {place} twice")
        limits[place] = match[2].strip()
    return limits
