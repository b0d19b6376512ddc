"""Which layers have a sliding window, and which are rotated, as transformers'
configurations derive it.
"""

from minfer.effects.models.architecture.rope_scaling import FULL, KINDS, SLIDING
from minfer.effects.models.config_reader import ConfigReader
from minfer.effects.models.families.family import Family


def read_windows(reader: ConfigReader, family: Family) -> tuple[int | None, ...]:
    """Returns the window of each layer; None: it attends to all keys. Raises
    `ModelConfigError`, `UnsupportedModelError`.
    """
    layers, window = reader.size("num_hidden_layers"), _window(reader, family)
    kinds = reader.config.get("layer_types") if family.windows != "flag" else None
    if kinds is None:
        return tuple(
            window if _slides(reader, family, i) else None for i in range(layers)
        )
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise reader.error(
            "layer_types", f"null or a list of num_hidden_layers = {layers}"
        )
    unknown = sorted(set(map(str, kinds)) - {*KINDS})
    if unknown or (family.windows == "uniform" and window and FULL in kinds):
        raise reader.refusal(
            f"layer_types {unknown or kinds} are not known to {family.architecture}"
        )
    if SLIDING in kinds and window is None:
        raise reader.error(
            "layer_types", "all full_attention, as no sliding window is in use"
        )
    return tuple(window if kind == SLIDING else None for kind in kinds)


def read_rotated(
    reader: ConfigReader, family: Family, windows: tuple[int | None, ...]
) -> tuple[bool, ...]:
    """Returns whether queries and keys of each layer are rotated. Raises
    `ModelConfigError`.
    """
    if family.rotated_layers == "all":
        return (True,) * len(windows)
    if family.rotated_layers == "windowed":
        return tuple(window is not None for window in windows)
    return tuple(_is_listed(reader, layer) for layer in range(len(windows)))


def _is_listed(reader: ConfigReader, layer: int) -> bool:
    """Returns whether a config lists a layer as one that is rotated."""
    listed, key = reader.config.get("no_rope_layers"), "no_rope_layers"
    if listed is None:
        return (layer + 1) % reader.size("no_rope_layer_interval", 4) != 0
    layers = reader.size("num_hidden_layers")
    if not isinstance(listed, list) or len(listed) < layers:
        raise reader.error(
            key, f"null or a list of at least num_hidden_layers = {layers}"
        )
    if any(rotated not in (0, 1) for rotated in listed):
        raise reader.error(key, "a list of 0 and 1")
    return bool(listed[layer])


def _slides(reader: ConfigReader, family: Family, layer: int) -> bool:
    """Returns whether a layer has the window, if there is one."""
    if family.windows in ("upper", "above"):
        return layer >= reader.size("max_window_layers", low=0)
    if family.windows == "lower":
        return layer % 2 == 0 and layer < reader.size("max_window_layers", low=0)
    if family.windows == "pattern":
        return (layer + 1) % reader.size("sliding_window_pattern") != 0
    if family.windows == "unrotated":
        return not _is_listed(reader, layer)
    return family.windows != "listed"


def _window(reader: ConfigReader, family: Family) -> int | None:
    """Returns the window of layers that have one, if the config sets it."""
    used = reader.flag("use_sliding_window")
    if reader.is_absent("sliding_window"):
        return None
    if family.windows == "none" and (used or reader.is_absent("use_sliding_window")):
        raise reader.refusal(f"sliding_window is not known to {family.architecture}")
    if used or family.windows in ("every", "uniform", "pattern", "above", "listed"):
        return reader.size("sliding_window", low=2)
    return None
