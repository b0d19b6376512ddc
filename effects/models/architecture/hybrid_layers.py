"""Which layers of a hybrid model have an attention, and which a recurrent sublayer; in
models whose layers have one sublayer each, also which have a feed-forward.
"""

from collections.abc import Mapping
from typing import Final

from minfer.effects.models.config_reader import ConfigReader
from minfer.effects.models.families.family import Family
from minfer.effects.models.families.recurrent_keys import HybridLayers, LayerKind

DEFAULT_INTERVAL: Final = 4
COUNT: Final = "num_hidden_layers"
# Lists of kinds that transformers' classes write, also of families that do not read them,
# and the kinds by their names there.
OTHER_LISTS: Final = ("layer_types", "layers_block_type")
COMMON_NAMES: Final[Mapping[str, LayerKind]] = {
    "attention": "attention",
    "full_attention": "attention",
    "mamba": "recurrent",
    "linear_attention": "recurrent",
    "hybrid": "both",
}


def with_layer_count(reader: ConfigReader, family: Family) -> ConfigReader:
    """Returns a config whose number of layers is the length of its list of kinds, if the
    family's class ignores any other number. Raises `ModelConfigError` for an empty list.
    """
    keys = family.hybrid
    if keys is None or not keys.alone:
        return reader
    listed = _listed(reader, keys)
    if listed is None:
        if reader.is_absent(COUNT):
            raise reader.error(keys.listed[0], "a list of the kind of each layer")
        return reader
    if not reader.config[listed]:
        raise reader.error(listed, "the kind of each layer, of one at least")
    config = {**reader.config, COUNT: len(reader.config[listed])}
    return ConfigReader(config, reader.source, reader.own_names)


def read_layer_kinds(
    reader: ConfigReader, family: Family, layers: int
) -> tuple[LayerKind, ...]:
    """Returns the kind of each layer. Raises `ModelConfigError`, and
    `UnsupportedModelError` for kinds that the family does not have, and for two lists
    that say different kinds.
    """
    attention: LayerKind = "attention"
    keys = family.hybrid
    if keys is None:
        return (attention,) * layers
    source = _source(reader, keys)
    kinds = _kinds_by(reader, keys, source, layers)
    if not {*kinds} & {"attention", "both"}:
        raise reader.refusal(
            f"{source}: no layer has an attention, which {family.architecture} needs "
            f"here; models with an attention in some layers work"
        )
    _check_other_lists(reader, keys, source, kinds)
    return kinds


def _listed(reader: ConfigReader, keys: HybridLayers) -> str | None:
    """Returns the key of the list of kinds, or of the string, that a config has. Raises
    `ModelConfigError` for another type.
    """
    for key in (*keys.listed, keys.pattern):
        if not reader.is_absent(key):
            if type(reader.config[key]) is not (str if key == keys.pattern else list):
                raise reader.error(key, "null, or the kind of each layer")
            return key
    return None


def _source(reader: ConfigReader, keys: HybridLayers) -> str:
    """Returns the key that says which layers have an attention: the first one that the
    config has, else one that it may have; empty if all layers are of one kind.
    """
    if (listed := _listed(reader, keys)) is not None:
        return listed
    of_some = (*keys.numbered, keys.period, keys.interval, keys.attention, *keys.listed)
    return next(filter(None, of_some), "")


def _kinds_by(
    reader: ConfigReader, keys: HybridLayers, source: str, layers: int
) -> tuple[LayerKind, ...]:
    """Returns the kind of each layer, as the key `source` lists or implies them."""
    if source in keys.numbered:
        return _numbered_kinds(reader, keys, layers)
    if source in (*keys.listed, keys.pattern) and not reader.is_absent(source):
        return _named_kinds(reader, keys, source, layers)
    kinds = [keys.every] * layers
    if keys.period:
        for index in periodic(reader, keys.period, keys.offset, layers):
            kinds[index] = "attention"
    if keys.interval:
        interval = reader.size(keys.interval, DEFAULT_INTERVAL)
        kinds[interval - 1 :: interval] = ["attention"] * (layers // interval)
    if keys.attention:
        has_list = not reader.is_absent(keys.attention)
        for index in reader.ids(keys.attention) if has_list else range(layers):
            kinds[index : index + 1] = ["attention"] * (index < layers)
    return tuple(kinds)


def _check_other_lists(
    reader: ConfigReader, keys: HybridLayers, source: str, kinds: tuple[LayerKind, ...]
) -> None:
    """Raise `UnsupportedModelError` for a list that says other kinds of layers than
    `kinds`, which `source` says: it would be ignored.
    """
    for key in dict.fromkeys((*keys.listed, *OTHER_LISTS, keys.pattern)):
        listed = reader.config.get(key)
        if key == source or listed is None:
            continue
        names = keys.letters if key == keys.pattern else {**COMMON_NAMES, **keys.names}
        is_list = isinstance(listed, list | str)
        if not is_list or tuple(names.get(str(name)) for name in listed) != kinds:
            raise reader.refusal(
                f"{key} says other kinds of layers than "
                f"{source or _every_layer(keys)}; correct one of them, or leave {key} out"
            )
    if source in keys.numbered or all(map(reader.is_absent, keys.numbered)):
        return
    if _numbered_kinds(reader, keys, len(kinds)) != kinds:
        raise reader.refusal(
            f"{', '.join(keys.numbered)} say other kinds of layers than {source}; "
            f"correct {source}, or leave it out"
        )


def _every_layer(keys: HybridLayers) -> str:
    """Returns what is known of all layers of a family, in words."""
    return f"this model has, in which each has kind {keys.every!r}"


def periodic(
    reader: ConfigReader, period_key: str, offset_key: str, layers: int
) -> range:
    """Returns the indices of each `period`-th layer, from the layer `offset` on. Raises
    `ModelConfigError` unless the offset is less than the period.
    """
    period, offset = reader.size(period_key), reader.size(offset_key, low=0)
    if offset >= period:
        raise reader.error(offset_key, f"less than {period_key} = {period}")
    return range(offset, layers, period)


def _numbered_kinds(
    reader: ConfigReader, keys: HybridLayers, layers: int
) -> tuple[LayerKind, ...]:
    """Returns the kinds of layers that lists number from 1. Raises `ModelConfigError`
    unless each layer is in one of the lists.
    """
    kinds: dict[int, LayerKind] = {}
    for key, kind in keys.numbered.items():
        for number in reader.ids(key):
            if not 1 <= number <= layers or number - 1 in kinds:
                raise reader.error(
                    key, f"a list of layers of 1 to {COUNT} = {layers}, each in one list"
                )
            kinds[number - 1] = kind
    if len(kinds) < layers:
        missing = min({*range(layers)} - kinds.keys()) + 1
        names = " or ".join(map(reader.name, keys.numbered))
        raise reader.error(
            keys.listed[0],
            f"a list of {COUNT} = {layers} kinds; or layer {missing} in {names}",
        )
    return tuple(kinds[index] for index in range(layers))


def _named_kinds(
    reader: ConfigReader, keys: HybridLayers, key: str, layers: int
) -> tuple[LayerKind, ...]:
    """Returns the kinds that a list or a string names."""
    listed, names = reader.config[key], keys.names
    if key == keys.pattern:
        names = keys.letters
    if len(listed) != layers:
        raise reader.error(key, f"null or a list of {COUNT} = {layers}")
    unknown = sorted({str(name) for name in listed} - names.keys())
    if unknown:
        raise reader.refusal(
            f"{key} {', '.join(unknown)} are not supported for this model; "
            f"{', '.join(names)} are"
        )
    return tuple(names[name] for name in listed)
