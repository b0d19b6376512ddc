"""A GGUF file's metadata as the config.json of the checkpoint that it was made from."""

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from minfer.effects.models.config_reader import UnsupportedModelError
from minfer.effects.models.gguf.architectures import (
    EXPERT_COUNT,
    SLIDING_WINDOW,
    Architecture,
    architecture_of,
)
from minfer.effects.models.gguf.block_types import BF16, F16, F32
from minfer.effects.models.gguf.container import GgufError, GgufFile, read_gguf
from minfer.effects.models.gguf.hf_tensors import keeps_int4
from minfer.effects.models.gguf.metadata import GgufMetadata
from minfer.effects.models.gguf.token_lists import stop_ids

MAX_EXPERTS: Final = 1 << 12  # in a layer
EMBEDDINGS: Final = "token_embd.weight"
OLD_SCALE: Final = ".rope.scale_linear"
ROPE_FACTORS: Final = "rope_freqs.weight"
FACTOR_TOLERANCE: Final = 1e-3  # relative tolerance of stored factors
# Llama 3's RoPE scaling: files hold the factors that follow from these numbers, not the
# numbers.
_LLAMA3: Final = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# By `general.type`.
_OTHER_KINDS: Final = {
    "adapter": "an adapter (LoRA), which has to be merged into its base model "
    "(`llama-export-lora`)",
    "mmproj": "the part of a model that reads images",
    "imatrix": "a matrix of importances, from which models are quantized",
}
# Keys of features that change logits and are not supported, each with the values that
# turn the feature off. Any other value is refused.
_UNSUPPORTED: Final[Mapping[str, tuple[Any, ...]]] = {
    ".attention.causal": (True,),
    ".attention.clamp_kqv": (0.0,),
    ".attention.max_alibi_bias": (0.0,),
    ".attention.scale": (),
    ".attn_logit_softcapping": (),
    ".embedding_scale": (1.0,),
    ".expert_gating_func": (0, 1),
    ".expert_group_count": (0, 1),
    ".expert_weights_scale": (0.0, 1.0),
    ".final_logit_softcapping": (),
    ".leading_dense_block_count": (0,),
    ".logit_scale": (1.0,),
    ".nextn_predict_layers": (0,),
    ".residual_scale": (1.0,),
    ".rope.scaling.attn_factor": (1.0,),
    ".rope.scaling.yarn_attn_factor": (1.0,),
    ".rope.scaling.yarn_beta_fast": (32.0,),
    ".rope.scaling.yarn_beta_slow": (1.0,),
    ".rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    ".rope.scaling.yarn_log_multiplier": (),
    ".use_parallel_residual": (False,),
    "split.count": (0, 1),
}
_GEMMA_27B_LAYERS: Final = 62  # only it scales queries by (hidden size / heads) ** -0.5


