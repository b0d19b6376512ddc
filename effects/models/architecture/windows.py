"""Which layers have a sliding window, as transformers' configurations derive it."""

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


def _slides(reader: ConfigReader, family: Family, layer: int) -> bool:
    """Returns whether a layer has the window, if there is one."""
    if family.windows == "upper":
        return layer >= reader.size("max_window_layers", low=0)
    if family.windows == "lower":
        return layer % 2 == 0 and layer < reader.size("max_window_layers", low=0)
    if family.windows == "pattern":
        return (layer + 1) % reader.size("sliding_window_pattern") != 0
    return True


def _window(reader: ConfigReader, family: Family) -> int | None:
    """Returns the window of layers that have one, if the config sets it."""
    used = reader.flag("use_sliding_window")
    if reader.is_absent("sliding_window"):
        return None
    if family.windows == "none" and (used or reader.is_absent("use_sliding_window")):
        raise reader.refusal(f"sliding_window is not known to {family.architecture}")
    if used or family.windows in ("every", "uniform", "pattern"):
        return reader.size("sliding_window", low=2)
    return None
