"""Maps the tensors of a GGUF file to those of the Hugging Face checkpoint.

Besides names, three things differ. In Llama's matrices of queries and keys the dimensions
of a head are in another order; Gemma's weights of norms have 1 added; and the matrices of
all experts of a layer are one tensor. A matrix of type Q4_0 becomes two tensors, its
numbers and its scales, which stay 4-bit integers in memory (formats/gguf.py), unless a
matrix that is fused with it has another type. All other quantized tensors are dequantized
as they are read.
"""

from collections.abc import Iterator, Mapping
from typing import Final, Literal

from attrs import evolve, frozen

from minfer.effects.models.config_reader import UnsupportedModelError
from minfer.effects.models.gguf.architectures import (
    EXPERT_COUNT,
    GLOBAL_NAMES,
    Architecture,
    architecture_of,
)
from minfer.effects.models.gguf.block_types import Q4_0
from minfer.effects.models.gguf.container import GgufFile, StoredTensor
from minfer.effects.models.gguf.metadata import GgufMetadata

NUMBERS, SCALES = ".q4_0", ".q4_0_scales"  # ends of names of a Q4_0 matrix's tensors
# Matrices of a layer that are fused in memory (linear.py), so that they need one scheme.
_FUSED: Final = (
    ("attn_q", "attn_k", "attn_v"),
    ("ffn_gate", "ffn_up"),
    ("ffn_gate_exps", "ffn_up_exps"),
    ("ffn_gate_shexp", "ffn_up_shexp"),
)
# Other matrices that may be quantized.
_UNFUSED: Final = ("attn_output", "ffn_down", "ffn_down_exps", "ffn_down_shexp")
# Tensors that are not weights: config.py reads them.
_NOT_WEIGHTS: Final = ("rope_freqs.weight",)
Form = Literal["whole", "numbers", "scales"]


@frozen(eq=False)
class HfTensor:
    """A tensor of the checkpoint, and the tensor in the file that has its values."""

    stored: StoredTensor
    shape: tuple[int, ...]
    form: Form = "whole"
    expert: int | None = None  # which part of a tensor of all experts
    heads: int = 0  # whose dimensions are reordered; 0: they are in order
    less_one: bool = False  # 1 is subtracted

    def get_shape(self) -> list[int]:
        """Returns the shape, as a slice of an open safetensors file does."""
        return [*self.shape]

    def get_dtype(self) -> str:
        """Returns the name of the type in safetensors, as such a slice does."""
        if self.form != "whole":
            return "U8" if self.form == "numbers" else "F16"
        return self.stored.type.name if self.stored.type.is_float else "F32"


def keeps_int4(file: GgufFile) -> bool:
    """Returns whether any matrix of a file stays in 4 bits in memory."""
    split_names = (name.removesuffix(".weight").split(".") for name in file.tensors)
    return any(
        _stays_int4(file, fields[1], fields[2])
        for fields in split_names
        if len(fields) == 3 and fields[0] == "blk"
    )


def hf_tensors(file: GgufFile) -> dict[str, HfTensor]:
    """Returns the tensors of the checkpoint by their names there. Raises
    `UnsupportedModelError` for tensors that its architecture does not have.
    """
    metadata = GgufMetadata(file)
    arch = architecture_of(metadata)
    heads = {}
    if arch.interleaved:
        queries = metadata.same_in_all_layers(".attention.head_count")
        keys = metadata.same_in_all_layers(".attention.head_count_kv", queries)
        heads = {"attn_q": queries, "attn_k": keys}
    tensors: dict[str, HfTensor] = {}
    for stored in file.tensors.values():
        if stored.name not in _NOT_WEIGHTS:
            tensors.update(_map_tensor(file, arch, heads, stored))
    return tensors


def _map_tensor(
    file: GgufFile, arch: Architecture, heads: Mapping[str, int], stored: StoredTensor
) -> Iterator[tuple[str, HfTensor]]:
    """Yields the names and tensors of the checkpoint whose values a stored one has."""
    base, _, end = stored.name.rpartition(".")
    tensor = HfTensor(stored, stored.shape)
    if end in ("weight", "bias") and base in GLOBAL_NAMES:
        yield f"{GLOBAL_NAMES[base]}.{end}", _norm(arch, base, tensor)
        return
    block, _, rest = base.partition(".")
    layer, _, name = rest.partition(".")
    is_layer_tensor = block == "blk" and layer.isdecimal() and end in ("weight", "bias")
    prefix = f"model.layers.{layer}"
    int4 = is_layer_tensor and end == "weight" and _stays_int4(file, layer, name)
    if (
        is_layer_tensor
        and (matrix := arch.expert_names.get(name))
        and arch.family.experts
    ):
        experts = GgufMetadata(file).integer(EXPERT_COUNT)
        if len(stored.shape) != 3 or end != "weight" or stored.shape[0] != experts:
            raise _unknown(file, arch, stored, f"its first dimension must be {experts}")
        for i in range(experts):
            tensor = HfTensor(stored, stored.shape[1:], expert=i)
            new_name = f"{prefix}.{arch.family.experts.experts}.{i}.{matrix}"
            yield from _split_forms(new_name, tensor, int4=int4)
        return
    if not is_layer_tensor or name not in arch.layer_names:
        raise _unknown(file, arch, stored)
    if name == "ffn_gate_inp_shexp":  # some files leave out its one output
        tensor = evolve(tensor, shape=(1, stored.shape[-1]))
    tensor = _norm(arch, name, evolve(tensor, heads=heads.get(name, 0)))
    new_name = f"{prefix}.{arch.layer_names[name]}"
    if end == "bias":
        yield f"{new_name}.bias", tensor
    else:
        yield from _split_forms(new_name, tensor, int4=int4)


def _norm(arch: Architecture, name: str, tensor: HfTensor) -> HfTensor:
    return evolve(tensor, less_one=arch.norms_plus_one and name.endswith("norm"))


def _split_forms(
    name: str, tensor: HfTensor, *, int4: bool
) -> Iterator[tuple[str, HfTensor]]:
    if not int4:
        yield f"{name}.weight", tensor
        return
    outputs, inputs = tensor.shape
    numbers, scales = (outputs, inputs // 2), (outputs, inputs // Q4_0.elements)
    yield name + NUMBERS, evolve(tensor, form="numbers", shape=numbers)
    yield name + SCALES, evolve(tensor, form="scales", shape=scales)


def _stays_int4(file: GgufFile, layer: str, name: str) -> bool:
    """Returns whether a layer's matrix, and each that is fused with it, is Q4_0."""
    fused = next((names for names in _FUSED if name in names), (name,))
    if len(fused) == 1 and name not in _UNFUSED:
        return False
    stored = (file.tensors.get(f"blk.{layer}.{matrix}.weight") for matrix in fused)
    return all(tensor is not None and tensor.type is Q4_0 for tensor in stored)


def _unknown(
    file: GgufFile, arch: Architecture, stored: StoredTensor, reason: str = ""
) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{file.path}: tensor {stored.name} of shape {list(stored.shape)} does not fit "
        f"the architecture {arch.name}{reason and '; ' + reason}. Convert the model "
        f"again with a current llama.cpp, or give the Hugging Face checkpoint"
    )
