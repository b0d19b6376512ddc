"""Where a model's layers keep what they know of a token: groups, pages, and slots.

Theory. Layers with the same window and sink tokens read the same keys, so one block table
serves them: they are a *group*. The groups of a model take blocks of the same tokens, but
give them back at different times: a layer with a window of 1,024 needs the last 16 blocks
of 64 tokens, one without needs all. So that all groups can share one pool, it is cut into
equal *pages*: a page holds the keys of one block in some layers, `layers_a_page`, and a
block of a group is a bundle of as many pages as its layers need. Each of these pages has
a table of its own on the device. Gemma 3 4B has 29 layers with a window and 5 without: in
pages of 5 layers a block takes 6 pages and 1. A model of one group has pages of all
layers.
"""

from math import ceil
from typing import Final

from attrs import frozen

from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.config_reader import UnsupportedModelError
from minfer.records.config import CacheGroup
from minfer.values.checks import ConfigError

MAX_SIZE_RATIO: Final = (
    1.25  # groups of so nearly equal size have pages of the largest one
)
MAX_PADDING: Final = 0.1  # share of pages that no layer uses


@frozen
class LayerPlace:
    """Where one layer's keys are."""

    table: int  # the block table that has its pages
    slot: int  # its place among the layers of a page


@frozen
class CacheLayout:
    """How the layers of a model share the pages of its cache."""

    groups: tuple[CacheGroup, ...]
    layers_a_page: int
    places: tuple[LayerPlace, ...]  # of each layer

    @property
    def tables(self) -> int:
        """Block tables of a row: one for each page of a bundle, over all groups."""
        return sum(group.pages for group in self.groups)

    @property
    def padding(self) -> float:
        """The share of a block's pages that no layer uses."""
        return 1 - len(self.places) / (self.tables * self.layers_a_page)


def one_group(spec: ModelSpec) -> CacheLayout:
    """Returns the layout with one table for all layers, whatever their windows: nothing
    is given back that any of them may read.
    """
    windows = spec.windows
    window = 0 if None in windows else max(filter(None, windows), default=0)
    window = window if window > 1 else 0  # of one token, blocks are not given back
    sinks = max(layer.attention.sink_tokens for layer in spec.layers) if window else 0
    layers = len(spec.layers)
    places = tuple(LayerPlace(0, index) for index in range(layers))
    return CacheLayout((CacheGroup(window, sink_tokens=sinks),), layers, places)


def cache_layout(spec: ModelSpec) -> CacheLayout:
    """Returns the layout of a model, its groups in the order of their first layers.

    Raises `UnsupportedModelError` if layers keep different numbers of a token.
    """
    members: dict[tuple[int | None, int], list[int]] = {}
    for index, layer in enumerate(spec.layers):
        reads = layer.attention.window, layer.attention.sink_tokens
        members.setdefault(reads, []).append(index)
    kv_shapes = {group.attention.kv_shape for group in spec.groups}
    if len(members) == 1:
        return one_group(spec)
    if len(kv_shapes) > 1:
        raise UnsupportedModelError(
            f"layers that keep different numbers of a token, {sorted(kv_shapes)}, in "
            f"groups of different windows are not supported"
        )
    size = _layers_a_page([len(layers) for layers in members.values()])
    places = [LayerPlace(0, 0)] * len(spec.layers)
    groups, first_table = [], 0
    for (window, sinks), indexes in members.items():
        pages = ceil(len(indexes) / size)
        groups.append(CacheGroup(window or 0, pages, sinks))
        for offset, index in enumerate(indexes):
            places[index] = LayerPlace(first_table + offset // size, offset % size)
        first_table += pages
    return CacheLayout(tuple(groups), size, tuple(places))


def layout_for(spec: ModelSpec, groups: tuple[CacheGroup, ...]) -> CacheLayout:
    """Returns the layout of a model in an engine with these groups. Raises ConfigError if
    it has none.
    """
    if len(groups) == 1 and groups[0].pages == 1:
        return one_group(spec)
    layout = cache_layout(spec)
    if layout.groups != groups:
        raise ConfigError(
            f"groups: this model's layers are of {list(layout.groups)}, not of "
            f"{list(groups)}"
        )
    return layout


def _layers_a_page(counts: list[int]) -> int:
    """Returns the layers of a page, for groups with these counts of layers: as many as
    the smallest group has, or the largest if they are nearly equal; fewer if pages would
    have much padding.
    """
    smallest, largest = min(counts), max(counts)
    size = largest if largest <= MAX_SIZE_RATIO * smallest else smallest
    while _padding(counts, size) > MAX_PADDING:
        size -= 1  # pages of one layer have none
    return size


def _padding(counts: list[int], size: int) -> float:
    return 1 - sum(counts) / (size * sum(ceil(count / size) for count in counts))
