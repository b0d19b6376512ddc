"""Which layers of a hybrid model have an attention, and which a recurrent sublayer."""

from minfer.effects.models.config_reader import ConfigReader
from minfer.effects.models.families.family import Family
from minfer.effects.models.families.recurrent_keys import HybridLayers, LayerKind

DEFAULT_INTERVAL = 4


def read_layer_kinds(
    reader: ConfigReader, family: Family, keys: HybridLayers, layers: int
) -> tuple[LayerKind, ...]:
    """Returns the kind of each layer. Raises `ModelConfigError`, and
    `UnsupportedModelError` for kinds that the family does not have.
    """
    kinds = _listed_kinds(reader, keys, layers)
    if {*kinds} == {"recurrent"}:
        raise reader.refusal(
            f"no layer has an attention, which {family.architecture} needs here; models "
            f"with an attention in some layers work"
        )
    return kinds


def _listed_kinds(
    reader: ConfigReader, keys: HybridLayers, layers: int
) -> tuple[LayerKind, ...]:
    """Returns the kind of each layer, as a config lists or implies them."""
    for key in keys.listed:
        if not reader.is_absent(key):
            return _named_kinds(reader, keys, key, layers)
    kinds = [keys.every] * layers
    if keys.interval:
        interval = reader.size(keys.interval, DEFAULT_INTERVAL)
        kinds[interval - 1 :: interval] = ["attention"] * (layers // interval)
    if keys.attention:
        has_list = not reader.is_absent(keys.attention)
        for index in reader.ids(keys.attention) if has_list else range(layers):
            kinds[index : index + 1] = ["attention"] * (index < layers)
    return tuple(kinds)


def _named_kinds(
    reader: ConfigReader, keys: HybridLayers, key: str, layers: int
) -> tuple[LayerKind, ...]:
    """Returns the kinds that a list names."""
    listed = reader.config[key]
    if not isinstance(listed, list) or len(listed) != layers:
        raise reader.error(key, f"null or a list of num_hidden_layers = {layers}")
    unknown = sorted({str(name) for name in listed} - keys.names.keys())
    if unknown:
        raise reader.refusal(
            f"{key} {', '.join(unknown)} are not supported for this model; "
            f"{', '.join(keys.names)} are"
        )
    return tuple(keys.names[name] for name in listed)
