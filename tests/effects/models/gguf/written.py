"""GGUF files written by the `gguf` package: of a model of transformers, with the names of
that package's own table, and of a tokenizer.

`write` also puts what the file's rounded numbers mean into the model, which then is the
reference.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import torch
from attrs import frozen
from gguf import GGMLQuantizationType as Type
from torch import Tensor

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
) -> Path:
    """Write a model; a matrix is stored as `kinds` says of a part of its name, or else as
    `kind`. `change` adds to the file, or changes it.
    """
    writer = gguf.GGUFWriter(path, ARCHITECTURES[family])
    add_sizes(writer, family, model.config)
    change(writer)
    for named in tensors(family, model):
        matching = (
            part_kind for name_part, part_kind in kinds.items() if name_part in named.name
        )
        tensor_kind = next(matching, kind) if named.tensor.dim() > 1 else Type.F32
        numbers = _permuted(named.tensor, named.heads).detach().float().numpy()
        offset = float(family == "Gemma3" and named.name.endswith("norm.weight"))
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


def add(writer: gguf.GGUFWriter, name: str, stored: Numbers, kind: Type) -> None:
    """Add a tensor, whose rows are bytes where they are blocks."""
    writer.add_tensor(name, stored, raw_dtype=kind)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(family: str, model: Any) -> Iterator[Named]:
    """The tensors of a file; those of experts are together there."""
    config = model.config
    arch = gguf.MODEL_ARCH[ARCHITECTURES[family].upper()]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for matrix_name, matrix in _split_experts(family, name, tensor):
            heads = 0
            if arch is gguf.MODEL_ARCH.LLAMA and "q_proj" in matrix_name:
                heads = config.num_attention_heads
            elif arch is gguf.MODEL_ARCH.LLAMA and "k_proj" in matrix_name:
                heads = config.num_key_value_heads
            file_name = names.get_name(matrix_name, try_suffixes=(".weight", ".bias"))
            assert file_name is not None, matrix_name
            yield Named(file_name, matrix, heads)


def _split_experts(
    family: str, name: str, stacked: Tensor
) -> Iterator[tuple[str, Tensor]]:
    prefix, _, end = name.partition(".experts.")
    if not end:
        yield name, stacked
        return
    # [experts, outputs, inputs], gates before ups.
    matrices = {"down_proj": stacked}
    if end == "gate_up_proj":
        gate, up = stacked.chunk(2, dim=1)
        matrices = {"gate_proj": gate, "up_proj": up}
    for matrix, tensor in matrices.items():
        if family == "Mixtral":
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


def add_sizes(writer: gguf.GGUFWriter, family: str, config: Any) -> None:
    """Add the metadata of a config, by the package's own methods."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    ropes = config.rope_parameters
    rope = ropes.get("full_attention", ropes)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        length = rope["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(length)
    if "Moe" in family or family == "Mixtral":
        count = getattr(config, "num_experts", None) or config.num_local_experts
        writer.add_expert_count(count)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if "Moe" in family:
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if family == "Qwen2Moe":
        width = config.shared_expert_intermediate_size
        writer.add_expert_shared_feed_forward_length(width)
    if family in ("Gemma3", "Mistral") or (family == "Mixtral" and config.sliding_window):
        writer.add_sliding_window(config.sliding_window)


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
