"""Read prompt files, and render prompts as token ids.

A prompt file holds the texts of the memory agent's two kinds of turn, with the slots {question}, {memory} and {section} in any
order, the text for methods that show the document itself, and under `texts` those of other agents. Slots are always filled with
token ids, never with text: the literal pieces are tokenised once, and a prompt is the concatenation of the pieces and the slots'
ids. So the next turn sees exactly the ids that were sampled.

`import_original.py` creates a prompt file with the original MemAgent's own texts.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Protocol

from memrl.utils.bounded_files import read_yaml

PROMPT_FOLDER = Path(__file__).resolve().parent
_TEXTS: dict[str, set[str]] = {
    "memory": {"question", "memory", "section"},
    "answer": {"question", "memory"},
    "no_memory": set(),
    "document": {"question", "section"},
}
SLOTS = frozenset({"question", "memory", "section"})
MEMORY_AGENT = ("memory", "answer", "no_memory")


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
        texts: further texts by name, with the slots of the agent that uses them.
    """

    memory: str = ""
    answer: str = ""
    no_memory: str = ""
    system: str | None = None
    document: str | None = None
    exact: bool = False
    texts: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self):
        if not self.exact:
            for name in ("memory", "answer", "document"):
                if (text := getattr(self, name)) is not None:
                    object.__setattr__(self, name, text.strip())
            object.__setattr__(self, "texts", {name: text.strip() for name, text in self.texts.items()})

    def text(self, name: str) -> str:
        """A text of the file, one of its own fields or one under `texts`; "" if it has none of this name."""
        return (getattr(self, name) or "") if name in _TEXTS else self.texts.get(name, "")


def load_prompts(name_or_path: str | Path, needed: Mapping[str, Collection[str]] | None = None) -> Prompts:
    """A prompt file by path, or by its name in `memrl/prompts`.

    Args:
        needed: the texts that it must have, with their slots; by default those of the memory agent.

    Raises:
        ValueError: the file does not exist, a field is unknown or missing, or a text has the wrong slots.
    """
    path = Path(name_or_path)
    if not path.suffix and not path.exists():
        path = PROMPT_FOLDER / f"{name_or_path}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in PROMPT_FOLDER.glob("*.yaml")))
        raise ValueError(f"there is no prompt file {name_or_path}; give a path, or one of: {known}")
    return check_prompts(read_yaml(path), str(path), needed)


def check_prompts(content: object, source: str, needed: Mapping[str, Collection[str]] | None = None) -> Prompts:
    """Prompts from a mapping; a ValueError starts with `source` and names the fault. `needed` as of `load_prompts`."""
    allowed = {field.name for field in fields(Prompts)}
    if not isinstance(content, dict):
        raise ValueError(f"{source} must be a mapping with the fields {', '.join(sorted(allowed))}")
    if unknown := sorted(set(content) - allowed, key=str):
        raise ValueError(f"{source} has the unknown field {unknown[0]!r}; allowed are {', '.join(sorted(allowed))}")
    if not isinstance(content.get("system"), str | None):
        raise ValueError(f"{source}: the field 'system' must hold text, or null for the chat template's default")
    if not isinstance(content.get("document"), str | None):
        raise ValueError(f"{source}: the field 'document' must hold text, or be left out")
    if not isinstance(content.get("exact", False), bool):
        raise ValueError(f"{source}: the field 'exact' must be true or false")
    texts = content.get("texts") or {}
    if not isinstance(texts, dict) or not all(isinstance(part, str) for pair in texts.items() for part in pair):
        raise ValueError(f"{source}: the field 'texts' must hold texts by name")
    if clash := sorted(texts.keys() & allowed):
        raise ValueError(f"{source}: {clash[0]!r} stands under 'texts'; it is a field of its own")
    needed = {name: _TEXTS[name] for name in MEMORY_AGENT} if needed is None else needed
    given = {name: content[name] for name in _TEXTS if content.get(name) is not None} | texts
    for name, text in given.items():
        if not isinstance(text, str) or (name in needed and not text.strip()):
            raise ValueError(f"{source}: the field {name!r} must hold text")
        if not text.strip():
            continue
        slots = _TEXTS.get(name, needed.get(name))
        if slots is not None:
            _check_slots(text, set(slots), f"{source}: the field {name!r}")
    if missing := [name for name in needed if name not in given]:
        if missing[0] in _TEXTS:
            raise ValueError(f"{source}: the field {missing[0]!r} must hold text")
        raise ValueError(
            f"{source} lacks the text {missing[0]!r}, which this agent needs; give --agent.prompts with a file that has it"
        )
    return Prompts(**content)


def _check_slots(text: str, slots: set[str], what: str) -> None:
    found = _slot_pattern(SLOTS.union(slots)).findall(text)
    if set(found) != slots or len(found) != len(slots):
        wanted = ", ".join(f"{{{slot}}}" for slot in sorted(slots)) or "no slot"
        raise ValueError(f"{what} must hold each of {wanted} exactly once, and no other slot")


def _slot_pattern(names: Collection[str]) -> re.Pattern[str]:
    return re.compile(rf"\{{({'|'.join(map(re.escape, sorted(names)))})\}}" if names else r"(?!)()")


class TemplateTokenizer(Protocol):
    """What `PromptTemplate` needs from a tokenizer; see `memrl.tokenizer.Tokenizer`."""

    def render_chat(self, content: str, system: str | None = None) -> str: ...

    def encode_template(self, text: str) -> list[int]: ...


class PromptTemplate:
    """A prompt's text inside the model's chat template, tokenised piece by piece."""

    def __init__(
        self,
        text: str,
        tokenizer: TemplateTokenizer,
        system: str | None = None,
        slots: Collection[str] = SLOTS,
    ):
        """
        Args:
            slots: names that stand for token ids where the text has them in braces; braces around others are text.

        Raises:
            ValueError: the chat template fails, or its output does not contain the user's message once and unchanged.
        """
        # In the chat template's input, slots are replaced by marks that templates leave unchanged.
        pattern = _slot_pattern(slots)
        marks = {name: f"\u241f{name}\u241f" for name in pattern.findall(text)}
        try:
            rendered = tokenizer.render_chat(pattern.sub(lambda match: marks[match[1]], text), system)
        except ValueError as error:  # some templates raise for a system message
            given = "a system message and a user message" if system else "a user message"
            raise ValueError(f"{error}; it was given {given}") from error
        pieces = re.split(f"\u241f({'|'.join(map(re.escape, marks)) or '(?!)'})\u241f", rendered)
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
        """The prompt's token ids, with every slot filled with the given ids; ValueError for a slot that it does not have."""
        if unknown := sorted(slots.keys() - set(self.slots)):
            raise ValueError(f"the prompt's text has no slot {{{unknown[0]}}}; it has {', '.join(self.slots) or 'none'}")
        ids = list(self.pieces[0])
        for name, piece in zip(self.slots, self.pieces[1:], strict=True):
            ids += slots[name]
            ids += piece
        return ids
