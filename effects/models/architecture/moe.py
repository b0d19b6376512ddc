"""A mixture of experts, one of the feed-forward types: sizes, weights, and its step.

Theory. A router scores each token for every expert, and the token goes through its best
few (Shazeer et al. 2017; Fedus et al. 2021): a model has many parameters, of which a
token is multiplied with few. Beside them there may be *shared* experts, which every token
goes through (DeepSeekMoE, Dai et al. 2024), weighed by a gate of their own in Qwen2-MoE.
How scores become a choice is a `RoutingRule` (kernels/leaves.py): DeepSeek-V3 adds a
correction to scores only where they are ranked, and first chooses groups of experts.

At few tokens a step reads the experts that are hit, E * (1 - (1 - k / E)^tokens) of E if
tokens choose k independently; a dense layer of as many parameters would read all.

Gemma 4 has experts *beside* a dense feed-forward: both read the residual stream, each
through a norm of its own; their results are normalised, added, and normalised again. Its
router has a norm of its own, too.

Every token also goes through the shared experts, if there are any. A single one that is
as wide as the others is stored behind them, in the same tensors, and used in two ways. In
steps of few tokens it is one more expert of each token, and has no launches of its own.
In steps of many it is a dense feed-forward, whose products are faster than those of
experts.

With tensor parallelism, every expert is split as a dense feed-forward is; or each rank
has some of the experts whole (expert parallelism), and a token's other experts are not
its own.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, Literal

from attrs import evolve, frozen

from minfer.effects.models.architecture.dense import (
    Dense,
    DenseWeights,
    dense_matrix_parts,
    dense_parts,
    empty_dense,
    read_dense,
)
from minfer.effects.models.architecture.linear import (
    LinearSizes,
    NormRule,
    WeightMaker,
    bias_parts,
    matrix_parts,
    norm_part,
    sublayer_norm_parts,
    weight_parts,
)
from minfer.effects.models.architecture.model_step import ModelStep
from minfer.effects.models.architecture.product_context import ProductContext
from minfer.effects.models.architecture.products import (
    adapters_may_change,
    add_experts,
    add_part,
    add_product,
    feed,
    gated,
    linear,
    normalise,
    route,
)
from minfer.effects.models.architecture.quantization import CheckpointForm
from minfer.effects.models.config_reader import ConfigReader
from minfer.effects.models.families.expert_keys import ExpertKeys, Routing, SharedExperts
from minfer.effects.models.families.family import Family
from minfer.effects.models.parts import WeightPart
from minfer.effects.models.ranks import SINGLE_RANK, RankInfo
from minfer.kernels.leaves import (
    UNGATED,
    Activation,
    ChosenExperts,
    ExpertRouter,
    Experts,
    Linear,
    Norm,
    RoutingRule,
    Shard,
)

if TYPE_CHECKING:
    from torch import Tensor

# Up to this many tokens of a step, a shared expert is one more of each token's experts.
# An estimate: with more, the products of experts are slower than cuBLAS by more than the
# saved launches take.
MAX_TOKENS_WITH_SHARED: Final = 256


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
    rank_experts: range | None = None
    beside: Dense | None = None  # a dense feed-forward beside the experts
    # The width of what experts get and return; None: the residual stream's. Of another
    # width, a product leads to it, and one back, both with a bias if there is `bias`.
    latent_size: int | None = None
    latent_bias: bool = False

    def for_rank(self, rank_info: RankInfo) -> "MoE":
        """Returns the sizes of one rank's part: some of the experts, or of each some
        channels; of shared ones always the latter. Raises `UnsupportedModelError`.
        """
        shared = None if self.shared is None else self.shared.for_rank(rank_info)
        beside = None if self.beside is None else self.beside.for_rank(rank_info)
        if not rank_info.parallel.by_expert:
            inter = rank_info.share(self.intermediate_size, "channels of an expert")
            return evolve(self, intermediate_size=inter, shared=shared, beside=beside)
        count = rank_info.share(self.experts, "experts")
        rank_experts = range(
            rank_info.tensor_rank * count, (rank_info.tensor_rank + 1) * count
        )
        return evolve(self, rank_experts=rank_experts, shared=shared, beside=beside)

    @property
    def num_rank_experts(self) -> int:
        """How many experts this rank has."""
        return self.experts if self.rank_experts is None else len(self.rank_experts)

    @property
    def has_equal_shared(self) -> bool:
        """Whether this rank has all experts, and a shared one that gets what the others
        get, with matrices of the same sizes.
        """
        is_latent = self.latent_size is not None
        if self.shared is None or self.rank_experts is not None or is_latent:
            return False
        pairs = (self.gate_up, self.shared.gate_up), (self.down, self.shared.down)
        return all(
            (expert.outputs, expert.inputs, expert.bias)
            == (shared.outputs, shared.inputs, shared.bias)
            for expert, shared in pairs
        )

    @property
    def largest_matrix(self) -> int:
        """Elements of the largest matrix of a checkpoint, experts one by one."""
        shared = 0 if self.shared is None else self.shared.largest_matrix
        return max(shared, self.hidden_size * self.intermediate_size)

    @property
    def expert_elements(self) -> int:
        """Elements of one expert's matrices."""
        return (2 + self.gated) * self.expert_width * self.intermediate_size

    @property
    def gated(self) -> bool:
        """Whether experts have gates."""
        return self.activation not in UNGATED

    @property
    def expert_width(self) -> int:
        """Width of what experts get, and of what they return."""
        return self.hidden_size if self.latent_size is None else self.latent_size

    @property
    def to_latent(self) -> LinearSizes | None:
        """The product that leads to the width of experts, if there is one."""
        return self._latent_product("to", self.hidden_size, self.expert_width)

    @property
    def from_latent(self) -> LinearSizes | None:
        """The product that leads back, if there is one."""
        return self._latent_product("from", self.expert_width, self.hidden_size)

    def _latent_product(
        self, way: Literal["to", "from"], inputs: int, outputs: int
    ) -> LinearSizes | None:
        """Returns the sizes of a product that all ranks have."""
        if self.latent_size is None:
            return None
        name = self.keys.stored.latent[way == "from"]
        return LinearSizes((name,), (outputs,), inputs, Shard.NONE, self.latent_bias)

    @property
    def router_elements(self) -> int:
        """Elements of the router, and of the gate of shared experts."""
        biases = self.experts * (self.keys.bias + bool(self.keys.routing.correction))
        return self.hidden_size * (self.experts + self.keys.shared.gate) + biases

    @property
    def gate_up(self) -> LinearSizes:
        """The gates of all experts, if they have some, and what they multiply."""
        stored = self.keys.stored
        gate, up, _ = stored.matrices
        names = (gate, up) if self.gated else (up,)
        return LinearSizes(
            names=tuple(f"{stored.experts}.0.{name}" for name in names),
            outputs=(self.intermediate_size,) * len(names),
            inputs=self.expert_width,
            shard=Shard.COLUMN,
            bias=self.keys.bias,
            experts=self.num_rank_experts,
        )

    @property
    def down(self) -> LinearSizes:
        """Back to the residual stream, of all experts."""
        stored = self.keys.stored
        return LinearSizes(
            names=(f"{stored.experts}.0.{stored.matrices[2]}",),
            outputs=(self.expert_width,),
            inputs=self.intermediate_size,
            shard=Shard.ROW,
            bias=self.keys.bias,
            experts=self.num_rank_experts,
        )

    @property
    def matrices(self) -> tuple[LinearSizes, ...]:
        """The sizes of all matrices but the router."""
        shared = () if self.shared is None else self.shared.matrices
        beside = () if self.beside is None else self.beside.matrices
        products = (self.to_latent, self.from_latent)
        latent = (sizes for sizes in products if sizes is not None)
        return (self.gate_up, self.down, *latent, *shared, *beside)

    @property
    def parameters(self) -> int:
        """Elements of all weights, the norms included."""
        return self._parameters(self.num_rank_experts)

    @property
    def float32_elements(self) -> int:
        """Elements of weights that are in float32 whatever the activations' dtype."""
        router = self.experts * self.hidden_size * self.keys.routing.float32
        router += self.experts * bool(self.keys.routing.correction)
        norms = self.norms.float32_elements(self.hidden_size)
        if self.beside is not None:
            norms += self.beside.float32_elements
            norms += self.hidden_size * (1 + self.norms.wide)  # the router's always are
        return router + norms

    @property
    def active_parameters(self) -> int:
        """Elements that a token is multiplied with."""
        return self._parameters(min(self.rule.top_k, self.num_rank_experts))

    def _parameters(self, experts: int) -> int:
        """Returns the elements of the weights, with this number of experts."""
        bias = (2 * self.intermediate_size + self.hidden_size) * self.keys.bias
        routed = experts * (self.expert_elements + bias)
        if self.to_latent is not None and self.from_latent is not None:
            routed += self.to_latent.elements + self.from_latent.elements
        shared = 0
        if self.shared is not None:
            shared = self.shared.gate_up.elements + self.shared.down.elements
        norms = self.norms.elements(self.hidden_size)
        if self.beside is not None:
            norms += self.beside.parameters + 2 * self.hidden_size + self.experts
        return routed + self.router_elements + shared + norms

    @property
    def activation_elements(self) -> int:
        """Elements that a token keeps at the widest place: in each of its experts gates
        and ups, their product, and a result.
        """
        routed = self.rule.top_k * (3 * self.intermediate_size + self.expert_width)
        routed += 2 * (self.latent_size or 0)
        shared = 0 if self.shared is None else self.shared.activation_elements
        beside = 0
        if self.beside is not None:
            beside = self.beside.activation_elements + 4 * self.hidden_size
        widest = max(routed, shared) + beside
        return widest + 2 * self.hidden_size + 2 * self.experts


