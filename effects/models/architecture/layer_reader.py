"""Reads the layers of a model from a config, by its row of the family table."""

from attrs import evolve

from minfer.effects.models.architecture.altup import read_altup
from minfer.effects.models.architecture.dense import (
    Dense,
    read_dense,
    read_dense_layers,
)
from minfer.effects.models.architecture.gaussian_topk import with_cutoffs
from minfer.effects.models.architecture.gqa_reader import read_gqa
from minfer.effects.models.architecture.hybrid_layers import (
    periodic,
    read_layer_kinds,
)
from minfer.effects.models.architecture.layer_heads import with_layer_heads
from minfer.effects.models.architecture.layer_inputs import LayerInput
from minfer.effects.models.architecture.layers import Attention, FeedForward, Layer
from minfer.effects.models.architecture.linear import NormRule
from minfer.effects.models.architecture.mla import read_mla
from minfer.effects.models.architecture.moe import read_moe
from minfer.effects.models.architecture.recurrent import Recurrent, read_recurrent
from minfer.effects.models.architecture.rope_scaling import (
    FULL,
    SCALING_BETA,
    parse_ropes,
)
from minfer.effects.models.config_reader import ConfigReader
from minfer.effects.models.families.attention_keys import Positions
from minfer.effects.models.families.expert_keys import SparseLayers
from minfer.effects.models.families.family import Family
from minfer.effects.models.families.recurrent_keys import LayerKind


def read_layers(
    reader: ConfigReader, family: Family, norms: NormRule
) -> tuple[tuple[Layer, ...], int]:
    """Returns the layers that a config describes, and the context in tokens. Raises
    `ModelConfigError` and `UnsupportedModelError`.
    """
    positions = family.positions
    ropes, context = parse_ropes(
        _rope_reader(reader, positions),
        bases=positions.bases,
        partial=positions.partial,
        longrope=positions.longrope,
        further_keys=frozenset({SCALING_BETA} if positions.query_scale == "rope" else ()),
        default=family.defaults.get("rope_parameters"),
        alpha=positions.ntk_alpha,
    )
    names = family.norms.names
    attention_norms = evolve(
        norms, before_name=names.before_attention, after_name=names.after_attention
    )
    feed_norms = evolve(norms, before_name=names.before_feed, after_name=names.after_feed)
    attentions: tuple[Attention, ...]
    match family.attention:
        case "gqa":
            heads = read_gqa(reader, family, attention_norms, ropes)
            attentions = with_layer_heads(reader, family, heads)
        case "mla":
            attentions = read_mla(reader, family, attention_norms, ropes[FULL])
    kinds = read_layer_kinds(reader, family, len(attentions))
    feed_forwards = _feed_forwards(reader, family, feed_norms, kinds)
    if family.extras.shared_wide and reader.flag(family.extras.shared_wide):
        feed_forwards = _with_shared_wide(feed_forwards, attentions)
    recurrent = _read_recurrent(reader, family, attention_norms, kinds)
    inputs = _read_layer_input(reader, family, norms)
    altup = read_altup(reader, norms) if family.extras.altup else None
    layers = (
        Layer(
            attentions[index] if kind in ("attention", "both") else None,
            feed_forwards[index],
            family.extras.parallel,
            inputs,
            family.extras.scalars,
            altup,
            recurrent.get(kind),
        )
        for index, kind in enumerate(kinds)
    )
    return tuple(layers), context


def _read_recurrent(
    reader: ConfigReader, family: Family, norms: NormRule, kinds: tuple[LayerKind, ...]
) -> dict[LayerKind, Recurrent]:
    """Returns the recurrent sublayer of each kind of layer that has one."""
    if family.recurrent is None or not {*kinds} & {"recurrent", "both"}:
        return {}
    alone = read_recurrent(reader, family.recurrent, norms, family.multipliers)
    beside = evolve(alone, norms=evolve(norms, before_name=""))
    return {"recurrent": alone, "both": beside}


def _with_shared_wide(
    feed_forwards: list[FeedForward | None], attentions: tuple[Attention, ...]
) -> list[FeedForward | None]:
    """Returns feed-forwards that are twice as wide in layers that read other layers'
    keys.
    """
    return [
        feed_forward
        if attention.shares_keys_of is None or feed_forward is None
        else _twice_as_wide(feed_forward)
        for feed_forward, attention in zip(feed_forwards, attentions, strict=True)
    ]


def _twice_as_wide(feed_forward: FeedForward) -> FeedForward:
    """Returns a dense feed-forward, or experts with one beside them, twice as wide."""
    if isinstance(feed_forward, Dense):
        return evolve(feed_forward, intermediate_size=2 * feed_forward.intermediate_size)
    if (beside := feed_forward.beside) is None:
        return feed_forward
    wide = evolve(beside, intermediate_size=2 * beside.intermediate_size)
    return evolve(feed_forward, beside=wide)


