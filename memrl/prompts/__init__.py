"""Prompt files, and how a prompt becomes token ids.

A prompt file holds the words of the memory agent's two kinds of turn, with the slots {question}, {memory} and {section} in any
order, and those of a reader who sees the document itself. What fills a slot is always token ids, never text: the literal pieces
are tokenised once, and a prompt is the pieces and the slots' ids strung together, so the ids that were sampled are the ids that
the next turn sees.

`python -m memrl.prompts import` makes a prompt file of the original's own words (`importing.py`).
"""

import re
from dataclasses import dataclass, fields
from pathlib import Path

import yaml

from memrl.tokenizer import Tokenizer

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
        no_memory: what stands in the memory slot before anything was read.
        system: system message; None leaves it to the chat template's own default.
        document: user message of those who read a document, or parts of it, at once; slots question, section. None where the file
            has none: the memory agent needs none.
        exact: whether blanks and line ends around the user messages belong to them. If not they are removed, because YAML's block
            texts end in a line end that nobody means.
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
        ValueError: no such file, unknown or missing fields, or slots that do not fit.
    """
    path = Path(name_or_path)
    if not path.suffix and not path.exists():
        path = PROMPT_FOLDER / f"{name_or_path}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in PROMPT_FOLDER.glob("*.yaml")))
        raise ValueError(f"there is no prompt file {name_or_path}; give a path, or one of: {known}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a YAML file: {str(error).splitlines()[0]}") from error
    return check_prompts(content, str(path))


def check_prompts(content: object, source: str) -> Prompts:
    """Prompts from a mapping, with every mistake named; `source` is what the messages call it."""
    allowed = {field.name for field in fields(Prompts)}
    if not isinstance(content, dict):
        raise ValueError(f"{source} must be a mapping with the fields {', '.join(sorted(allowed))}")
    if unknown := sorted(set(content) - allowed, key=str):
        raise ValueError(f"{source} has the unknown field {unknown[0]!r}; allowed are {', '.join(sorted(allowed))}")
    for name in ("memory", "answer", "no_memory"):
        if not isinstance(content.get(name), str) or not content[name].strip():
            raise ValueError(f"{source}: the field {name!r} must hold text")
    if not isinstance(content.get("system"), str | None):
        raise ValueError(f"{source}: the field 'system' must hold text, or null for the chat template's own")
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


class PromptTemplate:
    """A prompt's text inside the model's chat template, tokenised piece by piece."""

    def __init__(self, text: str, tokenizer: Tokenizer, system: str | None = None):
        """
        Raises:
            ValueError: the chat template fails, or does not show the user's message once and unchanged.
        """
        from jinja2 import TemplateError

        # The slots travel through the chat template as marks that no template has a reason to touch.
        marks = {name: f"\u241f{name}\u241f" for name in _SLOT.findall(text)}
        try:
            rendered = tokenizer.render_chat(_SLOT.sub(lambda match: marks[match[1]], text), system)
        except TemplateError as error:  # some templates raise for a system message
            reason = " ".join(str(error).split())
            given = "a system message and a user message" if system else "a user message"
            raise ValueError(f"the tokenizer's chat template does not take {given}: {reason}") from error
        pieces = re.split("\u241f(question|memory|section)\u241f", rendered)
        if sorted(pieces[1::2]) != sorted(marks):
            wrong, times = next((name, n) for name in marks if (n := pieces[1::2].count(name)) != 1)
            raise ValueError(
                f"the tokenizer's chat template shows the prompt's slot {{{wrong}}} {times} times; it must show "
                "the user's message exactly once and unchanged"
            )
        self.pieces = [tokenizer.encode_template(piece) for piece in pieces[0::2]]
        self.slots = pieces[1::2]

    @property
    def num_tokens(self) -> int:
        """Tokens of the literal pieces, slots empty."""
        return sum(len(piece) for piece in self.pieces)

    def render(self, **slots: list[int]) -> list[int]:
        """The prompt's token ids, every slot filled with the given ids."""
        ids = list(self.pieces[0])
        for name, piece in zip(self.slots, self.pieces[1:], strict=True):
            ids += slots[name]
            ids += piece
        return ids
