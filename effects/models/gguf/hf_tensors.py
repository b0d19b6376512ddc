"""Maps the tensors of a GGUF file to those of the Hugging Face checkpoint.

Besides names, four things differ. In Llama's matrices of queries and keys the dimensions
of a head are in another order; Gemma 2's and 3's weights of norms have 1 added; the
matrices of all experts of a layer are one tensor, which may hold both gates and ups; and
of DeepSeek's expansion of latents, keys and values are two, that of keys transposed. A
matrix of type Q4_0, or in a file that has any MXFP4, becomes two tensors, its numbers and
its scales, which stay in 4 bits in memory (formats/gguf.py), unless a matrix that is
fused with it has another type. All other quantized tensors are dequantized as they are
read.
"""

from collections.abc import Iterator, Mapping
from typing import Final, Literal

from attrs import evolve, frozen

from minfer.effects.models.config_reader import UnsupportedModelError
from minfer.effects.models.gguf.architectures import (
    EXPERT_COUNT,
    Architecture,
    architecture_of,
)
from minfer.effects.models.gguf.block_types import KEPT, MXFP4, BlockType
from minfer.effects.models.gguf.container import GgufFile, StoredTensor
from minfer.effects.models.gguf.metadata import GgufMetadata
from minfer.effects.models.gguf.rope_config import LONG_FACTORS, ROPE_FACTORS

# Ends of names of the tensors of a matrix that stays in 4 bits.
NUMBERS, SCALES = ".numbers", ".scales"
# Matrices of a layer that are fused in memory (linear.py), so that they need one scheme.
_FUSED: Final = (
    ("attn_q", "attn_k", "attn_v"),
    ("attn_q", "attn_k"),  # keys are values
    ("attn_q", "attn_kv_a_mqa"),
    ("attn_q_a", "attn_kv_a_mqa"),
    ("ffn_gate", "ffn_up"),
    ("ffn_gate_exps", "ffn_up_exps"),
    ("ffn_gate_shexp", "ffn_up_shexp"),
)
# Other matrices that may be quantized.
_UNFUSED: Final = (
    "attn_output",
    "attn_q",  # of a layer that reads keys and values of another one
    "attn_q_b",
    "attn_qkv",
    "ffn_down",
    "ffn_down_exps",
    "ffn_down_shexp",
    "ffn_gate_up_exps",
    "inp_gate",
    "proj",
)
# The two parts of DeepSeek's expansion of latents.
_KEYS, _VALUES = "attn_k_b", "attn_v_b"
Form = Literal["whole", "numbers", "scales", "keys of latents"]


@frozen(eq=False)
class HfTensor:
    """A tensor of the checkpoint, and the tensor in the file that has its values."""

    stored: StoredTensor
    shape: tuple[int, ...]
    form: Form = "whole"
    part: int = 0  # which of the `parts` of a tensor that holds several, as of experts
    parts: int = 1
    heads: int = 0  # whose dimensions are reordered; 0: they are in order
    less_one: bool = False  # 1 is subtracted
    values: StoredTensor | None = None  # of "keys of latents": what follows each head's

    def get_shape(self) -> list[int]:
        """Returns the shape, as a slice of an open safetensors file does."""
        return [*self.shape]

    def get_dtype(self) -> str:
        """Returns the name of the type in safetensors, as such a slice does."""
        if self.form == "numbers" or (
            self.form == "scales" and self.stored.type is MXFP4
        ):
            return "U8"
        if self.form == "scales":
            return "F16"
        return self.stored.type.name if self.stored.type.is_float else "F32"


def kept_type(file: GgufFile) -> BlockType | None:
    """Returns the type of which a file's matrices stay in 4 bits in memory; None: there
    are none.
    """
    split_names = [name.removesuffix(".weight").split(".") for name in file.tensors]
    for kind in KEPT:
        if any(
            _stays_packed(file, kind, fields[1], fields[2])
            for fields in split_names
            if len(fields) == 3 and fields[0] == "blk"
        ):
            return kind
    return None


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
    # No weights: rope_config.py reads them.
    factors = LONG_FACTORS if arch.family.positions.longrope else (ROPE_FACTORS,)
    reader = _Mapping(file, arch, heads, kept_type(file))
    tensors: dict[str, HfTensor] = {}
    for stored in file.tensors.values():
        if stored.name not in factors and not _is_further(metadata, stored.name):
            tensors.update(_map_tensor(reader, stored))
    return tensors


@frozen(eq=False)
class _Mapping:
    """What the names of a file's tensors depend on."""

    file: GgufFile
    arch: Architecture
    heads: Mapping[str, int]  # of matrices whose heads are reordered
    kept: BlockType | None  # matrices of this type stay in 4 bits


def _is_further(metadata: GgufMetadata, name: str) -> bool:
    """Returns whether a tensor is of a layer that predicts further tokens."""
    fields = name.split(".")
    is_layer = fields[0] == "blk" and len(fields) > 2 and fields[1].isdecimal()
    return is_layer and int(fields[1]) >= own_layers(metadata)


def own_layers(metadata: GgufMetadata) -> int:
    """Returns the number of layers without those that predict further tokens. Each has
    tensors in the file, so a number above that of tensors is refused: it would make what
    follows slow.
    """
    layers = metadata.integer(".block_count", below=len(metadata.file.tensors) + 1)
    further = metadata.integer(".nextn_predict_layers", 0, low=0, below=layers)
    return layers - further


