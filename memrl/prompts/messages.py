"""Render messages as token ids by a checkpoint's own chat template, with every content filled in as data.

The template sees marks in place of contents, so its output's literal text is known for each structure of a conversation (roles,
number of messages) and is rendered once. Contents are filled in afterwards, as plain text or ids: no document and no tool result
can become a special token.

An earlier `Turn` stands for the assistant's message with exactly its sampled ids:

    prompt(messages, turn, more) = prompt(messages) + turn.response_ids + what the template writes after the assistant's message

So the prompt of a turn begins with prompt and response of the turn before, id by id, also where the template would write earlier
messages of the assistant differently (Qwen3 leaves out their thoughts).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeGuard

from memrl.tokenizer import TextTokenizer
from memrl.types import Turn

Message = Mapping[str, Any] | Turn
Prompt = Sequence[int] | Sequence[Message]
Decode = Callable[[list[int]], str]
ROLES = ("system", "developer", "user", "assistant", "tool")
# A mark has nine characters, because Mistral's templates accept no other ids of calls. Its quote shows whether the template
# writes a content as a JSON string: then the content is escaped as the quote is.
_MARK = '\u241f{:06d}"\u241f'
_MARKS = re.compile('\u241f(\\d{6})(\\\\*)"\u241f')


class Slot(NamedTuple):
    """The place of content `number` in a rendered template, within `escapes` JSON strings."""

    number: int
    escapes: int


class MessageTokenizer(TextTokenizer, Protocol):
    """What `MessageTemplate` needs from a tokenizer; see `memrl.tokenizer.Tokenizer`."""

    @property
    def stop_ids(self) -> tuple[int, ...]: ...

    def render_messages(self, messages: Sequence[Mapping], tools: Sequence[Mapping] = ()) -> str: ...

    def chat_template(self, tools: Sequence[Mapping] = ()) -> str: ...

    def template_items(self, text: str) -> list[int | str]: ...


class MessageTemplate:
    """A checkpoint's chat template for conversations of any structure."""

    def __init__(self, tokenizer: MessageTokenizer, system: str | None = None):
        """`system`: system message of conversations that begin with none; None keeps the template's default."""
        self._tokenizer, self._system, self._stops = tokenizer, system, frozenset(tokenizer.stop_ids)
        self._items = lru_cache(maxsize=None)(self._read_template)
        self._encode = lru_cache(maxsize=16)(tokenizer.encode)  # as in `LocalLLM`

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping] = ()) -> list[int]:
        """The prompt's token ids, up to the start of the assistant's next message.

        Args:
            messages: mappings with `role`, `content` (text or token ids), of calls `tool_calls`, of results `tool_call_id` and
                `name`; and earlier turns.
            tools: JSON schemas of functions in OpenAI's form. A template without tools gets them in the system message.

        Raises:
            ValueError: a message is malformed, or the template refuses the conversation or leaves out one of its messages.
        """
        whole = [*with_system(check_messages(messages), self._system)]
        if not re.search(r"\btools\b", self._tokenizer.chat_template(tools)):
            decode = self._tokenizer.decode
            whole, tools = results_in_words(tools_in_words(whole, tools, decode), decode), ()
        ids: list[int] = []
        for end, message in enumerate(whole):
            if isinstance(message, Turn):
                ids += self._after_last_turn(whole[:end], tools) + message.response_ids
        return ids + self._after_last_turn(whole, tools)

    def _after_last_turn(self, messages: list[Message], tools: Sequence[Mapping]) -> list[int]:
        """The ids that follow the last turn's response, or all if there is none."""
        contents: list[str | list[int]] = []
        structure, spans = [], []
        for index, message in enumerate(messages):
            first = len(contents)
            structure.append(_marked(message, contents, role_of(*messages[index + 1 : index + 2]) == "tool"))
            spans.append(range(first, len(contents)))
        try:
            items = self._items(json.dumps(structure), json.dumps(tools))
        except ValueError as error:  # some templates raise for a system message, or unless user and assistant alternate
            raise ValueError(f"{error}; it was given the roles {', '.join(map(role_of, messages))}") from error
        last = max((index for index, message in enumerate(messages) if isinstance(message, Turn)), default=-1)
        if last >= 0:
            items = items[self._end_of_turn(items, messages, last, spans[last]) :]
        for message, span in zip(messages[last + 1 :], spans[last + 1 :], strict=True):
            times = sum(isinstance(item, Slot) and item.number == span.start for item in items)
            has_content = isinstance(message, Mapping) and message.get("content") and not message.get("tool_calls")
            if has_content and times != 1:
                raise ValueError(f"the chat template writes the content of a message of role {role_of(message)} {times} times")
        return self._fill(items, contents)

    def _end_of_turn(self, items: list[int | str | Slot], messages: list[Message], place: int, own: range) -> int:
        """Index of the first item behind the turn number `place`, whose contents are `own`.

        That is the stop token of its message, or what follows if the model has sampled one. What the template writes before it,
        such as the rest of a call, stands for the turn itself.
        """
        turn = messages[place]
        ended = isinstance(turn, Turn) and turn.response_ids[-1:] != [] and turn.response_ids[-1] in self._stops
        places = [index for index, item in enumerate(items) if isinstance(item, Slot) and item.number in own]
        if not places:
            raise ValueError("the chat template leaves out an earlier message of the assistant")
        for index in range(places[-1] + 1, len(items)):
            if isinstance(items[index], Slot):
                break
            if items[index] in self._stops:
                return index + ended
        if role_of(*messages[place + 1 : place + 2]) == "tool":
            raise ValueError("the chat template ends no assistant's message with a stop token, so it cannot go on after calls")
        return places[-1] + 1

    def _read_template(self, structure: str, tools: str) -> list[int | str | Slot]:
        pieces = _MARKS.split(self._tokenizer.render_messages(json.loads(structure), json.loads(tools)))
        items: list[int | str | Slot] = [*self._tokenizer.template_items(pieces[0])]
        for index, backslashes, piece in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
            # JSON writes a quote as \", and that again as \\\": 0, 1, 3, 7 backslashes.
            items += [Slot(int(index), len(backslashes).bit_length()), *self._tokenizer.template_items(piece)]
        return items

    def _fill(self, items: Sequence[int | str | Slot], contents: Sequence[str | list[int]]) -> list[int]:
        ids: list[int] = []
        text = ""  # template and contents since the last id, tokenised as one
        for item in items:
            value = [item] if isinstance(item, int) else item if isinstance(item, str) else contents[item.number]
            if isinstance(item, Slot) and item.escapes:
                value = text_of(value, self._tokenizer.decode)
                for _ in range(item.escapes):
                    value = json.dumps(value, ensure_ascii=False)[1:-1]
            if isinstance(value, str):
                text += value
                continue
            ids += self._encode(text) if text else []
            ids += value
            text = ""
        return ids + (self._encode(text) if text else [])


