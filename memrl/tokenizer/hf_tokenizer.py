"""Convert text to token ids and back with a Hugging Face tokenizer.

Document text is data: a string such as "<|im_end|>" or "<tool_call>" in it is encoded as plain characters. Only memrl's own
prompt pieces may contain added tokens.

Sentencepiece tokenizers (Llama 2, Mistral) add a leading space to every text that they encode and remove one from every text
that they decode. A prompt is concatenated from pieces, so these spaces are suppressed: the concatenated ids of two texts decode
to the concatenation of the texts.
"""

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from memrl.tokenizer.chat_template import render_chat_template
from memrl.tokenizer.deadline import within
from memrl.tokenizer.tokenizer_json import document_rules, holds_unknown_regex, safe_borders, split_at, without_dummy_space

T = TypeVar("T")
_END_MARKERS = ("<|im_end|>", "<|endoftext|>", "<|end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
# Every file that can define a tokenizer; the largest published ones together have about 60 MB.
TOKENIZER_FILES = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json chat_template.jinja chat_template.json "
    "tokenizer.model vocab.json merges.txt"
).split()
_MOST_BYTES = 2**28
_ENCODE_SECONDS = 6.0  # for 2^20 characters at most; they take one or two


class TextTokenizer(Protocol):
    """Anything that turns text into token ids and back."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class Tokenizer:
    """A Hugging Face tokenizer (`.hf`) with the operations that memrl needs.

    Attributes:
        special_ids: ids of special tokens, which `decode` does not show.
        vocab_size: number of tokens that the tokenizer lists; a model's vocabulary can be larger.
    """

    def __init__(self, hf, more_stop_ids: Iterable[int] = (), files: Mapping[str, bytes] | None = None):
        """
        Args:
            more_stop_ids: end a response, in addition to the tokenizer's own.
            files: the files that `hf` was loaded from, by name, so that `save` writes them unchanged.

        Raises:
            ValueError: this class of tokenizer is not supported.
        """
        if not hf.is_fast:
            raise ValueError(f"the tokenizer class {type(hf).__name__} is not supported; save it as tokenizer.json")
        self.hf = hf
        rules = json.loads(hf.backend_tokenizer.to_str()) | {"truncation": None, "padding": None, "post_processor": None}
        plain = without_dummy_space(rules)
        backend = type(hf.backend_tokenizer)
        self._plain = None if plain == rules else backend.from_str(json.dumps(plain))
        self._documents = backend.from_str(json.dumps(document_rules(plain)))
        self._border = safe_borders(plain)
        self._is_guarded = holds_unknown_regex(plain)
        self._fault = ""
        added = hf.backend_tokenizer.get_added_tokens_decoder()
        self._added = frozenset(added)
        self.special_ids = frozenset(hf.all_special_ids).union(token for token, how in added.items() if how.special)
        self.vocab_size = len(hf)
        self._more_stop_ids = frozenset(more_stop_ids)
        self._files, self._saved_state = files or {}, self._state()

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text: no tokens are added, and names of added tokens are plain text.

        A long text is cut where its tokens do not change, and within a run of a million characters without such a place.
        """
        ids = []
        for piece in split_at(text, self._border):
            ids += self._checked(lambda piece=piece: self._documents.encode_batch_fast([piece], add_special_tokens=False)[0].ids)
        return ids

    def encode_template(self, text: str) -> list[int]:
        """Token ids of a piece of a rendered chat template, in which added tokens are recognised.

        The text before the first special token continues the previous piece, so it gets no leading space; the rest is encoded in
        the tokenizer's own way.
        """
        return self._checked(lambda: self._encode_template(text))

    def _encode_template(self, text: str) -> list[int]:
        options = {"add_special_tokens": False, "split_special_tokens": False, "verbose": False}
        if self._plain is None:
            return self.hf(text, **options).input_ids
        plain = self._plain.encode(text, add_special_tokens=False)
        added = self.hf.added_tokens_decoder
        for index, (token, (start, _)) in enumerate(zip(plain.ids, plain.offsets, strict=True)):
            if token in added and added[token].special:
                return plain.ids[:index] + self.hf(text[start:], **options).input_ids
        return plain.ids

    def template_items(self, text: str) -> list[int | str]:
        """A piece of a rendered chat template as the ids of its added tokens and the plain texts between them.

        `encode` gives a plain text's ids also if contents are written into it, so that they are tokenised as one text, as in the
        model's own training. A sentencepiece tokenizer gives ids alone, because a text's ids depend on what stands before it.
        """
        if self._plain is not None:
            return [*self.encode_template(text)]
        found = self._checked(lambda: self.hf.backend_tokenizer.encode(text, add_special_tokens=False))
        items, end = [], 0
        for token, (start, stop) in zip(found.ids, found.offsets, strict=True):
            if token in self._added:
                items += [text[end:start]] * (start > end) + [token]
                end = stop
        return items + [text[end:]] * (end < len(text))

    def decode(self, ids: list[int]) -> str:
        """The text of the ids that `visible` keeps."""
        backend = self._plain or self.hf.backend_tokenizer
        shown = [token for token in ids if token not in self.special_ids]  # the backend leaves out ids that it does not list
        return self._checked(lambda: backend.decode(shown, skip_special_tokens=False))

    def visible(self, ids: Iterable[int]) -> list[int]:
        """The ids that `decode` shows: those that the tokenizer lists, without the special ones."""
        listed = self.hf.backend_tokenizer.id_to_token
        return [token for token in ids if token not in self.special_ids and listed(token) is not None]

    def render_chat(self, content: str, system: str | None = None) -> str:
        """One user message and the start of the assistant's turn, rendered by the model's chat template.

        Raises:
            ValueError: the template fails, or takes too much time or memory.
        """
        before = [{"role": "system", "content": system}] if system else []
        return self.render_messages([*before, {"role": "user", "content": content}])

    def render_messages(self, messages: Sequence[Mapping], tools: Sequence[Mapping] = ()) -> str:
        """As `render_chat`, for messages and tools in the form that chat templates expect (OpenAI's)."""
        special_tokens = {name: str(token) for name, token in self.hf.special_tokens_map.items()}
        try:
            texts = json.dumps(messages), json.dumps(tools or None)
            return render_chat_template(self.chat_template(tools), *texts, tuple(special_tokens.items()))
        except ValueError as error:
            raise ValueError(f"the chat template{self._of} fails: {error}") from None

    def chat_template(self, tools: Sequence[Mapping] = ()) -> str:
        """The chat template's text: of several templates the one for `tools`; ValueError if it is none."""
        template = self.hf.get_chat_template(tools=tools or None)
        if not isinstance(template, str):
            raise ValueError("it is not a text")
        return template

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files: those that it was loaded from, unless `hf` was changed.

        tokenizer_config.json then names transformers' generic class, the one that uses the rules of tokenizer.json as they are.
        """
        if self._files and self._state() == self._saved_state:
            for name, content in self._files.items():
                (folder / name).write_bytes(content)
        else:
            self.hf.save_pretrained(folder)
        name_generic_class(folder)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a response: the end-of-sequence token and the usual end-of-turn and end-of-text markers."""
        find = self.hf.backend_tokenizer.token_to_id
        known = {find(name) for name in _END_MARKERS}
        known |= {find("</s>")} & self.special_ids  # in other vocabularies it is the HTML tag
        return tuple(sorted((known | {self.hf.eos_token_id} | self._more_stop_ids) - {None}))

    @property
    def _of(self) -> str:
        """The folder, for messages."""
        return f" of {self.hf.name_or_path}" if self.hf.name_or_path else ""

    def _state(self) -> tuple:
        """What users of transformers change on a tokenizer."""
        return len(self.hf), str(self.hf.chat_template), str(self.hf.special_tokens_map)

    def _checked(self, work: Callable[[], T]) -> T:
        """The result of a call into the library `tokenizers`; whatever goes wrong there becomes a ValueError.

        Its regular expressions come from the checkpoint and can take for ever on an ordinary text. The library releases Python's
        lock but cannot be interrupted, so other expressions than the usual one get a deadline.
        """
        if self._fault:
            raise ValueError(self._fault)
        try:
            return within(_ENCODE_SECONDS, work) if self._is_guarded else work()
        except TimeoutError as error:
            self._fault = f"the tokenizer{self._of} is stuck in a regular expression of its tokenizer.json ({error})"
            raise ValueError(self._fault) from None
        except BaseException as error:
            if isinstance(error, Exception) or is_panic(error):
                raise ValueError(f"the tokenizer{self._of} fails on this text: {first_line(error)}") from None
            raise


