"""GGUF files written by the `gguf` package: of a model of transformers, with the names of
that package's own table, and of a tokenizer.

`write` also puts what the file's rounded numbers mean into the model, which then is the
reference.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from attrs import frozen
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from tests.effects.models.gguf.own_sizes import OWN_SIZES

# Arrays are shown as numpy has them, without types of elements.
Numbers = Any
ARCHITECTURES: Final = {
    "Llama": "llama",
    "Mistral": "llama",
    "Mixtral": "llama",
    "Qwen2": "qwen2",
    "Qwen3": "qwen3",
    "Qwen2Moe": "qwen2moe",
    "Qwen3Moe": "qwen3moe",
    "Gemma3": "gemma3",
    "GptOss": "gpt-oss",
    "Glm4Moe": "glm4moe",
    "DeepseekV2": "deepseek2",
    "DeepseekV3": "deepseek2",
    "Youtu": "deepseek2",
    "Gemma2": "gemma2",
    "Phi3": "phi3",
    "Ministral3": "mistral3",
    "Granite": "granite",
    "SmolLM3": "smollm3",
    "Olmo2": "olmo2",
    "Glm4": "glm4",
    "SeedOss": "seed_oss",
    "Ernie4_5": "ernie4_5",
    "HunYuanDenseV1": "hunyuan-dense",
    "MiniMaxM2": "minimax-m2",
    "Llama4": "llama4",
    "Gemma4": "gemma4",
    "Mistral4": "mistral4",
    "Cohere2": "cohere2",
}
# Whose converters write Llama's order of a head's dimensions.
_PERMUTED: Final = tuple(
    gguf.MODEL_ARCH[name] for name in ("LLAMA", "MISTRAL3", "GRANITE", "SMOLLM3")
)
_MOE: Final = ("Qwen2Moe", "Qwen3Moe")
_ROUTED: Final = ("Glm4Moe", "DeepseekV2", "DeepseekV3", "Mistral4")
_SOFTMAX: Final = ("DeepseekV2", "Mistral4")
_LATENTS: Final = ("DeepseekV2", "DeepseekV3", "Youtu", "Mistral4")
# Whose files have gates and ups of experts as one.
_FUSED: Final = (gguf.MODEL_ARCH.GEMMA4, gguf.MODEL_ARCH.MISTRAL4)
# Ends of names, as converters change them.
_RENAMED: Final = {
    "layer_scalar": "layer_scalar.weight",
    "router.scale": "router.proj.scale",
    "router.per_expert_scale": "experts.down_proj.scale",
}
_MIXTRAL: Final = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


@frozen
class Named:
    """A tensor of a checkpoint, as converters name it."""

    name: str  # in the file
    tensor: Tensor  # a view into the model
    heads: int = 0  # whose dimensions are written in Llama's order


def write(
    path: Path,
    family: str,
    model: Any,
    kinds: Mapping[str, Type],
    kind: Type = Type.F32,
    change: Callable[[gguf.GGUFWriter], object] = lambda _writer: None,
    arch: str = "",
) -> Path:
    """Write a model; a matrix is stored as `kinds` says of a part of its name, or else as
    `kind`. `change` adds to the file, or changes it. `arch` is another architecture than
    most files of the family have.
    """
    arch = arch or ARCHITECTURES[family]
    writer = gguf.GGUFWriter(path, arch)
    add_sizes(writer, family, model.config, arch)
    change(writer)
    for named in tensors(family, model, arch):
        matching = (
            part_kind for name_part, part_kind in kinds.items() if name_part in named.name
        )
        tensor_kind = next(matching, kind) if named.tensor.dim() > 1 else Type.F32
        numbers = _permuted(named.tensor, named.heads).detach().float().numpy()
        offset = float(
            family in ("Gemma2", "Gemma3") and named.name.endswith("norm.weight")
        )
        stored = gguf.quants.quantize(numbers + offset, tensor_kind)
        add(writer, named.name, stored, tensor_kind)
        dequantized = (
            torch.from_numpy(gguf.quants.dequantize(stored, tensor_kind).copy()) - offset
        )
        with torch.no_grad():
            named.tensor.copy_(
                _unpermuted(dequantized.reshape(numbers.shape), named.heads)
            )
    finish(writer)
    return path


def write_split(folder: Path, whole: Path, tensors: int) -> list[Path]:
    """Write a file as several of so many tensors, by the package's own writer."""
    folder.mkdir()
    reader = gguf.GGUFReader(whole)
    arch = reader.get_field("general.architecture")
    assert arch is not None
    path = folder / whole.name
    writer = gguf.GGUFWriter(path, arch.contents(), split_max_tensors=tensors)
    for name, stored in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind, element = stored.types[0], stored.types[-1]
            is_array = kind is gguf.GGUFValueType.ARRAY
            of_elements = element if is_array else None
            writer.add_key_value(name, stored.contents(), kind, of_elements)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)
    return sorted(folder.iterdir())