def _read_layer_input(
    reader: ConfigReader, family: Family, norms: NormRule
) -> LayerInput | None:
    """Returns what each layer does with an input of its own, if layers have some."""
    key = family.extras.inputs
    low = int(family.extras.altup)  # with AltUp, all layers have inputs
    if not key or not reader.size(key, 0, low=low):
        return None
    return LayerInput(reader.size("hidden_size"), reader.size(key), norms)


def _rope_reader(reader: ConfigReader, positions: Positions) -> ConfigReader:
    """Returns what ropes are read from. Raises `ModelConfigError`."""
    if positions.rotated_layers != "none":
        return _with_rotated_share(reader, positions.rotary_dim)
    no_ropes = dict.fromkeys(("rope_parameters", "rope_scaling"))
    return ConfigReader({**reader.config, **no_ropes}, reader.source, reader.own_names)


def _with_rotated_share(reader: ConfigReader, key: str) -> ConfigReader:
    """Returns a config with the share of a head's dimensions that turn, where it has
    their number, `key`, alone. Raises `ModelConfigError`.
    """
    if not key or reader.is_absent(key) or "partial_rotary_factor" in reader.config:
        return reader
    rotary_dim, head_dim = reader.size(key), reader.size("head_dim")
    if rotary_dim > head_dim:
        raise reader.error(key, f"at most head_dim = {head_dim}")
    share = {"partial_rotary_factor": rotary_dim / head_dim}
    return ConfigReader({**reader.config, **share}, reader.source, reader.own_names)


def _feed_forwards(
    reader: ConfigReader, family: Family, norms: NormRule, kinds: tuple[LayerKind, ...]
) -> list[FeedForward | None]:
    """Returns the feed-forward of each layer, if it has one."""
    experts, layers = family.experts, len(kinds)
    if family.hybrid is not None and family.hybrid.alone:
        dense = {i for i, kind in enumerate(kinds) if kind == "dense"}
        with_experts = {i for i, kind in enumerate(kinds) if kind == "sparse"}
    elif experts is None or not _has_experts(reader, experts.sparse):
        dense_layers = read_dense_layers(reader, family, norms, layers)
        return [*with_cutoffs(reader, family, dense_layers)]
    else:
        dense = _dense_layers(reader, experts.sparse, layers) & {*range(layers)}
        with_experts = {*range(layers)} - dense
    feed_forwards: list[FeedForward | None] = [None] * layers
    plain = read_dense(reader, family, norms) if dense else None
    for index in dense:
        feed_forwards[index] = plain
    if with_experts and experts is not None:
        mixtures = read_moe(reader, family, experts, norms, layers)
        for index in with_experts:
            feed_forwards[index] = mixtures[index]
    return feed_forwards


def _has_experts(reader: ConfigReader, keys: SparseLayers) -> bool:
    """Returns whether a config of a family with experts has some."""
    return not keys.enabled or reader.flag(keys.enabled)


def _dense_layers(reader: ConfigReader, keys: SparseLayers, layers: int) -> set[int]:
    """Returns the layers without experts. Raises `ModelConfigError`."""
    num_dense = reader.size(keys.first_dense, 0, low=0) if keys.first_dense else 0
    step = reader.size(keys.step, 1) if keys.step else 1
    dense = {*reader.ids(keys.dense), *range(num_dense)}
    dense |= {i for i in range(layers) if (i + 1) % step}
    if keys.period:
        dense |= {*range(layers)} - {*periodic(reader, keys.period, keys.offset, layers)}
    if keys.listed and not reader.is_absent(keys.listed):
        dense = {*range(layers)} - {*reader.ids(keys.listed)}
    if keys.between:
        dense |= {*range(layers)} - _sparse_range(reader, layers)
    if keys.layer_types and not reader.is_absent(keys.layer_types):
        return _dense_types(reader, keys.layer_types, layers)
    return dense


def _sparse_range(reader: ConfigReader, num_layers: int) -> set[int]:
    """Returns each `moe_layer_interval`-th layer of those from `moe_layer_start_index` to
    `moe_layer_end_index`, where -1 is the last one. Raises `ModelConfigError`.
    """
    first = reader.size("moe_layer_start_index", low=0)
    last = reader.size("moe_layer_end_index", low=-1)
    interval = reader.size("moe_layer_interval")
    end = num_layers if last == -1 else min(last + 1, num_layers)
    return {i for i in range(first, end) if (i + 1) % interval == 0}


def _dense_types(reader: ConfigReader, key: str, num_layers: int) -> set[int]:
    """Returns the layers that a list calls dense, the others being sparse. Raises
    `ModelConfigError`.
    """
    kinds = reader.config[key]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise reader.error(key, f"null or a list of num_hidden_layers = {num_layers}")
    if any(kind not in ("dense", "sparse") for kind in kinds):
        raise reader.error(key, "a list of 'dense' and 'sparse'")
    return {i for i, kind in enumerate(kinds) if kind == "dense"}
