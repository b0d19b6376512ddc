"""The tensors of a GGUF file under the names, and in the forms, of a Hugging Face
checkpoint.

Three things differ in files. Llama's queries and keys are stored in another order of a
head's dimensions; Gemma's norms are stored whole, not less 1; and the matrices of all
experts of a layer are one tensor. Matrices of type Q4_0 are shown as numbers and scales,
which stay 4-bit integers in memory (formats/gguf.py), unless a matrix that is fused with
them has another type. All other quantized tensors are dequantized as they are read.
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
from minfer.effects.models.gguf.metadata import Metadata

NUMBERS, SCALES = ".q4_0", ".q4_0_scales"  # how names end of a Q4_0 matrix's two parts
# Matrices of a layer that are fused in memory (linear.py): one scheme for all of a tuple.
_FUSED: Final = (
    ("attn_q", "attn_k", "attn_v"),
    ("ffn_gate", "ffn_up"),
    ("ffn_gate_exps", "ffn_up_exps"),
    ("ffn_gate_shexp", "ffn_up_shexp"),
)
_ALONE: Final = ("attn_output", "ffn_down", "ffn_down_exps", "ffn_down_shexp")
# Tensors that are not weights: config.py reads them.
_OTHERS: Final = ("rope_freqs.weight",)
Form = Literal["whole", "numbers", "scales"]


@frozen(eq=False)
class ShownTensor:
    """A tensor of the checkpoint, and where its values are."""

    stored: StoredTensor
    shape: tuple[int, ...]
    form: Form = "whole"
    expert: int | None = None  # of a tensor of all experts
    heads: int = 0  # whose dimensions are stored in Llama's order; 0: they are not
    less_one: bool = False

    def get_shape(self) -> list[int]:
        """Returns the shape, as a slice of a safetensors file does."""
        return [*self.shape]

    def get_dtype(self) -> str:
        """Returns the type in the checkpoint, likewise."""
        if self.form != "whole":
            return "U8" if self.form == "numbers" else "F16"
        return self.stored.type.name if self.stored.type.is_float else "F32"


def keeps_int4(file: GgufFile) -> bool:
    """Returns whether any matrix of a file stays in 4 bits."""
    names = (name.removesuffix(".weight").split(".") for name in file.tensors)
    return any(
        _stays_packed(file, parts[1], parts[2])
        for parts in names
        if len(parts) == 3 and parts[0] == "blk"
    )


def shown_tensors(file: GgufFile) -> dict[str, ShownTensor]:
    """Returns the tensors of the checkpoint by their names there. Raises
    `UnsupportedModelError` for tensors that its architecture does not have.
    """
    read = Metadata(file)
    arch = architecture_of(read)
    heads = {}
    if arch.interleaved:
        queries = read.same_in_all_layers(".attention.head_count")
        keys = read.same_in_all_layers(".attention.head_count_kv", queries)
        heads = {"attn_q": queries, "attn_k": keys}
    found: dict[str, ShownTensor] = {}
    for stored in file.tensors.values():
        if stored.name not in _OTHERS:
            found.update(_shown(file, arch, heads, stored))
    return found


def _shown(
    file: GgufFile, arch: Architecture, heads: Mapping[str, int], stored: StoredTensor
) -> Iterator[tuple[str, ShownTensor]]:
    """Yields the tensors of the checkpoint that a stored one holds."""
    base, _, end = stored.name.rpartition(".")
    whole = ShownTensor(stored, stored.shape)
    if end in ("weight", "bias") and base in GLOBAL_NAMES:
        yield f"{GLOBAL_NAMES[base]}.{end}", _norm(arch, base, whole)
        return
    block, _, rest = base.partition(".")
    layer, _, name = rest.partition(".")
    known = block == "blk" and layer.isdecimal() and end in ("weight", "bias")
    prefix = f"model.layers.{layer}"
    packed = known and end == "weight" and _stays_packed(file, layer, name)
    if known and (matrix := arch.expert_names.get(name)) and arch.family.experts:
        experts = Metadata(file).whole(EXPERT_COUNT)
        if len(stored.shape) != 3 or end != "weight" or stored.shape[0] != experts:
            raise _unknown(file, arch, stored, f"it has to be of {experts} experts")
        for i in range(experts):
            whole = ShownTensor(stored, stored.shape[1:], expert=i)
            found = f"{prefix}.{arch.family.experts.experts}.{i}.{matrix}"
            yield from _forms(found, whole, packed=packed)
        return
    if not known or name not in arch.layer_names:
        raise _unknown(file, arch, stored)
    if name == "ffn_gate_inp_shexp":  # some files leave out its one output
        whole = evolve(whole, shape=(1, stored.shape[-1]))
    whole = _norm(arch, name, evolve(whole, heads=heads.get(name, 0)))
    found = f"{prefix}.{arch.layer_names[name]}"
    if end == "bias":
        yield f"{found}.bias", whole
    else:
        yield from _forms(found, whole, packed=packed)


def _norm(arch: Architecture, name: str, whole: ShownTensor) -> ShownTensor:
    return evolve(whole, less_one=arch.norms_plus_one and name.endswith("norm"))


def _forms(
    name: str, whole: ShownTensor, *, packed: bool
) -> Iterator[tuple[str, ShownTensor]]:
    if not packed:
        yield f"{name}.weight", whole
        return
    outputs, inputs = whole.shape
    numbers, scales = (outputs, inputs // 2), (outputs, inputs // Q4_0.elements)
    yield name + NUMBERS, evolve(whole, form="numbers", shape=numbers)
    yield name + SCALES, evolve(whole, form="scales", shape=scales)


def _stays_packed(file: GgufFile, layer: str, name: str) -> bool:
    """Returns whether a layer's matrix, and all that are fused with it, are Q4_0."""
    together = next((names for names in _FUSED if name in names), (name,))
    if len(together) == 1 and name not in _ALONE:
        return False
    stored = (file.tensors.get(f"blk.{layer}.{one}.weight") for one in together)
    return all(one is not None and one.type is Q4_0 for one in stored)


def _unknown(
    file: GgufFile, arch: Architecture, stored: StoredTensor, why: str = ""
) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{file.path}: tensor {stored.name} of shape {list(stored.shape)} is not known "
        f"of {arch.name}{why and '; ' + why}: convert the model again with a current "
        f"llama.cpp, or give the Hugging Face checkpoint"
    )
