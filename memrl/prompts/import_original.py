r"""Extract the original MemAgent's prompts from the user's copy of its repository; memrl does not ship these texts.

Its code (github.com/BytedTsinghua-SIA/MemAgent) is parsed, never run. Texts are recognised by their slots:

    {prompt}, {memory} and {chunk}   a memory turn
    {prompt} and {memory}            the answer turn; if a file has several, the one with a \boxed{} answer
    $Q$ and $DOC$                    the prompt with the whole document
    a constant NO_MEMORY, or the default of `memory=`    the text of an empty memory

The result is the text that the original model saw. If the code passes a text through `str.format`, `{{}}` in the source becomes
`{}`. If it inserts the text in another way, as its trainer does, `{{}}` is kept, and the checkpoints were trained with that.
"""

import ast
import re
import string
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from memrl.prompts import check_prompts

# Files with turn prompts in the original's repository, in order of preference: trainer, quick start, evaluation.
TURN_FILES = (
    "recurrent/impls/memory.py",
    "quickstart.py",
    "taskutils/memory_eval/utils/recurrent_boxed.py",
    "taskutils/memory_eval/utils/recurrent.py",
)
DOCUMENT_FILES = ("taskutils/memory_eval/utils/boxed.py", "taskutils/memory_eval/utils/openai_api.py")
SLOTS = {"prompt": "question", "question": "question", "problem": "question", "memory": "memory"}
SLOTS |= {"chunk": "section", "section": "section", "context": "section", "Q": "question", "DOC": "section"}
ROLES = {("memory", "question", "section"): "memory", ("memory", "question"): "answer", ("question", "section"): "document"}
WANTED = {
    "memory": "memory turn, with the slots {prompt}, {memory} and {chunk} once each",
    "answer": "answer turn, with the slots {prompt} and {memory} once each",
    "no_memory": "empty memory: a constant NO_MEMORY, or the default of memory=",
}
DEPTH = 5  # number of parent folders in which an imported module is searched
_NO_MEMORY = re.compile(r"_*no_(previous_)?memory(_\w+)?", re.IGNORECASE)


@dataclass(frozen=True)
class Piece:
    """A text that the original's model saw, with memrl's slots, and its place in the code; `doubled`: doubled braces are kept."""

    text: str
    name: str
    path: Path
    line: int
    doubled: bool = False


def import_prompts(path: str | Path) -> dict[str, Piece]:
    """The texts "memory", "answer", "no_memory" and, if found, "document"; a ValueError if one is missing or ambiguous.

    `path` is the repository's folder, for the trainer's texts, or a Python file of it, for that file's texts.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path}: there is no such file or folder; give the folder of the original's repository")
    turns, documents = path, [path]
    if path.is_dir():
        turns, documents = _turn_file(path), [path / name for name in DOCUMENT_FILES if (path / name).is_file()]
    found = _pieces(turns)
    pieces = {role: _one(found[role], role, turns) for role in WANTED}
    for file in documents:
        if texts := _pieces(file)["document"]:
            return pieces | {"document": _one(texts, "document", file)}
    return pieces


def _turn_file(folder: Path) -> Path:
    """The first of TURN_FILES that is there, or else the only file with the prompt of a memory turn."""
    for name in TURN_FILES:
        if (folder / name).is_file():
            return folder / name
    known = [file for file in sorted(folder.rglob("*.py")) if _has_memory_turn(file)]
    if not known:
        raise ValueError(
            f"{folder}: no Python file there holds a {WANTED['memory']}; give the folder of the original's repository"
        )
    if len(known) > 1:
        names = ", ".join(str(file.relative_to(folder)) for file in known[:5])
        raise ValueError(f"{folder}: several files hold prompts of memory turns ({names}); give one of them, not the folder")
    return known[0]


def _has_memory_turn(path: Path) -> bool:
    try:
        return b"memory}" in path.read_bytes() and bool(_pieces(path)["memory"])
    except ValueError:  # not a Python file
        return False


def _one(pieces: list[Piece], role: str, path: Path) -> Piece:
    """The piece, if all have the same text; among several answer prompts the only one with a box."""
    texts = {piece.text: piece for piece in reversed(pieces)}
    if len(texts) > 1 and role == "answer":
        texts = {text: piece for text, piece in texts.items() if "\\boxed" in text} or texts
    if len(texts) == 1:
        return next(iter(texts.values()))
    if not texts:
        raise ValueError(f"{path}: holds no text for the {WANTED[role]}")
    places = ", ".join(f"{piece.name} in line {piece.line}" for piece in sorted(texts.values(), key=lambda piece: piece.line))
    raise ValueError(f"{path}: several texts could be {role!r}: {places}; give a copy of the file that has only one")


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{path} is not a Python file: {error}") from None


def _pieces(path: Path) -> dict[str, list[Piece]]:
    """The texts in a file, or imported by it, by role: those with the slots of a role, and those of an empty memory."""
    tree = _parse(path)
    found: dict[str, list[Piece]] = {role: [] for role in (*WANTED, "document")}
    for name, piece in _texts(tree, path):
        parts = _split(piece.text, "$" not in piece.text and _is_formatted(tree, name))
        slots = tuple(sorted(SLOTS.get(slot, slot) for _, slot in parts if slot is not None))
        if slots in ROLES:
            text = "".join(literal + (f"{{{SLOTS[slot]}}}" if slot is not None else "") for literal, slot in parts)
            doubled = any("{{" in literal or "}}" in literal for literal, _ in parts)
            found[ROLES[slots]].append(replace(piece, text=text, doubled=doubled))
        if (_NO_MEMORY.fullmatch(name) or name == "memory") and piece.text.strip():
            found["no_memory"].append(piece)
    found["no_memory"] += _default_memories(tree, path)
    return found


def _texts(tree: ast.Module, path: Path, follow_imports: bool = True) -> Iterator[tuple[str, Piece]]:
    """Each text that a file assigns to a name or imports; yields (name in this file, piece)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and (text := _text(node.value)) is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((name.id, Piece(text, name.id, path, node.lineno)) for name in targets if isinstance(name, ast.Name))
        elif isinstance(node, ast.ImportFrom) and follow_imports and (source := _module_file(node, path)) is not None:
            names = {alias.name: alias.asname or alias.name for alias in node.names}
            yield from ((names[name], piece) for name, piece in _texts(_parse(source), source, False) if name in names)


