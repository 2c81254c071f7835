"""Read what a server sends, whatever it is: within bounds, and as a completion or an error in a few words."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from memrl.endpoint.failures import BadReply
from memrl.utils.plain_text import printable

# The longest real answers have 128,000 tokens: 1.2 MB if every character is escaped.
LARGEST_REPLY = 4 * 2**20
_KINDS = {list: "a list", dict: "an object", bool: "true or false"}


class Completion(NamedTuple):
    """The part of a server's answer that is used. `finish_reason` is "length" or "stop"; the tokens are as the server counts.

    `tool_calls` have the form {"id", "type", "function": {"name", "arguments"}}, the arguments as JSON text, valid or not.
    """

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    tool_calls: list[dict]


async def read_bounded(response: Any) -> None:
    """Read a response's body before the HTTP client does, which has no bound; an event hook of httpx.

    Raises:
        BadReply: it is larger than LARGEST_REPLY, or compressed, which was not asked for and hides its size.
    """
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise BadReply(f"the answer is compressed ({encoding[:20]}), which was not asked for", is_temporary=False)
    body = bytearray()
    async for part in response.stream:
        body += part
        if len(body) > LARGEST_REPLY:
            raise BadReply(f"the answer is larger than {LARGEST_REPLY >> 20} MiB", is_temporary=False)
    await response.stream.aclose()
    response.stream = type(response)(response.status_code, content=bytes(body)).stream


def read_completion(body: str) -> Completion:
    """The completion in a body of JSON; BadReply says in a few words what else it is."""
    reply = _parse(body)
    choices = reply.get("choices") if isinstance(reply, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(reply, dict) or not isinstance(choice, dict) or not isinstance(message, dict):
        raise BadReply(f"the answer is not a completion: {_quote(body)}")
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        raise BadReply(f"the message's content is {_KINDS.get(type(content), 'a number')}, not text")
    # Without content there may be reasoning, which is not the answer. JSON can hold half a surrogate pair, which no tokenizer
    # accepts.
    text = (content or "").encode("utf-8", "replace").decode()
    usage = reply.get("usage")
    prompt_tokens, completion_tokens = (_count(usage, name) for name in ("prompt_tokens", "completion_tokens"))
    finish_reason = "length" if choice.get("finish_reason") == "length" else "stop"
    return Completion(text, finish_reason, prompt_tokens, completion_tokens, _read_calls(message.get("tool_calls")))


def _read_calls(calls: Any) -> list[dict]:
    made = []
    for number, call in enumerate(calls if isinstance(calls, list) else []):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadReply("a tool call in the answer has no function with a name")
        identity, arguments = call.get("id"), function.get("arguments")
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments or {})  # some servers send an object
        texts = {
            name: text.encode("utf-8", "replace").decode()
            for name, text in (("name", function["name"]), ("arguments", arguments))
        }
        identity = identity if isinstance(identity, str) and identity else f"call{number:05}"
        made.append({"id": identity, "type": "function", "function": texts})
    return made


def read_model_names(body: str) -> list[str]:
    """Names in an answer to /models; empty if it has none."""
    try:
        reply = _parse(body)
    except BadReply:
        return []
    listed = reply.get("data") if isinstance(reply, dict) else None
    names = [model.get("id") for model in listed if isinstance(model, dict)] if isinstance(listed, list) else []
    return [name for name in names if isinstance(name, str)]


def _parse(body: str) -> Any:
    if not body.strip():
        raise BadReply("the answer is empty")
    try:
        return json.loads(body)
    except (ValueError, RecursionError):  # also numbers of very many digits
        raise BadReply(f"the answer is not JSON: {_quote(body)}") from None


def _count(usage: Any, name: str) -> int:
    """A number of tokens as the server counts them; 0 if it sends none, or nonsense."""
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if type(value) is int and 0 <= value < 2**53 else 0


def _quote(body: str) -> str:
    return f"'{printable(body, 120)}'"
