"""The leaves of a model's weights: what a kernel takes.

A leaf is a matrix, or the matrices of a layer's experts, with how its numbers are stored
and split, so that a kernel has all that it needs to multiply with it, and a new scheme
adds no parameters. `Norm` and `ExpertRouter` are the other two things that products need.

torch is not imported: the sizes of a model are read without it.
"""

from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING, Final, Literal, Protocol

from attrs import evolve, frozen

if TYPE_CHECKING:
    from torch import Tensor


@frozen(kw_only=True)
class Scheme:
    """How a matrix's numbers are stored, and which modules multiply with it."""

    name: str
    bits: int  # of a number; 0: as activations have
    storage: str  # the dtype that holds them; empty: the activations'
    # Inputs that share a scale, of one output. 0: all inputs; there are scales unless
    # the storage is the activations'.
    group: int = 0
    # Their dtype; empty: the activations', or there are none. Those in FP8 have a factor
    # of each output.
    scales: str = ""
    zeros: bool = False  # each group has the number that stands for 0
    # What activations are rounded to before a product: nothing, or the same type, with a
    # scale for a row of them, or for a group of a row. Kernels of the GPU round only many
    # tokens; fewer are more exact as they are.
    activations: Literal["as they are", "rows", "groups"] = "as they are"
    cpu: str  # the module of this folder on the CPU; empty: there is none
    gpu: str
    cpu_experts: str = "plain_experts"  # of products with the matrices of experts
    gpu_experts: str = "plain_experts"

    @property
    def is_plain(self) -> bool:
        """Whether numbers are stored in the activations' dtype, without scales."""
        return not self.storage

    @property
    def numbers(self) -> int:
        """Numbers in an element of the storage: two of 4 bits are in a byte, the one of
        the even input in the low half.
        """
        return 2 if self.bits == 4 else 1

    def groups(self, inputs: int) -> int:
        """Returns the number of scales of an output with `inputs` inputs."""
        if self.is_plain:
            return 0
        return -(-inputs // self.group) if self.group else 1

    @property
    def has_factors(self) -> bool:
        """Whether scales are multiplied with a factor of each output."""
        return self.scales == FP8_TYPE

    @property
    def is_int4(self) -> bool:
        """Whether numbers are 4-bit integers, with scales in the activations' dtype."""
        return self.bits == 4 and not self.scales

    def packs_on_cpu(self, outputs: int, inputs: int, dtype: str) -> bool:
        """Whether torch's 4-bit product takes such a matrix under activations of `dtype`
        (cpu_int4.py).
        """
        is_supported = (
            self.is_int4 and self.group in PACKED_GROUPS and dtype in PACKED_DTYPES
        )
        return is_supported and inputs % self.group == 0 and outputs % PACKED_OUTPUTS == 0

    def matrix_bytes(self, outputs: int, inputs: int, element: int) -> int:
        """Returns the bytes of a matrix, scales included, under activations of `element`
        bytes.
        """
        if self.is_plain:
            return outputs * inputs * element
        scale = SCALE_BYTES.get(self.scales, element) + self.zeros
        factor = FACTOR_BYTES * self.has_factors
        return outputs * (inputs * self.bits // 8 + self.groups(inputs) * scale + factor)

    def packing_bytes(self, outputs: int, inputs: int, dtype: str, element: int) -> int:
        """Returns what a library of the CPU stores besides, at most: a table of the
        outputs with each part of an INT8 matrix (cpu_int8.py), offsets of 4-bit groups
        instead of their zeros (cpu_int4.py).
        """
        if self.storage == "int8":
            return outputs * -(-inputs // INT8_PART) * INT8_TABLE
        if self.packs_on_cpu(outputs, inputs, dtype):
            return outputs * self.groups(inputs) * (element - self.zeros)
        return 0


FP8_TYPE: Final = "float8_e4m3fn"
SCALE_BYTES: Final = {"float32": 4, "uint8": 1, FP8_TYPE: 1}
FACTOR_BYTES: Final = 4  # float32
# What torch's 4-bit product on the CPU takes.
PACKED_GROUPS: Final = (32, 64, 128, 256)
PACKED_OUTPUTS: Final = 16  # a divisor of the outputs
PACKED_DTYPES: Final = ("bfloat16", "float32")  # of scales
# Inputs of an INT8 matrix that are packed together: 2048 * 64 * 128 = 2^24.
INT8_PART: Final = 2048
INT8_TABLE: Final = 4 + 4 + 4  # bytes of an output: a scale, a zero, a sum of its numbers
PLAIN: Final = Scheme(
    name="plain",
    bits=0,
    storage="",
    cpu="plain",
    gpu="fused_linear",
    gpu_experts="experts",
)
# A scale of an output and of a token: each rounded to its largest magnitude.
FP8: Final = Scheme(
    name="fp8",
    bits=8,
    storage="float8_e4m3fn",
    scales="float32",
    activations="rows",
    cpu="quantized",
    gpu="quantized_linear",
    gpu_experts="experts",
)
# DeepSeek-V3's: a scale of 128 x 128 numbers, stored for each output, so that matrices
# are fused wherever their blocks begin.
FP8_BLOCKS: Final = Scheme(
    name="fp8_per_block",
    bits=8,
    storage="float8_e4m3fn",
    group=128,
    scales="float32",
    activations="groups",
    cpu="quantized",
    gpu="quantized_linear",
    gpu_experts="experts",
)
INT8: Final = Scheme(
    name="int8",
    bits=8,
    storage="int8",
    scales="float32",
    activations="rows",
    cpu="quantized",
    gpu="quantized_linear",
    gpu_experts="experts",
)
# Microscaling (OCP 2023): FP4 E2M1, scales of 8 bits that are powers of two.
MXFP4: Final = Scheme(
    name="mxfp4",
    bits=4,
    storage="uint8",
    group=32,
    scales="uint8",
    cpu="quantized",
    gpu="quantized_linear",
    gpu_experts="experts",
)
# NVIDIA's: FP4 E2M1, scales in FP8, and one factor of a matrix, here stored for each
# output, so that matrices are fused.
NVFP4: Final = Scheme(
    name="nvfp4",
    bits=4,
    storage="uint8",
    group=16,
    scales=FP8_TYPE,
    cpu="quantized",
    gpu="quantized_linear",
    gpu_experts="experts",
)
MAX_DEQUANTIZED_NUMBERS: Final = 1 << 24  # of a matrix, at once
INT4_GROUPS: Final = (32, 64, 128)


def int4(group: int, *, zeros: bool = False) -> Scheme:
    """Returns the scheme of integers from 0 to 15 in groups: (number - zero) * scale,
    where zero is 8 unless groups have their own.
    """
    return Scheme(
        name=f"int4-g{group}",
        bits=4,
        storage="uint8",
        group=group,
        zeros=zeros,
        cpu="quantized",
        gpu="quantized_linear",
        gpu_experts="experts",
    )


class Shard(Enum):
    """Which part of a matrix each rank has, when several share a model."""

    NONE = "none"  # all of it
    COLUMN = "column"  # some outputs: rows of `weight`, a part of each fused matrix
    ROW = "row"  # some inputs: columns of `weight`; the products have to be summed


@frozen(eq=False)
class Norm:
    """RMSNorm's factors, or LayerNorm's. In float32 beside narrower activations, the
    product with them is computed in float32 too, and then rounded (Gemma); LayerNorm's
    always is.
    """

    weight: "Tensor"  # [size], or of each head its own: [heads, size]
    eps: float
    bias: "Tensor | None" = None  # [size], of LayerNorm
    centered: bool = False  # LayerNorm: the mean is subtracted first


class Packed(Protocol):
    """A matrix in the layout of a library."""

    def product(self, x: "Tensor", bias: "Tensor | None") -> "Tensor":
        """Returns x @ weight.T + bias [rows, outputs], in the dtype of `x`."""


@frozen(eq=False, kw_only=True)
class AdapterSlots:
    """Low-rank additions to a matrix, B @ A of an adapter in each slot (lora.py).

    Each of the matrices that are fused in one has its own A, and B is all of theirs, one
    beside the other. Of experts, the tensors have a dimension of them behind the slots.
    What is behind an adapter's rank is not read, and may be anything.
    """

    lora_a: "Tensor"  # [slots, parts * rank, inputs]
    lora_b: "Tensor"  # [slots, rank, outputs], with the adapter's factor
    # [slots, parts] int32; 0: the adapter does not change the matrix
    ranks: "Tensor"
    parts: tuple[int, ...]  # outputs of each matrix that has an A of its own

    @property
    def rank(self) -> int:
        """The largest rank that a slot has room for."""
        return int(self.lora_b.shape[-2])


@frozen(eq=False, kw_only=True)
class Linear:
    """A matrix, or several fused ones, that activations are multiplied with.

    Those of a layer's experts are one leaf: each tensor begins with a dimension of
    experts.
    """

    weight: "Tensor"  # [outputs, inputs / scheme.numbers]
    bias: "Tensor | None" = None  # [outputs]
    scheme: Scheme = PLAIN
    scales: "Tensor | None" = None  # [outputs, groups]: factors of the numbers
    zeros: "Tensor | None" = None  # [outputs, groups] uint8: the numbers that mean 0
    factors: "Tensor | None" = None  # [outputs, 1] float32: multiply scales in FP8
    # The scales of whole blocks, for the library that multiplies them (fp8_blocks.py):
    # [blocks of outputs, groups rounded up to a multiple of 4] float32.
    blocks: "Tensor | None" = None
    shard: Shard = Shard.NONE
    parts: tuple[int, ...]  # outputs of each matrix fused in it
    # What multiplies instead, of experts one each: `weight` has its shape, but no data.
    packed: "Packed | tuple[Packed, ...] | None" = None
    adapters: AdapterSlots | None = None  # None: no adapter can change it

    @property
    def inputs(self) -> int:
        """The size of the rows that it multiplies."""
        return int(self.weight.shape[-1]) * self.scheme.numbers

    @property
    def scaled(self) -> "Tensor":
        """The scales of a quantized matrix. Raises ValueError if it has none."""
        if self.scales is None:
            raise ValueError(f"a {self.scheme.name} matrix has no scales")
        return self.scales

    @property
    def extras(self) -> "Tensor | None":
        """What kernels read beside weights and scales: zeros, or factors."""
        return self.zeros if self.factors is None else self.factors

    def select(self, index: "int | slice") -> "Linear":
        """Returns a part of it along the first dimension: one expert's matrix, those of
        some experts, or some outputs. It shares memory.
        """
        tensors = (self.bias, self.scales, self.zeros, self.factors)
        bias, scales, zeros, factors = (
            None if tensor is None else tensor[index] for tensor in tensors
        )
        weight = self.weight[index]
        fused_outputs = self.parts if self.weight.dim() == 3 else (len(weight),)
        packed = self.packed[index] if isinstance(self.packed, tuple) else self.packed
        return evolve(
            self,
            weight=weight,
            bias=bias,
            scales=scales,
            zeros=zeros,
            factors=factors,
            blocks=None,
            parts=fused_outputs,
            packed=packed,
            adapters=None,
        )

    def pieces(self) -> "Iterator[Linear]":
        """Yields the matrices that are fused in one; they share its memory."""
        end = 0
        for outputs in self.parts:
            end += outputs
            yield self.select(slice(end - outputs, end))


@frozen(eq=False)
class HeadWeights:
    """What belongs to the heads of a layer. None: the model has none."""

    # [head_dim], the same for each query head, or [heads, head_dim]
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    v_norm: Norm | None = None  # of each value head, beside the others
    norms_after_rope: bool = False  # heads are rotated, then normalised (Hunyuan)
    sinks: "Tensor | None" = None  # [heads] float32


@frozen(eq=False)
class WholeNorms:
    """Norms of the queries of all heads as one vector, and of the keys; of a rank, their
    factors for its heads.
    """

    query: Norm  # [heads * head_dim]
    key: Norm  # [kv_heads * head_dim]


# What a gate of attention goes through.
GateActivation = Literal["softplus", "sigmoid"]


@frozen(eq=False)
class HeadGate:
    """Gates of what attention returns, of the rows that queries are of."""

    linear: "Linear"  # an output for each head, or for each of its dimensions
    activation: GateActivation


@frozen(eq=False)
class LatentWeights:
    """What belongs to the latents of a layer."""

    norm: Norm  # [rank]
    # Keys and values of latents: of each head its key, not rotated, then its value.
    expansion: Linear


# What the gate of a gated product goes through: silu, gelu by tanh, or "clamped":
# gpt-oss's (up + 1) * gate * sigmoid(1.702 * gate), gate at most 7, |up| at most 7.
# Without a gate, and so of one product instead of two: gelu, gelu by tanh, or the square
# of relu.
Activation = Literal[
    "silu",
    "gelu_tanh",
    "clamped",
    "ungated_gelu",
    "ungated_gelu_tanh",
    "ungated_relu2",
]
UNGATED: Final[frozenset[Activation]] = frozenset(
    {"ungated_gelu", "ungated_gelu_tanh", "ungated_relu2"}
)


@frozen
class RoutingRule:
    """How a router's logits choose experts, and their weights."""

    top_k: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    # Logits choose, not scores, which are equal where float32 rounds them to 1.
    by_logits: bool = False
    normalise: bool = True  # weights of the chosen experts sum to 1
    scaling: float = 1.0  # multiplies the weights
    groups: int = 1  # of equally many consecutive experts
    kept_groups: int = 1  # only experts of the best of them may be chosen
    # What ranks a group: its best score, or the sum of its best two.
    ranked_by: Literal["best", "best_two"] = "best"
    # Of the weights that are normalised: a smaller sum counts as this one.
    min_sum: float = 0.0
    added: float = 1e-20  # to a sum without a least one
    # Logits are cap * tanh(logit / cap), if it is not 0.
    logit_cap: float = 0.0


@frozen(eq=False, kw_only=True)
class ExpertRouter:
    """Chooses the experts of each token. Logits are computed in the dtype of `weight`."""

    weight: "Tensor"  # [experts, hidden]
    bias: "Tensor | None" = None  # [experts], of the logits
    # [experts] float32: added to scores to choose, not in the weights
    correction: "Tensor | None" = None
    # [experts]: multiplies the weights of chosen experts
    expert_scale: "Tensor | None" = None
    # Whether each token also goes through a shared expert, whose id is behind those of
    # the others. Its weight is 1, or with `shared_gate` [1, hidden] the sigmoid of the
    # product with it.
    shared: bool = False
    shared_gate: "Tensor | None" = None
    rule: RoutingRule
    # The first of this rank's experts, and how many it has: ids of chosen ones count from
    # there, and those of others are -1. None: it has all.
    first_local: int = 0
    num_local: int | None = None


@frozen(eq=False)
class ChosenExperts:
    """The experts of each token. An id of -1 (of padding, of an expert that another rank
    has) is no expert.
    """

    ids: "Tensor"  # [tokens, top_k] int32; with a shared expert, one more
    weights: "Tensor"  # the same shape, float32


@frozen(eq=False, kw_only=True)
class Experts:
    """The feed-forwards of a layer's experts."""

    # 2 * inter outputs: gates, then what they multiply; without gates inter outputs
    gate_up: Linear
    down: Linear  # hidden outputs
    activation: Activation = "silu"
    weighs_inputs: bool = False  # a choice's weights multiply inputs, not outputs