@frozen(eq=False, kw_only=True)
class SharedWeights:
    """The shared experts."""

    gate_up: Linear
    down: Linear
    gate: Linear | None  # weighs them: one output


@frozen(eq=False)
class WithShared:
    """The experts with the shared one behind them: `MoEWeights.experts` and
    `MoEWeights.shared` are parts of the same memory.
    """

    router: ExpertRouter  # chooses the shared expert for each token, too
    experts: Experts


@frozen(eq=False, kw_only=True)
class BesideWeights:
    """A dense feed-forward beside the experts, and what belongs to both."""

    dense: DenseWeights
    router_norm: Norm  # [hidden], of the router's input
    result: Norm  # [hidden], of the experts' result


@frozen(eq=False)
class LatentProducts:
    """The products to the width of experts, and back."""

    to_latent: Linear
    from_latent: Linear


@frozen(eq=False, kw_only=True)
class MoEWeights:
    """The weights of one layer's mixture of experts."""

    norm: Norm | None  # [hidden], of the input
    router: ExpertRouter
    experts: Experts
    shared: SharedWeights | None
    with_shared: WithShared | None = None  # for few tokens
    after: Norm | None = None  # [hidden], of the result
    beside: BesideWeights | None = None
    latent: LatentProducts | None = None


def read_moe(
    reader: ConfigReader, family: Family, keys: ExpertKeys, norms: NormRule, layers: int
) -> list[MoE]:
    """Returns the mixture of experts of each layer, if it has one, from a config. Raises
    `ModelConfigError`, `UnsupportedModelError`.
    """
    hidden, inter = reader.size("hidden_size"), reader.size(keys.inter)
    count = _present_key(reader, keys.count)
    top_k_key = _present_key(reader, keys.routing.top_k)
    per_layer = _top_k_by_layer(reader, keys.routing, top_k_key, layers)
    rules = {
        k: _read_rule(reader, keys.routing, count, top_k_key, k) for k in {*per_layer}
    }
    beside = None
    if (names := keys.beside) is not None:
        of_dense = evolve(norms, after_name=names.dense_result)
        beside = read_dense(reader, family, of_dense)
        norms = evolve(norms, before_name=names.experts)
    mixture = MoE(
        hidden_size=hidden,
        intermediate_size=inter,
        experts=reader.size(count),
        keys=keys,
        rule=rules[per_layer[0]],
        activation=family.activation,
        norms=norms,
        shared=_read_shared(reader, family, keys.shared, norms, inter),
        beside=beside,
        latent_size=None if reader.is_absent(keys.latent) else reader.size(keys.latent),
        latent_bias=reader.is_set(family.biases.mlp),
    )
    return [evolve(mixture, rule=rules[top_k]) for top_k in per_layer]


