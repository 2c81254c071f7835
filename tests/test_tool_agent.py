"""The agents that talk in messages: one turn (`chat`), and a loop of tool calls (`tools`)."""

import json
import re
from pathlib import Path

import pytest
import yaml

from memrl.agents import load_agent_function, make_config, run_agent
from memrl.agents.tool_calls import call_form, native_calls, parse
from memrl.agents.toolbox import TOOLS, run_call
from memrl.agents.toolbox.calculator import calculate
from memrl.llm import Decoding, LocalLLM
from memrl.prompts import PROMPT_FOLDER
from memrl.types import Sample
from tests.fake_endpoint import FakeEndpoint, Reply
from tests.test_agent import ScriptedSampler, saying, shown
from tests.test_messages import LLAMA, MISTRAL, with_template
from tests.test_remote_messages import remote
from tests.test_tokenizer import character_tokenizer

REPO = Path(__file__).resolve().parent.parent
SAMPLE = Sample("s", "What is 3 + 4?", "", ("7",), metadata={"answer_form": "integer"})


def config(function="tools", options=None, **more):
    limits = {"answer_tokens": 300, "question_tokens": 200, "chunk_tokens": 20} | more
    caps = {"call": 300} if function == "tools" else None
    return make_config("chat", function=function, options=options, caps=caps, **limits)


def call(expression="3 + 4", name="calculator"):
    return f'<tool_call>{{"name": "{name}", "arguments": {{"expression": "{expression}"}}}}</tool_call>'


def talk(*replies, sample=SAMPLE, tokenizer=None, settings=None):
    """The trajectory of a model that gives these replies, and the sampler."""
    tokenizer = tokenizer or character_tokenizer()
    sampler = ScriptedSampler(saying(tokenizer, *replies))
    llm = LocalLLM(sampler, tokenizer, Decoding())
    return llm.run([run_agent(llm.session(0), sample, settings or config())])[0]


def results(turn) -> list[str]:
    """The results in a turn's prompt."""
    text = shown(character_tokenizer(), turn)
    return [part.split("\n</tool_response>")[0] for part in text.split("<tool_response>\n")[1:]]


# --- chat -----------------------------------------------------------------------------------------------------------


def test_the_chat_agent_asks_once_with_the_document_above_the_question():
    trajectory = talk("Anna", sample=Sample("s", "Who?", "Anna sings."), settings=config("chat"))
    [turn] = trajectory.turns
    text = shown(character_tokenizer(), turn)
    assert text.startswith("<|im_start|>user\nRead the text") and text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert text.index("Anna sings.") < text.index("Who?")
    assert (turn.kind, trajectory.response, trajectory.scores) == ("answer", "Anna", {"cut_tokens": 0.0})


def test_the_chat_agent_shows_the_question_alone_without_a_document_and_cuts_the_middle_of_a_long_one():
    alone = talk("7", settings=config("chat"))
    assert "text" not in shown(character_tokenizer(), alone.turns[0])
    assert SAMPLE.question in shown(character_tokenizer(), alone.turns[0])
    long = talk("7", sample=Sample("s", "Who?", "a" * 10 + "b" * 30 + "c" * 10), settings=config("chat"))
    assert "\n" + "a" * 10 + "c" * 10 + "\n" in shown(character_tokenizer(), long.turns[0])
    assert long.scores == {"cut_tokens": 30.0}


def test_the_chat_agents_longest_turn_is_its_bound():
    from memrl.agents.limits import longest_turn

    settings = config("chat")
    sample = Sample("s", "q" * settings.question_tokens, "d" * 50)
    turn = talk("x" * 299, sample=sample, settings=settings).turns[0]
    assert turn.num_tokens == longest_turn(character_tokenizer(), settings)


# --- tools ----------------------------------------------------------------------------------------------------------


def test_the_tool_agent_calls_until_it_answers_and_its_turns_extend_one_another():
    trajectory = talk(f"Let me see. {call()}", call("7 * 2") + call("2 ** 3"), "It is \\boxed{14}.")
    first, second, third = trajectory.turns
    assert [turn.kind for turn in trajectory.turns] == ["call", "call", "answer"]
    assert trajectory.response == "It is \\boxed{14}." and trajectory.scores == {
        "calls": 3.0,
        "failed_calls": 0.0,
        "cut_tokens": 0.0,
    }
    assert results(first) == [] and results(second) == ["7"] and results(third) == ["7", "14", "8"]
    for before, after in ((first, second), (second, third)):
        assert after.prompt_ids[: before.num_tokens] == before.prompt_ids + before.response_ids
    assert '"calculator"' in shown(character_tokenizer(), first) and "check_answer" in shown(character_tokenizer(), first)