def _map_tensor(
    mapping: _Mapping, stored: StoredTensor
) -> Iterator[tuple[str, HfTensor]]:
    """Yields the names and tensors of the checkpoint whose values a stored one has."""
    file, arch = mapping.file, mapping.arch
    base, _, end = stored.name.rpartition(".")
    tensor = HfTensor(stored, stored.shape)
    if end in ("weight", "bias") and base in arch.global_names:
        yield f"{arch.global_names[base]}.{end}", _norm(arch, base, tensor)
        return
    block, _, rest = base.partition(".")
    layer, _, name = rest.partition(".")
    prefix = f"model.layers.{layer}"
    if block != "blk" or not layer.isdecimal():
        raise _unknown(file, arch, stored)
    if (whole_name := arch.whole_names.get(f"{name}.{end}")) is not None:
        yield f"{prefix}.{whole_name}", tensor
        return
    if end not in ("weight", "bias"):
        raise _unknown(file, arch, stored)
    if name in (_KEYS, _VALUES):
        if name == _KEYS:
            yield f"{prefix}.self_attn.kv_b_proj.weight", _expansion(file, arch, stored)
        return
    packed = (
        end == "weight"
        and mapping.kept is not None
        and _stays_packed(file, mapping.kept, layer, name)
    )
    if name in arch.expert_names and arch.family.experts is not None:
        prefix += f".{arch.family.experts.stored.experts}"
        for matrix, of_expert in _expert_tensors(mapping, stored, name):
            yield from _stored_forms(f"{prefix}.{matrix}", end, of_expert, packed=packed)
        return
    if name not in arch.layer_names:
        raise _unknown(file, arch, stored)
    if name == "ffn_gate_inp_shexp":  # some files leave out its one output
        tensor = evolve(tensor, shape=(1, stored.shape[-1]))
    tensor = _norm(arch, name, evolve(tensor, heads=mapping.heads.get(name, 0)))
    new_name = f"{prefix}.{arch.layer_names[name]}"
    yield from _stored_forms(new_name, end, tensor, packed=packed)


def _expert_tensors(
    mapping: _Mapping, stored: StoredTensor, name: str
) -> Iterator[tuple[str, HfTensor]]:
    """Yields the names, behind those of experts, and the parts of a tensor that holds a
    matrix or two of each expert, or their biases.
    """
    experts = GgufMetadata(mapping.file).integer(EXPERT_COUNT)
    matrices = mapping.arch.expert_names[name]
    dimensions = 3 if stored.name.endswith(".weight") else 2
    if len(stored.shape) != dimensions or stored.shape[0] != experts:
        reason = f"its first dimension must be {experts}"
        raise _unknown(mapping.file, mapping.arch, stored, reason)
    if stored.shape[1] % len(matrices):
        reason = "its second dimension must be even"
        raise _unknown(mapping.file, mapping.arch, stored, reason)
    shape = (stored.shape[1] // len(matrices), *stored.shape[2:])
    parts = experts * len(matrices)
    for part in range(parts):
        expert, matrix = divmod(part, len(matrices))
        tensor = HfTensor(stored, shape, part=part, parts=parts)
        yield f"{expert}.{matrices[matrix]}", tensor


def _expansion(file: GgufFile, arch: Architecture, keys: StoredTensor) -> HfTensor:
    """Returns the expansion of latents of a layer, whose keys and values are apart."""
    values = file.tensors.get(keys.name.replace(_KEYS, _VALUES))
    if (
        values is None
        or len(keys.shape) != 3
        or len(values.shape) != 3
        or (keys.shape[0], keys.shape[1]) != (values.shape[0], values.shape[2])
    ):
        raise _unknown(file, arch, keys, f"it must fit one of the name {_VALUES}")
    heads, rank, key_dim = keys.shape
    shape = (heads * (key_dim + values.shape[1]), rank)
    return HfTensor(keys, shape, form="keys of latents", values=values)


def _norm(arch: Architecture, name: str, tensor: HfTensor) -> HfTensor:
    return evolve(tensor, less_one=arch.norms_plus_one and name.endswith("norm"))


def _stored_forms(
    name: str, end: str, tensor: HfTensor, *, packed: bool
) -> Iterator[tuple[str, HfTensor]]:
    """Yields a tensor, or what it becomes if it stays in 4 bits."""
    if not packed:
        yield f"{name}.{end}", tensor
        return
    outputs, inputs = tensor.shape
    numbers = (outputs, inputs // 2)
    scales = (outputs, inputs // tensor.stored.type.elements)
    yield name + NUMBERS, evolve(tensor, form="numbers", shape=numbers)
    yield name + SCALES, evolve(tensor, form="scales", shape=scales)


def _stays_packed(file: GgufFile, kind: BlockType, layer: str, name: str) -> bool:
    """Returns whether a layer's matrix, and each that is fused with it, has a type."""
    # Files without ffn_gate have gate and up as one (Phi-3).
    is_one = name == "ffn_up" and f"blk.{layer}.ffn_gate.weight" not in file.tensors
    for matrices in (*(names for names in _FUSED if name in names), (name,)):
        stored = [file.tensors.get(f"blk.{layer}.{matrix}.weight") for matrix in matrices]
        if None not in stored and (len(matrices) > 1 or name in _UNFUSED or is_one):
            return all(tensor is not None and tensor.type is kind for tensor in stored)
    return False


def _unknown(
    file: GgufFile, arch: Architecture, stored: StoredTensor, reason: str = ""
) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{file.path}: tensor {stored.name} of shape {list(stored.shape)} does not fit "
        f"the architecture {arch.name}{reason and '; ' + reason}. Convert the model "
        f"again with a current llama.cpp, or give the Hugging Face checkpoint"
    )
