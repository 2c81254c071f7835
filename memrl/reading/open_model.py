"""Open a model folder for reading: the options of `memrl infer` and `memrl eval`, the device, the weights, the sampler.

Importing this module is cheap; torch is imported by the first call that needs it. Annotations are not postponed here, because
jsonargparse would import everything under TYPE_CHECKING to resolve them, and --help would take seconds.
"""

import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from memrl.utils.devices import pick_device, set_threads

if TYPE_CHECKING:
    from memrl.agents import AgentConfig
    from memrl.llm import Decoding, LocalLLM
    from memrl.model import Transformer
    from memrl.tokenizer import Tokenizer


@dataclass
class AgentOverrides:
    """How to read documents; the model's memrl_agent.yaml, or else the default, applies if an option is not given."""

    prompts: str | None = None
    """Prompt file: a path, or the name of one in memrl/prompts."""
    chunk_tokens: int | None = None
    """Document tokens in a chunk."""
    memory_tokens: int | None = None
    """Largest number of tokens of the memory."""
    answer_tokens: int | None = None
    """Largest number of tokens of the answer turn."""
    question_tokens: int | None = None
    """Largest number of tokens of a question; longer ones are refused."""


@dataclass
class ReaderOptions:
    """How to run the model."""

    temperature: float = 0.0
    """Sampling temperature; 0 is greedy decoding."""
    top_p: float = 1.0
    """Sample from the smallest set of most likely tokens that reaches this probability."""
    top_k: int = 0
    """Sample from this many of the most likely tokens; 0: off."""
    min_p: float = 0.0
    """Drop tokens less likely than this times the most likely one; 0: off."""
    max_rows: int = 128
    """Documents read at the same time; changes the speed, not the results. Up to this many unfinished documents restart after an
    interruption."""
    cache_gib: float = 4.0
    """Largest size of the key/value cache in GiB."""
    attention: Literal["auto", "eager", "sdpa", "flash", "triton"] = "auto"
    """Attention backend; auto: the best one that runs on this machine, named at the start."""
    max_step_tokens: int = 0
    """Largest number of prompt and response tokens in one forward pass; 0: chosen for the model and the device."""
    share_prefixes: bool = True
    """Compute and cache the common beginning of prompts only once."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights; auto: as in the checkpoint."""
    yarn: float = 0.0
    """Stretch positions by YaRN for texts this many times longer than the checkpoint's window, for example 4; 0: off."""
    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda, cuda:N, or map: layers spread over all GPUs, the rest in CPU memory."""
    max_memory: str | None = None
    """Memory of each device for weights, with --device map: for example 0=70GiB,1=70GiB,cpu=100GiB; all of it if not given."""
    threads: int = 0
    """CPU threads; 0: all cores."""
    agent: AgentOverrides = field(default_factory=AgentOverrides)


def load_settings(model: str | Path, options: ReaderOptions) -> "tuple[AgentConfig, Tokenizer]":
    """Agent settings and tokenizer of a model folder, checked before the weights are read.

    Raises:
        ValueError: there is no such folder, or a file in it or an option is not usable.
    """
    from memrl.agents.agent_file import load_agent

    if not Path(model).is_dir():
        raise ValueError(f"there is no model folder {model}; give a Hugging Face folder (config.json, safetensors)")
    check_options(options)
    agent = load_agent(model, **asdict(options.agent))
    if options.yarn:
        model_window(model, options)
    from memrl.tokenizer import load_tokenizer

    return agent, load_tokenizer(model)


def check_options(options: ReaderOptions) -> None:
    """Refuse numbers out of range; ValueError."""
    for name, value, allowed in (
        ("max_rows", options.max_rows, options.max_rows >= 1),
        ("cache_gib", options.cache_gib, 0 < options.cache_gib < float("inf")),
        ("threads", options.threads, options.threads >= 0),
        ("temperature", options.temperature, 0 <= options.temperature < float("inf")),
        ("top_p", options.top_p, 0 < options.top_p <= 1),
        ("top_k", options.top_k, options.top_k >= 0),
        ("min_p", options.min_p, 0 <= options.min_p <= 1),
        ("max_step_tokens", options.max_step_tokens, options.max_step_tokens >= 0),
    ):
        if not allowed:
            raise ValueError(f"{name} is {value}; see --help for what is allowed")


def model_window(model: str | Path, options: ReaderOptions) -> int:
    """Largest number of tokens of a prompt and its response together: the model's window, stretched by YaRN if that is on.

    Raises:
        ValueError: config.json cannot be used, or not together with the option yarn.
    """
    from memrl.model.hf_config import longest_text, read_config

    return longest_text(read_config(model, options.yarn))


def model_settings(options: ReaderOptions) -> dict[str, str | float]:
    """The options that change the logits; results are compared only if they agree."""
    return {"dtype": options.dtype, "yarn": options.yarn}


def open_llm(model: str | Path, tokenizer: "Tokenizer", agent: "AgentConfig", options: ReaderOptions) -> "LocalLLM":
    """Load the weights and build the sampler.

    Whether its cache is large enough depends on the documents: see `memrl.agents.limits.check_turn`.

    Returns:
        The llm; its `about` lists what was loaded, in how many seconds, and the attention backend.

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
    return LocalLLM(sampler, tokenizer, decoding(options), agent.prompts.system, about)


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

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    limits: dict[int | str, str] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+|cpu)\s*=\s*(\S.*)", part, re.ASCII)
        if match is None:
            raise ValueError(f"max_memory holds {part!r}; give for example 0=70GiB,1=70GiB,cpu=100GiB")
        place = match[1] if match[1] == "cpu" else int(match[1])
        if isinstance(place, int) and place >= count:
            raise ValueError(f"max_memory names GPU {place}, but PyTorch finds {count} GPUs here")
        if place in limits:
            raise ValueError(f"max_memory names {place} twice")
        limits[place] = match[2].strip()
    return limits


def check_seed(seed: int) -> int:
    """Return the seed; ValueError if it does not fit the signed 64-bit number that sampling hashes."""
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed is {seed}; it must lie between 0 and {2**63 - 1}")
    return seed
