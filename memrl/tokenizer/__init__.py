"""Text to token ids and back with the rules of a checkpoint's own tokenizer, and its chat template."""

from memrl.tokenizer.hf_tokenizer import TOKENIZER_FILES, TextTokenizer, Tokenizer, load_tokenizer, name_generic_class

__all__ = ["TOKENIZER_FILES", "TextTokenizer", "Tokenizer", "load_tokenizer", "name_generic_class"]
