"""Convert text to token ids and back with a Hugging Face tokenizer.

Document text is data: a string such as "<|im_end|>" in it is encoded as plain characters. Only memrl's own prompt pieces may
contain special tokens.

Sentencepiece tokenizers (Llama 2, Mistral) add a leading space to every text that they encode and remove one from every text
that they decode. A prompt is concatenated from pieces, so these spaces are suppressed: the concatenated ids of two texts decode
to the concatenation of the texts.
"""

import copy
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

_END_MARKERS = ("<|im_end|>", "<|endoftext|>", "<|end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
# Digits, spaces, line ends, accents and contractions, on which ways of splitting text differ.
_PROBE = "It's 12,345 items  in São Paulo\n\n 東京\t(x_1) we'LL\r\n"


class TextTokenizer(Protocol):
    """Anything that turns text into token ids and back."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class Tokenizer:
    """A Hugging Face tokenizer (`.hf`) with the operations that memrl needs."""

    def __init__(self, hf, more_stop_ids: Iterable[int] = ()):
        """`more_stop_ids` end a response, in addition to the tokenizer's own."""
        self.hf = hf
        self._plain = _without_dummy_space(hf)
        self._more_stop_ids = frozenset(more_stop_ids)
        self.special_ids = frozenset(hf.all_special_ids)
        self.vocab_size = len(hf)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text: no tokens are added, and names of special tokens are plain text."""
        return self._plain(text, add_special_tokens=False, split_special_tokens=True, verbose=False).input_ids

    def encode_template(self, text: str) -> list[int]:
        """Token ids of a piece of a rendered chat template, in which special tokens are recognised.

        The text before the first special token continues the previous piece, so it gets no leading space; the rest is encoded in
        the tokenizer's own way.
        """
        options = {"add_special_tokens": False, "split_special_tokens": False, "verbose": False}
        if self._plain is self.hf:
            return self.hf(text, **options).input_ids
        plain = self._plain(text, return_offsets_mapping=True, **options)
        added = self.hf.added_tokens_decoder
        for index, (token, (start, _)) in enumerate(zip(plain.input_ids, plain.offset_mapping, strict=True)):
            if token in added and added[token].special:
                return plain.input_ids[:index] + self.hf(text[start:], **options).input_ids
        return plain.input_ids

    def decode(self, ids: list[int]) -> str:
        return self._plain.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def render_chat(self, content: str, system: str | None = None) -> str:
        """One user message and the start of the assistant's turn, rendered by the model's chat template."""
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": content})
        return self.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a response: the end-of-sequence token and the usual end-of-turn and end-of-text markers."""
        vocabulary = self.hf.get_vocab()
        known = {vocabulary[name] for name in _END_MARKERS if name in vocabulary}
        known |= {vocabulary.get("</s>")} & self.special_ids  # in other vocabularies it is the HTML tag
        return tuple(sorted((known | {self.hf.eos_token_id} | self._more_stop_ids) - {None}))


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in a Hugging Face folder.

    Raises:
        ValueError: the folder has no usable tokenizer, or the tokenizer has no chat template.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)  # hide warnings about missing PyTorch and long texts
    from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerFast

    path = Path(path)
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise ValueError(
            f"{path} holds no tokenizer (tokenizer.json); copy the tokenizer files of the model's Hugging Face folder there"
        )
    try:
        # AutoTokenizer uses config.json's model type: for qwen2 it assumes Qwen's byte-level BPE, and for mistral it ignores the
        # leading space that sentencepiece files of the Llama kind require.
        class_name = _read_object(path / "tokenizer_config.json").get("tokenizer_class")
        kind = AutoTokenizer
        if (path / "tokenizer.json").is_file():
            if class_name in ("TokenizersBackend", "PreTrainedTokenizerFast"):  # tokenizer.json alone defines it
                kind = PreTrainedTokenizerFast
        elif class_name in ("LlamaTokenizer", "LlamaTokenizerFast"):
            kind = LlamaTokenizer
        hf = kind.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        if kind is AutoTokenizer and not _agrees_with_file(hf, class_name, path / "tokenizer.json"):
            hf = PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # the library raises many types of errors for a broken file
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(f"{path}: the tokenizer cannot be read ({reason})") from error
    if not hf.chat_template:
        raise ValueError(f"the tokenizer in {path} has no chat template; memrl needs one (use an -Instruct checkpoint's)")
    return Tokenizer(hf, _generation_stop_ids(path / "generation_config.json"))


def _read_object(file: Path) -> dict:
    """The JSON object in a file; empty without that file or object."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON ({error}); download or copy it again") from None
    return content if isinstance(content, dict) else {}


def _agrees_with_file(hf, class_name: str | None, file: Path) -> bool:
    """Whether a class of transformers splits text as tokenizer.json defines; some classes replace the file's rules."""
    if not file.is_file() or class_name in ("Qwen2Tokenizer", "Qwen2TokenizerFast"):  # these agree, and the file is large
        return True
    from tokenizers import Tokenizer as Backend

    probe = _PROBE + "".join(f"{token}x" for token in hf.all_special_tokens)
    return Backend.from_file(str(file)).encode(probe, add_special_tokens=False).ids == hf.encode(probe, add_special_tokens=False)


def _generation_stop_ids(file: Path) -> list[int]:
    """The eos_token_id of generation_config.json, one id or a list of them; empty without that file."""
    found = _read_object(file).get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise ValueError(f"{file}: eos_token_id must be a token id or a list of them, found {found!r}")
    return ids


def _without_dummy_space(hf):
    """The tokenizer itself, or a copy that neither adds a leading space when encoding nor removes one when decoding.

    ValueError if the leading space of this tokenizer class cannot be turned off.
    """
    if not hf.is_fast:
        a, b, ab = (hf.encode(text, add_special_tokens=False) for text in ("a", "b", "ab"))
        if a + b == ab:
            return hf
        raise ValueError(f"the tokenizer class {type(hf).__name__} is not supported; save it as tokenizer.json")
    parts = {name: getattr(hf.backend_tokenizer, name) for name in ("normalizer", "pre_tokenizer", "decoder")}
    parts = {name: part and json.loads(part.__getstate__()) for name, part in parts.items()}
    plain = {name: _strip_part(part) for name, part in parts.items()}
    if plain == parts:
        return hf
    changed = copy.deepcopy(hf)
    backend = json.loads(hf.backend_tokenizer.to_str())
    fresh = type(hf.backend_tokenizer).from_str(json.dumps(backend | plain))
    for name in plain:
        setattr(changed.backend_tokenizer, name, getattr(fresh, name))
    return changed


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