def _module_file(node: ast.ImportFrom, path: Path) -> Path | None:
    """The file of `from MODULE import ...`, if it is in the same repository as `path`."""
    parts = (node.module or "").split(".")
    folders = path.absolute().parents
    folders = folders[node.level - 1 : node.level] if node.level else folders[:DEPTH]
    files = (folder.joinpath(*parts).with_suffix(".py") for folder in folders if all(parts))
    return next((file for file in files if file.is_file()), None)


def _text(node: ast.AST | None) -> str | None:
    """The value of a string constant, or of several joined by +; otherwise None."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left), _text(node.right)
        return None if left is None or right is None else left + right
    return None


def _is_formatted(tree: ast.Module, name: str) -> bool:
    """Whether the code calls `name.format`, or never passes the text to any function."""
    is_passed = False
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "format" and getattr(node.value, "id", None) == name:
            return True
        if isinstance(node, ast.Call):
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            is_passed |= any(isinstance(value, ast.Name) and value.id == name for value in given)
    return not is_passed


def _split(text: str, formatted: bool) -> list[tuple[str, str | None]]:
    """Pairs of a literal text and the slot after it; the last slot is None."""
    if formatted:
        try:
            parts = list(string.Formatter().parse(text))
        except ValueError:
            return [(text, None)]
        # A slot with a format, such as {x:>10}, cannot be filled with ids.
        return [(literal, slot if not spec and not kind else f"{slot}:{spec}") for literal, slot, spec, kind in parts]
    parts = re.split(r"\$([A-Z]+)\$" if "$" in text else r"\{([A-Za-z_]+)\}", text)
    return list(zip(parts[0::2], [*parts[1::2], None], strict=True))


def _default_memories(tree: ast.Module, path: Path) -> Iterator[Piece]:
    """Texts of an empty memory that have no name: encoded at once, or the default of an argument."""
    for node in ast.walk(tree):
        name, values = "memory=", []
        if isinstance(node, ast.Assign) and _NO_MEMORY.fullmatch(getattr(node.targets[0], "attr", "")):
            name = ast.unparse(node.targets[0])
            values = [node.value, *getattr(node.value, "args", [])]  # self.NO_MEMORY_TOKENS = tokenizer.encode("...")
        elif isinstance(node, ast.keyword) and node.arg == "memory":  # memory=a if a else "...", or memory=a or "..."
            values = [getattr(node.value, "orelse", node.value), *getattr(node.value, "values", [])]
        yield from (Piece(text, name, path, value.lineno) for value in values if (text := _text(value)) and text.strip())


def prompt_file(pieces: dict[str, Piece], root: Path) -> str:
    """A YAML prompt file with exactly the pieces' texts, and comments on the source of each."""
    lines = [
        "# Prompts of the original MemAgent, made from a copy of its repository by `memrl prompts import`:",
        "#",
        *(f"#   {line}" for line in describe(pieces, root)),
        "#",
        "# exact: its model saw the spaces and line ends around these texts, and the spaces at ends of lines; keep them.",
        "exact: true",
    ]
    text = "\n".join(lines) + "\n" + "".join(_field(role, piece.text) for role, piece in pieces.items())
    check_prompts(yaml.safe_load(text), "the prompt file made from the repository")
    return text


def describe(pieces: dict[str, Piece], root: Path) -> list[str]:
    """One line per text: its role, file, line and name in the original's code."""
    lines = []
    for role, piece in pieces.items():
        file = piece.path.absolute()
        place = file.relative_to(root.absolute()) if file.is_relative_to(root.absolute()) else Path(file.name)
        note = ", with doubled braces kept" if piece.doubled else ""
        lines.append(f"{role:<10} {place.as_posix()}, line {piece.line}: {piece.name}{note}")
    return lines


def _field(role: str, text: str) -> str:
    if "\n" not in text or not text.replace("\n", "").isprintable():  # a block would change these
        return yaml.safe_dump({role: text}, allow_unicode=True, width=2**31)
    # "2" because a text may start with spaces; "-" and "+" because it may end in no line end or in several.
    chomping = "" if re.search(r"[^\n]\n\Z", text) else "+" if text.endswith("\n") else "-"
    return f"{role}: |2{chomping}\n" + "".join(f"  {line}\n" if line else "\n" for line in text.removesuffix("\n").split("\n"))
