"""Read and write the agent's settings in a model folder.

`memrl_agent.yaml` in a Hugging Face model folder holds the agent's limits and the full texts of its prompts, so a trained model
is used and evaluated with exactly the prompts that it was trained with, even if the prompt files change later.
"""

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from memrl.agents.memory import AgentConfig
from memrl.prompts import Prompts, check_prompts, load_prompts
from memrl.utils.bounded_files import read_yaml
from memrl.utils.bounds import MOST_INT
from memrl.utils.files import write_whole

FILE_NAME = "memrl_agent.yaml"
DEFAULT_PROMPTS = "question_first"
LIMITS = ("chunk_tokens", "memory_tokens", "answer_tokens", "question_tokens")


class _Dumper(yaml.SafeDumper):
    """Writes multi-line texts as blocks, which people can read and edit."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def save_agent(config: AgentConfig, folder: str | Path) -> None:
    """Write `folder/memrl_agent.yaml`, whole or not at all."""
    path = Path(folder) / FILE_NAME
    content = {name: getattr(config, name) for name in LIMITS} | {"prompts": asdict(config.prompts)}
    text = yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**31)
    write_whole(path, text)


def load_agent(folder: str | Path, **overrides: Any) -> AgentConfig:
    """The settings in a model folder; the original's defaults if it has no such file.

    Args:
        overrides: fields of `AgentConfig` to replace; None keeps a field. `prompts` may also be a prompt file's name or path.

    Raises:
        ValueError: the file is damaged, or a key is missing, unknown or has an invalid value.
    """
    path = Path(folder) / FILE_NAME
    config = _read(path) if os.path.lexists(path) else AgentConfig(load_prompts(DEFAULT_PROMPTS))
    given = {name: value for name, value in overrides.items() if value is not None}
    if unknown := sorted(set(given) - {*LIMITS, "prompts"}):
        raise ValueError(f"the agent has no setting {unknown[0]!r}; there are {', '.join(LIMITS)}, prompts")
    for name in LIMITS:
        if name in given:
            _check_limit(given[name], f"agent.{name}")
    if "prompts" in given and not isinstance(given["prompts"], Prompts):
        given["prompts"] = load_prompts(given["prompts"])
    return replace(config, **given)


def _read(path: Path) -> AgentConfig:
    content = read_yaml(path)
    keys = {*LIMITS, "prompts"}
    if not isinstance(content, dict):
        raise ValueError(f"{path} must be a mapping with the keys {', '.join(sorted(keys))}")
    if unknown := sorted(str(key) for key in content if key not in keys):
        raise ValueError(f"{path} has the unknown key {unknown[0]!r}; allowed are {', '.join(sorted(keys))}")
    if missing := sorted(keys - set(content)):
        raise ValueError(f"{path} lacks the key {missing[0]!r}")
    for name in LIMITS:
        _check_limit(content[name], f"{path}: {name}")
    prompts = check_prompts(content["prompts"], f"{path}: prompts")
    return AgentConfig(prompts, **{name: content[name] for name in LIMITS})


def _check_limit(value: object, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_INT:
        raise ValueError(f"{name} is {value!r}; it must be a whole number of tokens, at least 1 and at most {MOST_INT}")