BROKEN = {
    "broken JSON": ('<tool_call>{"name": "calculator", </tool_call>', "error: the call is not valid JSON: .* at character \\d+"),
    "an unknown tool": (call(name="search"), "error: there is no tool 'search'; there are calculator, check_answer"),
    "a wrong argument": (
        '<tool_call>{"name": "calculator", "arguments": {"x": "1"}}</tool_call>',
        "takes one argument, 'expression'",
    ),
    "one argument too many": (call('1", "y": "2'), "takes one argument, 'expression'"),
    "a list as text": ('<tool_call>{"name": "calculator", "arguments": {"expression": [1]}}</tool_call>', "a text"),
    "no arguments": ('<tool_call>{"name": "calculator"}</tool_call>', 'the "arguments" of a call are a JSON object'),
    "no object": ("<tool_call>5</tool_call>", 'a call is a JSON object with a "name"'),
    "no arithmetic": (call("import os"), "error: 'import os' is not an arithmetic expression"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_call_that_cannot_be_made_is_answered_with_the_reason(name):
    said, reason = BROKEN[name]
    trajectory = talk(said, "7")
    [result] = results(trajectory.turns[1])
    assert re.search(reason, result) and result.startswith("error: ")
    assert trajectory.scores["failed_calls"] == 1.0 and trajectory.response == "7"


def test_calls_beyond_the_limit_of_a_turn_are_not_made():
    trajectory = talk(call("1 + 1") * 3, "2", settings=config(options={"max_calls": 2}))
    assert results(trajectory.turns[1]) == ["2", "2", "error: at most 2 calls in one turn are made"]
    assert trajectory.scores["calls"] == 3.0 and trajectory.scores["failed_calls"] == 1.0


def test_the_last_turn_ends_the_conversation_even_if_it_calls():
    trajectory = talk(*[call()] * 3, settings=config(options={"max_turns": 3}))
    assert [turn.kind for turn in trajectory.turns] == ["call", "call", "answer"]
    assert trajectory.response == call() and trajectory.scores["calls"] == 2.0


def test_the_caps_of_calls_and_of_the_last_turn_arrive():
    settings = config(options={"max_turns": 2}, answer_tokens=5)
    assert [turn.max_new_tokens for turn in talk(call(), "7", settings=settings).turns] == [300, 5]


def test_a_long_result_is_cut():
    trajectory = talk(call("2 ** 300"), "7", settings=config(options={"result_tokens": 12}))
    assert results(trajectory.turns[1]) == [str(2**300)[:12]]


def test_only_the_listed_tools_are_offered_and_run():
    trajectory = talk(call(), "7", settings=config(options={"tools": ["check_answer"]}))
    assert "calculator" not in shown(character_tokenizer(), trajectory.turns[0])
    assert results(trajectory.turns[1]) == ["error: there is no tool 'calculator'; there are check_answer"]


@pytest.mark.parametrize("options", [{"max_turns": 0}, {"max_calls": "2"}, {"tools": ["search"]}, {"depth": 1}])
def test_an_option_that_makes_no_sense_is_refused(options):
    with pytest.raises(ValueError, match=r"max_turns|max_calls|tools names 'search'|no option 'depth'"):
        config(options=options)


@pytest.mark.parametrize("style", ["Mistral", "Llama"])
def test_the_tool_agent_speaks_the_checkpoints_own_form(style):
    if style == "Mistral":
        tokenizer = with_template(MISTRAL)
        said = '[TOOL_CALLS] [{"name": "calculator", "arguments": {"expression": "3 + 4"}, "id": "abcdefghi"}]'
        result = '[TOOL_RESULTS] {"content": 7, "call_id": "abcdefghi"}[/TOOL_RESULTS]'
    else:
        tokenizer = with_template(LLAMA)
        said = '{"name": "calculator", "parameters": {"expression": "3 + 4"}}'
        result = 'ipython {"output": "7"}<|im_end|>'
    trajectory = talk(said, "7", tokenizer=tokenizer)
    first, second = trajectory.turns
    assert second.prompt_ids[: first.num_tokens] == first.prompt_ids + first.response_ids
    assert shown(tokenizer, second)[len(shown(tokenizer, first)) + len(said) + len("<|im_end|>") :].startswith(result)


def test_the_tool_agent_runs_against_a_server_with_native_calls():
    native = [{"id": "c1", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "3 + 4"}'}}]
    with FakeEndpoint(script=[Reply(None, tool_calls=native), Reply("red")]) as server:
        llm = remote(server)
        trajectory = llm.run([run_agent(llm.session(0), SAMPLE, config())])[0]
    assert [turn.kind for turn in trajectory.turns] == ["call", "answer"] and trajectory.response == "red"
    assert server.bodies[1]["messages"][-1] == {"role": "tool", "content": "7", "tool_call_id": "c1", "name": "calculator"}
    assert {tool["function"]["name"] for tool in server.bodies[0]["tools"]} == set(TOOLS)


# --- the tools ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "value"),
    [("3 + 4 * 2 ** 3", "35"), ("(1 + 2) / 4", "0.75"), ("6 / 2", "3"), ("-2 ** 2", "-4"), ("0.1 + 0.2", "0.3"), ("1e3", "1000")],
)
def test_the_calculator_computes(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["9**9**9", "2**400", "1/0", "0**-1", "(-8)**0.5", "1e400", "__import__('os')", "True + 1", "x", "", "3 4", "(" * 300, "1//2",
     "'a' * 9", "[1]", "1 if 1 else 2", "9" * 150, "1" + "+1" * 200, "\0", "0.1**-99999"],
)  # fmt: skip
def test_the_calculator_refuses_what_is_no_bounded_arithmetic(expression):
    with pytest.raises(ValueError):
        calculate(expression)


def test_the_answer_checker_says_whether_the_form_fits_and_nothing_about_the_gold_answer():
    def check(answer, form, gold="7"):
        sample = Sample("s", "q", "", (gold,), metadata={} if form is None else {"answer_form": form})
        made = parse(f"<tool_call>{json.dumps({'name': 'check_answer', 'arguments': {'answer': answer}})}</tool_call>")
        return run_call(made[0], ["check_answer"], sample)

    right, wrong = "the form is right", "wrong form"
    assert check("12", "integer") == check("-3", "integer") == check("1.5", "number") == check("ja", "word") == right
    assert all(check(*pair).startswith(wrong) for pair in (("x", "integer"), ("1.5", "integer"), ("a b", "word"), (" ", None)))
    assert check("no", ["yes", "no"]) == right and check("maybe", ["yes", "no"]) == "wrong form: it must be one of yes, no"
    assert check("anything", None) == check("anything", "unheard of") == right
    # The same words whatever is right, so it cannot be used to find the answer.
    assert len({check("12", "integer", gold) for gold in ("12", "13", "")}) == 1


# --- calls ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "form", "names", "errors"),
    [
        ("No call.", "hermes", [], 0),
        (call() + " and " + call(name="f"), "hermes", ["calculator", "f"], 0),
        (call().removesuffix("</tool_call>"), "hermes", ["calculator"], 0),
        (f"<tool_call>[{{'name': 'f'}}]</tool_call>{call()}", "hermes", ["", "calculator"], 1),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "hermes", ["f"], 0),
        ('<tool_call>{"name": "f", "arguments": "{"}</tool_call>', "hermes", ["f"], 1),
        ("<tool_call>" + "[" * 100_000, "hermes", [""], 1),
        ("<tool_call>" + "1" * 9_999, "hermes", [""], 1),
        ("<tool_call>[]</tool_call>", "hermes", [""], 1),
        ('{"name": "f", "arguments": {}}', "hermes", [], 0),
        ('[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]', "mistral", ["f", "g"], 0),
        ("[TOOL_CALLS] oh", "mistral", [""], 1),
        ("[1, 2] is it", "mistral", [], 0),
        ('<|python_tag|>{"name": "f", "parameters": {}}', "llama", ["f"], 0),
        ('{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', "llama", ["f", "g"], 0),
        ('{"name": "f", "parameters": {}} so', "llama", ["f", ""], 1),
        ('{"answer": 5}', "llama", [], 0),
    ],
)  # fmt: skip
def test_calls_are_found_in_the_three_forms(text, form, names, errors):
    found = parse(text, form)
    assert [made.name for made in found] == names and sum(bool(made.error) for made in found) == errors
    assert len({made.id for made in found}) == len(found)


def test_the_form_of_calls_is_the_chat_templates():
    assert [call_form(text) for text in (LLAMA, MISTRAL, "no tools", "<tool_call>")] == ["llama", "mistral", "hermes", "hermes"]


def test_native_calls_are_read_like_calls_in_a_text():
    def read(arguments):
        return native_calls([{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}])[0]

    assert read('{"a": 1}') == ("c", "f", {"a": 1}, "") and read("") == ("c", "f", {}, "")
    assert read("{").error and read("[1]").error


# --- the files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chat", "tools"])
def test_the_config_files_make_an_agent(name):
    options = yaml.safe_load((REPO / "configs" / "agents" / f"{name}.yaml").read_text())["agent"]
    made = make_config(**options)
    assert made.function == name and load_agent_function(name).file is None
    assert (PROMPT_FOLDER / f"{options['prompts']}.yaml").is_file()
