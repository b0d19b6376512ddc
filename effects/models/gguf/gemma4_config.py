"""The attention of Gemma 4 in a GGUF file's metadata, as config.json has it.

Its layers with a window have keys of their own in the metadata, which end in `_swa`. In
layers without one a share of a head's dimensions turn. Files say which by factors that
frequencies are divided by: those of the others are so large that they do not turn.
"""

from typing import Any, Final

from minfer.effects.models.config_reader import UnsupportedModelError
from minfer.effects.models.gguf.architectures import (
    SLIDING_WINDOW,
    SLIDING_WINDOW_PATTERN,
)
from minfer.effects.models.gguf.container import GgufArray
from minfer.effects.models.gguf.feed_forward_config import SHARED_KEYS
from minfer.effects.models.gguf.hf_tensors import own_layers
from minfer.effects.models.gguf.metadata import GgufMetadata
from minfer.effects.models.gguf.rope_config import ROPE_FACTORS, read_factors

UNROTATED_FACTOR: Final = 1e30
_FULL, _SLIDING = "full_attention", "sliding_attention"  # `layer_types`
_KEY_HEADS: Final = ".attention.head_count_kv"
_INPUT_TABLE: Final = "per_layer_token_embd.weight"


def read_gemma4(metadata: GgufMetadata) -> dict[str, Any]:
    """Returns the fields about attention, windows, RoPE and inputs of layers. Raises
    `GgufError`, `UnsupportedModelError`.
    """
    layer_types = _layer_types(metadata)
    full_dim, sliding_dim = _head_dim(metadata, ""), _head_dim(metadata, "_swa")
    cap = ".final_logit_softcapping"
    return {
        "layer_types": layer_types,
        "sliding_window": metadata.integer(SLIDING_WINDOW),
        "head_dim": sliding_dim,
        "global_head_dim": full_dim,
        "num_kv_shared_layers": metadata.integer(SHARED_KEYS, 0, low=0),
        "rope_parameters": {
            _SLIDING: {
                "rope_type": "default",
                "rope_theta": metadata.number(".rope.freq_base_swa", 10000.0),
            },
            _FULL: {
                "rope_type": "proportional",
                "rope_theta": metadata.number(".rope.freq_base", 10000.0),
                "partial_rotary_factor": _rotated_share(metadata, full_dim),
            },
        },
        "final_logit_softcapping": metadata.number(cap) if metadata.get(cap) else None,
        **_key_heads(metadata, layer_types),
        **_layer_inputs(metadata),
    }


def _layer_types(metadata: GgufMetadata) -> list[str]:
    """Returns which layers have a window. The last one has none, whatever a config says,
    and the reader of configs takes it so.
    """
    pattern = metadata.array(SLIDING_WINDOW_PATTERN).numbers()
    layers = own_layers(metadata)
    if len(pattern) != layers or pattern[-1]:
        expected = f"an array of {layers} elements, of which the last is false"
        raise metadata.error(SLIDING_WINDOW_PATTERN, expected)
    return [_SLIDING if has_window else _FULL for has_window in pattern]


def _head_dim(metadata: GgufMetadata, end: str) -> int:
    """Returns the dimensions of a head of layers without or with a window, which are
    those of its values, and those that have frequencies.
    """
    head_dim = metadata.integer(f".attention.key_length{end}")
    for key in (f".attention.value_length{end}", f".rope.dimension_count{end}"):
        if metadata.integer(key, head_dim) != head_dim:
            raise metadata.error(key, f"a head's dimensions, {head_dim}")
    return head_dim


def _key_heads(metadata: GgufMetadata, layer_types: list[str]) -> dict[str, Any]:
    """Returns the numbers of key heads, and whether keys are values in layers without a
    window: files have no matrix of values there.
    """
    counts = metadata.get(_KEY_HEADS)
    numbers = (
        counts.numbers()
        if isinstance(counts, GgufArray)
        else (metadata.integer(_KEY_HEADS),) * len(layer_types)
    )
    if len(numbers) != len(layer_types):
        raise metadata.error(_KEY_HEADS, f"of {len(layer_types)} layers")
    by_type = {
        kind: {
            number for number, of in zip(numbers, layer_types, strict=True) if of == kind
        }
        for kind in layer_types
    }
    if any(len(found) > 1 or min(found) < 1 for found in by_type.values()):
        raise metadata.error(
            _KEY_HEADS, "above 0, and one number for each kind of layers"
        )
    (full,) = by_type[_FULL]
    (sliding,) = by_type.get(_SLIDING, {full})
    first_full = layer_types.index(_FULL)
    has_values = f"blk.{first_full}.attn_v.weight" in metadata.file.tensors
    if has_values and full != sliding:
        expected = f"the same in all layers, as there is blk.{first_full}.attn_v.weight"
        raise metadata.error(_KEY_HEADS, expected)
    return {
        "num_key_value_heads": sliding,
        "num_global_key_value_heads": full,
        "attention_k_eq_v": not has_values,
    }


def _rotated_share(metadata: GgufMetadata, head_dim: int) -> float:
    """Returns the share of a head's dimensions that turn in layers without a window.
    Raises `UnsupportedModelError` for factors that scale frequencies.
    """
    for key, allowed in (
        (".rope.scaling.type", (None, "none")),
        (".rope.scaling.factor", (None, 0.0, 1.0)),
    ):
        if metadata.get(key) not in allowed:
            raise metadata.error(key, str(allowed[-1]))
    factors = read_factors(metadata, ROPE_FACTORS, head_dim)
    rotated = sum(factor == 1 for factor in factors)
    others = factors[rotated:]
    if not rotated or any(factor < UNROTATED_FACTOR * 0.99 for factor in others):
        raise UnsupportedModelError(
            f"{metadata.file.path}: tensor {ROPE_FACTORS} must hold {head_dim // 2} "
            f"factors in float32, first those of dimensions that turn, 1, and then "
            f"{UNROTATED_FACTOR:g}; convert the model again with a current llama.cpp, or "
            f"give the Hugging Face checkpoint"
        )
    return 2 * rotated / head_dim


def _layer_inputs(metadata: GgufMetadata) -> dict[str, int]:
    """Returns the sizes of what layers get of a token's embedding, if they do."""
    width = metadata.integer(".embedding_length_per_layer_input", 0, low=0)
    table = metadata.file.tensors.get(_INPUT_TABLE)
    if width and table is None:
        key = metadata.full(".embedding_length_per_layer_input")
        raise UnsupportedModelError(
            f"{metadata.file.path}: tensor {_INPUT_TABLE} is missing, though {key} = "
            f"{width}; download the file again, or convert the model again"
        )
    sizes = {"hidden_size_per_layer_input": width}
    return (
        sizes if table is None else sizes | {"vocab_size_per_layer_input": table.shape[0]}
    )
