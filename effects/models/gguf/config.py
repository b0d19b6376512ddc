"""A GGUF file's metadata as the config.json of the checkpoint that it was made from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from minfer.effects.models.config_reader import UnsupportedModelError
from minfer.effects.models.gguf.architectures import (
    Architecture,
    architecture_of,
)
from minfer.effects.models.gguf.attention_config import read_attention
from minfer.effects.models.gguf.block_types import BF16, F16, F32
from minfer.effects.models.gguf.container import GgufError, GgufFile, read_gguf
from minfer.effects.models.gguf.experts_config import read_experts
from minfer.effects.models.gguf.feed_forward_config import read_feed_forward
from minfer.effects.models.gguf.hf_tensors import kept_type, own_layers
from minfer.effects.models.gguf.metadata import GgufMetadata
from minfer.effects.models.gguf.token_lists import stop_ids

# In config.json, of Seed-OSS and of Ernie.
OUT_BIAS, USE_BIAS = "attention_out_bias", "use_bias"
EMBEDDINGS: Final = "token_embd.weight"
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
    ".attention.temperature_length": (0,),
    ".attention.temperature_scale": (0.0,),
    ".attn_logit_softcapping": (),
    ".embedding_scale": (1.0,),
    ".expert_gating_func": (0, 1),
    ".expert_group_count": (0, 1),
    ".expert_weights_scale": (0.0, 1.0),
    ".final_logit_softcapping": (),
    ".interleave_moe_layer_step": (0, 1),
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
}
_ATTENTION_BIASES: Final = ("blk.0.attn_q.bias", "blk.0.attn_q_a.bias")


def gguf_config(path: str | Path) -> dict[str, Any]:
    """Returns the config.json of the checkpoint that a file was made from.

    Raises `GgufError` for damaged files and metadata, and `UnsupportedModelError`.
    """
    file = read_gguf(path)
    metadata = GgufMetadata(file)
    _refuse_other_kinds(metadata)
    arch = architecture_of(metadata)
    for key, allowed in _UNSUPPORTED.items():
        if key not in arch.reads:
            _refuse_unless(metadata, key, allowed)
    if (embeddings := file.tensors.get(EMBEDDINGS)) is None:
        raise GgufError(
            f"{file.path}: tensor {EMBEDDINGS} is missing; download the file again, or "
            f"convert the model again"
        )
    config = {
        "architectures": [arch.family.architecture],
        "model_type": arch.model_type,
        "vocab_size": embeddings.shape[0],
        "hidden_size": metadata.integer(".embedding_length"),
        "num_hidden_layers": own_layers(metadata),
        "num_nextn_predict_layers": metadata.integer(".nextn_predict_layers", 0, low=0),
        "num_attention_heads": metadata.same_in_all_layers(".attention.head_count"),
        **_norm_eps(metadata, arch),
        "max_position_embeddings": metadata.integer(".context_length"),
        "rope_theta": metadata.number(".rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": not file.tensors.keys().isdisjoint(_ATTENTION_BIASES),
        "qkv_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        "eos_token_id": [*stop_ids(metadata)],
        "dtype": _dtype(file, arch),
        **read_attention(metadata, arch),
        **read_feed_forward(metadata, arch),
        **read_experts(metadata, arch),
    }
    for key in (OUT_BIAS, USE_BIAS):
        if arch.family.biases.out == key:
            config[key] = "blk.0.attn_output.bias" in file.tensors
    if (kept := kept_type(file)) is not None:
        config["quantization_config"] = {"quant_method": "gguf", "kept": kept.name}
    return config


def _norm_eps(metadata: GgufMetadata, arch: Architecture) -> dict[str, float]:
    """Returns the eps of norms, by its name in config.json."""
    key = "layer_norm" if arch.family.norms.layer_norm else "layer_norm_rms"
    name = arch.family.own_names.get("rms_norm_eps", "rms_norm_eps")
    return {name: metadata.number(f".attention.{key}_epsilon")}


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
    raise UnsupportedModelError(f"{metadata.file.path}: {fault}; {remedy}")


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
        and not arch.family.factors.embedding_root  # Gemma
    ):
        return "float16"
    return "bfloat16"
