"""Which layers of a hybrid model have an attention, and which a recurrent sublayer; of
models whose layers have one sublayer each, which have a feed-forward.
"""

from typing import Final

from minfer.effects.models.config_reader import ConfigReader
from minfer.effects.models.families.family import Family
from minfer.effects.models.families.recurrent_keys import HybridLayers, LayerKind

DEFAULT_INTERVAL: Final = 4
COUNT: Final = "num_hidden_layers"


def with_layer_count(reader: ConfigReader, family: Family) -> ConfigReader:
    """Returns a config with the number of layers that are listed, if the family's class
    ignores any other number.
    """
    keys = family.hybrid
    if keys is None or not keys.alone:
        return reader
    listed = _listed(reader, keys)
    if listed is None:
        return reader
    config = {**reader.config, COUNT: len(reader.config[listed])}
    return ConfigReader(config, reader.source, reader.own_names)


def read_layer_kinds(
    reader: ConfigReader, family: Family, layers: int
) -> tuple[LayerKind, ...]:
    """Returns the kind of each layer. Raises `ModelConfigError`, and
    `UnsupportedModelError` for kinds that the family does not have.
    """
    attention: LayerKind = "attention"
    if family.hybrid is None:
        return (attention,) * layers
    kinds = _listed_kinds(reader, family.hybrid, layers)
    if not {*kinds} & {"attention", "both"}:
        raise reader.refusal(
            f"no layer has an attention, which {family.architecture} needs here; models "
            f"with an attention in some layers work"
        )
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


def _listed_kinds(
    reader: ConfigReader, keys: HybridLayers, layers: int
) -> tuple[LayerKind, ...]:
    """Returns the kind of each layer, as a config lists or implies them."""
    if (listed := _listed(reader, keys)) is not None:
        return _named_kinds(reader, keys, listed, layers)
    kinds = [keys.every] * layers
    if keys.numbered:
        return _numbered_kinds(reader, keys, layers)
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


def periodic(
    reader: ConfigReader, period_key: str, offset_key: str, layers: int
) -> range:
    """Returns each `period`-th layer, from the layer `offset` on. Raises
    `ModelConfigError`.
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