def add(writer: gguf.GGUFWriter, name: str, stored: Numbers, kind: Type) -> None:
    """Add a tensor, whose rows are bytes where they are blocks."""
    writer.add_tensor(name, stored, raw_dtype=kind)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(family: str, model: Any, arch_name: str = "") -> Iterator[Named]:
    """The tensors of a file; those of experts are together there."""
    config = model.config
    by_name = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    arch = by_name[arch_name or ARCHITECTURES[family]]
    is_fused = arch in _FUSED
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for matrix_name, matrix in _split(family, config, name, tensor, is_fused):
            heads = 0
            if arch in _PERMUTED and "q_proj" in matrix_name:
                heads = config.num_attention_heads
            elif arch in _PERMUTED and "k_proj" in matrix_name:
                heads = config.num_key_value_heads
            module, _, end = matrix_name.rpartition(".")
            is_scale = end == "scale"  # beside a matrix, without a name of its own
            file_name = names.get_name(
                module if is_scale else matrix_name, try_suffixes=(".weight", ".bias")
            )
            assert file_name is not None, matrix_name
            if is_scale:
                file_name += ".scale"
            if file_name.endswith("attn_sinks"):
                file_name += ".weight"
            if file_name.endswith("exp_probs_b"):
                file_name += ".bias"
            yield Named(file_name, matrix, heads)


