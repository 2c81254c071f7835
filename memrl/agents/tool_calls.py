"""Find the calls of tools in a response, in the form that the checkpoint's chat template shows.

    Hermes, Qwen   <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number, with text around them
    Mistral        [TOOL_CALLS] [{"name": ..., "arguments": {...}, "id": ...}, ...]
    Llama 3        {"name": ..., "parameters": {...}}; several are separated by ";"

Special tokens such as [TOOL_CALLS] are not part of a response's text, so they may be absent. Pure functions of texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_MARKERS = re.compile(r"\A\s*(?:\[TOOL_CALLS\]|<\|python_tag\|>)")


class ToolCall(NamedTuple):
    """A call; one with an `error` cannot be made, and the error says to the model why."""

    id: str
    name: str
    arguments: dict[str, Any]
    error: str = ""


def call_form(chat_template: str) -> str:
    """The form of a checkpoint's calls: "mistral", "llama" or "hermes", also where the template shows none."""
    if "[TOOL_CALLS]" in chat_template:
        return "mistral"
    return "llama" if "<tool_call>" not in chat_template and '"parameters": ' in chat_template else "hermes"


def parse(text: str, form: str = "hermes") -> list[ToolCall]:
    """The calls in a response, in order; empty if it makes none.

    >>> parse('Let me see. <tool_call>{"name": "calculator", "arguments": {"expression": "3 + 4"}}</tool_call>')
    [ToolCall(id='call00000', name='calculator', arguments={'expression': '3 + 4'}, error='')]
    >>> parse('[{"name": "f", "arguments": {}, "id": "x1"}]', "mistral")[0].id
    'x1'
    >>> [call.name for call in parse('{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": 1}}', "llama")]
    ['f', 'g']
    >>> parse("<tool_call>{'name': 1}</tool_call>")[0].error
    'the call is not valid JSON: Expecting property name enclosed in double quotes at character 1'
    """
    if form == "hermes":
        bodies = [match[1] for match in _HERMES.finditer(text)]
    else:
        start = "[{" if form == "mistral" else '{"name"'
        body = _MARKERS.sub("", text, count=1)
        is_call = "[TOOL_CALLS]" in text or "".join(body[:20].split()).startswith(start)
        bodies = [body] if is_call else []
    calls: list[ToolCall] = []
    for body in bodies:
        calls += _read(body, len(calls))
    return calls


def native_calls(calls: Sequence[Mapping]) -> list[ToolCall]:
    """The calls that a server sent besides the text, in OpenAI's form; see `Turn.tool_calls`."""
    return [_check({**call["function"], "id": call["id"]}, number) for number, call in enumerate(calls)]


def _read(body: str, number: int) -> list[ToolCall]:
    """The calls in JSON: an object, a list of objects, or several separated by ";". What is broken ends it with an error."""
    calls: list[ToolCall] = []
    rest = body.strip()
    while rest or not calls:
        try:
            value, end = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError) as error:  # also numbers of very many digits
            place = f" at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
            reason = getattr(error, "msg", "") or "it is nested too deeply, or has a number of too many digits"
            return [*calls, _broken(f"the call is not valid JSON: {reason}{place}", number + len(calls))]
        for part in value if isinstance(value, list) else [value]:
            calls.append(_check(part, number + len(calls)))
        rest = rest[end:].strip()
        if rest and not rest.startswith(";"):
            return [*calls, _broken("the call has text behind its JSON object", number + len(calls))]
        rest = rest[1:].strip()
        if not calls:
            return [_broken("the list of calls is empty", number)]
    return calls


def _check(value: Any, number: int) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return _broken('a call is a JSON object with a "name" and "arguments"', number)
    identity, arguments = value.get("id"), value.get("arguments", value.get("parameters"))
    identity = identity if isinstance(identity, str) and re.fullmatch(r"[\w-]{1,64}", identity) else f"call{number:05}"
    if isinstance(arguments, str):  # OpenAI's form, which some models have learned
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return ToolCall(identity, value["name"], {}, "the arguments are not valid JSON")
    if not isinstance(arguments, dict):
        return ToolCall(identity, value["name"], {}, 'the "arguments" of a call are a JSON object of names and values')
    return ToolCall(identity, value["name"], arguments)


def _broken(error: str, number: int) -> ToolCall:
    return ToolCall(f"call{number:05}", "", {}, error)
