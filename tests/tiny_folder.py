"""A random two-layer model with a word-level tokenizer, saved as a Hugging Face folder like any other."""

from collections.abc import Sequence
from pathlib import Path

from memrl.agents import AgentConfig
from memrl.agents.agent_file import save_agent
from memrl.model import TransformerConfig, save_model
from memrl.model.loader import from_scratch
from memrl.prompts import Prompts
from memrl.tokenizer import Tokenizer

WORDS = ("red blue green grey north south east west stone river cloud tree one two three four code name is . ? Q M S A").split()
CHAT = "{% for m in messages %}<|im_start|> {{ m.content }} <|im_end|>{% endfor %}<|im_start|>"
PROMPTS = Prompts(memory="Q {question} M {memory} S {section}", answer="A Q {question} M {memory}", no_memory="none")


def make_tokenizer(words: Sequence[str] = (*WORDS, "none"), chat: str = CHAT) -> Tokenizer:
    """One word, one token."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|unk|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend = Backend(models.WordLevel({w: i for i, w in enumerate([*special, *words])}, unk_token="<|unk|>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<|unk|>", eos_token="<|im_end|>", pad_token="<|endoftext|>")
    hf.add_special_tokens({"additional_special_tokens": special[1:]})
    hf.chat_template = chat
    return Tokenizer(hf)


def make_folder(folder: Path, *, seed: int = 0, chunk_tokens: int = 8) -> Path:
    tokenizer = make_tokenizer()
    config = TransformerConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_size=16,
        tie_word_embeddings=True,
    )
    save_model(from_scratch(config, seed), folder, tokenizer)
    save_agent(AgentConfig(PROMPTS, chunk_tokens, memory_tokens=4, answer_tokens=3, question_tokens=6), folder)
    return folder
