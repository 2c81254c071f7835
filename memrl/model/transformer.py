"""The decoder-only transformer, implemented from scratch and used for both sampling and training.

A pre-norm decoder with rotary positions, grouped-query attention, a SwiGLU feed-forward layer and an output layer that may be
tied to the embedding. The families differ in the attention alone:

    qwen2 (Qwen2, Qwen2.5)           biases on q, k and v
    qwen3                            RMS norm of q and k per head, before the rotation
    llama (Llama 2 and 3, SmolLM2)   neither
    mistral                          neither

qwen3 and llama checkpoints may also have biases on q, k, v and o. Parameter names are Hugging Face's, so checkpoints load without
a name map.

Tokens are always packed: one dimension [T], sequences end to end, never padded. Shape legend in `kernels/README.md`.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from memrl.kernels.elementwise import apply_rope, rms_norm, swiglu
from memrl.kernels.logprob import token_logprobs
from memrl.model.attention_context import AttentionContext
from memrl.model.positions import RopeConfig, rope_angles, rope_inverse_frequencies

FAMILIES = ("qwen2", "qwen3", "llama", "mistral")


@dataclass(frozen=True)
class TransformerConfig:
    """The shape of a model, as in a checkpoint's config.json; sizes count units, `head_size` is one head's width.

    Attributes:
        family: one of FAMILIES, config.json's model_type.
        attention_bias: biases on q, k, v and o; only qwen3 and llama have this setting.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    rope: RopeConfig = field(default_factory=RopeConfig)
    family: str = "qwen2"
    attention_bias: bool = False

    def __post_init__(self):
        if self.family not in FAMILIES:
            raise ValueError(f"model_type {self.family!r} is not supported; supported: {', '.join(FAMILIES)}")
        if self.attention_bias and self.family not in ("qwen3", "llama"):
            raise ValueError(f"{self.family} has no attention_bias; only qwen3 and llama have that setting")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_heads}) must be a multiple of num_key_value_heads ({self.num_kv_heads})"
            )

    @property
    def qkv_bias(self) -> bool:
        return self.family == "qwen2" or self.attention_bias

    @property
    def qk_norm(self) -> bool:
        return self.family == "qwen3"


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: TransformerConfig, layer: int):
        super().__init__()
        self.layer, self.head_size = layer, config.head_size
        q_size, kv_size = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.attention_bias)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_size, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, context: AttentionContext) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (-1, self.head_size))  # (T, H, D)
        k = self.k_proj(x).unflatten(-1, (-1, self.head_size))  # (T, K, D)
        v = self.v_proj(x).unflatten(-1, (-1, self.head_size))  # (T, K, D)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        out = context.attend(self.layer, apply_rope(q, cos, sin), apply_rope(k, cos, sin), v)
        return self.o_proj(out.flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class Layer(nn.Module):
    def __init__(self, config: TransformerConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, context: AttentionContext) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, context)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    """Everything up to the last norm; checkpoints expect it under the name `model`."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class OutputLayer(nn.Linear):
    """Hidden states to fp32 logits or, given targets, to their log-probabilities and entropies."""

    def forward(self, input: Tensor, targets: Tensor | None = None, temperature: float = 1.0) -> Any:
        if targets is None:
            return super().forward(input).float()
        return token_logprobs(input, self.weight, targets, temperature)


class Transformer(nn.Module):
    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.lm_head = OutputLayer(config.hidden_size, config.vocab_size, bias=False)
        self.checkpoint_layers = False  # recompute each layer in the backward pass instead of keeping its activations
        self.tie_weights()
        # Not a buffer: .to(bfloat16) would round it and lose the angles of far positions.
        self.inverse_frequencies = rope_inverse_frequencies(config.rope, config.head_size)
        # Set if the layers are spread over devices (`device_map.py`): the device of each layer's computation.
        self.placement: list[torch.device] | None = None

    def tie_weights(self) -> None:
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def device(self) -> torch.device:
        """The device of token ids, positions and results."""
        return self.placement[0] if self.placement else self.model.norm.weight.device

    def layer_devices(self) -> list[torch.device]:
        """The device of each layer's computation; offloaded weights are moved there for the layer's turn."""
        return list(self.placement or [self.device] * self.config.num_layers)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.norm.weight.dtype

    def init_weights(self, generator: torch.Generator) -> None:
        """Initialise reproducibly: normal weights with std `initializer_range`, zero biases, unit norms."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "norm" in name:
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=self.config.initializer_range, generator=generator)

    def forward(
        self,
        ids: Tensor,
        context: AttentionContext,
        select: Tensor | None = None,
        targets: Tensor | None = None,
        temperature: float = 1.0,
    ):
        """One pass over packed tokens.

        Args:
            ids: int64 [T].
            context: the attention between tokens, and every token's position.
            select: int64 [N], indices of the tokens whose next-token distribution is computed; None for all. Vocabulary-sized
                work is done for these alone.
            targets: int64 [N], token ids whose log-probabilities are computed.
            temperature: divides the logits before the log-softmax; only used with targets.

        Returns:
            fp32 logits [N, V]; with targets a tuple (log-probabilities [N], entropies [N]).
        """
        x = self.model.embed_tokens(ids)
        self.inverse_frequencies = self.inverse_frequencies.to(x.device)  # copied once, at the first call
        cos, sin = rope_angles(self.inverse_frequencies, context.positions, self.config.rope, x.dtype)
        for layer in self.model.layers:
            if cos.device != x.device:  # otherwise every layer on another device would copy them
                cos, sin = cos.to(x.device), sin.to(x.device)
            if self.checkpoint_layers and torch.is_grad_enabled():
                x = checkpoint(layer, x, cos, sin, context, use_reentrant=False)
            else:
                x = layer(x, cos, sin, context)
        if select is not None:
            x = x[select.to(x.device)]
        return self.lm_head(self.model.norm(x), targets, temperature)


def meta_model(config: TransformerConfig, dtype: torch.dtype = torch.float32) -> Transformer:
    """A model on the meta device: shapes without weights."""
    with torch.device("meta"), _NoInit():
        return Transformer(config).to(dtype)


class _NoInit(TorchFunctionMode):
    """Skips the initialisation of weights: it has no effect on the meta device, but triggers imports that take seconds."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)
