"""Find an agent by its name, or load it from a user's file, with what its module declares.

An agent is `async def NAME(llm, sample, config) -> Trajectory`. Its module may declare, all of them optional:

    PROMPTS = {"memory": {"question", "section"}}     the texts that its prompt file must have, with their slots
    CAPS = {"check": 64}                              most tokens of its own kinds of turn, if the settings give no others
    class Options                                     a dataclass of its own settings, each with a default
    def longest_turn(sizes, config, section, question) -> int          see `memrl.agents.memory.longest_turn`
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from memrl.agents.agent_config import AgentConfig
from memrl.prompts import Prompts, load_prompts
from memrl.types import Trajectory, Turn
from memrl.utils.bounds import MOST_INT
from memrl.utils.user_file import load_user_function

if TYPE_CHECKING:
    from memrl.agents import Agent
    from memrl.llm import Session
    from memrl.types import Sample

AGENTS = ("memory", "chat", "tools", "gated", "passes", "recall", "map_reduce")


@dataclass(frozen=True)
class AgentFunction:
    """An agent and what its module declares; `file` is None for those of memrl."""

    run: Agent[AgentConfig]
    texts: Mapping[str, Collection[str]]
    caps: Mapping[str, int]
    options: type | None
    longest_turn: Callable[[Mapping[str, int], AgentConfig, int, int], int] | None
    file: Path | None


@lru_cache(maxsize=64)
def load_agent_function(name: str) -> AgentFunction:
    """The agent of this name, or of FILE.py:NAME; the file is imported. ValueError if there is none."""
    if name in AGENTS:
        module = importlib.import_module(f"memrl.agents.{name}")
        return _describe(getattr(module, f"{name}_agent"), vars(module), None)
    if ":" not in name:
        raise ValueError(f"there is no agent {name!r}; there are {', '.join(AGENTS)}, or give FILE.py:NAME")
    try:
        function, module = load_user_function(name)
        if not inspect.iscoroutinefunction(function):
            raise ValueError("it is not an async function: async def NAME(llm, sample, config)")
        try:
            inspect.signature(function).bind(None, None, None)
        except TypeError as error:
            raise ValueError(f"it must take (llm, sample, config): {error}") from error
        return _describe(function, vars(module), Path(name.rpartition(":")[0]))
    except ValueError as error:
        raise ValueError(f"agent {name}: {error}") from error


def _describe(run: Agent[AgentConfig], declared: Mapping[str, Any], file: Path | None) -> AgentFunction:
    options = declared.get("Options")
    if options is not None and not (isinstance(options, type) and dataclasses.is_dataclass(options)):
        raise ValueError("Options must be a dataclass")
    longest = declared.get("longest_turn")
    return AgentFunction(run, declared.get("PROMPTS", {}), declared.get("CAPS", {}), options, longest, file)


def make_config(
    prompts: str | Path | Prompts,
    *,
    function: str = "memory",
    caps: Mapping[str, int] | None = None,
    options: Mapping[str, Any] | None = None,
    **limits: int,
) -> AgentConfig:
    """The settings of an agent, checked against what its module declares.

    Args:
        prompts: a prompt file's name, path or contents.
        limits: chunk_tokens and the other limits of `AgentConfig`.

    Raises:
        ValueError: no such agent or prompt file, a text that the agent needs is missing, or an option is unknown or of another
            type.
    """
    found = load_agent_function(function)
    if isinstance(prompts, Prompts):
        for name in found.texts:
            if not prompts.text(name).strip():
                raise ValueError(
                    f"the agent {function} needs the text {name!r}, which the prompts lack; give --agent.prompts with a file "
                    "that has it"
                )
    else:
        prompts = load_prompts(prompts, found.texts)
    for kind, cap in (caps or {}).items():
        if kind in ("memory", "answer"):
            raise ValueError(f"agent.caps.{kind} is {cap!r}; the cap of these turns is agent.{kind}_tokens")
        if found.file is None and kind not in found.caps:  # a user's file may name kinds as it goes
            raise ValueError(
                f"agent.caps.{kind} would have no effect: the agent {function} caps {', '.join(found.caps) or 'no kind'}"
            )
        if isinstance(cap, bool) or not isinstance(cap, int) or not 1 <= cap <= MOST_INT:
            raise ValueError(f"agent.caps.{kind} is {cap!r}; it must be a whole number of tokens, at least 1")
    if found.file is None and found.options is None and options:
        raise ValueError(f"agent.options.{next(iter(options))} would have no effect: the agent {function} has no options")
    merged = {**found.caps, **(caps or {})}
    return AgentConfig(prompts, function=function, caps=merged, options=make_options(found.options, options or {}), **limits)


def make_options(kind: type | None, values: Mapping[str, Any]) -> Any:
    """An instance of an agent's `Options` from a mapping, or the mapping itself; ValueError for unknown names and wrong types."""
    if kind is None:
        return dict(values)
    types = get_type_hints(kind)
    known = {field.name: types[field.name] for field in dataclasses.fields(kind)}
    checked = {}
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"the agent has no option {name!r}; there are {', '.join(known) or 'none'} (agent.options)")
        checked[name] = _of_type(value, known[name], f"agent.options.{name}")
    return kind(**checked)


def _of_type(value: Any, wanted: Any, name: str) -> Any:
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(wanted).validate_python(value, strict=True)
    except ValidationError as error:
        raise ValueError(f"{name} is {value!r}; {error.errors()[0]['msg']}") from error


async def run_agent(llm: Session, sample: Sample, config: AgentConfig) -> Trajectory:
    """Run the agent that `config.function` names.

    Raises:
        ValueError: what it returns is no trajectory with turns, texts and finite scores; and whatever the agent raises.
    """
    found: Any = await load_agent_function(config.function).run(llm, sample, config)
    if problem := fault_of(found):
        raise ValueError(f"the agent returned {problem}")
    return found


def fault_of(found: Any) -> str:
    """What is wrong with an agent's trajectory, in words; "" if nothing is. A user's function may return anything."""
    if not isinstance(found, Trajectory):
        return f"{_kind(found)}; it must return a memrl.types.Trajectory"
    if not isinstance(found.turns, list) or not found.turns:
        return "a trajectory without turns; they are what llm.chat returns, the answer's last"
    for turn in found.turns:
        if not isinstance(turn, Turn):
            return f"a trajectory in which a turn is {_kind(turn)}; it must be what llm.chat returns"
    for name, text in (("response", found.response), ("memory", found.memory)):
        if not isinstance(text, str):
            return f"a trajectory whose {name} is {_kind(text)}; it must be a text"
    for name, value in found.scores.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            return f"a trajectory whose score {name!r} is {value!r}; scores are finite numbers"
    return ""


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
