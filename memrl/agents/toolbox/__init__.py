"""The tools that the tool agent offers: functions of a text and the sample, with their JSON schemas."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from memrl.agents.tool_calls import ToolCall
from memrl.agents.toolbox.calculator import calculate
from memrl.types import Sample


class Tool(NamedTuple):
    """`run(text, sample)` gives the result; a ValueError says what is wrong with the text."""

    description: str
    argument: str
    meaning: str
    run: Callable[[str, Sample], str]


def check_answer(answer: str, sample: Sample) -> str:
    """Whether an answer has the form that the task asks for. It is never compared with the gold answers.

    The form is `sample.metadata["answer_form"]`: integer, number, word, or a list of the allowed answers. Without one, any answer
    that is not blank has the right form.
    """
    form, text = sample.metadata.get("answer_form"), answer.strip()
    if not text:
        return "wrong form: the answer is empty"
    if isinstance(form, list | tuple):
        return "the form is right" if text in form else f"wrong form: it must be one of {', '.join(map(str, form))}"
    digits = text.removeprefix("-")
    fits = {
        "integer": digits.isdecimal(),
        "number": digits.replace(".", "", 1).isdecimal(),
        "word": len(text.split()) == 1,
    }
    return "the form is right" if fits.get(str(form), True) else f"wrong form: it must be one {form}"


TOOLS = {
    "calculator": Tool(
        "Compute an arithmetic expression.",
        "expression",
        "Numbers, + - * / ** and parentheses.",
        lambda text, sample: calculate(text),
    ),
    "check_answer": Tool(
        "Say whether an answer has the form that the question asks for, not whether it is right.",
        "answer",
        "The bare answer.",
        check_answer,
    ),
}


def schema(name: str) -> dict[str, Any]:
    """A tool's JSON schema, in OpenAI's form."""
    tool = TOOLS[name]
    properties = {tool.argument: {"type": "string", "description": tool.meaning}}
    parameters = {"type": "object", "properties": properties, "required": [tool.argument]}
    return {"type": "function", "function": {"name": name, "description": tool.description, "parameters": parameters}}


def run_call(call: ToolCall, allowed: Collection[str], sample: Sample) -> str:
    """The result of a call as text; "error: ..." says to the model what is wrong with it."""
    if call.error:
        return f"error: {call.error}"
    if call.name not in allowed:
        return f"error: there is no tool {call.name[:64]!r}; there are {', '.join(allowed)}"
    tool = TOOLS[call.name]
    text = call.arguments.get(tool.argument)
    if call.arguments.keys() != {tool.argument} or not isinstance(text, str | int | float):
        return f"error: {call.name} takes one argument, {tool.argument!r}, a text"
    try:
        return tool.run(str(text), sample)
    except ValueError as error:
        return f"error: {error}"
