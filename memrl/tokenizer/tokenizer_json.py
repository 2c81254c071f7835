"""Rules of a tokenizer as in the file tokenizer.json: change and inspect them, and cut texts that they encode."""

import re
import secrets
from collections.abc import Iterator

# The pattern of Qwen2, Qwen2.5 and Qwen3, and of Llama 3 without {1,3}; its time is linear in the text's length.
_USUAL_REGEX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ORDINARY = re.compile(r"[\w\s\u2581]*")
_PIECE, _LONGEST_PIECE = 2**19, 2**20
# Where a long text may be cut, and what a token that reaches across would hold. Not within a run of blanks: patterns such as
# GPT-2's split its last one off if a word follows. In byte-level vocabularies other letters stand for bytes: U+0120 for a space,
# U+010A for a line end, U+0109 to U+010D for other blanks. U+2581 is sentencepiece's space.
_BORDERS = {
    r"(?<=[A-Za-z0-9])(?= [A-Za-z])": re.compile("[A-Za-z0-9][ \u0120\u2581][A-Za-z]"),
    r"(?<=\S\n)(?=\w)": re.compile("[\n\u010a][^\0\\s\u0109-\u010d\u0120\u2581]"),
}


def without_dummy_space(rules: dict) -> dict:
    """The rules, without those that add a leading space when encoding or remove one when decoding."""
    return rules | {name: _strip_part(rules.get(name)) for name in ("normalizer", "pre_tokenizer", "decoder")}


def _strip_part(part):
    """A normalizer, pre-tokenizer or decoder as in tokenizer.json, without the rules that add or remove a leading space."""
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    if kind == "Sequence":
        return {name: _strip_list(value) if isinstance(value, list) else value for name, value in part.items()}
    if kind == "Metaspace":
        return part | {"prepend_scheme": "never"}
    if kind == "ByteLevel" and part.get("add_prefix_space"):
        return part | {"add_prefix_space": False}
    if kind == "Prepend" or (kind == "Strip" and part.get("content") == " "):
        return None
    return part


def _strip_list(parts: list) -> list:
    return [plain for part in parts if (plain := _strip_part(part)) is not None]


def document_rules(rules: dict) -> dict:
    """The rules for text that is data: no name of a control token stands for that token.

    Their names are replaced by random ones, in the vocabulary too: there a model of whole words would find them, and merges can
    produce them. Added tokens of letters, digits and blanks alone, such as runs of blanks, are ordinary text, and stay.
    """
    added, model = rules["added_tokens"], rules["model"]
    control = [token["content"] for token in added if token["special"] or not _ORDINARY.fullmatch(token["content"])]
    names = {name: f"\0{secrets.token_hex(8)}" for name in control}
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        vocab = {names.get(token, token): number for token, number in vocab.items()}
    else:
        vocab = [[names.get(token, token), score] for token, score in vocab]
    changed = model | {"vocab": vocab}
    if model.get("unk_token") in names:
        changed["unk_token"] = names[model["unk_token"]]
    if any(name in model["vocab"] for name in names) and "merges" in model:
        changed["merges"] = [pair for pair in map(_pair, model["merges"]) if names.keys().isdisjoint((*pair, "".join(pair)))]
    added = [token | {"content": names.get(token["content"], token["content"])} for token in added]
    return rules | {"added_tokens": added, "model": changed}


def _pair(merge: str | list[str]) -> list[str]:
    return merge.split(" ") if isinstance(merge, str) else merge


def holds_unknown_regex(rules: dict) -> bool:
    """Whether there are regular expressions other than Qwen's and Llama's."""
    found: list[str] = []

    def visit(part: object) -> None:
        if isinstance(part, dict):
            found.extend([part["Regex"]] if isinstance(part.get("Regex"), str) else [])
            part = list(part.values())
        if isinstance(part, list):
            for item in part:
                visit(item)

    visit([rules.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")])
    return any(pattern.replace("{1,3}", "") != _USUAL_REGEX for pattern in found)


def safe_borders(rules: dict) -> re.Pattern[str]:
    """Matches the places where a text can be cut without changing its tokens, because no token reaches across."""
    vocab = rules["model"]["vocab"]
    words = "\0".join(vocab if isinstance(vocab, dict) else (token for token, _ in vocab))
    safe = [border for border, crossing in _BORDERS.items() if not crossing.search(words)]
    return re.compile("|".join(safe) or r"(?!)")


def split_at(text: str, border: re.Pattern[str]) -> Iterator[str]:
    """Cut a long text at borders into pieces of at least 2^19 characters; anywhere if there is no border in 2^20.

    The limit bounds the time and memory of regular expressions, which go back character by character over a run of blanks.
    """
    start = 0
    while len(text) - start > _PIECE:
        found = border.search(text, start + _PIECE, start + _LONGEST_PIECE)
        end = found.start() if found else min(start + _LONGEST_PIECE, len(text))
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]
