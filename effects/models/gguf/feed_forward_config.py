"""The width of dense feed-forwards in a GGUF file's metadata, as config.json has it."""

from typing import Any, Final

from minfer.effects.models.gguf.architectures import Architecture
from minfer.effects.models.gguf.container import GgufArray
from minfer.effects.models.gguf.hf_tensors import own_layers
from minfer.effects.models.gguf.metadata import GgufMetadata

SHARED_KEYS: Final = ".attention.shared_kv_layers"
_WIDTH: Final = ".feed_forward_length"


def read_feed_forward(metadata: GgufMetadata, arch: Architecture) -> dict[str, Any]:
    """Returns the fields about dense feed-forwards. Raises `GgufError`."""
    wide = arch.family.extras.shared_wide
    if wide and isinstance(metadata.get(_WIDTH), GgufArray):
        return {wide: True, "intermediate_size": _width_of_own_keys(metadata)}
    # Files of models without dense layers may have 0, or nothing.
    width = metadata.same_in_all_layers(_WIDTH, 1, low=0) or 1
    return {arch.family.feed_forward.width: width}


def _width_of_own_keys(metadata: GgufMetadata) -> int:
    """Returns the width of layers with keys of their own; the others, which read keys of
    another layer, are twice as wide (Gemma 4).
    """
    widths = metadata.array(_WIDTH).numbers()
    layers = own_layers(metadata)
    own = layers - metadata.integer(SHARED_KEYS, 0, low=0, below=layers)
    width = widths[0] if widths else 0
    if type(width) is not int or width < 1:
        raise metadata.error(_WIDTH, f"{layers} integers above 0")
    if widths != (width,) * own + (2 * width,) * (layers - own):
        expected = f"{own} times {width}, and then {layers - own} times {2 * width}"
        raise metadata.error(_WIDTH, expected)
    return width