def is_panic(error: BaseException) -> bool:
    """Whether the library `tokenizers` failed inside; its error is deliberately not an Exception."""
    return type(error).__name__ == "PanicException"


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in a Hugging Face folder.

    Raises:
        ValueError: the folder has no usable tokenizer, or the tokenizer has no chat template.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)  # hide warnings about missing PyTorch and long texts
    path = Path(path)
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise ValueError(
            f"{path} holds no tokenizer (tokenizer.json); copy the tokenizer files of the model's Hugging Face folder there"
        )
    files = {name: (path / name).read_bytes() for name in TOKENIZER_FILES if (path / name).is_file() and _is_small(path / name)}
    try:
        hf = _load(path, files)
    except BaseException as error:  # the library raises many types of errors for a broken file
        if isinstance(error, Exception) or is_panic(error):
            raise ValueError(f"{path}: the tokenizer cannot be read ({first_line(error)})") from error
        raise
    if not hf.chat_template:
        raise ValueError(f"the tokenizer in {path} has no chat template; memrl needs one (use an -Instruct checkpoint's)")
    # transformers writes the tokenizer.json that a folder with tokenizer.model alone lacks.
    return Tokenizer(hf, _generation_stop_ids(path / "generation_config.json"), files if "tokenizer.json" in files else None)


