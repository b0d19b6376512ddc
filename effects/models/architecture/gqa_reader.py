"""Reads the sizes of grouped-query attention from a config; see gqa.py."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import evolve

from minfer.effects.models.architecture.gqa import GQA
from minfer.effects.models.architecture.linear import (
    NormRule,
)
from minfer.effects.models.architecture.query_scale import read_query_scale
from minfer.effects.models.architecture.rope_scaling import (
    FULL,
    SLIDING,
    UNROTATED,
    Rope,
)
from minfer.effects.models.architecture.windows import read_rotated, read_windows
from minfer.effects.models.config_reader import ConfigReader
from minfer.effects.models.families.family import Family

if TYPE_CHECKING:
    pass


def read_gqa(
    reader: ConfigReader, family: Family, norms: NormRule, ropes: Mapping[str, Rope]
) -> tuple[GQA, ...]:
    """Returns the attention of each layer, from a config. Raises `ModelConfigError`,
    `UnsupportedModelError`.
    """
    hidden, heads = reader.size("hidden_size"), reader.size("num_attention_heads")
    kv_heads = reader.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise reader.error(
            "num_key_value_heads", f"a divisor of num_attention_heads = {heads}"
        )
    if reader.is_absent("head_dim") and hidden % heads:
        raise reader.error("hidden_size", f"a multiple of num_attention_heads = {heads}")
    head_dim = reader.size("head_dim", hidden // heads)
    if head_dim % 2:
        raise reader.error(
            "head_dim", f"even, which {head_dim} is not, as its halves are paired"
        )
    for rope in ropes.values():
        for key, factors in (
            ("short_factor", rope.short_factors),
            ("long_factor", rope.long_factors),
        ):
            pairs = rope.rotary_dim(head_dim) // 2
            if rope.kind == "longrope" and len(factors) != pairs:
                raise reader.error(
                    "rope_scaling", f"with a {key} for each of {pairs} rotated pairs"
                )
        if rope.kind == "dynamic" and head_dim == 2:
            raise reader.error("head_dim", "above 2, as a base is scaled by it")
        if rope.rotary_dim(head_dim) % 4 and rope.partial != 1:
            raise reader.error(
                "partial_rotary_factor", f"a quarter of {head_dim}, or more"
            )
    scores, qk_norm = family.scores, family.qk_norm
    divisor = reader.positive(scores.root_of) if scores.root_of else head_dim
    scale: float = divisor**-0.5 if scores.scaled else 1.0
    if scores.multiplier:
        # transformers divides scores by a root where it is null, and not where there is
        # none.
        default = None if scores.multiplier in reader.config else 1.0
        scale = reader.positive(scores.multiplier, default)
    multipliers = family.multipliers
    (input_factor,) = reader.factors(multipliers.attention_input)
    (result_factor,) = reader.factors(multipliers.attention_result)
    (key_factor,) = reader.factors(multipliers.keys)
    attention = GQA(
        hidden_size=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=scale * key_factor * input_factor**2,
        input_factor=input_factor,
        result_factor=result_factor,
        score_cap=reader.optional_positive(scores.cap),
        norms=norms,
        qk_norm=reader.is_set(qk_norm.present),
        qk_norm_over=qk_norm.over,
        qk_norm_after_rope=qk_norm.after_rope,
        qk_norm_factors=qk_norm.factors,
        qk_norm_names=qk_norm.names,
        qkv_bias=reader.is_set(family.biases.qkv),
        out_bias=reader.is_set(family.biases.out),
        sinks_name=scores.sinks_name,
        value_dim=_read_value_dim(reader, family, head_dim),
        value_scale=reader.optional_positive(family.heads.value_scale) or 1.0,
        stored_qkv=family.stored.qkv,
        # With one key head, that is all queries, keys, values.
        qkv_by_key_head=family.stored.qkv_by_key_head and kv_heads > 1,
        value_norm=family.heads.value_norm,
        gate=family.heads.gate,
        gates_by_head=_gates_by_head(reader, family),
    )
    ropes = {
        kind: evolve(rope, interleaved=family.positions.interleaved)
        for kind, rope in ropes.items()
    }
    windows = read_windows(reader, family)
    layers = zip(
        windows,
        read_rotated(reader, family, windows),
        _heads_by_layer(reader, family, attention, len(windows)),
        strict=True,
    )
    chunks = family.windows.where == "chunked"
    window_kv_heads = kv_heads * family.heads.window_kv_multiple
    if heads % window_kv_heads:
        raise reader.error(
            "num_key_value_heads",
            f"such that {window_kv_heads}, those of layers with a window, are a divisor "
            f"of num_attention_heads = {heads}",
        )
    attentions = (
        evolve(
            attention,
            heads=layer_heads,
            window=window,
            chunk=(window or 0) if chunks else 0,
            rope=ropes[SLIDING if window else FULL] if rotated else UNROTATED,
            query_scale=read_query_scale(reader, family, rotated=rotated),
            sinks=scores.sinks is True or (bool(scores.sinks) and window is not None),
            kv_heads=kv_heads if window is None else window_kv_heads,
        )
        for window, rotated, layer_heads in layers
    )
    has_unit_heads = reader.is_set(qk_norm.unit)
    return tuple(
        _with_unit_heads(attention, norms.eps)
        if has_unit_heads and attention.rope != UNROTATED
        else attention
        for attention in attentions
    )


def _read_value_dim(reader: ConfigReader, family: Family, head_dim: int) -> int | None:
    """Returns the width of values; None: that of keys. Raises `ModelConfigError`."""
    if not family.heads.value_dim:
        return None
    value_dim = reader.size(family.heads.value_dim)
    if value_dim > head_dim:
        raise reader.error(family.heads.value_dim, f"at most head_dim = {head_dim}")
    return value_dim


def _with_unit_heads(attention: GQA, eps: float) -> GQA:
    """Returns an attention whose query and key heads are normalised after the rotation,
    without factors, as one that normalises them before: a norm of `eps` undoes the factor
    of cosines and sines, but for its eps.
    """
    rope = attention.rope
    if rope is None:
        return attention
    return evolve(
        attention,
        rope=evolve(rope, attention_factor=1.0),
        unit_heads=eps / rope.attention_factor**2,
    )


def _heads_by_layer(
    reader: ConfigReader, family: Family, attention: GQA, layers: int
) -> list[int]:
    """Returns the query heads of each layer."""
    key = family.heads.by_layer
    listed = reader.config.get(key) if key else None
    if listed is None:
        return [attention.heads] * layers
    if (
        not isinstance(listed, list)
        or len(listed) != layers
        or any(
            type(heads) is not int or heads < 1 or heads % attention.kv_heads
            for heads in listed
        )
    ):
        raise reader.error(
            key,
            f"null or a list of num_hidden_layers = {layers} multiples of "
            f"num_key_value_heads = {attention.kv_heads}",
        )
    return listed


def _gates_by_head(reader: ConfigReader, family: Family) -> bool:
    """Returns whether a gate is of a whole head."""
    key = family.heads.gate.granularity if family.heads.gate else ""
    if not key:
        return False
    granularity = reader.config.get(key)
    if granularity not in (True, "per-head", "per-element"):
        raise reader.error(key, "true, 'per-head' or 'per-element'")
    return bool(granularity != "per-element")
