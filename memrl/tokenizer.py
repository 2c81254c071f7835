"""Text to token ids and back, on top of a Hugging Face tokenizer.

Document text is data: a string such as "<|im_end|>" inside it is encoded as the characters it consists of. Only memrl's own
prompt pieces may contain special tokens.
"""

import json
import logging
from pathlib import Path


class Tokenizer:
    """What memrl needs of a tokenizer; the Hugging Face object itself is `.hf`."""

    def __init__(self, hf):
        self.hf = hf
        self.special_ids = frozenset(hf.all_special_ids)
        self.vocab_size = len(hf)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text: nothing is added, and special-token strings are not special."""
        return self.hf(text, add_special_tokens=False, split_special_tokens=True, verbose=False).input_ids

    def encode_template(self, text: str) -> list[int]:
        """Token ids of a piece of a rendered chat template, in which special tokens are meant as such."""
        return self.hf(text, add_special_tokens=False, split_special_tokens=False, verbose=False).input_ids

    def decode(self, ids: list[int]) -> str:
        return self.hf.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def render_chat(self, content: str, system: str | None = None) -> str:
        """One user message and the cue for the assistant's turn, as the model's chat template writes them."""
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": content})
        return self.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a response: the end-of-sequence token and the usual end-of-turn and end-of-text markers."""
        names = ("<|im_end|>", "<|endoftext|>", "<|end|>")
        known = [self.hf.convert_tokens_to_ids(name) for name in names if name in self.hf.get_vocab()]
        return tuple(sorted({self.hf.eos_token_id, *known} - {None}))


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in a Hugging Face folder.

    Raises:
        ValueError: no usable tokenizer there, or one without a chat template.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)  # "none of PyTorch, ..." and length warnings do not apply
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = Path(path)
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise ValueError(
            f"{path} holds no tokenizer (tokenizer.json); copy the tokenizer files of the model's Hugging Face folder there"
        )
    try:
        # AutoTokenizer goes by config.json's model type and reads any tokenizer beside a Qwen2 model as Qwen's byte-level BPE.
        kind = PreTrainedTokenizerFast if _is_generic(path / "tokenizer_config.json") else AutoTokenizer
        hf = kind.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises many kinds for a broken file; all of them mean the same to a user
        reason = str(error).strip().splitlines()
        raise ValueError(f"{path}: the tokenizer cannot be read ({reason[0] if reason else type(error).__name__})") from error
    if not hf.chat_template:
        raise ValueError(f"the tokenizer in {path} has no chat template; memrl needs one (use an -Instruct checkpoint's)")
    return Tokenizer(hf)


def _is_generic(config_path: Path) -> bool:
    """Whether tokenizer_config.json says that tokenizer.json alone defines the tokenizer."""
    if not config_path.is_file() or not (config_path.parent / "tokenizer.json").is_file():
        return False
    config = json.loads(config_path.read_text(encoding="utf-8"))
    return isinstance(config, dict) and config.get("tokenizer_class") in ("TokenizersBackend", "PreTrainedTokenizerFast")
