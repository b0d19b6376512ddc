"""Qwen3's architecture in plain torch, with the names that its checkpoints have.

Lean enough to be compiled whole, and told apart from transformers' by nothing but speed:
its weights are a checkpoint of `Qwen3ForCausalLM` as they are, and a test compares the
logits. Norms of queries and keys keep attention calm at high learning rates.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from attrs import frozen
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from bench.bundled.vocabulary import CONTEXT, PAD, SIZE, SPECIAL

WEIGHTS: Final = "model.safetensors"
EPSILON: Final = 1e-6
THETA: Final = 10_000.0
HEAD: Final = 64  # wide, for both: attention kernels of GPUs ask for it


@frozen(kw_only=True)
class Shape:
    """How large a model is."""

    hidden: int
    feed_forward: int
    layers: int
    heads: int
    shared_heads: int  # of keys and values
    vocabulary: int = SIZE

    def config(self) -> dict[str, Any]:
        """The contents of config.json."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "dtype": "bfloat16",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.feed_forward,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.shared_heads,
            "head_dim": HEAD,
            "hidden_act": "silu",
            "max_position_embeddings": CONTEXT,
            "initializer_range": 0.02,
            "rms_norm_eps": EPSILON,
            "rope_theta": THETA,
            "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "use_cache": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": SPECIAL.index(PAD),
        }


SHAPES: Final[Mapping[str, Shape]] = {
    "target": Shape(hidden=256, feed_forward=512, layers=9, heads=4, shared_heads=2),
    "draft": Shape(hidden=128, feed_forward=320, layers=3, heads=2, shared_heads=1),
    "tiny": Shape(
        hidden=64, feed_forward=128, layers=2, heads=1, shared_heads=1
    ),  # for trials
}


class Norm(nn.Module):
    """Root mean square normalization, in float32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)
        return (wide * self.weight).to(x.dtype)


def _linear(x: Tensor, *layers: nn.Linear) -> Tensor:
    """One product with the weights of several layers, in the precision of `x`."""
    weight = (
        layers[0].weight
        if len(layers) == 1
        else torch.cat([layer.weight for layer in layers])
    )
    return functional.linear(x, weight.to(x.dtype))


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.sizes = [
            shape.heads * HEAD,
            shape.shared_heads * HEAD,
            shape.shared_heads * HEAD,
        ]
        self.q_proj = nn.Linear(shape.hidden, self.sizes[0], bias=False)
        self.k_proj = nn.Linear(shape.hidden, self.sizes[1], bias=False)
        self.v_proj = nn.Linear(shape.hidden, self.sizes[2], bias=False)
        self.o_proj = nn.Linear(self.sizes[0], shape.hidden, bias=False)
        self.q_norm = Norm(HEAD)
        self.k_norm = Norm(HEAD)
        self.groups = shape.heads // shape.shared_heads

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        rows, length, _ = x.shape
        parts = torch.split(
            _linear(x, self.q_proj, self.k_proj, self.v_proj), self.sizes, -1
        )
        q, k, v = (part.view(rows, length, -1, HEAD) for part in parts)
        q = _turned(self.q_norm(q), turn).transpose(1, 2)
        k = (
            _turned(self.k_norm(k), turn)
            .transpose(1, 2)
            .repeat_interleave(self.groups, 1)
        )
        v = v.transpose(1, 2).repeat_interleave(self.groups, 1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return _linear(mixed.transpose(1, 2).reshape(rows, length, -1), self.o_proj)


def _turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions: halves of a head, as the checkpoints have them."""
    cos, sin = turn
    low, high = x.float().chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype)


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.down_proj = nn.Linear(shape.feed_forward, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = _linear(x, self.gate_proj, self.up_proj).chunk(2, -1)
        return _linear(functional.silu(gate) * up, self.down_proj)


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = FeedForward(shape)
        self.input_layernorm = Norm(shape.hidden)
        self.post_attention_layernorm = Norm(shape.hidden)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), turn)
        found: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return found


class Body(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden)


class Model(nn.Module):
    """A causal language model with tied embeddings; computes in `precision`."""

    def __init__(self, shape: Shape, precision: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.model = Body(shape)
        self.precision = precision
        inverse = THETA ** (-torch.arange(0, HEAD, 2, dtype=torch.float64) / HEAD)
        angles = torch.outer(torch.arange(CONTEXT, dtype=torch.float64), inverse)
        self.register_buffer("cos", angles.cos().float()[:, None], persistent=False)
        self.register_buffer("sin", angles.sin().float()[:, None], persistent=False)

    def begin(self, seed: int) -> "Model":
        """Random weights; what a layer adds is nothing at first."""
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(weight)
            elif weight.dim() > 1:
                scale = 0.05 if "embed" in name else 0.5 * weight.shape[1] ** -0.5
                nn.init.normal_(weight, std=scale, generator=generator)
        return self

    def load(self, folder: Path) -> "Model":
        """The weights of a folder in the Hugging Face layout; kept in float32."""
        weights = load_file(folder / WEIGHTS)
        self.load_state_dict({name: one.float() for name, one in weights.items()})
        return self

    def forward(self, ids: Tensor) -> Tensor:
        """Logits, in the model's precision."""
        turn = (
            self.get_buffer("cos")[: ids.shape[1]],
            self.get_buffer("sin")[: ids.shape[1]],
        )
        embedding = self.model.embed_tokens.weight
        x = functional.embedding(ids, embedding).to(self.precision)
        for layer in self.model.layers:
            x = layer(x, turn)
        return functional.linear(self.model.norm(x), embedding.to(x.dtype))
