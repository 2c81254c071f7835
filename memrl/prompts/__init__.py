"""Read prompt files, and render prompts as token ids.

A prompt file holds the texts of the memory agent's two kinds of turn, with the slots {question}, {memory} and {section} in any
order, and the text for methods that show the document itself. Slots are always filled with token ids, never with text: the
literal pieces are tokenised once, and a prompt is the concatenation of the pieces and the slots' ids. So the next turn sees
exactly the ids that were sampled.

`import_original.py` creates a prompt file with the original MemAgent's own texts.
"""

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

from memrl.utils.bounded_files import read_yaml

PROMPT_FOLDER = Path(__file__).resolve().parent
_SLOT = re.compile(r"\{(question|memory|section)\}")
_FIELDS = {
    "memory": {"question", "memory", "section"},
    "answer": {"question", "memory"},
    "document": {"question", "section"},
}


@dataclass(frozen=True)
class Prompts:
    """The contents of a prompt file.

    Attributes:
        memory: user message of a memory turn; slots question, memory, section.
        answer: user message of the answer turn; slots question, memory.
        no_memory: text of the memory slot before the first chunk is read.
        system: system message; None keeps the chat template's default.
        document: user message of methods that show the document, or parts of it, in one prompt; slots question, section. None if
            the file has none; the memory agent does not need it.
        exact: keep spaces and line ends around the user messages. By default they are removed, because YAML's block texts end
            in an unintended line end.
    """

    memory: str
    answer: str
    no_memory: str
    system: str | None = None
    document: str | None = None
    exact: bool = False

    def __post_init__(self):
        if not self.exact:
            for name in _FIELDS:
                if (text := getattr(self, name)) is not None:
                    object.__setattr__(self, name, text.strip())


def load_prompts(name_or_path: str | Path) -> Prompts:
    """A prompt file by path, or by its name in `memrl/prompts`.

    Raises:
        ValueError: the file does not exist, a field is unknown or missing, or a text has the wrong slots.
    """
    path = Path(name_or_path)
    if not path.suffix and not path.exists():
        path = PROMPT_FOLDER / f"{name_or_path}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in PROMPT_FOLDER.glob("*.yaml")))
        raise ValueError(f"there is no prompt file {name_or_path}; give a path, or one of: {known}")
    return check_prompts(read_yaml(path), str(path))


def check_prompts(content: object, source: str) -> Prompts:
    """Prompts from a mapping; a ValueError starts with `source` and names the fault."""
    allowed = {field.name for field in fields(Prompts)}
    if not isinstance(content, dict):
        raise ValueError(f"{source} must be a mapping with the fields {', '.join(sorted(allowed))}")
    if unknown := sorted(set(content) - allowed, key=str):
        raise ValueError(f"{source} has the unknown field {unknown[0]!r}; allowed are {', '.join(sorted(allowed))}")
    for name in ("memory", "answer", "no_memory"):
        if not isinstance(content.get(name), str) or not content[name].strip():
            raise ValueError(f"{source}: the field {name!r} must hold text")
    if not isinstance(content.get("system"), str | None):
        raise ValueError(f"{source}: the field 'system' must hold text, or null for the chat template's default")
    if not isinstance(content.get("document"), str | None):
        raise ValueError(f"{source}: the field 'document' must hold text, or be left out")
    if not isinstance(content.get("exact", False), bool):
        raise ValueError(f"{source}: the field 'exact' must be true or false")
    for name, slots in _FIELDS.items():
        if content.get(name) is None:
            continue
        found = _SLOT.findall(content[name])
        if set(found) != slots or len(found) != len(slots):
            wanted = ", ".join(f"{{{slot}}}" for slot in sorted(slots))
            raise ValueError(f"{source}: the field {name!r} must hold each of {wanted} exactly once, and no other slot")
    return Prompts(**content)


class TemplateTokenizer(Protocol):
    """What `PromptTemplate` needs from a tokenizer; see `memrl.tokenizer.Tokenizer`."""

    def render_chat(self, content: str, system: str | None = None) -> str: ...

    def encode_template(self, text: str) -> list[int]: ...


class PromptTemplate:
    """A prompt's text inside the model's chat template, tokenised piece by piece."""

    def __init__(self, text: str, tokenizer: TemplateTokenizer, system: str | None = None):
        """
        Raises:
            ValueError: the chat template fails, or its output does not contain the user's message once and unchanged.
        """
        # In the chat template's input, slots are replaced by marks that templates leave unchanged.
        marks = {name: f"\u241f{name}\u241f" for name in _SLOT.findall(text)}
        try:
            rendered = tokenizer.render_chat(_SLOT.sub(lambda match: marks[match[1]], text), system)
        except ValueError as error:  # some templates raise for a system message
            given = "a system message and a user message" if system else "a user message"
            raise ValueError(f"{error}; it was given {given}") from error
        pieces = re.split("\u241f(question|memory|section)\u241f", rendered)
        if sorted(pieces[1::2]) != sorted(marks):
            wrong, times = next((name, n) for name in marks if (n := pieces[1::2].count(name)) != 1)
            raise ValueError(
                f"the output of the tokenizer's chat template has the prompt's slot {{{wrong}}} {times} times; it must "
                "contain the user's message exactly once and unchanged"
            )
        self.pieces = [tokenizer.encode_template(piece) for piece in pieces[0::2]]
        self.slots = pieces[1::2]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the literal pieces."""
        return sum(len(piece) for piece in self.pieces)

    def render(self, **slots: list[int]) -> list[int]:
        """The prompt's token ids, with every slot filled with the given ids."""
        ids = list(self.pieces[0])
        for name, piece in zip(self.slots, self.pieces[1:], strict=True):
            ids += slots[name]
            ids += piece
        return ids
