"""Heads that differ by layer: other sizes without a window, and keys of other layers.

Theory. Gemma 4's layers without a window have fewer and wider key heads than those with
one. With *keys that are values*, a layer has no product of values: they are its keys
before these are normalised and rotated. In some of its models the last layers compute no
keys and values either: each reads those of the last layer before them that has the same
window or none, so that a token keeps less.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from attrs import evolve

from minfer.effects.models.architecture.gqa import GQA
from minfer.effects.models.config_reader import ConfigReader
from minfer.effects.models.families.attention_keys import FullHeads
from minfer.effects.models.families.family import Family

LAYER_SIZES: Final = "per_layer_config"  # transformers 5.24 writes sizes by layer there


def with_layer_heads(
    reader: ConfigReader, family: Family, attentions: tuple[GQA, ...]
) -> tuple[GQA, ...]:
    """Returns attentions with the heads that a config gives each of them. Raises
    `ModelConfigError`, `UnsupportedModelError`.
    """
    if family.heads.full is not None:
        attentions = _with_full_heads(reader, family.heads.full, attentions)
    if family.extras.shared_keys:
        attentions = _with_shared_keys(reader, family.extras.shared_keys, attentions)
    return with_slots(attentions)


def with_slots(attentions: Sequence[GQA]) -> tuple[GQA, ...]:
    """Returns attentions with the number of them that share a place in the cache: 1 for
    the largest, and an even number for those of at most half their size, as places have
    a half for keys and one for values.
    """
    largest = max(attention.kv_elements for attention in attentions)
    return tuple(
        evolve(
            attention,
            layers_a_slot=max(1, 2 * (largest // 2 // attention.kv_elements)),
        )
        if attention.kv_elements < largest
        else attention
        for attention in attentions
    )


def _with_full_heads(
    reader: ConfigReader, keys: FullHeads, attentions: tuple[GQA, ...]
) -> tuple[GQA, ...]:
    """Returns attentions whose layers without a window have sizes of their own."""
    reader.size("sliding_window")
    keys_are_values = reader.flag(keys.keys_are_values)
    full = {keys.head_dim: reader.size(keys.head_dim)}
    if keys_are_values and not reader.is_absent(keys.kv_heads):
        full[keys.kv_heads] = reader.size(keys.kv_heads)
    by_layer = _read_layer_sizes(reader, len(attentions))
    changed = []
    for index, attention in enumerate(attentions):
        is_full = attention.window is None
        dim, count = attention.head_dim, attention.kv_heads
        if by_layer is not None:
            dim = by_layer[index].size("head_dim", dim)
            count = by_layer[index].size("num_key_value_heads", count)
        elif is_full:
            dim, count = full[keys.head_dim], full.get(keys.kv_heads, count)
        if dim % 4 or attention.heads % count:
            raise reader.error(
                keys.head_dim if dim % 4 else keys.kv_heads,
                f"a multiple of 4, and {keys.kv_heads} a divisor of "
                f"num_attention_heads = {attention.heads}",
            )
        changed.append(
            evolve(
                attention,
                head_dim=dim,
                kv_heads=count,
                keys_are_values=keys_are_values and is_full,
            )
        )
    return tuple(changed)


def _read_layer_sizes(reader: ConfigReader, layers: int) -> list[ConfigReader] | None:
    """Returns what a config says of each layer's heads; None: nothing."""
    tables = reader.config.get(LAYER_SIZES)
    if tables is None:
        return None
    if not isinstance(tables, dict) or any(
        not isinstance(table, dict) for table in tables.values()
    ):
        raise reader.error(LAYER_SIZES, "an object with an object for each layer")
    sizes: list[Mapping[str, Any]] = [{}] * layers
    for name, table in tables.items():
        index = int(name) if name.isdecimal() else layers
        unknown = sorted(table.keys() - {"head_dim", "num_key_value_heads"})
        if index >= layers or unknown:
            raise reader.refusal(
                f"{LAYER_SIZES}: {unknown or 'layer'} of {name!r} is not supported; "
                f"head_dim and num_key_value_heads of layers 0 to {layers - 1} are"
            )
        sizes[index] = table
    return [
        ConfigReader(table, f"{reader.source}: {LAYER_SIZES} {index}")
        for index, table in enumerate(sizes)
    ]


def _with_shared_keys(
    reader: ConfigReader, key: str, attentions: tuple[GQA, ...]
) -> tuple[GQA, ...]:
    """Returns attentions of which the last ones read other layers' keys."""
    first = len(attentions) - reader.size(key, 0, low=0)
    changed = list(attentions)
    for index in range(max(first, 0), len(attentions)):
        window = attentions[index].window
        sources = [i for i in range(first) if attentions[i].window == window]
        if not sources:
            raise reader.error(
                key, "so small that a layer of each kind has keys of its own"
            )
        changed[index] = evolve(attentions[index], shares_keys_of=sources[-1])
    return tuple(changed)
