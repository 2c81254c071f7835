"""The agent's settings in a model folder."""

import re
from dataclasses import replace

import pytest
import yaml

from memrl.agents import AgentConfig
from memrl.agents.agent_file import FILE_NAME, load_agent, save_agent
from memrl.prompts import Prompts, load_prompts

ODD = Prompts(
    memory=' {section}\r\n"{question}"\t# {memory}: \x85 \u2028 - \u00e9\u4e2d\n\n  indented \n',
    answer="{question}{memory}",
    no_memory="null",
    system="yes\n",
)


@pytest.mark.parametrize("prompts", [ODD, load_prompts("question_first"), load_prompts("section_first")])
def test_saved_settings_are_read_back_unchanged(tmp_path, prompts):
    config = AgentConfig(prompts, 25, 6, 4, 8)
    save_agent(config, tmp_path)
    assert load_agent(tmp_path) == config


def test_folder_without_the_file_gets_the_original_limits(tmp_path):
    assert load_agent(tmp_path) == AgentConfig(load_prompts("question_first"), 5000, 1024, 1024, 1024)


def test_overrides_replace_single_settings_and_none_does_not(tmp_path):
    save_agent(AgentConfig(ODD, 25, 6, 4, 8), tmp_path)
    config = load_agent(tmp_path, chunk_tokens=50, memory_tokens=None, prompts="section_first")
    assert config == AgentConfig(load_prompts("section_first"), 50, 6, 4, 8)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("chunk_tokens: 1", "answer_tokens"),
        ("[]", "mapping"),
        ("a: [", "not a YAML file"),
        (
            "{chunk_tokens: 1, memory_tokens: 1, answer_tokens: 1, question_tokens: 1, prompts: {}, chunks: 2}",
            "chunks",
        ),
        (
            "{chunk_tokens: 0, memory_tokens: 1, answer_tokens: 1, question_tokens: 1, prompts: {}}",
            "chunk_tokens",
        ),
        (
            "{chunk_tokens: 1, memory_tokens: '1', answer_tokens: 1, question_tokens: 1, prompts: {}}",
            "memory_tokens",
        ),
        (
            "{chunk_tokens: 1, memory_tokens: 1, answer_tokens: true, question_tokens: 1, prompts: {}}",
            "answer_tokens",
        ),
        (
            "{chunk_tokens: 1, memory_tokens: 1, answer_tokens: 1, question_tokens: 1, prompts: {memory: x}}",
            "prompts",
        ),
    ],
)
def test_damaged_file_is_refused_naming_file_and_key(tmp_path, text, named):
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(ValueError, match=named) as error:
        load_agent(tmp_path)
    assert FILE_NAME in str(error.value)


@pytest.mark.parametrize("overrides", [{"chunk_tokens": 0}, {"chunk": 5}, {"prompts": "no_such_prompts"}])
def test_bad_overrides_are_refused(tmp_path, overrides):
    with pytest.raises(ValueError):
        load_agent(tmp_path, **overrides)


def test_a_model_folder_does_not_choose_a_file_to_run(tmp_path):
    (tmp_path / "own.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nasync def read(llm, sample, config):\n    return None\n"
    )
    spec = f"{tmp_path / 'own.py'}:read"
    content = {"chunk_tokens": 1, "memory_tokens": 1, "answer_tokens": 1, "question_tokens": 1, "function": spec, "prompts": {}}
    (tmp_path / FILE_NAME).write_text(yaml.safe_dump(content))
    for others in ({}, {"chunk_tokens": 2}, {"options": {"a": 1}}, {"function": "memory", "prompts": "question_first"}):
        if "function" in others:
            assert load_agent(tmp_path, **others).function == "memory"
        else:
            with pytest.raises(ValueError, match="a file that this command would run"):
                load_agent(tmp_path, **others)
    assert not (tmp_path / "ran").exists()
    assert load_agent(tmp_path, function=spec).function == spec and (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"function": "nobody"}, "there is no agent 'nobody'"),
        ({"function": 7}, "function must be text"),
        ({"caps": [1]}, "caps must be a mapping"),
        ({"caps": {"check": 10**30}, "function": "passes"}, "agent.caps.check is 1000"),
        ({"caps": {"check": "9"}, "function": "passes"}, "agent.caps.check is '9'"),
        ({"caps": {"merge": 9}, "function": "passes"}, "agent.caps.merge would have no effect: the agent passes caps check"),
        ({"caps": {"answer": 9}, "function": "passes"}, "the cap of these turns is agent.answer_tokens"),
        ({"options": {"speed": 1}}, "agent.options.speed would have no effect: the agent memory has no options"),
        ({"options": {"speed": 1}, "function": "passes"}, "no option 'speed'; there are max_passes"),
        ({"options": {"max_passes": [[[1]]]}, "function": "passes"}, "agent.options.max_passes is"),
    ],
)
def test_an_agent_that_does_not_exist_or_has_odd_settings_is_refused(tmp_path, changed, named):
    texts = load_prompts("passes", {})
    texts = replace(texts, memory="{question} {memory} {section}")  # for the memory agent too
    save_agent(AgentConfig(texts, 25, 6, 4, 8), tmp_path)
    content = yaml.safe_load((tmp_path / FILE_NAME).read_text())
    (tmp_path / FILE_NAME).write_text(yaml.safe_dump(content | changed))
    with pytest.raises(ValueError, match=re.escape(named)):
        load_agent(tmp_path)
