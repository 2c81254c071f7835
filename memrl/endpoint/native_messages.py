"""Messages and tool calls as an OpenAI-compatible server takes and sends them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from memrl.prompts.messages import check_messages, results_in_words, text_of
from memrl.types import Turn

if TYPE_CHECKING:
    from memrl.prompts.messages import Message


def native_messages(messages: Sequence[Message], decode: Callable[[list[int]], str]) -> list[dict]:
    """The messages with contents as text. A result that answers no call of the server's own, but one in a text, is the user's."""
    return [_native(message, decode) for message in results_in_words(check_messages(messages), decode, keep_native=True)]


def _native(message: Message, decode: Callable[[list[int]], str]) -> dict:
    if isinstance(message, Turn):
        calls = {"tool_calls": message.tool_calls} if message.tool_calls else {}
        return {"role": "assistant", "content": message.text or (None if calls else ""), **calls}
    return {**message, "content": text_of(message.get("content"), decode)}


def contents_ids(messages: Sequence[Message], encode: Callable[[str], list[int]]) -> list[int]:
    """All contents and responses end to end, so that the ids of a turn begin with those of the turn before it."""
    ids: list[int] = []
    for message in messages:
        content = message.response_ids if isinstance(message, Turn) else message.get("content") or []
        ids += encode(content) if isinstance(content, str) else content
    return ids


def calls_in_words(calls: Sequence[Mapping]) -> str:
    """Calls as Hermes models write them: what a local model's response holds."""
    functions = (call["function"] for call in calls)
    return "".join(
        f'<tool_call>\n{{"name": {json.dumps(f["name"])}, "arguments": {f["arguments"]}}}\n</tool_call>' for f in functions
    )
