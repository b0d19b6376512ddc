"""Metadata of GGUF files that one family alone has, as its converter in llama.cpp writes
them.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import gguf
import numpy as np

INTERVAL: Final = 4  # of Cohere 2's layers without a window, which files do not say


def _add_cohere2(writer: gguf.GGUFWriter, config: Any, _arch: str) -> None:
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_logit_scale(config.logit_scale)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    has_window = [kind == "sliding_attention" for kind in config.layer_types]
    if has_window != [bool((layer + 1) % INTERVAL) for layer in range(len(has_window))]:
        writer.add_sliding_window_pattern(has_window)


def _add_llama4(writer: gguf.GGUFWriter, config: Any, _arch: str) -> None:
    rope = config.rope_parameters
    writer.add_feed_forward_length(config.intermediate_size_mlp)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
    writer.add_rope_dimension_count(config.head_dim)
    if all(kind == "full_attention" for kind in config.layer_types):
        writer.add_sliding_window(0)
    if rope["rope_type"] == "llama3":  # as Scout has it: nothing is blended
        exponents = np.arange(0, config.head_dim, 2) / config.head_dim
        wavelengths = 2 * math.pi * rope["rope_theta"] ** exponents
        is_short = wavelengths < rope["original_max_position_embeddings"]
        factors = np.where(is_short, 1, rope["factor"]).astype(np.float32)
        writer.add_tensor("rope_freqs.weight", factors)


def _add_mistral4(writer: gguf.GGUFWriter, config: Any, arch: str) -> None:
    if arch == "deepseek2":  # Mistral Large 3
        rope = config.rope_parameters
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
        writer.add_attn_temperature_length(rope["original_max_position_embeddings"])


def _add_gemma4(writer: gguf.GGUFWriter, model_config: Any, _arch: str) -> None:
    config = model_config.to_dict()
    layers, shared = config["num_hidden_layers"], config["num_kv_shared_layers"]
    has_window = [kind == "sliding_attention" for kind in config["layer_types"]]
    sizes = (config["per_layer_config"] or {}).get(str(has_window.index(False)), {})
    full_dim = sizes.get("head_dim", config["head_dim"])
    key_heads = config["num_key_value_heads"]
    full_heads = sizes.get("num_key_value_heads", key_heads)
    writer.add_head_count_kv(
        key_heads
        if full_heads == key_heads
        else [key_heads if window else full_heads for window in has_window]
    )
    writer.add_key_length(full_dim)
    writer.add_value_length(full_dim)
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_rope_dimension_count(full_dim)
    writer.add_rope_dimension_count_swa(config["head_dim"])
    ropes = config["rope_parameters"]
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    turning = int(full_dim * ropes["full_attention"]["partial_rotary_factor"] / 2)
    factors = [1.0] * turning + [1e30] * (full_dim // 2 - turning)
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    writer.add_sliding_window_pattern(has_window)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    if config["use_double_wide_mlp"]:
        writer.kv_data[0].pop("gemma4.feed_forward_length")
        width = config["intermediate_size"]
        widths = [width] * (layers - shared) + [2 * width] * shared
        writer.add_feed_forward_length(widths)
    if config["final_logit_softcapping"] is not None:
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["enable_moe_block"]:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


OWN_SIZES: Final[Mapping[str, Callable[[gguf.GGUFWriter, Any, str], None]]] = {
    "Cohere2": _add_cohere2,
    "Llama4": _add_llama4,
    "Mistral4": _add_mistral4,
    "Gemma4": _add_gemma4,
}