def is_messages(prompt: Prompt) -> TypeGuard[Sequence[Message]]:
    """Whether a prompt is messages, and not token ids."""
    return len(prompt) > 0 and not isinstance(prompt[0], int)


def check_ids(prompt: Any, tools: Sequence[Mapping]) -> list[int]:
    """The ids of a rendered prompt; ValueError if there are tools, for which it is too late."""
    if tools:
        raise ValueError("tools are written into messages by the chat template; give chat messages instead of a rendered prompt")
    return prompt


def role_of(message: Message | None = None) -> str:
    return "assistant" if isinstance(message, Turn) else message["role"] if message else ""


def check_messages(messages: Sequence[Message]) -> Sequence[Message]:
    """The unchanged messages; ValueError if there are none, or one has a wrong role or content."""
    if not messages:
        raise ValueError("a prompt needs token ids or at least one message")
    for place, message in enumerate(messages):
        if isinstance(message, Turn):
            continue
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            raise ValueError(f"message {place} must be a turn, or a mapping with a role of {', '.join(ROLES)}")
        content = message.get("content")
        is_ids = isinstance(content, list) and all(isinstance(token, int) for token in content)
        if not (isinstance(content, str) or is_ids or (content is None and message.get("tool_calls"))):
            raise ValueError(f"message {place} ({message['role']}): content must be text or a list of token ids")
    return messages


