"""The leaves of a model's weights: what a kernel takes.

A leaf is a matrix, or the matrices of a layer's experts, with how its numbers are stored
and split, so that a kernel has all that it needs to multiply with it, and a new scheme
adds no parameters. `Norm` and `Router` are the other two things that products need.

torch is not imported: the sizes of a model are read without it.
"""

from enum import Enum
from typing import TYPE_CHECKING, Final, Literal

from attrs import frozen

if TYPE_CHECKING:
    from torch import Tensor


@frozen
class Scheme:
    """How a matrix's numbers are stored, and which modules multiply with it."""

    name: str
    storage: str  # the dtype of the numbers
    scales: str  # what a scale belongs to
    arithmetic: str  # the dtype that products are computed in
    cpu: str  # the module of this folder on the CPU; empty: there is none
    gpu: str
    cpu_experts: str  # of products with the matrices of experts
    gpu_experts: str


PLAIN: Final = Scheme(
    name="plain",
    storage="the activations' dtype: float32, bfloat16 or float16",
    scales="none",
    arithmetic="the activations' dtype, summed in float32",
    cpu="plain",
    gpu="fused_linear",
    cpu_experts="plain_experts",
    gpu_experts="experts",
)


class Shard(Enum):
    """Which part of a matrix each rank has, when several share a model."""

    NONE = "none"  # all of it
    COLUMN = "column"  # some outputs: rows of `weight`, a part of each fused matrix
    ROW = "row"  # some inputs: columns of `weight`; the products have to be summed


@frozen(eq=False)
class Norm:
    """RMSNorm's factors. In float32 beside narrower activations, the product with them
    is computed in float32 too, and then rounded (Gemma).
    """

    weight: "Tensor"  # [size]
    eps: float


@frozen(eq=False, kw_only=True)
class Linear:
    """A matrix, or several fused ones, that activations are multiplied with."""

    weight: "Tensor"  # [outputs, inputs]
    bias: "Tensor | None" = None  # [outputs]
    scheme: Scheme = PLAIN
    scales: "Tensor | None" = None  # factors for the numbers of `weight`
    shard: Shard = Shard.NONE
    parts: tuple[int, ...]  # outputs of each matrix fused in it


@frozen(eq=False)
class HeadWeights:
    """What belongs to the heads of a layer. None: the model has none."""

    q_norm: Norm | None = None  # [head_dim], of each query head
    k_norm: Norm | None = None
    sinks: "Tensor | None" = None  # [heads] float32


@frozen(eq=False)
class LatentWeights:
    """What belongs to the latents of a layer."""

    norm: Norm  # [rank]
    # Keys and values of latents: of each head its key, not rotated, then its value.
    expansion: Linear


# What the gate of a gated product goes through: silu, gelu by tanh, or "clamped":
# gpt-oss's (up + 1) * gate * sigmoid(1.702 * gate), gate at most 7, |up| at most 7.
Activation = Literal["silu", "gelu_tanh", "clamped"]


@frozen
class RoutingRule:
    """How a router's logits choose experts, and their weights."""

    top_k: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True  # weights of the chosen experts sum to 1
    scaling: float = 1.0  # multiplies the weights
    groups: int = 1  # of equally many consecutive experts
    kept_groups: int = 1  # only experts of the best of them may be chosen
    # What ranks a group: its best score, or the sum of its best two.
    ranked_by: Literal["best", "best_two"] = "best"


@frozen(eq=False, kw_only=True)
class Router:
    """Chooses the experts of each token. Logits are computed in the dtype of `weight`."""

    weight: "Tensor"  # [experts, hidden]
    bias: "Tensor | None" = None  # [experts], of the logits
    # [experts] float32: added to scores to choose, not in the weights
    correction: "Tensor | None" = None
    rule: RoutingRule


@frozen(eq=False)
class Choice:
    """The experts of each token. An id of -1 (of padding) is no expert."""

    ids: "Tensor"  # [tokens, top_k] int32
    weights: "Tensor"  # [tokens, top_k] float32


@frozen(eq=False, kw_only=True)
class Experts:
    """The feed-forwards of a layer's experts."""

    gate_up: "Tensor"  # [experts, 2 * inter, hidden]: gates, then what they multiply
    down: "Tensor"  # [experts, hidden, inter]
    gate_up_bias: "Tensor | None" = None  # [experts, 2 * inter]
    down_bias: "Tensor | None" = None  # [experts, hidden]
    activation: Activation = "silu"
    scheme: Scheme = PLAIN
    shard: Shard = Shard.NONE
