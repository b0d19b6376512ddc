"""Names of config values that a family has for itself, and the common names that readers
know.
"""

from collections.abc import Mapping
from typing import Any

from minfer.effects.models.config_reader import ConfigReader
from minfer.effects.models.families.family import Family


def with_common_names(reader: ConfigReader, family: Family) -> dict[str, Any]:
    """Returns a config with values under the names that most families have for them.
    Raises `ModelConfigError` for what should be an object, and `UnsupportedModelError`
    for a name in one that the family does not have there.
    """
    # A common name is not known to a family that has its own.
    config = {
        family.aliases.get(key, key): value
        for key, value in reader.config.items()
        if key not in family.own_names
    }
    for own_name, common_name in family.synonyms.items():
        if not reader.is_absent(own_name):
            config[common_name] = reader.config[own_name]
    for key, names in family.nested.items():
        inner = {} if reader.is_absent(key) else reader.config[key]
        if not isinstance(inner, dict):
            raise reader.error(key, "an object or null")
        present = {name: value for name, value in inner.items() if value is not None}
        if unknown := sorted(present.keys() - names.keys()):
            raise reader.refusal(
                f"{key}: {', '.join(unknown)} are not supported for this model; "
                f"{', '.join(names)} are"
            )
        config |= {names[name]: value for name, value in present.items()}
    return config


def names_in_file(family: Family, config: Mapping[str, Any]) -> Mapping[str, str]:
    """Returns what a config calls values, by their common names, for errors."""
    names = dict(family.own_names)
    names |= {
        common_name: own_name
        for own_name, common_name in family.synonyms.items()
        if config.get(own_name) is not None
    }
    for key, inner_names in family.nested.items():
        inner = config.get(key)
        present = inner.keys() if isinstance(inner, dict) else ()
        names |= {
            inner_names[name]: f"{key}.{name}" for name in present if name in inner_names
        }
    return names