def _top_k_by_layer(
    reader: ConfigReader, routing: Routing, key: str, layers: int
) -> list[int]:
    """Returns of how many experts a token goes through in each layer."""
    listed = reader.config.get(key)
    if not routing.top_k_by_layer or not isinstance(listed, list):
        return [reader.size(key)] * layers
    if len(listed) != layers or any(type(top_k) is not int for top_k in listed):
        expected = f"an integer, or a list of num_hidden_layers = {layers} integers"
        raise reader.error(key, expected)
    return listed


def _present_key(reader: ConfigReader, keys: tuple[str, ...]) -> str:
    """Returns the first of several names of a field that a config has."""
    return next((key for key in keys if not reader.is_absent(key)), keys[0])


def _read_shared(
    reader: ConfigReader, family: Family, keys: SharedExperts, norms: NormRule, inter: int
) -> Dense | None:
    """Returns the shared experts as one feed-forward, if there are any."""
    width = reader.size(keys.width, low=0) if keys.width else 0
    if keys.count:
        width = inter * reader.size(keys.count, 0, low=0)
    if not width:
        return None
    return Dense(
        hidden_size=reader.size("hidden_size"),
        intermediate_size=width,
        norms=norms,
        bias=reader.is_set(family.biases.mlp),
        activation=family.activation,
        name=keys.name,
        stored_gate_up=keys.matrices[0],
        down_name=keys.matrices[1],
    )


