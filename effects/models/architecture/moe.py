"""A mixture of experts, one of the feed-forward types: sizes, weights, and its step.

Theory. A router scores each token for every expert, and the token goes through its best
few (Shazeer et al. 2017; Fedus et al. 2021): a model has many parameters, of which a
token is multiplied with few. Beside them there may be *shared* experts, which every token
goes through (DeepSeekMoE, Dai et al. 2024), weighed by a gate of their own in Qwen2-MoE.
How scores become a choice is a `RoutingRule` (kernels/leaves.py): DeepSeek-V3 adds a
correction to scores only where they are ranked, and first chooses groups of experts.

At few tokens a step reads the experts that are hit, E * (1 - (1 - k / E)^tokens) of E if
tokens choose k independently; a dense layer of as many parameters would read all.

With tensor parallelism, every expert is split as a dense feed-forward is; or each rank
has some of the experts whole (expert parallelism), and a token's other experts are not
its own.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from minfer.effects.models.architecture.dense import (
    Dense,
    dense_matrix_parts,
    feed_norm_parts,
)
from minfer.effects.models.architecture.linear import (
    LinearSizes,
    Maker,
    NormRule,
    matrix_parts,
)
from minfer.effects.models.architecture.model_step import ModelStep
from minfer.effects.models.architecture.products import (
    add_experts,
    add_part,
    add_product,
    gated,
    linear,
    normalise,
    route,
)
from minfer.effects.models.architecture.quantization import Files
from minfer.effects.models.config_reader import ConfigReader
from minfer.effects.models.families import ExpertKeys, Family
from minfer.effects.models.parts import Part
from minfer.effects.models.ranks import ALONE, Place
from minfer.kernels.leaves import (
    Activation,
    ExpertRouter,
    Experts,
    Linear,
    Norm,
    RoutingRule,
    Shard,
)

if TYPE_CHECKING:
    from torch import Tensor


@frozen(kw_only=True)
class MoE:
    """Sizes of one layer's mixture of experts, in elements."""

    hidden_size: int
    intermediate_size: int  # of an expert
    experts: int
    keys: ExpertKeys
    rule: RoutingRule
    activation: Activation
    norms: NormRule
    shared: Dense | None  # the shared experts, as one
    # Of the experts, those that this rank has; None: all of them.
    own: range | None = None

    def for_rank(self, place: Place) -> "MoE":
        """Returns the sizes of one rank's part: some of the experts, or of each some
        channels; of shared ones always the latter. Raises `UnsupportedModelError`.
        """
        shared = None if self.shared is None else self.shared.for_rank(place)
        if not place.parallel.by_expert:
            inter = place.share(self.intermediate_size, "channels of an expert")
            return evolve(self, intermediate_size=inter, shared=shared)
        count = place.share(self.experts, "experts")
        own = range(place.part * count, (place.part + 1) * count)
        return evolve(self, own=own, shared=shared)

    @property
    def held(self) -> int:
        """How many experts this rank has."""
        return self.experts if self.own is None else len(self.own)

    @property
    def largest_matrix(self) -> int:
        """Elements of the largest matrix of a checkpoint, experts one by one."""
        shared = 0 if self.shared is None else self.shared.largest_matrix
        return max(shared, self.hidden_size * self.intermediate_size)

    @property
    def expert_elements(self) -> int:
        """Elements of one expert's matrices."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def router_elements(self) -> int:
        """Elements of the router, and of the gate of shared experts."""
        own = self.experts * (self.keys.bias + self.keys.correction)
        return self.hidden_size * (self.experts + self.keys.shared_gate) + own

    @property
    def gate_up(self) -> LinearSizes:
        """The gates of all experts, and what they multiply."""
        gate, up, _ = self.keys.matrices
        return LinearSizes(
            names=(f"{self.keys.experts}.0.{gate}", f"{self.keys.experts}.0.{up}"),
            outputs=(self.intermediate_size, self.intermediate_size),
            inputs=self.hidden_size,
            shard=Shard.COLUMN,
            bias=self.keys.bias,
            experts=self.held,
        )

    @property
    def down(self) -> LinearSizes:
        """Back to the residual stream, of all experts."""
        return LinearSizes(
            names=(f"{self.keys.experts}.0.{self.keys.matrices[2]}",),
            outputs=(self.hidden_size,),
            inputs=self.intermediate_size,
            shard=Shard.ROW,
            bias=self.keys.bias,
            experts=self.held,
        )

    @property
    def matrices(self) -> tuple[LinearSizes, ...]:
        """The sizes of all matrices but the router."""
        shared = () if self.shared is None else self.shared.matrices
        return (self.gate_up, self.down, *shared)

    @property
    def parameters(self) -> int:
        """Elements of all weights, the norms included."""
        return self._parameters(self.held)

    @property
    def float32_elements(self) -> int:
        """Elements of weights that are in float32 whatever the activations' dtype."""
        router = self.experts * self.hidden_size * self.keys.float32
        router += self.experts * self.keys.correction
        return router + self.norms.float32_elements(self.hidden_size)

    @property
    def active_parameters(self) -> int:
        """Elements that a token is multiplied with."""
        return self._parameters(min(self.rule.top_k, self.held))

    def _parameters(self, experts: int) -> int:
        """Elements of the weights, with so many experts."""
        bias = (2 * self.intermediate_size + self.hidden_size) * self.keys.bias
        own = experts * (self.expert_elements + bias)
        shared = 0
        if self.shared is not None:
            shared = self.shared.gate_up.elements + self.shared.down.elements
        norms = self.hidden_size * (1 + self.norms.after)
        return own + self.router_elements + shared + norms

    @property
    def activation_elements(self) -> int:
        """Elements that a token keeps at the widest place: in each of its experts gates
        and ups, their product, and a result.
        """
        own = self.rule.top_k * (3 * self.intermediate_size + self.hidden_size)
        shared = 0 if self.shared is None else self.shared.activation_elements
        return max(own, shared) + 2 * self.hidden_size + 2 * self.experts


