"""The sizes of attention in a GGUF file's metadata, as config.json has them."""

from typing import Any, Final

from minfer.effects.models.gguf.architectures import SLIDING_WINDOW, Architecture
from minfer.effects.models.gguf.hf_tensors import own_layers
from minfer.effects.models.gguf.metadata import GgufMetadata
from minfer.effects.models.gguf.rope_config import read_rope_scaling

_GEMMA_27B_LAYERS: Final = 62  # only it scales queries by (hidden size / heads) ** -0.5


def read_attention(metadata: GgufMetadata, arch: Architecture) -> dict[str, Any]:
    """Returns the fields about attention, windows and RoPE. Raises `GgufError`,
    `UnsupportedModelError`.
    """
    if arch.family.attention == "mla":
        return _latents(metadata)
    heads = metadata.same_in_all_layers(".attention.head_count")
    hidden = metadata.integer(".embedding_length")
    head_dim = metadata.integer(".attention.key_length", hidden // heads)
    if metadata.integer(".attention.value_length", head_dim) != head_dim:
        raise metadata.error(
            ".attention.value_length", f"a head's dimensions, {head_dim}"
        )
    rotated = metadata.integer(".rope.dimension_count", head_dim)
    if rotated != head_dim and not arch.family.positions.partial:
        raise metadata.error(".rope.dimension_count", f"a head's dimensions, {head_dim}")
    config: dict[str, Any] = {
        "num_key_value_heads": metadata.same_in_all_layers(
            ".attention.head_count_kv", heads
        ),
        "head_dim": head_dim,
        "rope_scaling": read_rope_scaling(metadata, head_dim),
    }
    if arch.model_type == "gpt_oss" and config["rope_scaling"] is not None:
        # Of its published config; files do not say it.
        config["rope_scaling"]["truncate"] = False
    if arch.family.positions.partial:
        config["partial_rotary_factor"] = rotated / head_dim
    if isinstance(arch.family.qk_norm.present, str):
        is_normed = "blk.0.attn_q_norm.weight" in metadata.file.tensors
        config[arch.family.qk_norm.present] = is_normed
    return config | _windows(metadata, heads, head_dim, hidden)


def _latents(metadata: GgufMetadata) -> dict[str, Any]:
    """Returns the sizes of latents. Files with keys and values of latents apart have one
    key head, and the sizes of heads under other keys.
    """
    rotated = metadata.integer(".rope.dimension_count")
    key_dim, value_dim = (
        metadata.integer(f".attention.{kind}_length_mla", 0, low=0)
        or metadata.integer(f".attention.{kind}_length")
        for kind in ("key", "value")
    )
    if key_dim <= rotated:
        raise metadata.error(".attention.key_length", f"more than {rotated}")
    scaling = read_rope_scaling(metadata, rotated)
    if scaling is not None and metadata.get(".rope.scaling.yarn_log_multiplier"):
        # Stored as a tenth of what config.json has for scores, and also for cosines.
        mscale = 10 * metadata.number(".rope.scaling.yarn_log_multiplier")
        scaling |= {"mscale": mscale, "mscale_all_dim": mscale}
    ranks = {
        f"{name}_lora_rank": metadata.integer(f".attention.{name}_lora_rank")
        for name in ("q", "kv")
        if name == "kv" or metadata.get(".attention.q_lora_rank") is not None
    }
    return {
        "q_lora_rank": None,
        **ranks,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key_dim - rotated,
        "v_head_dim": value_dim,
        "rope_scaling": scaling,
    }


def _windows(
    metadata: GgufMetadata, heads: int, head_dim: int, hidden: int
) -> dict[str, Any]:
    """Returns the sliding window of Mistral's and gpt-oss' layers, or the sizes of
    Gemma's layers with and without windows.
    """
    if metadata.arch == "llama" and metadata.get(SLIDING_WINDOW) is not None:
        return {"sliding_window": metadata.integer(SLIDING_WINDOW)}
    if metadata.arch == "llama":
        return {"sliding_window": None}
    if metadata.arch == "gpt-oss":
        return {"sliding_window": metadata.integer(SLIDING_WINDOW)}
    if metadata.arch != "gemma3":
        return {}
    is_27b = own_layers(metadata) == _GEMMA_27B_LAYERS
    return {
        "query_pre_attn_scalar": hidden // heads if is_27b else head_dim,
        "sliding_window": metadata.integer(SLIDING_WINDOW),
        "sliding_window_pattern": metadata.integer(
            ".attention.sliding_window_pattern", 6
        ),
        "rope_theta": metadata.number(".rope.freq_base", 1e6),
        "rope_local_base_freq": metadata.number(".rope.freq_base_swa", 10000.0),
    }
