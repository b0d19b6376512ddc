"""Which layers have a sliding window, as transformers' configurations derive it."""

from minfer.effects.models.architecture.rope_scaling import FULL, KINDS, SLIDING
from minfer.effects.models.config_reader import ConfigReader
from minfer.effects.models.families import Family


def read_windows(read: ConfigReader, family: Family) -> tuple[int | None, ...]:
    """Returns the window of each layer; None: it attends to all keys. Raises
    `ModelConfigError`, `UnsupportedModelError`.
    """
    layers, window = read.size("num_hidden_layers"), _window(read, family)
    kinds = read.config.get("layer_types") if family.windows != "flag" else None
    if kinds is None:
        return tuple(window if _slides(read, family, i) else None for i in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise read.error("layer_types", f"null or a list of num_hidden_layers = {layers}")
    other = sorted(set(map(str, kinds)) - {*KINDS})
    if other or (family.windows == "uniform" and window and FULL in kinds):
        raise read.refusal(
            f"layer_types {other or kinds} are not known to {family.architecture}"
        )
    if SLIDING in kinds and window is None:
        raise read.error(
            "layer_types", "all full_attention, as no sliding window is in use"
        )
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _slides(read: ConfigReader, family: Family, layer: int) -> bool:
    """Returns whether a layer has the window, if there is one."""
    if family.windows == "upper":
        return layer >= read.size("max_window_layers", low=0)
    if family.windows == "lower":
        return layer % 2 == 0 and layer < read.size("max_window_layers", low=0)
    if family.windows == "pattern":
        return (layer + 1) % read.size("sliding_window_pattern") != 0
    return True


def _window(read: ConfigReader, family: Family) -> int | None:
    """Returns the window of layers that have one, if the config sets it."""
    used = read.flag("use_sliding_window")
    if read.absent("sliding_window"):
        return None
    if family.windows == "none" and (used or read.absent("use_sliding_window")):
        raise read.refusal(f"sliding_window is not known to {family.architecture}")
    if used or family.windows in ("every", "uniform", "pattern"):
        return read.size("sliding_window", low=2)
    return None