def _read_rule(
    reader: ConfigReader, routing: Routing, count: str, top_k_key: str, top_k: int
) -> RoutingRule:
    """Returns how experts are chosen, `count` and `top_k_key` being the keys of their
    number, and of the chosen ones. Raises `ModelConfigError` for what cannot be.
    """
    experts = reader.size(count)
    if not 1 <= top_k <= experts:
        raise reader.error(top_k_key, f"at least 1 and at most {count} = {experts}")
    method = reader.config.get("topk_method")
    if method not in (None, "greedy", "group_limited_greedy", "noaux_tc"):
        fault = f"a router with topk_method {method!r} is not supported"
        raise reader.refusal(f"{fault}; 'greedy', 'group_limited_greedy', 'noaux_tc' are")
    if (scores := reader.config.get("scoring_func")) not in (None, routing.scores):
        fault = f"a router with scoring_func {scores!r} is not supported for this model"
        raise reader.refusal(f"{fault}; {routing.scores!r} is")
    grouped = routing.groups and method != "greedy" and not reader.is_absent("n_group")
    groups = reader.size("n_group") if grouped else 1
    kept_groups = reader.size("topk_group", 1) if grouped else 1
    if experts % groups:
        raise reader.error("n_group", f"a divisor of {count} = {experts}")
    if kept_groups > groups or top_k > kept_groups * (experts // groups):
        condition = f"num_experts_per_tok = {top_k} of {count} = {experts} are in so many"
        raise reader.error(
            "topk_group", f"at most n_group = {groups}, and such that {condition}"
        )
    if routing.correction and groups > 1 and experts // groups < 2:
        raise reader.error("n_group", "so few that each group has two experts")
    return RoutingRule(
        top_k=top_k,
        scores=routing.scores,
        by_logits=routing.weighs_inputs,
        normalise=reader.is_set(routing.normalise),
        min_sum=reader.positive(routing.min_sum) if routing.min_sum else 0.0,
        added=routing.added,
        logit_cap=_logit_cap(reader, routing.logit_cap),
        scaling=reader.positive(routing.scaling, 1.0) if routing.scaling else 1.0,
        groups=groups,
        kept_groups=kept_groups,
        ranked_by="best_two" if routing.correction or routing.best_two else "best",
    )


def _logit_cap(reader: ConfigReader, key: str) -> float:
    """Returns the cap of the router's logits; 0: there is none."""
    return reader.positive(key) if key and reader.config.get(key) else 0.0


def empty_moe(sizes: MoE, make: WeightMaker) -> MoEWeights:
    """Returns uninitialised weights of these sizes."""
    before, after = make.sublayer_norms(sizes.hidden_size, sizes.norms)
    router = _empty_router(sizes, make)
    shared: SharedWeights | None
    with_shared: WithShared | None = None
    if sizes.shared is not None and _is_stored_behind(sizes, sizes.shared, make):
        experts, shared, with_shared = _empty_with_shared(sizes, router, make)
    else:
        experts, shared = _empty_experts(sizes, make), _empty_shared(sizes, make)
    return MoEWeights(
        norm=before,
        router=router,
        experts=experts,
        shared=shared,
        with_shared=with_shared,
        after=after,
        beside=None if sizes.beside is None else _empty_beside(sizes, sizes.beside, make),
        latent=_empty_latent(sizes, make),
    )


def _empty_router(sizes: MoE, make: WeightMaker) -> ExpertRouter:
    """Returns an uninitialised router."""
    keys, count, rank_experts = sizes.keys, sizes.experts, sizes.rank_experts
    return ExpertRouter(
        weight=make.tensor(
            count, sizes.hidden_size, dtype="float32" if keys.routing.float32 else None
        ),
        bias=make.vector(count) if keys.bias else None,
        correction=make.vector(count, "float32") if keys.routing.correction else None,
        expert_scale=None if sizes.beside is None else make.vector(count),
        rule=sizes.rule,
        first_local=0 if rank_experts is None else rank_experts.start,
        num_local=None if rank_experts is None else len(rank_experts),
    )


def _empty_experts(sizes: MoE, make: WeightMaker, more: int = 0) -> Experts:
    """Returns the uninitialised experts of a rank, and `more` behind them."""
    count = sizes.num_rank_experts + more
    return Experts(
        gate_up=make.linear(evolve(sizes.gate_up, experts=count)),
        down=make.linear(evolve(sizes.down, experts=count)),
        activation=sizes.activation,
        weighs_inputs=sizes.keys.routing.weighs_inputs,
    )


def _empty_shared(sizes: MoE, make: WeightMaker) -> SharedWeights | None:
    """Returns uninitialised shared experts, if there are any."""
    if sizes.shared is None:
        return None
    return SharedWeights(
        gate_up=make.linear(sizes.shared.gate_up),
        down=make.linear(sizes.shared.down),
        gate=_empty_shared_gate(sizes, make),
    )


def _empty_shared_gate(sizes: MoE, make: WeightMaker) -> Linear | None:
    """Returns the uninitialised gate of shared experts, if they have one."""
    if not sizes.keys.shared.gate:
        return None
    return Linear(weight=make.matrix(1, sizes.hidden_size), parts=(1,))


def _is_stored_behind(sizes: MoE, shared: Dense, make: WeightMaker) -> bool:
    """Returns whether the shared expert is stored behind a rank's experts: if its
    matrices have the same sizes and the same quantization. On the CPU, quantized matrices
    are packed one by one, so they cannot be parts of one tensor.
    """
    if not sizes.has_equal_shared or not make.has_memory:
        return False
    for expert, of_shared in (
        (sizes.gate_up, shared.gate_up),
        (sizes.down, shared.down),
    ):
        scheme = make.scheme(expert)
        if scheme != make.scheme(of_shared):
            return False
        if make.device == "cpu" and not scheme.is_plain:
            return False
    return True


def _empty_with_shared(
    sizes: MoE, router: ExpertRouter, make: WeightMaker
) -> tuple[Experts, SharedWeights, WithShared]:
    """Returns uninitialised experts, the shared one behind them, and all together."""
    every, count = _empty_experts(sizes, make, more=1), sizes.num_rank_experts
    experts = evolve(
        every,
        gate_up=every.gate_up.select(slice(count)),
        down=every.down.select(slice(count)),
    )
    gate = _empty_shared_gate(sizes, make)
    shared = SharedWeights(
        gate_up=every.gate_up.select(count), down=every.down.select(count), gate=gate
    )
    router = evolve(
        router, shared=True, shared_gate=None if gate is None else gate.weight
    )
    return experts, shared, WithShared(router, every)


def _empty_latent(sizes: MoE, make: WeightMaker) -> LatentProducts | None:
    """Returns uninitialised products to the width of experts and back, if there are
    any.
    """
    if sizes.to_latent is None or sizes.from_latent is None:
        return None
    return LatentProducts(make.linear(sizes.to_latent), make.linear(sizes.from_latent))


def _empty_beside(sizes: MoE, dense: Dense, make: WeightMaker) -> BesideWeights:
    """Returns uninitialised weights of a feed-forward beside experts."""
    router_norm = Norm(make.vector(sizes.hidden_size, "float32"), sizes.norms.eps)
    return BesideWeights(
        dense=empty_dense(dense, make),
        router_norm=router_norm,
        result=make.norm(sizes.hidden_size, sizes.norms),
    )


def moe_parts(
    sizes: MoE, weights: MoEWeights, form: CheckpointForm
) -> Iterator[WeightPart]:
    """Yields the tensors of a layer of a checkpoint, with their targets: the matrices of
    experts one by one, or stacked, those of all experts as one tensor.
    """
    keys, router, shared = sizes.keys, weights.router, weights.shared
    yield from sublayer_norm_parts(weights.norm, weights.after, sizes.norms)
    yield WeightPart(f"{keys.stored.router}.weight", router.weight)
    if router.bias is not None:
        yield WeightPart(f"{keys.stored.router}.bias", router.bias)
    if router.correction is not None:
        correction = router.correction
        yield WeightPart(
            keys.routing.correction,
            correction[None] if keys.routing.correction_rows else correction,
        )
    is_stacked = keys.stored.stacked if form.stacked is None else form.stacked
    if sizes.beside is not None and weights.beside is not None:
        yield from _beside_parts(sizes, sizes.beside, weights, weights.beside, form)
    if weights.latent is not None:
        yield from _latent_parts(sizes, weights.latent, form)
    expert_parts = _stacked_parts if is_stacked or keys.stored.stacks else _single_parts
    yield from expert_parts(sizes, weights.experts, form)
    if sizes.shared is not None and shared is not None:
        yield from dense_matrix_parts(sizes.shared, shared.gate_up, shared.down, form)
        if shared.gate is not None:
            yield WeightPart(f"{keys.shared.name}_gate.weight", shared.gate.weight)


def _latent_parts(
    sizes: MoE, latent: LatentProducts, form: CheckpointForm
) -> Iterator[WeightPart]:
    """Yields the tensors of the products to the width of experts and back. Ranks sum what
    the latter returns, so one of them adds its bias.
    """
    if (to_latent := sizes.to_latent) is not None:
        yield from weight_parts(to_latent, latent.to_latent, form)
        yield from bias_parts(to_latent, latent.to_latent)
    if (from_latent := sizes.from_latent) is not None:
        yield from weight_parts(from_latent, latent.from_latent, form)
        for part in bias_parts(from_latent, latent.from_latent):
            yield evolve(part, on_one_rank=True)


def _beside_parts(
    sizes: MoE,
    dense: Dense,
    weights: MoEWeights,
    beside: BesideWeights,
    form: CheckpointForm,
) -> Iterator[WeightPart]:
    """Yields the tensors of a feed-forward beside experts, and of what both have."""
    root, router = sizes.hidden_size**-0.5, sizes.keys.stored.router.rpartition(".")[0]

    def scaled(stored: "Tensor") -> "Tensor":
        return stored.float().mul_(root)

    yield from dense_parts(dense, beside.dense, form)
    yield WeightPart(f"{router}.scale", beside.router_norm.weight, scaled)
    if weights.router.expert_scale is not None:
        yield WeightPart(f"{router}.per_expert_scale", weights.router.expert_scale)
    if sizes.keys.beside is not None:
        name = sizes.keys.beside.experts_result
        yield norm_part(name, beside.result, sizes.norms)


def _single_parts(
    sizes: MoE, experts: Experts, form: CheckpointForm
) -> Iterator[WeightPart]:
    """Yields the tensors of each expert."""
    gate, up, down = sizes.keys.stored.matrices
    names = (gate, up, down) if sizes.gated else (up, down)
    for index, expert in enumerate(sizes.rank_experts or range(sizes.experts)):
        leaves = (*experts.gate_up.select(index).pieces(), experts.down.select(index))
        for name, leaf in zip(names, leaves, strict=True):
            matrix = f"{sizes.keys.stored.experts}.{expert}.{name}"
            yield from matrix_parts(matrix, leaf, form)
            if leaf.bias is not None:
                is_summed = name == down and sizes.rank_experts is None
                yield WeightPart(f"{matrix}.bias", leaf.bias, on_one_rank=is_summed)


def _stacked_parts(
    sizes: MoE, experts: Experts, form: CheckpointForm
) -> Iterator[WeightPart]:
    """Yields the tensors of all experts."""
    stored = sizes.keys.stored
    transposed = stored.transposed or (stored.maybe_transposed and form.transposed)
    alternate = _gates_first if stored.alternating else None
    # Alternating gates and ups are divided as one matrix.
    num_fused = 1 if stored.alternating or not sizes.gated else 2
    gate_up, down = stored.stacks or (
        f"{stored.experts}.{'gate_up_proj' if sizes.gated else 'up_proj'}",
        f"{stored.experts}.down_proj",
    )
    for matrix, leaf, sizes_of, order, fused in (
        (gate_up, experts.gate_up, sizes.gate_up, alternate, num_fused),
        (down, experts.down, sizes.down, None, 1),
    ):
        for weight_part in _stack_parts(matrix, leaf, form, transposed=transposed):
            matrix_name = sizes_of.names[0]
            yield evolve(weight_part, matrix=matrix_name, fused=fused).rearranged(order)
        if leaf.bias is not None:
            is_summed = matrix == down and sizes.rank_experts is None
            bias = WeightPart(
                f"{matrix}_bias", leaf.bias, fused=fused, on_one_rank=is_summed
            )
            yield bias.rearranged(order)


def _stack_parts(
    matrix: str, leaf: Linear, form: CheckpointForm, *, transposed: bool
) -> Iterator[WeightPart]:
    """Yields the tensors of one matrix of all experts; those with full numbers may be
    [experts, in, out].
    """
    if leaf.scheme.is_plain:
        weight_parts = iter([WeightPart(matrix, leaf.weight)])
    else:
        weight_parts = form.format_of(matrix).expert_parts(matrix, leaf)
    for weight_part in weight_parts:
        if transposed and weight_part.name == matrix:
            experts, outputs, inputs = weight_part.shape
            yield evolve(
                weight_part, shape=(experts, inputs, outputs), arrange=_transposed
            )
        else:
            yield evolve(weight_part, scales=weight_part.target is leaf.scales)


def _transposed(stored: "Tensor") -> "Tensor":
    """Returns [experts, out, in] of [experts, in, out]."""
    return stored.transpose(1, 2)


def _gates_first(stored: "Tensor") -> "Tensor":
    """Returns gates, then ups, of [experts, 2 * inter, ...] where they alternate."""
    shape = stored.shape
    paired = stored.reshape(shape[0], -1, 2, *shape[2:])
    return paired.transpose(1, 2).reshape(shape)


def feed_moe(
    sizes: MoE,
    weights: MoEWeights,
    hidden: "Tensor",
    step: ModelStep,
    x: "Tensor | None" = None,
) -> None:
    """Add the mixture of experts of `hidden` [tokens, hidden] to it, or that of
    normalised rows `x`.
    """
    if weights.beside is not None:
        _feed_beside(sizes, weights, weights.beside, hidden, step)
        return
    if x is None:
        x = hidden if weights.norm is None else normalise(hidden, weights.norm)
    adds_directly = (
        step.communicator.rank_info.has_whole_matrices and weights.after is None
    )
    total = hidden if adds_directly else hidden.new_zeros(hidden.shape)
    if (with_shared := _with_shared(weights, len(x), step.products)) is not None:
        choice = route(x, with_shared.router, step.products)
        add_experts(total, x, with_shared.experts, choice, step.products)
    else:
        _add_routed(weights, total, x, step.products)
        if weights.shared is not None:
            _add_shared(sizes, weights.shared, total, x, step.products)
    if not adds_directly:
        add_part(hidden, total, step.communicator, weights.after)


def _with_shared(
    weights: MoEWeights, tokens: int, context: ProductContext
) -> WithShared | None:
    """Returns the experts with the shared one behind them, if this number of tokens uses
    them so; not if adapters may change them, which know it as a dense feed-forward.
    """
    experts, shared = weights.experts, weights.shared
    if weights.with_shared is None or shared is None or tokens > MAX_TOKENS_WITH_SHARED:
        return None
    matrices = experts.gate_up, experts.down, shared.gate_up, shared.down
    return None if adapters_may_change(context, *matrices) else weights.with_shared


def _add_routed(
    weights: MoEWeights, total: "Tensor", x: "Tensor", context: ProductContext
) -> None:
    """Add the experts that the router chooses for normalised tokens `x`."""
    choice = route(x, weights.router, context)
    if weights.latent is None:
        add_experts(total, x, weights.experts, choice, context)
    else:
        _add_latent(weights.experts, weights.latent, choice, total, x, context)


def _add_latent(
    experts: Experts,
    latent: LatentProducts,
    choice: ChosenExperts,
    total: "Tensor",
    x: "Tensor",
    context: ProductContext,
) -> None:
    """Add the experts of normalised tokens `x`, which have a width of their own."""
    inputs = linear(x, latent.to_latent, context)
    results = inputs.new_zeros(inputs.shape)
    add_experts(results, inputs, experts, choice, context)
    add_product(total, results, latent.from_latent, context, SINGLE_RANK)


def _feed_beside(
    sizes: MoE,
    weights: MoEWeights,
    beside: BesideWeights,
    hidden: "Tensor",
    step: ModelStep,
) -> None:
    """Add experts and a dense feed-forward beside them to `hidden` [tokens, hidden]."""
    dense, tokens = beside.dense, len(hidden)
    # Ranks sum the parts of both at once.
    parts = hidden.new_zeros(2 * tokens, hidden.shape[1])
    x = hidden if dense.norm is None else normalise(hidden, dense.norm)
    inner = gated(x, dense.gate_up, sizes.activation, step.products)
    parts[:tokens] = linear(inner, dense.down, step.products)
    x = hidden if weights.norm is None else normalise(hidden, weights.norm)
    routed = normalise(hidden, beside.router_norm)
    choice = route(routed, weights.router, step.products)
    add_experts(parts[tokens:], x, weights.experts, choice, step.products)
    if not step.communicator.rank_info.has_whole_matrices:
        parts = step.communicator.sum(parts)
    result = normalise(parts[tokens:], beside.result)
    of_dense = parts[:tokens]
    result.add_(of_dense if dense.after is None else normalise(of_dense, dense.after))
    hidden.add_(result if weights.after is None else normalise(result, weights.after))


def _add_shared(
    sizes: MoE,
    shared: SharedWeights,
    total: "Tensor",
    x: "Tensor",
    context: ProductContext,
) -> None:
    """Add the shared experts of normalised tokens `x`; of ranks, this one's part."""
    gate_up, down, gate = shared.gate_up, shared.down, shared.gate
    if gate is None:
        feed(total, None, gate_up, down, sizes.activation, context, SINGLE_RANK, x=x)
        return
    inner = gated(x, gate_up, sizes.activation, context)
    inner = inner * linear(x, gate, context).sigmoid()
    add_product(total, inner, down, context, SINGLE_RANK)
