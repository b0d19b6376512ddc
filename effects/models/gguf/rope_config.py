"""The scaling of RoPE in a GGUF file's metadata, as config.json has it."""

import math
import struct
from typing import Any, Final

from minfer.effects.models.config_reader import UnsupportedModelError
from minfer.effects.models.gguf.block_types import F32
from minfer.effects.models.gguf.metadata import GgufMetadata

OLD_SCALE: Final = ".rope.scale_linear"
ROPE_FACTORS: Final = "rope_freqs.weight"
# Of longrope, and what config.json calls them.
LONG_FACTORS: Final = {
    "rope_factors_long.weight": "long_factor",
    "rope_factors_short.weight": "short_factor",
}
FACTOR_TOLERANCE: Final = 1e-3  # relative tolerance of stored factors
# Llama 3's RoPE scaling: files hold the factors that follow from these numbers, not the
# numbers.
_LOW_FREQ_FACTOR: Final = 1.0
_HIGH_FREQ_FACTORS: Final = (4.0, 1.0)  # of Llama 3, and of Llama 4 Scout
_LLAMA3_CONTEXT: Final = 8192


def read_rope_scaling(metadata: GgufMetadata, head_dim: int) -> dict[str, Any] | None:
    """Returns the config's `rope_scaling`; None: RoPE is not scaled."""
    # As llama.cpp reads them: older files have another key, and no type is linear.
    key = ".rope.scaling.factor"
    if metadata.get(key) is None and metadata.get(OLD_SCALE) is not None:
        key = OLD_SCALE
    is_scaled = metadata.get(key) not in (None, 0.0, 1.0)
    kind = metadata.text(".rope.scaling.type", "linear" if is_scaled else "none")
    if ROPE_FACTORS in metadata.file.tensors:
        if kind != "none" and is_scaled:
            raise UnsupportedModelError(
                f"{metadata.file.path}: metadata {metadata.full(key)} beside tensor "
                f"{ROPE_FACTORS} is not supported; give the Hugging Face checkpoint that "
                f"the file was made from"
            )
        return _llama3(metadata, head_dim)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        key = metadata.full(".rope.scaling.type")
        raise UnsupportedModelError(
            f"{metadata.file.path}: metadata {key} = {kind!r:.100} is not supported; "
            f"linear and yarn are. Give the Hugging Face checkpoint that the file was "
            f"made from"
        )
    factor = metadata.number(key)
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        key = ".rope.scaling.original_context_length"
        length = metadata.integer(".context_length")
        scaling["original_max_position_embeddings"] = metadata.integer(key, length)
    return scaling


def read_longrope(metadata: GgufMetadata, rotated: int) -> dict[str, Any] | None:
    """Returns the `rope_scaling` of a model that has longrope alone: the file holds both
    sets of factors. None: RoPE is not scaled.
    """
    if metadata.get(".rope.scaling.factor") not in (None, 0.0, 1.0):
        raise metadata.error(".rope.scaling.factor", "1: only longrope is supported")
    has_factors = not LONG_FACTORS.keys().isdisjoint(metadata.file.tensors)
    kind = metadata.text(".rope.scaling.type", "none")
    if kind not in ("none", "longrope") or (kind == "longrope" and not has_factors):
        raise metadata.error(
            ".rope.scaling.type", "none, or longrope with tensors of its factors"
        )
    if not has_factors:
        if metadata.get(".rope.scaling.attn_factor") not in (None, 1.0):
            raise metadata.error(".rope.scaling.attn_factor", "1, without longrope")
        return None
    scaling: dict[str, Any] = {"rope_type": "longrope"}
    for name, key in LONG_FACTORS.items():
        factors = read_factors(metadata, name, rotated)
        if not factors:
            raise UnsupportedModelError(
                f"{metadata.file.path}: tensor {name} must hold {rotated // 2} factors "
                f"in float32; convert the model again with a current llama.cpp, or give "
                f"the Hugging Face checkpoint"
            )
        scaling[key] = [*factors]
    # Of cosines and sines.
    if metadata.get(".rope.scaling.attn_factor") is not None:
        scaling["attention_factor"] = metadata.number(".rope.scaling.attn_factor")
    return scaling


def read_factors(metadata: GgufMetadata, name: str, rotated: int) -> tuple[float, ...]:
    """Returns factors of frequencies, one a pair of dimensions that turn; none, if the
    tensor is missing or has another type or shape.
    """
    stored = metadata.file.tensors.get(name)
    if stored is None or stored.type is not F32 or stored.shape != (rotated // 2,):
        return ()
    return struct.unpack_from(f"<{rotated // 2}f", stored.data, stored.start)


def _llama3(metadata: GgufMetadata, head_dim: int) -> dict[str, Any]:
    """Returns the `rope_scaling` of Llama 3 and 4. The file holds the factors that
    frequencies are divided by, one a pair of dimensions. Raises `UnsupportedModelError`
    if they are not those of published models.
    """
    theta = metadata.number(".rope.freq_base", 10000.0)
    factors = read_factors(metadata, ROPE_FACTORS, head_dim)
    factor = max(factors, default=0.0)
    for high in _HIGH_FREQ_FACTORS if factor >= 1 else ():
        expected = _llama3_factors(theta, head_dim, factor, high)
        pairs = zip(factors, expected, strict=True)
        if all(
            math.isclose(stored_factor, expected_factor, rel_tol=FACTOR_TOLERANCE)
            for stored_factor, expected_factor in pairs
        ):
            return {
                "rope_type": "llama3",
                "factor": round(factor, 4),
                "low_freq_factor": _LOW_FREQ_FACTOR,
                "high_freq_factor": high,
                "original_max_position_embeddings": _LLAMA3_CONTEXT,
            }
    raise UnsupportedModelError(
        f"{metadata.file.path}: tensor {ROPE_FACTORS} holds RoPE factors other than "
        f"Llama 3's and 4's, which are not supported; give the Hugging Face checkpoint "
        f"that the file was made from"
    )


def _llama3_factors(
    theta: float, head_dim: int, factor: float, high: float
) -> list[float]:
    """Returns the factor that Llama 3 divides each frequency by."""
    factors = []
    for i in range(0, head_dim, 2):
        turns = _LLAMA3_CONTEXT / (2 * math.pi * theta ** (i / head_dim))
        above = turns - _LOW_FREQ_FACTOR
        band = high - _LOW_FREQ_FACTOR
        unscaled_share = min(max(above / band, 0.0), 1.0) if band else float(above > 0)
        factors.append(1 / ((1 - unscaled_share) / factor + unscaled_share))
    return factors
