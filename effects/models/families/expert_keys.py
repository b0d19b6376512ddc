"""What the rows of the family table say of experts; see family.py."""

from typing import Literal

from attrs import frozen


@frozen(kw_only=True)
class Routing:
    """How a router chooses experts, and weighs their results."""

    # Keys of how many experts a token goes through, the first that is there.
    top_k: tuple[str, ...] = ("num_experts_per_tok",)
    top_k_by_layer: bool = False  # which may be a list, of a number for each layer
    scores: Literal["softmax", "sigmoid"] = "softmax"
    float32: bool = False  # logits are computed in float32
    logit_cap: str = ""  # the key of a cap of logits
    # The tensor of a layer that corrects scores before experts are chosen; empty: they
    # are not corrected.
    correction: str = ""
    correction_rows: bool = False  # it is [1, experts] there
    groups: bool = False  # n_group and topk_group limit the choice
    # Groups are ranked by their best two scores; with a correction they always are.
    best_two: bool = False
    normalise: bool | str = "norm_topk_prob"  # weights sum to 1
    min_sum: str = ""  # the key of the least sum that they are divided by
    added: float = 1e-20  # to that sum
    scaling: str = ""  # the key of a factor of them
    weighs_inputs: bool = False  # they multiply what experts get (Llama 4)


@frozen(kw_only=True)
class SharedExperts:
    """Experts that every token goes through, as one feed-forward."""

    width: str = ""  # the key of their width
    count: str = ""  # or of their number, each as wide as an expert
    gate: bool = False  # a gate weighs their result
    name: str = "mlp.shared_experts"  # in a layer of a checkpoint
    # The tensor of gate and up, if these are stored as one, and that of down.
    matrices: tuple[str, str] = ("", "down_proj")


@frozen(kw_only=True)
class SparseLayers:
    """Which layers have experts; the others are dense. Later keys have priority."""

    enabled: str = ""  # the flag without which all layers are dense
    first_dense: str = ""  # the key of the number of first layers that are dense
    dense: str = ""  # the key of a list of dense layers
    step: str = ""  # the key of how often a layer is sparse
    # The key of that, and of the first layer that is sparse (Jamba).
    period: str = ""
    offset: str = ""
    listed: str = ""  # the key of a list of them
    # moe_layer_start_index, moe_layer_end_index and moe_layer_interval say which layers
    # are sparse (Ernie).
    between: bool = False
    layer_types: str = ""  # the key of a list of "dense" and "sparse"


@frozen(kw_only=True)
class StoredExperts:
    """Names and shapes of tensors in a layer of a checkpoint."""

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    # The products to the width of experts, and back, where they have one of their own.
    latent: tuple[str, str] = ("", "")
    # Published checkpoints have the matrices of all experts as one tensor.
    stacked: bool = False
    # The names of the two stacked tensors, where checkpoints have no others.
    stacks: tuple[str, ...] = ()
    transposed: bool = False  # stacked tensors are [experts, in, out]
    maybe_transposed: bool = False  # in some checkpoints, as their shapes show
    alternating: bool = False  # gates alternate with ups in them


@frozen(kw_only=True)
class NormsBeside:
    """Names of norms in a layer of a checkpoint whose experts are beside a dense
    feed-forward (Gemma 4): that of the experts' input, and those of the results of both,
    before they are added.
    """

    experts: str
    dense_result: str
    experts_result: str


@frozen(kw_only=True)
class ExpertKeys:
    """The experts of a family: their number and width, and what else is known of them."""

    count: tuple[str, ...]  # keys of their number, the first that is there
    inter: str = "moe_intermediate_size"  # the key of an expert's width
    # The key of the width of what experts get and return, if it is their own (Nemotron-H)
    latent: str = ""
    bias: bool = False  # router and experts have biases
    routing: Routing = Routing()
    shared: SharedExperts = SharedExperts()
    sparse: SparseLayers = SparseLayers()
    stored: StoredExperts = StoredExperts()
    beside: NormsBeside | None = None  # experts are beside a dense feed-forward
