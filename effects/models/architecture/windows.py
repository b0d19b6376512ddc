"""Which layers have a sliding window or attend within chunks of positions, and which are
rotated, as transformers' configurations derive it.
"""

from minfer.effects.models.architecture.rope_scaling import (
    CHUNKED,
    FULL,
    KINDS,
    SLIDING,
)
from minfer.effects.models.config_reader import ConfigReader
from minfer.effects.models.families.family import Family


def read_windows(reader: ConfigReader, family: Family) -> tuple[int | None, ...]:
    """Returns the window of each layer, or the positions of a chunk within which it
    attends; None: it attends to all keys. Raises `ModelConfigError`,
    `UnsupportedModelError`.
    """
    windows = _listed_windows(reader, family)
    return (*windows[:-1], None) if family.windows.last_full else windows


def _listed_windows(reader: ConfigReader, family: Family) -> tuple[int | None, ...]:
    """Returns the window of each layer, as a config lists them."""
    layers, window = reader.size("num_hidden_layers"), _window(reader, family)
    kinds = reader.config.get("layer_types")
    if family.windows.where == "flag" or family.hybrid is not None:
        kinds = None  # of a hybrid model, hybrid_layers.py reads them
    if kinds is None:
        return tuple(
            window if _slides(reader, family, i) else None for i in range(layers)
        )
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise reader.error(
            "layer_types", f"null or a list of num_hidden_layers = {layers}"
        )
    limited = CHUNKED if family.windows.where == "chunked" else SLIDING
    known = {FULL, CHUNKED} if family.windows.where == "chunked" else {*KINDS}
    unknown = sorted(set(map(str, kinds)) - known)
    if unknown or (family.windows.where == "uniform" and window and FULL in kinds):
        raise reader.refusal(
            f"layer_types {unknown or kinds} are not known to {family.architecture}"
        )
    if limited in kinds and window is None:
        absent = "attention_chunk_size" if limited == CHUNKED else "sliding window"
        raise reader.error("layer_types", f"all full_attention, as no {absent} is in use")
    return tuple(window if kind == limited else None for kind in kinds)


def read_rotated(
    reader: ConfigReader, family: Family, windows: tuple[int | None, ...]
) -> tuple[bool, ...]:
    """Returns whether queries and keys of each layer are rotated. Raises
    `ModelConfigError`.
    """
    if family.positions.rotated_layers == "all":
        return (True,) * len(windows)
    if family.positions.rotated_layers == "none":
        return (False,) * len(windows)
    if family.positions.rotated_layers == "windowed":
        return tuple(window is not None for window in windows)
    return tuple(_is_listed(reader, layer) for layer in range(len(windows)))


def _is_listed(reader: ConfigReader, layer: int) -> bool:
    """Returns whether a config lists a layer as one that is rotated."""
    listed, key = reader.config.get("no_rope_layers"), "no_rope_layers"
    if listed is None or listed == []:
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
    if family.windows.where in ("upper", "above"):
        return layer >= reader.size("max_window_layers", low=0)
    if family.windows.where == "lower":
        return layer % 2 == 0 and layer < reader.size("max_window_layers", low=0)
    if family.windows.where == "pattern":
        if family.windows.first_full and layer == 0:
            return False
        return (layer + 1) % reader.size("sliding_window_pattern") != 0
    if family.windows.where == "chunked":
        return _is_listed(reader, layer)
    if family.windows.where == "unrotated":
        return not _is_listed(reader, layer)
    return family.windows.where != "listed"


def _window(reader: ConfigReader, family: Family) -> int | None:
    """Returns the window of layers that have one, if the config sets it."""
    used = reader.flag("use_sliding_window")
    if family.windows.where == "chunked" and reader.is_absent("sliding_window"):
        absent = reader.is_absent("attention_chunk_size")
        return None if absent else reader.size("attention_chunk_size", low=2)
    if family.windows.first_full and not reader.is_absent("sliding_window_size"):
        return reader.size("sliding_window_size") + 1  # the query's own key is not in it
    if reader.is_absent("sliding_window"):
        return None
    if family.windows.where in ("none", "chunked") and (
        used or reader.is_absent("use_sliding_window")
    ):
        raise reader.refusal(f"sliding_window is not known to {family.architecture}")
    if used or family.windows.where in ("every", "uniform", "pattern", "above", "listed"):
        return reader.size("sliding_window", low=2)
    return None