@frozen(eq=False, kw_only=True)
class SharedWeights:
    """The shared experts."""

    gate_up: Linear
    down: Linear
    gate: Linear | None  # weighs them: one output


@frozen(eq=False, kw_only=True)
class MoEWeights:
    """The weights of one layer's mixture of experts."""

    norm: Norm  # [hidden], of the input
    router: ExpertRouter
    experts: Experts
    shared: SharedWeights | None
    after: Norm | None = None  # [hidden], of the result


def read_moe(
    read: ConfigReader, family: Family, keys: ExpertKeys, norms: NormRule
) -> MoE:
    """Returns the mixture of experts of a model, from a config. Raises
    `ModelConfigError`, `UnsupportedModelError`.
    """
    hidden, inter = read.size("hidden_size"), read.size(keys.inter)
    count = next((key for key in keys.count if not read.absent(key)), keys.count[0])
    return MoE(
        hidden_size=hidden,
        intermediate_size=inter,
        experts=read.size(count),
        keys=keys,
        rule=_read_rule(read, keys, count),
        activation=family.activation,
        norms=norms,
        shared=_read_shared(read, family, keys, norms, inter),
    )


def _read_shared(
    read: ConfigReader, family: Family, keys: ExpertKeys, norms: NormRule, inter: int
) -> Dense | None:
    """Returns the shared experts as one feed-forward, if there are any."""
    width = read.size(keys.shared, low=0) if keys.shared else 0
    if keys.shared_count:
        width = inter * read.size(keys.shared_count, 0, low=0)
    if not width:
        return None
    return Dense(
        hidden_size=read.size("hidden_size"),
        intermediate_size=width,
        norms=norms,
        bias=read.is_set(family.mlp_bias),
        activation=family.activation,
        name=keys.shared_experts,
    )