def _split(
    family: str, config: Any, name: str, tensor: Tensor, is_fused: bool
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file that one of a checkpoint is written as, by their names."""
    renamed = next((end for end in _RENAMED if name.endswith(end)), None)
    if renamed is not None:
        yield name.removesuffix(renamed) + _RENAMED[renamed], tensor
    elif name.endswith("e_score_correction_bias"):
        if family == "MiniMaxM2":
            name = name.replace("mlp", "block_sparse_moe")
        yield name.removesuffix("_bias"), tensor
    elif family in _LATENTS and "kv_b_proj" in name:
        by_head = tensor.view(config.num_attention_heads, -1, tensor.shape[-1])
        sizes = [config.qk_nope_head_dim, config.v_head_dim]
        keys, values = by_head.split_with_sizes(sizes, 1)
        yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
        yield name.replace("kv_b_proj", "v_b_proj"), values
    elif family == "GptOss" and ".experts." in name:
        matrix = name.removesuffix("_bias")
        end = "bias" if matrix != name else "weight"
        of_experts = tensor if end == "bias" else tensor.transpose(1, 2)
        if "gate_up" not in name:
            yield f"{matrix}.{end}", of_experts
            return
        for first, kind in enumerate(("gate_proj", "up_proj")):
            yield f"{matrix.replace('gate_up_proj', kind)}.{end}", of_experts[:, first::2]
    else:
        yield from _split_experts(family, name, tensor, is_fused)


def _split_experts(
    family: str, name: str, stacked: Tensor, is_fused: bool
) -> Iterator[tuple[str, Tensor]]:
    prefix, _, end = name.partition(".experts.")
    if not end:
        yield name, stacked
        return
    # [experts, outputs, inputs], gates before ups.
    if family == "Llama4":  # [experts, inputs, outputs]
        stacked = stacked.transpose(1, 2)
    matrices = {"down_proj": stacked}
    if end == "gate_up_proj" and is_fused:
        matrices = {end: stacked}
    elif end == "gate_up_proj":
        gate, up = stacked.chunk(2, dim=1)
        matrices = {"gate_proj": gate, "up_proj": up}
    for matrix, tensor in matrices.items():
        if family in ("Mixtral", "MiniMaxM2"):
            prefix, matrix = prefix.replace("mlp", "block_sparse_moe"), _MIXTRAL[matrix]
        yield f"{prefix}.experts.{matrix}.weight", tensor


def _permuted(tensor: Tensor, heads: int) -> Tensor:
    """Llama's order of a head's dimensions, as converters write it."""
    if not heads:
        return tensor
    shape = (heads, 2, len(tensor) // heads // 2, *tensor.shape[1:])
    return tensor.reshape(shape).swapaxes(1, 2).reshape(tensor.shape)


def _unpermuted(stored: Tensor, heads: int) -> Tensor:
    if not heads:
        return stored
    shape = (heads, len(stored) // heads // 2, 2, *stored.shape[1:])
    return stored.reshape(shape).swapaxes(1, 2).reshape(stored.shape)


def add_sizes(writer: gguf.GGUFWriter, family: str, config: Any, arch: str) -> None:
    """Add the metadata of a config, by the package's own methods."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    if family != "Llama4":
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if family in _LATENTS:
        _add_latents(writer, config)
    elif family != "Gemma4":
        writer.add_head_count_kv(config.num_key_value_heads)
        if (head_dim := getattr(config, "head_dim", None)) is not None:
            writer.add_key_length(head_dim)
            writer.add_value_length(head_dim)
    if family != "Cohere2":
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    _add_rope(writer, config)
    if family in _ROUTED:
        _add_routing(writer, family, config)
    elif family in (*_MOE, "Mixtral", "GptOss", "MiniMaxM2", "Llama4"):
        count = getattr(config, "num_experts", None) or config.num_local_experts
        writer.add_expert_count(count)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if family in _MOE:
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if family == "Qwen2Moe":
        width = config.shared_expert_intermediate_size
        writer.add_expert_shared_feed_forward_length(width)
    add_own_sizes(writer, family, config)
    if family in OWN_SIZES:
        OWN_SIZES[family](writer, config, arch)
    if family in ("Gemma2", "Gemma3", "Gemma4", "GptOss", "Cohere2") or (
        family in ("Mistral", "Mixtral") and config.sliding_window
    ):
        writer.add_sliding_window(config.sliding_window)


def _add_rope(writer: gguf.GGUFWriter, config: Any) -> None:
    ropes = config.rope_parameters
    rope = ropes.get("full_attention", ropes)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        length = rope["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(length)


def add_own_sizes(writer: gguf.GGUFWriter, family: str, config: Any) -> None:
    """Add the metadata that one family alone has."""
    rope = config.rope_parameters
    if family == "Gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    elif family == "Ministral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    elif family == "Granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    elif family == "Phi3":
        writer.add_sliding_window(config.sliding_window or 0)
        original = rope.get("original_max_position_embeddings")
        original = original or config.original_max_position_embeddings
        writer.add_rope_scaling_orig_ctx_len(original)
        if rope["rope_type"] == "longrope":
            scale = config.max_position_embeddings / original
            factor = math.sqrt(1 + math.log(scale) / math.log(original))
            writer.add_rope_scaling_attn_factors(rope.get("attention_factor") or factor)
            for name in ("long", "short"):
                factors = np.array(rope[f"{name}_factor"], np.float32)
                writer.add_tensor(f"rope_factors_{name}.weight", factors)
    elif family == "MiniMaxM2":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    elif family == "HunYuanDenseV1" and rope["rope_type"] == "dynamic":
        share = config.head_dim / (config.head_dim - 2)
        writer.kv_data[0].pop("hunyuan-dense.rope.freq_base")
        writer.add_rope_freq_base(rope["rope_theta"] * rope["alpha"] ** share)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_rope_scaling_factor(1)
    if family in ("Phi3", "Glm4", "MiniMaxM2"):
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        writer.add_rope_dimension_count(
            int(head_dim * rope.get("partial_rotary_factor", 1))
        )


def _add_latents(writer: gguf.GGUFWriter, config: Any) -> None:
    """Add the sizes of latents, with keys and values of latents apart."""
    rank, rotated = config.kv_lora_rank, config.qk_rope_head_dim
    writer.add_head_count_kv(1)
    writer.add_kv_lora_rank(rank)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_key_length(rank + rotated)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + rotated)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_rope_dimension_count(rotated)
    if "mscale_all_dim" in config.rope_parameters:
        mscale = config.rope_parameters["mscale_all_dim"]
        writer.add_rope_scaling_yarn_log_mul(0.1 * mscale)


def _add_routing(writer: gguf.GGUFWriter, family: str, config: Any) -> None:
    """Add how experts are chosen."""
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if getattr(config, "norm_topk_prob", False):
        writer.add_expert_weights_norm(True)
    is_softmax = family in _SOFTMAX
    kinds = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(kinds.SOFTMAX if is_softmax else kinds.SIGMOID)
    if (config.n_group or 1) > 1:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if family == "Glm4Moe":
        rotated = config.head_dim * config.rope_parameters["partial_rotary_factor"]
        writer.add_rope_dimension_count(int(rotated))


def add_tokenizer(
    writer: gguf.GGUFWriter, backend: Any, pre: str, **special_ids: int
) -> None:
    """Add a byte-level tokenizer of the tokenizers library, as converters do."""
    state = json.loads(backend.to_str())
    added = {added_token["id"]: added_token for added_token in state["added_tokens"]}
    size = backend.get_vocab_size(with_added_tokens=True)
    kinds = [gguf.TokenType.NORMAL] * size
    for token, added_token in added.items():
        special = added_token["special"]
        kinds[token] = gguf.TokenType[("USER_DEFINED", "CONTROL")[special]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([backend.id_to_token(token) for token in range(size)])
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
    for name, token in special_ids.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
