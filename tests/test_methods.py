"""The compared methods: made by name, their settings, and that each has as many and as long turns as it declares."""

import importlib
import json
import random
from dataclasses import replace

import pytest

from memrl.agents import AgentConfig, memory_agent
from memrl.agents.limits import check_turn
from memrl.evaluation.methods import ENDPOINT_RESERVE, LOWER, METHODS, MethodOptions, make_methods
from memrl.llm import Decoding, LocalLLM
from memrl.model import Transformer
from memrl.prompts import Prompts, load_prompts
from memrl.sampler import Request, Sampler, SamplingParams
from memrl.types import Sample
from memrl.utils.command_line import Parser
from tests.test_agent import ScriptedSampler
from tests.test_tokenizer import character_tokenizer

PROMPTS = Prompts(
    memory="Q={question};M={memory};S={section};",
    answer="Q={question};M={memory};",
    no_memory="nothing",
    document="D={section};Q={question};",
)
AGENT = AgentConfig(PROMPTS, chunk_tokens=10, memory_tokens=7, answer_tokens=5, question_tokens=20)
OPTIONS = MethodOptions(retrieval_tokens=60, passage_tokens=12)
WINDOW = 200


@pytest.fixture(scope="module")
def tokenizer():
    return character_tokenizer()


@pytest.fixture(scope="module")
def llm(tokenizer):
    """Every response has the maximum length."""
    return LocalLLM(ScriptedSampler(lambda request: tokenizer.encode("x" * 99)), tokenizer, Decoding())


def made(*names, options=OPTIONS, agent=AGENT, window=WINDOW):
    return list(make_methods(names, options, agent, window).values())


def text(size):
    return "".join(random.Random(size).choices("abcdefgh    ", k=size))


def test_methods_are_made_in_the_order_given():
    assert [method.name for method in made(*METHODS)] == list(METHODS)
    assert [method.name for method in made(" retrieval", "memory ")] == ["retrieval", "memory"]


@pytest.mark.parametrize(
    ("names", "change", "message"),
    [
        ([], {}, "there is no method to run; give one or more of memory, one_shot, retrieval"),
        (["oneshot"], {}, "there is no method 'oneshot'; there are memory, one_shot, retrieval"),
        (["memory", "one_shot", "memory"], {}, "the method 'memory' is given twice"),
        (["memory"], {"window": 0}, "window is 0; it must be a number of tokens, at least 1"),
        (["one_shot"], {"window": 201}, r"window is 201, but this model is made for 200 tokens; .*--yarn"),
        (["retrieval"], {"passage_tokens": 0}, "passage_tokens is 0; it must be at least 1"),
        (["retrieval"], {"retrieval_tokens": 11}, "retrieval_tokens is 11, less than one passage of 12 tokens"),
    ],
)
def test_mistakes_are_reported_in_one_line(names, change, message):
    with pytest.raises(ValueError, match=message) as raised:
        made(*names, options=replace(OPTIONS, **change))
    assert "\n" not in str(raised.value)


def test_a_missing_package_is_reported_before_anything_runs(monkeypatch):
    monkeypatch.setitem(importlib.sys.modules, "bm25s", None)
    assert made("memory", "one_shot")
    with pytest.raises(ValueError, match="retrieval needs the package bm25s; pip install bm25s"):
        made("memory", "retrieval")


def test_the_window_is_the_models_or_a_smaller_one():
    assert made("one_shot")[0].config.window == WINDOW
    small = replace(OPTIONS, window=150)
    assert [method.config.window for method in made("one_shot", "retrieval", options=small)] == [150, 150]


def test_an_endpoints_window_is_given_by_the_user():
    with pytest.raises(ValueError, match=r"one_shot needs the endpoint's window, .*--window TOKENS"):
        made("memory", "one_shot", window=None)
    [retrieval] = made("retrieval", window=None)
    assert retrieval.config.window is None  # its prompts are bounded all the same
    given = replace(OPTIONS, window=8192)
    methods = made("one_shot", "retrieval", window=None, options=given)
    assert [method.config.window for method in methods] == [8192 - ENDPOINT_RESERVE] * 2
    with pytest.raises(ValueError, match=f"window is {ENDPOINT_RESERVE}; of an endpoint's window {ENDPOINT_RESERVE} tokens"):
        made("memory", window=None, options=replace(OPTIONS, window=ENDPOINT_RESERVE))


def test_settings_are_json_and_differ_if_a_prompt_does():
    def described(options=OPTIONS, agent=AGENT, window=WINDOW):
        methods = made(*METHODS, options=options, agent=agent, window=window)
        return {method.name: json.dumps(method.settings(), sort_keys=True) for method in methods}

    def changed(**change):
        other = described(**change)
        return {name for name in METHODS if other[name] != base[name]}

    base = described()
    assert changed() == set()
    assert changed(window=190) == {"one_shot", "retrieval"} == changed(options=replace(OPTIONS, window=190))
    assert changed(options=replace(OPTIONS, retrieval_tokens=61)) == {"retrieval"}
    assert changed(options=replace(OPTIONS, passage_tokens=13)) == {"retrieval"}
    for name in ("chunk_tokens", "memory_tokens"):
        assert changed(agent=replace(AGENT, **{name: 9})) == {"memory"}
    for name in ("answer_tokens", "question_tokens"):
        assert changed(agent=replace(AGENT, **{name: 9})) == set(METHODS)
    for name in ("memory", "answer", "no_memory"):
        assert changed(agent=replace(AGENT, prompts=replace(PROMPTS, **{name: f"{getattr(PROMPTS, name)}."}))) == {"memory"}
    assert changed(agent=replace(AGENT, prompts=replace(PROMPTS, document="{section}{question}"))) == {"one_shot", "retrieval"}
    assert changed(agent=replace(AGENT, prompts=replace(PROMPTS, system="Be brief."))) == set(METHODS)


