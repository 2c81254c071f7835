"""The model, its rotary positions and attention contexts; reading and writing Hugging Face folders."""

from memrl.model.attention_context import PackedContext
from memrl.model.device_map import load_dispatched
from memrl.model.hf_config import read_config
from memrl.model.loader import describe_model, load_model, logits_of
from memrl.model.saver import save_model
from memrl.model.transformer import Transformer, TransformerConfig

__all__ = [
    "PackedContext",
    "Transformer",
    "TransformerConfig",
    "describe_model",
    "load_dispatched",
    "load_model",
    "logits_of",
    "read_config",
    "save_model",
]
