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

MOST_EXPERTS: Final = 1 << 12  # in a layer
EMBEDDINGS: Final = "token_embd.weight"
OLD_SCALE: Final = ".rope.scale_linear"
ROPE_FACTORS: Final = "rope_freqs.weight"
FACTOR_ERROR: Final = 1e-3  # relative tolerance of stored factors
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
    read = GgufMetadata(file)
    _refuse_other_kinds(read)
    arch = architecture_of(read)
    for key, allowed in _UNSUPPORTED.items():
        _refuse_unless(read, key, allowed)
    if (embeddings := file.tensors.get(EMBEDDINGS)) is None:
        raise GgufError(
            f"{file.path}: tensor {EMBEDDINGS} is missing; download the file again, or "
            f"convert the model again"
        )
    heads, hidden = read.same_in_all_layers(".attention.head_count"), _hidden(read)
    head_dim = read.whole(".attention.key_length", hidden // heads)
    if read.whole(".attention.value_length", head_dim) != head_dim:
        raise read.error(".attention.value_length", f"a head's dimensions, {head_dim}")
    if read.whole(".rope.dimension_count", head_dim) != head_dim:
        raise read.error(".rope.dimension_count", f"a head's dimensions, {head_dim}")
    config = {
        "architectures": [arch.family.architecture],
        "model_type": arch.model_type,
        "vocab_size": embeddings.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": _layers(read),
        "num_attention_heads": heads,
        "num_key_value_heads": read.same_in_all_layers(".attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": read.same_in_all_layers(".feed_forward_length", 1, low=0)
        or 1,
        "rms_norm_eps": read.number(".attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": read.whole(".context_length"),
        "rope_theta": read.number(".rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(read, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "qkv_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        "eos_token_id": [*stop_ids(read)],
        "dtype": _dtype(file, arch),
        **_experts(read, arch),
        **_windows(read, heads, head_dim, hidden),
    }
    if keeps_int4(file):
        config["quantization_config"] = {"quant_method": "gguf"}
    return config


def _refuse_other_kinds(read: GgufMetadata) -> None:
    """Refuse files that are no model. Raises `UnsupportedModelError`."""
    kind = read.get("general.type")
    if kind not in (None, "model"):
        raise UnsupportedModelError(
            f"{read.file.path}: general.type = {kind!r:.100}: the file is no model but "
            f"{_OTHER_KINDS.get(str(kind), 'something else')}; give a model's file"
        )


def _refuse_unless(read: GgufMetadata, key: str, allowed: tuple[Any, ...]) -> None:
    value = read.get(key)
    if value is None or any(value == one for one in allowed):
        return
    what = f"metadata {read.full(key)} = {value!r:.100} is not supported"
    remedy = "give the Hugging Face checkpoint that the file was made from"
    if key == "split.count":
        what = f"the file is one of the {value!r:.100} parts of a split file"
        remedy = "join them with `llama-gguf-split --merge`"
    raise UnsupportedModelError(f"{read.file.path}: {what}; {remedy}")


def _hidden(read: GgufMetadata) -> int:
    return read.whole(".embedding_length")


def _layers(read: GgufMetadata) -> int:
    """Returns the number of layers. Each has tensors in the file, so a number above that
    of tensors is refused: it would make what follows slow.
    """
    return read.whole(".block_count", below=len(read.file.tensors) + 1)


def _dtype(file: GgufFile, arch: Architecture) -> str:
    """Returns the dtype of activations, which follows from the types of the matrices, as
    the file does not give the model's dtype.

    Quantized files run in bfloat16, which does not overflow; so does Gemma, whose
    activations overflow float16.
    """
    matrices = {one.type for one in file.tensors.values() if len(one.shape) > 1}
    if matrices == {F32}:
        return "float32"
    if matrices <= {F16, F32} and BF16 not in matrices and not arch.norms_plus_one:
        return "float16"
    return "bfloat16"


def _experts(read: GgufMetadata, arch: Architecture) -> dict[str, Any]:
    keys = arch.family.experts
    if keys is None:
        return {}
    found: dict[str, Any] = {
        keys.count[0]: read.whole(EXPERT_COUNT, below=MOST_EXPERTS + 1),
        "num_experts_per_tok": read.whole(".expert_used_count"),
    }
    if isinstance(keys.normalise, str):
        # Files without the key are read as the published models of the architecture.
        default = arch.model_type != "qwen2_moe"
        found[keys.normalise] = read.flag(".expert_weights_norm", default=default)
    if keys.inter != "intermediate_size":
        found[keys.inter] = _width(read, ".expert_feed_forward_length", "ffn_up_exps")
    if keys.shared:
        key = ".expert_shared_feed_forward_length"
        found[keys.shared] = _width(read, key, "ffn_up_shexp")
    return found


def _width(read: GgufMetadata, key: str, matrix: str) -> int:
    """Returns the width of a feed-forward: from the shape of its matrix, as older files
    lack the key, else from the key.
    """
    stored = read.file.tensors.get(f"blk.0.{matrix}.weight")
    if stored is None or len(stored.shape) == 1:
        return read.whole(key)
    return read.whole(key, stored.shape[-2])


def _windows(
    read: GgufMetadata, heads: int, head_dim: int, hidden: int
) -> dict[str, Any]:
    """Returns Mistral's sliding window, or the sizes of Gemma's layers with and without
    windows.
    """
    if read.arch == "llama" and read.get(SLIDING_WINDOW) is not None:
        return {"sliding_window": read.whole(SLIDING_WINDOW)}
    if read.arch == "llama":
        return {"sliding_window": None}
    if read.arch != "gemma3":
        return {}
    wide = _layers(read) == _GEMMA_27B_LAYERS
    return {
        "query_pre_attn_scalar": hidden // heads if wide else head_dim,
        "sliding_window": read.whole(SLIDING_WINDOW),
        "sliding_window_pattern": read.whole(".attention.sliding_window_pattern", 6),
        "rope_theta": read.number(".rope.freq_base", 1e6),
        "rope_local_base_freq": read.number(".rope.freq_base_swa", 10000.0),
    }


def _rope_scaling(read: GgufMetadata, head_dim: int) -> dict[str, Any] | None:
    """Returns the config's `rope_scaling`; None: RoPE is not scaled."""
    # As llama.cpp reads them: older files have another key, and no type is linear.
    key = ".rope.scaling.factor"
    if read.get(key) is None and read.get(OLD_SCALE) is not None:
        key = OLD_SCALE
    scaled = read.get(key) not in (None, 0.0, 1.0)
    kind = read.text(".rope.scaling.type", "linear" if scaled else "none")
    if ROPE_FACTORS in read.file.tensors:
        if kind != "none" and scaled:
            raise UnsupportedModelError(
                f"{read.file.path}: metadata {read.full(key)} beside tensor "
                f"{ROPE_FACTORS} is not supported; give the Hugging Face checkpoint that "
                f"the file was made from"
            )
        return _llama3(read, head_dim)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        key = read.full(".rope.scaling.type")
        raise UnsupportedModelError(
            f"{read.file.path}: metadata {key} = {kind!r:.100} is not supported; linear "
            f"and yarn are. Give the Hugging Face checkpoint that the file was made from"
        )
    factor = read.number(key)
    found: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        key = ".rope.scaling.original_context_length"
        length = read.whole(".context_length")
        found["original_max_position_embeddings"] = read.whole(key, length)
    return found


def _llama3(read: GgufMetadata, head_dim: int) -> dict[str, Any]:
    """Returns Llama 3's `rope_scaling`. The file holds the factors that frequencies are
    divided by, one a pair of dimensions. Raises `UnsupportedModelError` if they are not
    Llama 3's.
    """
    stored = read.file.tensors[ROPE_FACTORS]
    theta = read.number(".rope.freq_base", 10000.0)
    found: tuple[float, ...] = ()
    if stored.type is F32 and stored.shape == (head_dim // 2,):
        how = f"<{head_dim // 2}f"
        found = struct.unpack_from(how, read.file.data, stored.start)
    factor = max(found, default=0.0)
    if factor >= 1:
        scaling = {"rope_type": "llama3", "factor": round(factor, 4), **_LLAMA3}
        expected = _llama3_factors(theta, head_dim, factor)
        pairs = zip(found, expected, strict=True)
        if all(math.isclose(one, two, rel_tol=FACTOR_ERROR) for one, two in pairs):
            return scaling
    raise UnsupportedModelError(
        f"{read.file.path}: tensor {ROPE_FACTORS} holds RoPE factors other than Llama "
        f"3's, which are not supported; give the Hugging Face checkpoint that the file "
        f"was made from"
    )


def _llama3_factors(theta: float, head_dim: int, factor: float) -> list[float]:
    """Returns the factor that Llama 3 divides each frequency by."""
    slow, fast, context = _LLAMA3.values()
    found = []
    for i in range(0, head_dim, 2):
        turns = context / (2 * math.pi * theta ** (i / head_dim))
        share = min(max((turns - slow) / (fast - slow), 0.0), 1.0)
        found.append(1 / ((1 - share) / factor + share))
    return found