def _read_rule(read: ConfigReader, keys: ExpertKeys, count: str) -> RoutingRule:
    """Returns how experts are chosen, `count` being the key of their number. Raises
    `ModelConfigError` for what cannot be.
    """
    experts = read.size(count)
    top_k = read.size("num_experts_per_tok")
    if top_k > experts:
        raise read.error("num_experts_per_tok", f"at most {count} = {experts}")
    method = read.config.get("topk_method")
    if method not in (None, "greedy", "group_limited_greedy", "noaux_tc"):
        what = f"a router with topk_method {method!r} is not supported"
        raise read.refusal(f"{what}; 'greedy', 'group_limited_greedy', 'noaux_tc' are")
    if (scores := read.config.get("scoring_func")) not in (None, keys.scores):
        what = f"a router with scoring_func {scores!r} is not supported for this model"
        raise read.refusal(f"{what}; {keys.scores!r} is")
    grouped = method != "greedy" and not read.absent("n_group")
    groups = read.size("n_group") if grouped else 1
    kept = read.size("topk_group", 1) if grouped else 1
    if experts % groups:
        raise read.error("n_group", f"a divisor of {count} = {experts}")
    if kept > groups or top_k > kept * (experts // groups):
        enough = f"num_experts_per_tok = {top_k} of {count} = {experts} are in so many"
        raise read.error(
            "topk_group", f"at most n_group = {groups}, and such that {enough}"
        )
    if keys.correction and groups > 1 and experts // groups < 2:
        raise read.error("n_group", "so few that each group has two experts")
    return RoutingRule(
        top_k=top_k,
        scores=keys.scores,
        normalise=read.is_set(keys.normalise),
        scaling=read.positive("routed_scaling_factor", 1.0),
        groups=groups,
        kept_groups=kept,
        ranked_by="best_two" if keys.correction else "best",
    )


def empty_moe(sizes: MoE, make: Maker) -> MoEWeights:
    """Returns uninitialised weights of these sizes."""
    hidden, count = sizes.hidden_size, sizes.experts
    keys, norms = sizes.keys, sizes.norms
    shared = None
    if sizes.shared is not None:
        gate = Linear(weight=make.matrix(1, hidden), parts=(1,))
        shared = SharedWeights(
            gate_up=make.linear(sizes.shared.gate_up),
            down=make.linear(sizes.shared.down),
            gate=gate if keys.shared_gate else None,
        )
    return MoEWeights(
        norm=make.norm(hidden, norms),
        router=ExpertRouter(
            weight=make.tensor(count, hidden, dtype="float32" if keys.float32 else None),
            bias=make.vector(count) if keys.bias else None,
            correction=make.vector(count, "float32") if keys.correction else None,
            rule=sizes.rule,
            first_local=0 if sizes.own is None else sizes.own.start,
            num_local=None if sizes.own is None else len(sizes.own),
        ),
        experts=Experts(
            gate_up=make.linear(sizes.gate_up),
            down=make.linear(sizes.down),
            activation=sizes.activation,
        ),
        shared=shared,
        after=make.norm(hidden, norms) if norms.after else None,
    )


def moe_parts(sizes: MoE, weights: MoEWeights, files: Files) -> Iterator[Part]:
    """Yields the tensors of a layer of a checkpoint, with their places: the matrices of
    experts one by one, or stacked, those of all experts as one tensor.
    """
    keys, router, shared = sizes.keys, weights.router, weights.shared
    yield from feed_norm_parts(weights.norm, weights.after, sizes.norms)
    yield Part(f"{keys.router}.weight", router.weight)
    if router.bias is not None:
        yield Part(f"{keys.router}.bias", router.bias)
    if router.correction is not None:
        yield Part(f"{keys.router}.e_score_correction_bias", router.correction)
    expert_parts = _stacked_parts if files.stacked or keys.turned else _single_parts
    yield from expert_parts(sizes, weights.experts, files)
    if sizes.shared is not None and shared is not None:
        yield from dense_matrix_parts(sizes.shared, shared.gate_up, shared.down, files)
        if shared.gate is not None:
            yield Part(f"{keys.shared_experts}_gate.weight", shared.gate.weight)


def _single_parts(sizes: MoE, experts: Experts, files: Files) -> Iterator[Part]:
    """Yields the tensors of each expert."""
    gate, up, down = sizes.keys.matrices
    for at, i in enumerate(sizes.own or range(sizes.experts)):
        of_gate, of_up = experts.gate_up.select(at).pieces()
        pieces = ((gate, of_gate), (up, of_up), (down, experts.down.select(at)))
        for name, place in pieces:
            yield from matrix_parts(f"{sizes.keys.experts}.{i}.{name}", place, files)


def _stacked_parts(sizes: MoE, experts: Experts, files: Files) -> Iterator[Part]:
    """Yields the tensors of all experts."""
    keys = sizes.keys
    alternate = _gates_first if keys.turned else None
    pair = 1 if keys.turned else 2  # alternating gates and ups are divided as one matrix
    for name, by, of_first, order, fused in (
        ("gate_up_proj", experts.gate_up, sizes.gate_up, alternate, pair),
        ("down_proj", experts.down, sizes.down, None, 1),
    ):
        matrix = f"{keys.experts}.{name}"
        for part in _stack_parts(matrix, by, files, turned=keys.turned):
            matrix_name = of_first.names[0]
            yield evolve(part, matrix=matrix_name, fused=fused).then(order)
        if by.bias is not None:
            summed = name == "down_proj" and sizes.own is None
            bias = Part(f"{matrix}_bias", by.bias, fused=fused, once=summed)
            yield bias.then(order)


def _stack_parts(
    matrix: str, by: Linear, files: Files, *, turned: bool
) -> Iterator[Part]:
    """Yields the tensors of one matrix of all experts; those with full numbers may be
    [experts, in, out].
    """
    if by.scheme.is_plain:
        found = iter([Part(matrix, by.weight)])
    else:
        found = files.format_of(matrix).expert_parts(matrix, by)
    for part in found:
        if turned and part.name == matrix:
            experts, outputs, inputs = part.shape
            yield evolve(part, shape=(experts, inputs, outputs), arrange=_turned)
        else:
            yield evolve(part, scales=part.place is by.scales)


def _turned(stored: "Tensor") -> "Tensor":
    """Returns [experts, out, in] of [experts, in, out]."""
    return stored.transpose(1, 2)


def _gates_first(stored: "Tensor") -> "Tensor":
    """Returns gates, then ups, of [experts, 2 * inter, ...] where they alternate."""
    shape = stored.shape
    paired = stored.reshape(shape[0], -1, 2, *shape[2:])
    return paired.transpose(1, 2).reshape(shape)


def feed_moe(sizes: MoE, weights: MoEWeights, hidden: "Tensor", step: ModelStep) -> None:
    """Add the mixture of experts of `hidden` [tokens, hidden] to it."""
    x = normalise(hidden, weights.norm)
    alone = step.ranks.place.has_whole_matrices and weights.after is None
    total = hidden if alone else hidden.new_zeros(hidden.shape)
    choice = route(x, weights.router, step.real)
    add_experts(total, x, weights.experts, choice)
    if weights.shared is not None:
        _add_shared(sizes, weights.shared, total, x)
    if not alone:
        add_part(hidden, total, step.ranks, weights.after)


def _add_shared(sizes: MoE, shared: SharedWeights, total: "Tensor", x: "Tensor") -> None:
    """Add the shared experts of normalised tokens `x`; of ranks, this one's part."""
    inner = gated(x, shared.gate_up, sizes.activation)
    if shared.gate is not None:
        inner = inner * linear(x, shared.gate).sigmoid()
    add_product(total, inner, shared.down, ALONE)
