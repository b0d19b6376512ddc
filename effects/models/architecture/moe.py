"""A mixture of experts, one of the feed-forward types: its sizes, read from a config.
moe_weights.py has the weights, moe_step.py the step.

Theory. A router scores each token for every expert, and the token goes through its best
few (Shazeer et al. 2017; Fedus et al. 2021): a model has many parameters, of which a
token is multiplied with few. Beside them there may be *shared* experts, which every token
goes through (DeepSeekMoE, Dai et al. 2024), weighed by a gate of their own in Qwen2-MoE.
How scores become a choice is a `RoutingRule` (kernels/leaves.py): DeepSeek-V3 adds a
correction to scores only where they are ranked, and first chooses groups of experts.

Gemma 4 has experts *beside* a dense feed-forward: both read the residual stream, each
through a norm of its own; their results are normalised, added, and normalised again. Its
router has a norm of its own, too.

With tensor parallelism, every expert is split as a dense feed-forward is; or each rank
has some of the experts whole (expert parallelism), and a token's other experts are not
its own.
"""

from typing import Literal

from attrs import evolve, frozen

from minfer.effects.models.architecture.dense import Dense, read_dense
from minfer.effects.models.architecture.linear import LinearSizes, NormRule
from minfer.effects.models.config_reader import ConfigReader
from minfer.effects.models.families.expert_keys import ExpertKeys, Routing, SharedExperts
from minfer.effects.models.families.family import Family
from minfer.effects.models.ranks import RankInfo
from minfer.kernels.leaves import UNGATED, Activation, RoutingRule, Shard


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