def with_system(messages: Sequence[Message], system: str | None) -> list[Message]:
    """The messages, after the system message if they begin with none."""
    begins = bool(messages) and role_of(messages[0]) in ("system", "developer")
    return [*messages] if begins or not system else [{"role": "system", "content": system}, *messages]


def _marked(message: Message, contents: list[str | list[int]], has_results: bool) -> dict:
    """The message as the template sees it, with marks in place of what it says, which is added to `contents`.

    The content is the first mark, unless it is empty. A turn with results behind it gets a call, because templates refuse results
    without one; what the template writes of both is not used.
    """

    def mark(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {mark(name): mark(part) for name, part in value.items()}
        if isinstance(value, list) and not all(isinstance(part, int) for part in value):
            return [mark(part) for part in value]
        if not isinstance(value, str | list):
            return value
        contents.append(value)
        return _MARK.format(len(contents) - 1)

    if isinstance(message, Turn):
        message = {"role": "assistant", "content": "turn"}
        if has_results:
            message["tool_calls"] = [{"name": "name", "arguments": {}}]
    content = message.get("content") or ""
    marked = {"role": message["role"], "content": mark(content) if content else ""}
    marked |= {name: mark(message[name]) for name in ("name", "tool_call_id") if name in message}
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        name, arguments = function["name"], function["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        made = {"id": mark(call.get("id", "")), "type": "function"}
        made["function"] = {"name": mark(name), "arguments": mark(arguments)}
        marked.setdefault("tool_calls", []).append(made)
    return marked


# The format of the Hermes models (NousResearch, Hermes function calling), which Qwen2.5 and Qwen3 use too.
TOOL_WORDS = """You can call the functions that these JSON schemas describe:
<tools>
{tools}
</tools>
To call one, write a JSON object with its name and its arguments between these tags:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>"""


def tools_in_words(messages: Sequence[Message], tools: Sequence[Mapping], decode: Decode) -> list[Message]:
    """The messages with the tools in the system message, for a chat template that knows no tools."""
    if not tools:
        return [*messages]
    words = TOOL_WORDS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    [first, *rest] = messages
    if isinstance(first, Mapping) and first["role"] == "system":
        return [{**first, "content": f"{text_of(first['content'], decode)}\n\n{words}"}, *rest]
    return [{"role": "system", "content": words}, *messages]


def results_in_words(messages: Sequence[Message], decode: Decode, keep_native: bool = False) -> list[Message]:
    """The messages with the results of each turn as one message of the user; `keep_native` keeps results of `Turn.tool_calls`."""
    made: list[Message] = []
    texts: list[str] = []  # of the results since the last other message
    keeps = False
    for index, message in enumerate(messages):
        if role_of(message) != "tool" or isinstance(message, Turn):
            keeps = keep_native and bool(message.tool_calls if isinstance(message, Turn) else message.get("tool_calls"))
            made.append(message)
        elif keeps:
            made.append(message)
        else:
            texts.append(f"<tool_response>\n{text_of(message['content'], decode)}\n</tool_response>")
            if role_of(*messages[index + 1 : index + 2]) != "tool":
                made.append({"role": "user", "content": "\n".join(texts)})
                texts = []
    return made


def text_of(content: str | list[int] | None, decode: Decode) -> str:
    return content if isinstance(content, str) else decode(content or [])


class PlainMessage:
    """A tokenizer for `PromptTemplate` whose chat template is the message's content alone."""

    def __init__(self, tokenizer: TextTokenizer):
        self.encode_template = tokenizer.encode

    def render_chat(self, content: str, system: str | None = None) -> str:
        return content
