"""Arithmetic of shapes: what a step of a model takes, from its spec and the engine's
sizes alone.

How far a step is padded so that a CUDA graph can serve it, which steps are captured at
all, and how many bytes a forward keeps at its widest place. Functions of their arguments,
without torch.
"""

from typing import Final

from minfer.config import EngineConfig
from minfer.effects.models.spec import ModelSpec, dtype_bytes, weight_bytes

# A layer's weights, with its share of the embeddings, times tokens: up to so much its
# launches, eight of 80 us, take about as long as its products at 690 TFLOP/s (H200,
# 2026-11-22).
CAPTURED_WORK: Final = 2.8e11


def padded_tokens(count: int) -> int:
    """From history, of the CUDA graph that serves so many: at most half as many again
    above 128.
    """
    return -(-count // _quarter(count)) * _quarter(count)


def _quarter(count: int) -> int:
    return max(64, (1 << (count - 1).bit_length()) // 4)


def captured_tokens(spec: ModelSpec, budget: int) -> int:
    """From history, in the largest step that is captured as a CUDA graph."""
    weights = weight_bytes(spec) // dtype_bytes(spec.dtype) // spec.layers
    most = int(CAPTURED_WORK / weights)
    return min(padded_tokens(budget), most // _quarter(most) * _quarter(most))


def activation_bytes(spec: ModelSpec, sizes: EngineConfig) -> int:
    """What a forward and the sampler hold besides weights and cache, at most."""
    element = dtype_bytes(spec.dtype)
    qkv = spec.q_size + 2 * spec.kv_size
    # Rotation works in float32: for narrower types the turned heads exist twice more in
    # it.
    rotation = qkv * (element if element == 4 else 8)
    attention = (qkv + 2 * spec.q_size) * element + rotation
    feed_forward = 3 * spec.intermediate_size * element
    token = 2 * spec.hidden_size * element + max(attention, feed_forward)
    beside = sizes.max_num_batched_tokens + sizes.block_size
    keys = (sizes.max_model_len if w is None else w + beside for w in set(spec.windows))
    # Of one query: float32, and the boolean it is made from.
    mask = sum(5 * min(count, sizes.max_model_len) for count in keys)
    row = spec.vocab_size * (
        element + 3 * 4
    )  # logits, float32 copy, noise, sorted or masked copy
    rope = 0 if spec.rope is None else sizes.max_model_len * 2 * spec.head_dim * 4
    return sizes.max_num_batched_tokens * (token + mask) + sizes.max_num_seqs * row + rope


def cuda_activation_bytes(spec: ModelSpec, sizes: EngineConfig, tokens: int) -> int:
    """The same on a GPU, of a forward of `tokens` tokens."""
    element, rows = (
        dtype_bytes(spec.dtype),
        sizes.max_num_seqs * 5 // 4 + 32,
    )  # padding included
    attention = 2 * spec.q_size + 2 * spec.kv_size
    token = element * (3 * spec.hidden_size + max(attention, 3 * spec.intermediate_size))
    logits = spec.vocab_size * (element + 4)  # and the ids that top-k and top-p leave
    tables = 4 * sizes.max_num_seqs * (sizes.max_model_len // sizes.block_size + 1)
    rope = 0 if spec.rope is None else sizes.max_model_len * spec.head_dim * 4
    # Of Flash-Decoding's ranges: they fill the processors, and none has more than 8,192
    # tokens.
    ranges = max(4 * 132, rows * spec.kv_heads * -(-sizes.max_model_len // 8192))
    parts = 4 * ranges * (spec.heads // spec.kv_heads) * (spec.head_dim + 1)
    return tokens * token + rows * logits + 4 * tables + rope + parts