def _load(path: Path, files: Mapping[str, bytes]):
    """transformers' tokenizer of a folder.

    Most classes of transformers build their rules anew and lose some of tokenizer.json's: GPT2Tokenizer loses the splitting into
    digits of SmolLM2. The generic class uses the file's, all but the post-processor, which it may replace.
    """
    from tokenizers import Tokenizer as Backend
    from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerFast

    if "tokenizer.json" in files:
        hf = PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
        rules = json.loads(files["tokenizer.json"])
        rules |= {"model": {"type": "WordLevel", "vocab": {}, "unk_token": ""}, "added_tokens": []}
        hf.backend_tokenizer.post_processor = Backend.from_str(json.dumps(rules)).post_processor
        return hf
    class_name = _read_object(path / "tokenizer_config.json").get("tokenizer_class")
    # For mistral, AutoTokenizer ignores the leading space that sentencepiece files of the Llama kind require.
    kind = LlamaTokenizer if class_name in ("LlamaTokenizer", "LlamaTokenizerFast") else AutoTokenizer
    return kind.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)


def name_generic_class(folder: Path) -> None:
    """Let a folder's tokenizer_config.json name the class that uses tokenizer.json as it is, as transformers 4 calls it too."""
    file = folder / "tokenizer_config.json"
    config = _read_object(file)
    if (folder / "tokenizer.json").is_file() and config.get("tokenizer_class") != "PreTrainedTokenizerFast":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _is_small(file: Path) -> bool:
    if file.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{file} has {file.stat().st_size:,} bytes; a tokenizer's file has at most {_MOST_BYTES:,}")
    return True


def _read_object(file: Path) -> dict:
    """The JSON object in a file; empty without that file or object."""
    if not file.is_file() or not _is_small(file):
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON ({error}); download or copy it again") from None
    return content if isinstance(content, dict) else {}


def _generation_stop_ids(file: Path) -> list[int]:
    """The eos_token_id of generation_config.json, one id or a list of them; empty without that file."""
    found = _read_object(file).get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise ValueError(f"{file}: eos_token_id must be a token id or a list of them, found {found!r}")
    return ids