def test_without_a_document_prompt_the_settings_name_the_default_one():
    agent = replace(AGENT, prompts=replace(PROMPTS, document=None))
    default = load_prompts("question_first").document
    for method in made("one_shot", "retrieval", agent=agent):
        assert method.settings()["prompts"]["document"] == default


def test_memory_is_the_agent_that_is_trained(llm):
    sample = Sample("s", "why?", text(47))
    [method] = made("memory")
    ours, theirs = llm.run([method.run(llm.session(0), sample), memory_agent(llm.session(0), sample, AGENT)])
    assert ours == theirs and len(ours.turns) == 6


@pytest.mark.parametrize("size", [0, 1, 9, 10, 11, 59, 60, 61, 150, 400])
@pytest.mark.parametrize("name", METHODS)
def test_turns_are_as_many_and_as_long_as_the_method_declares(llm, tokenizer, name, size):
    [method] = made(name)
    question = "why a?"
    trajectory = llm.run([method.run(llm.session(0), Sample("s", question, "y" * size))])[0]
    assert len(trajectory.turns) == method.num_turns(size)
    longest = max(turn.num_tokens for turn in trajectory.turns)
    declared = method.longest_turn(tokenizer, document_tokens=size, question_tokens=len(question))
    slack = 0
    if name == "retrieval" and size > 60:
        slack = 11  # whole passages do not fill the budget
    elif name == "memory" and size == 0:
        slack = len("S=;") - AGENT.answer_tokens + AGENT.memory_tokens  # counted as if there were a chunk
    assert declared - slack <= longest <= declared
    assert declared <= method.longest_turn(tokenizer, question_tokens=len(question)) <= method.longest_turn(tokenizer)
    assert method.longest_turn(tokenizer) <= WINDOW


def test_retrieval_within_a_small_window_never_takes_more(tokenizer):
    [method] = made("retrieval", window=80)
    assert method.longest_turn(tokenizer) == 80
    [method] = made("retrieval", window=None)
    assert method.longest_turn(tokenizer) > 80


def test_every_method_answers_through_a_tiny_model(tokenizer, tiny_config, randomize):
    model = Transformer(replace(tiny_config, vocab_size=tokenizer.vocab_size)).eval()
    randomize(model, seed=2, std=0.2)
    llm = LocalLLM(Sampler(model, tokenizer, max_rows=4), tokenizer, Decoding(temperature=1.0))
    methods = made(*METHODS)
    samples = [Sample(f"s{size}", "why a?", text(size)) for size in (0, 30, 300)]

    def read(order):
        trajectories = llm.run(methods[m].run(llm.session(1, m, s), samples[s]) for m, s in order)
        return {key: trajectory.response for key, trajectory in zip(order, trajectories, strict=True)}

    order = [(m, s) for m in range(3) for s in range(3)]
    assert read(order) == read(order[::-1])


@pytest.mark.parametrize("name", METHODS)
def test_the_cache_check_names_what_makes_turns_shorter(tokenizer, tiny_config, randomize, name):
    model = Transformer(replace(tiny_config, vocab_size=tokenizer.vocab_size)).eval()
    [method] = made(name)
    tokens = method.longest_turn(tokenizer)
    needed = -(-Request([0] * tokens, SamplingParams(1)).max_cached // 4) * 4
    from memrl.sampler.kv_cache import KVCache

    size = KVCache.bytes_per_token(model.config, model.dtype)
    check_turn(Sampler(model, cache_gib=needed * size / 2**30, page_size=4), tokens, LOWER[name])
    with pytest.raises(ValueError, match=rf"cache of {needed} tokens.*or lower {LOWER[name]}$"):
        check_turn(Sampler(model, cache_gib=(needed - 4) * size / 2**30, page_size=4), tokens, LOWER[name])


def test_options_are_read_from_the_command_line_with_their_explanations(capsys):
    parser = Parser(prog="x")
    parser.add_class_arguments(MethodOptions)
    assert parser.parse_args([]).as_dict() == {"window": None, "retrieval_tokens": 4000, "passage_tokens": 256}
    assert parser.parse_args(["--window", "8000", "--retrieval_tokens=10"]).window == 8000
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    shown = capsys.readouterr().out
    assert "the model's own window" in shown and "Tokens of each passage" in shown


def test_results_of_a_users_agent_belong_to_its_file_and_the_modules_it_imports(tmp_path):
    (tmp_path / "words.py").write_text("STOP = 'red'\n")
    (tmp_path / "own.py").write_text("import words\nasync def read(llm, sample, config):\n    return words.STOP\n")
    name = f"{tmp_path / 'own.py'}:read"

    def settings():
        return made(name)[0].settings()

    first = settings()
    (tmp_path / "words.py").write_text("STOP = 'fox'\n")
    second = settings()
    (tmp_path / "own.py").write_text("import words\nasync def read(llm, sample, config):\n    return words.STOP.upper()\n")
    assert first["modules"] != second["modules"] and first["file"] == second["file"] != settings()["file"]
