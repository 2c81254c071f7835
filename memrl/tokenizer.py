"""Text to token ids and back, on top of a Hugging Face tokenizer.

Document text is data: a string such as "<|im_end|>" inside it is encoded as the characters it consists of. Only memrl's own
prompt pieces may contain special tokens.

Sentencepiece tokenizers (Llama 2, Mistral) put a space in front of whatever they encode and take one away from whatever they
decode. A prompt is strung together from pieces, where each such space would be one that nobody wrote; so it is left out, and the
ids of two texts end to end decode to the two texts end to end.
"""

import copy
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

_END_MARKERS = ("<|im_end|>", "<|endoftext|>", "<|end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
# Digits, blanks, line ends, accents and contractions: where ways of splitting text differ.
_PROBE = "It's 12,345 items  in São Paulo\n\n 東京\t(x_1) we'LL\r\n"


class TextTokenizer(Protocol):
    """Anything that turns text into token ids and back."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class Tokenizer:
    """What memrl needs of a tokenizer; the Hugging Face object itself is `.hf`."""

    def __init__(self, hf, more_stop_ids: Iterable[int] = ()):
        """
        Args:
            more_stop_ids: ends of a response besides those that the tokenizer's own tokens tell.
        """
        self.hf = hf
        self._plain = _without_dummy_space(hf)
        self._more_stop_ids = frozenset(more_stop_ids)
        self.special_ids = frozenset(hf.all_special_ids)
        self.vocab_size = len(hf)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text: nothing is added, and special-token strings are not special."""
        return self._plain(text, add_special_tokens=False, split_special_tokens=True, verbose=False).input_ids

    def encode_template(self, text: str) -> list[int]:
        """Token ids of a piece of a rendered chat template, in which special tokens are meant as such.

        What stands before the first special token goes on from the piece before; from there on it is the tokenizer's own way.
        """
        options = {"add_special_tokens": False, "split_special_tokens": False, "verbose": False}
        if self._plain is self.hf:
            return self.hf(text, **options).input_ids
        plain = self._plain(text, return_offsets_mapping=True, **options)
        added = self.hf.added_tokens_decoder
        for place, (token, (start, _)) in enumerate(zip(plain.input_ids, plain.offset_mapping, strict=True)):
            if token in added and added[token].special:
                return plain.input_ids[:place] + self.hf(text[start:], **options).input_ids
        return plain.input_ids

    def decode(self, ids: list[int]) -> str:
        return self._plain.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def render_chat(self, content: str, system: str | None = None) -> str:
        """One user message and the cue for the assistant's turn, as the model's chat template writes them."""
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": content})
        return self.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a response: the end-of-sequence token and the usual end-of-turn and end-of-text markers."""
        vocabulary = self.hf.get_vocab()
        known = {vocabulary[name] for name in _END_MARKERS if name in vocabulary}
        known |= {vocabulary.get("</s>")} & self.special_ids  # in other vocabularies it is a piece of HTML
        return tuple(sorted((known | {self.hf.eos_token_id} | self._more_stop_ids) - {None}))


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in a Hugging Face folder.

    Raises:
        ValueError: no usable tokenizer there, or one without a chat template.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)  # "none of PyTorch, ..." and length warnings do not apply
    from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerFast

    path = Path(path)
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise ValueError(
            f"{path} holds no tokenizer (tokenizer.json); copy the tokenizer files of the model's Hugging Face folder there"
        )
    try:
        # AutoTokenizer goes by config.json's model type and reads any tokenizer beside a Qwen2 model as Qwen's byte-level BPE.
        # Beside a Mistral it forgets the space in front that sentencepiece files of the Llama kind ask for.
        named = _named_class(path / "tokenizer_config.json")
        kind = AutoTokenizer
        if (path / "tokenizer.json").is_file():
            if named in ("TokenizersBackend", "PreTrainedTokenizerFast"):  # tokenizer.json alone defines it
                kind = PreTrainedTokenizerFast
        elif named in ("LlamaTokenizer", "LlamaTokenizerFast"):
            kind = LlamaTokenizer
        hf = kind.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        if kind is AutoTokenizer and not _reads_as_its_file(hf, named, path / "tokenizer.json"):
            hf = PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # the library raises many kinds for a broken file; all of them mean the same to a user
        reason = str(error).strip().splitlines()
        raise ValueError(f"{path}: the tokenizer cannot be read ({reason[0] if reason else type(error).__name__})") from error
    if not hf.chat_template:
        raise ValueError(f"the tokenizer in {path} has no chat template; memrl needs one (use an -Instruct checkpoint's)")
    return Tokenizer(hf, _generation_stop_ids(path / "generation_config.json"))


def _named_class(config_path: Path) -> str | None:
    """The tokenizer_class of a tokenizer_config.json, where there is one."""
    if not config_path.is_file():
        return None
    config = json.loads(config_path.read_text(encoding="utf-8"))
    return config.get("tokenizer_class") if isinstance(config, dict) else None


def _reads_as_its_file(hf, named: str | None, file: Path) -> bool:
    """Whether a class of transformers splits text as tokenizer.json says: some put their own rules in place of the file's."""
    if not file.is_file() or named in ("Qwen2Tokenizer", "Qwen2TokenizerFast"):  # equal, and a large file to read twice
        return True
    from tokenizers import Tokenizer as Backend

    probe = _PROBE + "".join(f"{token}x" for token in hf.all_special_tokens)
    return Backend.from_file(str(file)).encode(probe, add_special_tokens=False).ids == hf.encode(probe, add_special_tokens=False)


def _generation_stop_ids(file: Path) -> list[int]:
    """The eos_token_id of generation_config.json, a number or a list of them; none where there is no such file."""
    if not file.is_file():
        return []
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON ({error}); download or copy it again") from None
    found = config.get("eos_token_id") if isinstance(config, dict) else None
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise ValueError(f"{file}: eos_token_id must be a token id or a list of them, found {found!r}")
    return ids


def _without_dummy_space(hf):
    """The tokenizer itself, or a copy that neither adds a space in front when it encodes nor takes one away when it decodes.

    Raises:
        ValueError: a tokenizer that adds a space and cannot be told not to.
    """
    if not hf.is_fast:
        if hf.encode("a", add_special_tokens=False) + hf.encode("b", add_special_tokens=False) == hf.encode(
            "ab", add_special_tokens=False
        ):
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
    """A normalizer, pre-tokenizer or decoder as in tokenizer.json, without what adds or removes a leading space."""
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
