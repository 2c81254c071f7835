"""Read and write the agent's settings in a model folder.

`memrl_agent.yaml` in a Hugging Face model folder holds the agent's limits and the full texts of its prompts, so a trained model
is used and evaluated with exactly the prompts that it was trained with, even if the prompt files change later.
"""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from memrl.agents.agent_config import AgentConfig
from memrl.agents.agent_function import AGENTS, load_agent_function, make_config
from memrl.prompts import PROMPT_FOLDER, Prompts, check_prompts, load_prompts
from memrl.utils.bounded_files import read_yaml
from memrl.utils.bounds import MOST_INT
from memrl.utils.files import write_whole

FILE_NAME = "memrl_agent.yaml"
DEFAULT_PROMPTS = "question_first"
LIMITS = ("chunk_tokens", "memory_tokens", "answer_tokens", "question_tokens")
OTHERS = ("function", "caps", "options")  # not in the files of versions that had the memory agent alone


class _Dumper(yaml.SafeDumper):
    """Writes multi-line texts as blocks, which people can read and edit."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def save_agent(config: AgentConfig, folder: str | Path) -> None:
    """Write `folder/memrl_agent.yaml`, whole or not at all."""
    path = Path(folder) / FILE_NAME
    text = yaml.dump(agent_settings(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**31)
    write_whole(path, text)


def agent_settings(config: AgentConfig) -> dict[str, Any]:
    """All settings of an agent, as plain values."""
    settings: dict[str, Any] = {name: getattr(config, name) for name in LIMITS}
    if config.function != "memory":
        settings |= {"function": config.function, "caps": dict(config.caps), "options": config.options_dict()}
    prompts = asdict(config.prompts)
    if not prompts["texts"]:
        del prompts["texts"]
    return settings | {"prompts": prompts}


def load_agent(folder: str | Path, **overrides: Any) -> AgentConfig:
    """The settings in a model folder; the original's defaults if it has no such file.

    Args:
        overrides: fields of `AgentConfig` to replace; None keeps a field. `prompts` may also be a prompt file's name or path.
            Another `function` has its own caps and options.

    Raises:
        ValueError: the file is damaged, or a key is missing, unknown or has an invalid value; or it names a user's file with an
            agent, which is only run if `function` names it: a model folder from elsewhere must not choose what runs here.
    """
    path = Path(folder) / FILE_NAME
    saved = _read(path) if os.path.lexists(path) else {}
    given = {name: value for name, value in overrides.items() if value is not None}
    if unknown := sorted(set(given) - {*LIMITS, *OTHERS, "prompts"}):
        raise ValueError(f"the agent has no setting {unknown[0]!r}; there are {', '.join((*LIMITS, *OTHERS, 'prompts'))}")
    for name in LIMITS:
        if name in given:
            _check_limit(given[name], f"agent.{name}")
    trained = saved.get("function", "memory")
    function = given.get("function", trained)
    if ":" in function and "function" not in given:
        raise ValueError(
            f"{path} names the agent {function!r}, a file that this command would run; if you trust it, give "
            f"--agent.function {function}"
        )
    if function in AGENTS and function != trained:
        saved = {name: value for name, value in saved.items() if name not in OTHERS}
    for name in ("caps", "options"):
        if name in given:
            given[name] = {**saved.get(name, {}), **given[name]}
    needed = load_agent_function(function).texts
    prompts = given.pop("prompts", saved.pop("prompts", None))
    if prompts is None:
        prompts = function if (PROMPT_FOLDER / f"{function}.yaml").is_file() else DEFAULT_PROMPTS
    elif not isinstance(prompts, (dict, Prompts)):
        prompts = load_prompts(prompts, needed)
    if isinstance(prompts, dict):
        if function != trained and any(name not in prompts and name not in prompts.get("texts", {}) for name in needed):
            raise ValueError(f"{path} has the prompts of the agent {trained}; give --agent.prompts with those of {function}")
        prompts = check_prompts(prompts, f"{path}: prompts", needed)
    return make_config(prompts, **{**saved, **given, "function": function})


def _read(path: Path) -> dict[str, Any]:
    content = read_yaml(path)
    keys = {*LIMITS, "prompts"}
    if not isinstance(content, dict):
        raise ValueError(f"{path} must be a mapping with the keys {', '.join(sorted(keys))}")
    if unknown := sorted(str(key) for key in content if key not in {*keys, *OTHERS}):
        raise ValueError(f"{path} has the unknown key {unknown[0]!r}; allowed are {', '.join(sorted({*keys, *OTHERS}))}")
    if missing := sorted(keys - set(content)):
        raise ValueError(f"{path} lacks the key {missing[0]!r}")
    for name in LIMITS:
        _check_limit(content[name], f"{path}: {name}")
    for name, kind, meaning in (("function", str, "text"), ("caps", dict, "a mapping"), ("options", dict, "a mapping")):
        if not isinstance(content.get(name, kind()), kind):
            raise ValueError(f"{path}: {name} must be {meaning}")
    if not isinstance(content["prompts"], dict):
        check_prompts(content["prompts"], f"{path}: prompts")
    return content


def _check_limit(value: object, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_INT:
        raise ValueError(f"{name} is {value!r}; it must be a whole number of tokens, at least 1 and at most {MOST_INT}")