def gguf_config(path: str | Path) -> dict[str, Any]:
    """Returns the config.json of the checkpoint that a file was made from.

    Raises `GgufError` for damaged files and metadata, and `UnsupportedModelError`.
    """
    file = read_gguf(path)
    metadata = GgufMetadata(file)
    _refuse_other_kinds(metadata)
    arch = architecture_of(metadata)
    for key, allowed in _UNSUPPORTED.items():
        _refuse_unless(metadata, key, allowed)
    if (embeddings := file.tensors.get(EMBEDDINGS)) is None:
        raise GgufError(
            f"{file.path}: tensor {EMBEDDINGS} is missing; download the file again, or "
            f"convert the model again"
        )
    heads = metadata.same_in_all_layers(".attention.head_count")
    hidden = _hidden(metadata)
    head_dim = metadata.integer(".attention.key_length", hidden // heads)
    if metadata.integer(".attention.value_length", head_dim) != head_dim:
        raise metadata.error(
            ".attention.value_length", f"a head's dimensions, {head_dim}"
        )
    if metadata.integer(".rope.dimension_count", head_dim) != head_dim:
        raise metadata.error(".rope.dimension_count", f"a head's dimensions, {head_dim}")
    config = {
        "architectures": [arch.family.architecture],
        "model_type": arch.model_type,
        "vocab_size": embeddings.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": _layers(metadata),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.same_in_all_layers(
            ".attention.head_count_kv", heads
        ),
        "head_dim": head_dim,
        "intermediate_size": metadata.same_in_all_layers(".feed_forward_length", 1, low=0)
        or 1,
        "rms_norm_eps": metadata.number(".attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.integer(".context_length"),
        "rope_theta": metadata.number(".rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(metadata, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "qkv_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        "eos_token_id": [*stop_ids(metadata)],
        "dtype": _dtype(file, arch),
        **_experts(metadata, arch),
        **_windows(metadata, heads, head_dim, hidden),
    }
    if keeps_int4(file):
        config["quantization_config"] = {"quant_method": "gguf"}
    return config


def _refuse_other_kinds(metadata: GgufMetadata) -> None:
    """Refuse files that are no model. Raises `UnsupportedModelError`."""
    kind = metadata.get("general.type")
    if kind not in (None, "model"):
        raise UnsupportedModelError(
            f"{metadata.file.path}: general.type = {kind!r:.100}: the file is no model "
            f"but {_OTHER_KINDS.get(str(kind), 'something else')}; give a model's file"
        )


def _refuse_unless(metadata: GgufMetadata, key: str, allowed: tuple[Any, ...]) -> None:
    value = metadata.get(key)
    if value is None or any(value == allowed_value for allowed_value in allowed):
        return
    fault = f"metadata {metadata.full(key)} = {value!r:.100} is not supported"
    remedy = "give the Hugging Face checkpoint that the file was made from"
    if key == "split.count":
        fault = f"the file is one of the {value!r:.100} parts of a split file"
        remedy = "join them with `llama-gguf-split --merge`"
    raise UnsupportedModelError(f"{metadata.file.path}: {fault}; {remedy}")


def _hidden(metadata: GgufMetadata) -> int:
    return metadata.integer(".embedding_length")


def _layers(metadata: GgufMetadata) -> int:
    """Returns the number of layers. Each has tensors in the file, so a number above that
    of tensors is refused: it would make what follows slow.
    """
    return metadata.integer(".block_count", below=len(metadata.file.tensors) + 1)


def _dtype(file: GgufFile, arch: Architecture) -> str:
    """Returns the dtype of activations, which follows from the types of the matrices, as
    the file does not give the model's dtype.

    Quantized files run in bfloat16, which does not overflow; so does Gemma, whose
    activations overflow float16.
    """
    matrix_types = {
        tensor.type for tensor in file.tensors.values() if len(tensor.shape) > 1
    }
    if matrix_types == {F32}:
        return "float32"
    if (
        matrix_types <= {F16, F32}
        and BF16 not in matrix_types
        and not arch.norms_plus_one
    ):
        return "float16"
    return "bfloat16"


def _experts(metadata: GgufMetadata, arch: Architecture) -> dict[str, Any]:
    keys = arch.family.experts
    if keys is None:
        return {}
    config: dict[str, Any] = {
        keys.count[0]: metadata.integer(EXPERT_COUNT, below=MAX_EXPERTS + 1),
        "num_experts_per_tok": metadata.integer(".expert_used_count"),
    }
    if isinstance(keys.normalise, str):
        # Files without the key are read as the published models of the architecture.
        default = arch.model_type != "qwen2_moe"
        config[keys.normalise] = metadata.flag(".expert_weights_norm", default=default)
    if keys.inter != "intermediate_size":
        config[keys.inter] = _width(
            metadata, ".expert_feed_forward_length", "ffn_up_exps"
        )
    if keys.shared:
        key = ".expert_shared_feed_forward_length"
        config[keys.shared] = _width(metadata, key, "ffn_up_shexp")
    return config


def _width(metadata: GgufMetadata, key: str, matrix: str) -> int:
    """Returns the width of a feed-forward: from the shape of its matrix, as older files
    lack the key, else from the key.
    """
    stored = metadata.file.tensors.get(f"blk.0.{matrix}.weight")
    if stored is None or len(stored.shape) == 1:
        return metadata.integer(key)
    return metadata.integer(key, stored.shape[-2])


def _windows(
    metadata: GgufMetadata, heads: int, head_dim: int, hidden: int
) -> dict[str, Any]:
    """Returns Mistral's sliding window, or the sizes of Gemma's layers with and without
    windows.
    """
    if metadata.arch == "llama" and metadata.get(SLIDING_WINDOW) is not None:
        return {"sliding_window": metadata.integer(SLIDING_WINDOW)}
    if metadata.arch == "llama":
        return {"sliding_window": None}
    if metadata.arch != "gemma3":
        return {}
    is_27b = _layers(metadata) == _GEMMA_27B_LAYERS
    return {
        "query_pre_attn_scalar": hidden // heads if is_27b else head_dim,
        "sliding_window": metadata.integer(SLIDING_WINDOW),
        "sliding_window_pattern": metadata.integer(
            ".attention.sliding_window_pattern", 6
        ),
        "rope_theta": metadata.number(".rope.freq_base", 1e6),
        "rope_local_base_freq": metadata.number(".rope.freq_base_swa", 10000.0),
    }


def _rope_scaling(metadata: GgufMetadata, head_dim: int) -> dict[str, Any] | None:
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


def _llama3(metadata: GgufMetadata, head_dim: int) -> dict[str, Any]:
    """Returns Llama 3's `rope_scaling`. The file holds the factors that frequencies are
    divided by, one a pair of dimensions. Raises `UnsupportedModelError` if they are not
    Llama 3's.
    """
    stored = metadata.file.tensors[ROPE_FACTORS]
    theta = metadata.number(".rope.freq_base", 10000.0)
    factors: tuple[float, ...] = ()
    if stored.type is F32 and stored.shape == (head_dim // 2,):
        layout = f"<{head_dim // 2}f"
        factors = struct.unpack_from(layout, metadata.file.data, stored.start)
    factor = max(factors, default=0.0)
    if factor >= 1:
        scaling = {"rope_type": "llama3", "factor": round(factor, 4), **_LLAMA3}
        expected = _llama3_factors(theta, head_dim, factor)
        pairs = zip(factors, expected, strict=True)
        if all(
            math.isclose(stored_factor, expected_factor, rel_tol=FACTOR_TOLERANCE)
            for stored_factor, expected_factor in pairs
        ):
            return scaling
    raise UnsupportedModelError(
        f"{metadata.file.path}: tensor {ROPE_FACTORS} holds RoPE factors other than "
        f"Llama 3's, which are not supported; give the Hugging Face checkpoint that the "
        f"file was made from"
    )


def _llama3_factors(theta: float, head_dim: int, factor: float) -> list[float]:
    """Returns the factor that Llama 3 divides each frequency by."""
    slow, fast, context = _LLAMA3.values()
    factors = []
    for i in range(0, head_dim, 2):
        turns = context / (2 * math.pi * theta ** (i / head_dim))
        unscaled_share = min(max((turns - slow) / (fast - slow), 0.0), 1.0)
        factors.append(1 / ((1 - unscaled_share) / factor + unscaled_share))
    return factors
