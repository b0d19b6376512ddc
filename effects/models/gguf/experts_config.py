"""The sizes of experts in a GGUF file's metadata, as config.json has them."""

from typing import Any, Final

from minfer.effects.models.gguf.architectures import (
    EXPERT_COUNT,
    MOE_STEP,
    Architecture,
)
from minfer.effects.models.gguf.metadata import GgufMetadata

MAX_EXPERTS: Final = 1 << 12  # in a layer
_GATING: Final = {"softmax": 1, "sigmoid": 2}  # as files number them


def read_experts(metadata: GgufMetadata, arch: Architecture) -> dict[str, Any]:
    """Returns the fields about experts; none if there are no experts. Raises
    `GgufError`.
    """
    keys = arch.family.experts
    if keys is None:
        return {}
    if keys.sparse.enabled and "blk.0.ffn_gate_inp.weight" not in metadata.file.tensors:
        return {keys.sparse.enabled: False}
    normalise = keys.routing.normalise
    config: dict[str, Any] = {
        keys.count[0]: metadata.integer(EXPERT_COUNT, below=MAX_EXPERTS + 1),
        keys.routing.top_k[0]: metadata.integer(".expert_used_count"),
    }
    if keys.sparse.enabled:
        config[keys.sparse.enabled] = True
    if isinstance(normalise, str):
        # Files without the key are read as the published models of the architecture.
        default = arch.model_type != "qwen2_moe"
        config[normalise] = metadata.flag(".expert_weights_norm", default=default)
    dense = 0
    if keys.sparse.first_dense:
        dense = metadata.integer(".leading_dense_block_count", 0, low=0)
        config[keys.sparse.first_dense] = dense
    if MOE_STEP in arch.reads:
        config[keys.sparse.step] = metadata.integer(MOE_STEP)
        dense = config[keys.sparse.step] - 1
    width = _width(metadata, ".expert_feed_forward_length", dense, "ffn_up_exps")
    config[keys.inter] = width
    if keys.shared.width not in ("", keys.inter):
        key = ".expert_shared_feed_forward_length"
        config[keys.shared.width] = _width(metadata, key, dense, "ffn_up_shexp")
    if keys.shared.count:
        config[keys.shared.count] = metadata.integer(".expert_shared_count", 0, low=0)
    if ".expert_gating_func" in arch.reads:
        # Older files of the first architectures do not say it.
        missing: Any = ... if arch.model_type == "minimax_m2" else 0
        gating = metadata.integer(".expert_gating_func", missing, low=0)
        expected = _GATING[keys.routing.scores]
        if gating and gating != expected:
            raise metadata.error(".expert_gating_func", str(expected))
    if ".expert_weights_scale" in arch.reads:
        config |= _routing(metadata, arch)
    return config


def _routing(metadata: GgufMetadata, arch: Architecture) -> dict[str, Any]:
    """Returns the fields of the rule by which experts are chosen."""
    groups = metadata.integer(".expert_group_count", 0, low=0) or 1
    config = {
        # 0, too, is no factor.
        "routed_scaling_factor": metadata.get(".expert_weights_scale") or 1.0,
        "n_group": groups,
        "topk_group": metadata.integer(".expert_group_used_count", 0, low=0) or groups,
        "norm_topk_prob": metadata.flag(".expert_weights_norm", default=False),
    }
    if arch.model_type == "deepseek_v2":
        is_limited = groups > 1
        config["topk_method"] = "group_limited_greedy" if is_limited else "greedy"
    return config


def _width(metadata: GgufMetadata, key: str, layer: int, matrix: str) -> int:
    """Returns the width of a feed-forward: from the shape of its matrix in a layer, as
    older files lack the key, else from the key.
    """
    stored = metadata.file.tensors.get(f"blk.{layer}.{matrix}.weight")
    if stored is None or len(stored.shape) == 1:
        return metadata.integer(key)
    return metadata.integer(key, stored.shape[-2])
