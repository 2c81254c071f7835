"""The model, its rotary positions, what it attends to, and Hugging Face folders in and out."""

from memrl.model.attention import PackedContext
from memrl.model.hf_config import read_config
from memrl.model.loader import load_model, logits_of, save_model
from memrl.model.transformer import Transformer, TransformerConfig

__all__ = [
    "PackedContext",
    "Transformer",
    "TransformerConfig",
    "load_model",
    "logits_of",
    "read_config",
    "save_model",
]
