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

Layers may keep different numbers of a token (Gemma 4). A page then has places, *slots*,
for layers of the largest kind, and several smaller layers share one: their keys and
values stand side by side in a token's part of it (`LayerPlace.share`). Gemma 4 31B keeps
8,192 numbers of a token in its 50 layers with a window, and 4,096 in the 10 without, two
of which share a slot: in pages of 5 slots a block takes 10 pages and 1. Layers that read
the keys of another one have its place.

Recurrent layers keep a state instead, which is a bundle of the same pages; they are the
last group (state_layout.py). All stages of a pipeline have the same tables, and each has
the states of its own layers in the first pages of a bundle.
"""

from collections.abc import Iterable
from math import ceil
from typing import Final

from attrs import evolve, frozen

from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.layout.shapes import layer_kv_bytes_per_token
from minfer.effects.models.layout.state_layout import (
    StateLayout,
    state_layout,
)
from minfer.records.config import CacheGroup, EngineConfig
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
    share: int = 0  # which of the layers it is that share the slot


@frozen
class CacheLayout:
    """How the layers of a model share the pages of its cache."""

    groups: tuple[CacheGroup, ...]
    layers_a_page: int  # of the largest kind: slots
    places: tuple[LayerPlace | None, ...]  # of each layer; None: it has no attention
    states: StateLayout | None = None  # of its own recurrent layers, if it has any

    @property
    def block_groups(self) -> tuple[CacheGroup, ...]:
        """The groups of layers that keep blocks of tokens."""
        return self.groups[:-1] if self.groups[-1].state else self.groups

    @property
    def state_pages(self) -> int:
        """The pages of a state, of the stage with the largest; 0: there are no recurrent
        layers.
        """
        return self.groups[-1].pages if self.groups[-1].state else 0

    @property
    def tables(self) -> int:
        """Block tables of a row: one for each page of a block, over all groups."""
        return sum(group.pages for group in self.block_groups)

    def place(self, index: int) -> LayerPlace:
        """Returns where the keys of the layer `index` are. Raises TypeError if it has no
        attention.
        """
        place = self.places[index]
        if place is None:
            raise TypeError(f"layer {index} has no attention")
        return place

    @property
    def padding(self) -> float:
        """The share of a block's pages that no layer uses."""
        used = {(place.table, place.slot) for place in self.places if place is not None}
        return 1 - len(used) / (self.tables * self.layers_a_page)


def one_group(spec: ModelSpec) -> CacheLayout:
    """Returns the layout with one table for all layers, whatever their windows: nothing
    is given back that any of them may read.
    """
    windows = spec.windows
    window = 0 if None in windows else max(filter(None, windows), default=0)
    window = window if window > 1 else 0  # of one token, blocks are not given back
    sinks = max(attention.sink_tokens for attention in spec.attentions) if window else 0
    count, slots = _slots(spec, range(len(spec.layers)))
    places = (LayerPlace(0, *slots[index]) for index in slots)
    return CacheLayout(
        (CacheGroup(window, sink_tokens=sinks),), count, _with_sharing(spec, places)
    )


def cache_layout(spec: ModelSpec) -> CacheLayout:
    """Returns the layout of a model, its groups in the order of their first layers."""
    members: dict[tuple[int | None, int], list[int]] = {}
    for index, layer in enumerate(spec.layers):
        if layer.attention is not None:
            reads = layer.attention.window, layer.attention.sink_tokens
            members.setdefault(reads, []).append(index)
    if len(members) == 1:
        return one_group(spec)
    slots_of = {reads: _slots(spec, indexes) for reads, indexes in members.items()}
    size = _layers_a_page([count for count, _ in slots_of.values()])
    places: dict[int, LayerPlace] = {}
    groups, first_table = [], 0
    for (window, sinks), (count, slots) in slots_of.items():
        pages = ceil(count / size)
        groups.append(CacheGroup(window or 0, pages, sinks))
        for index, (slot, share) in slots.items():
            table = first_table + slot // size
            places[index] = LayerPlace(table, slot % size, share)
        first_table += pages
    in_order = (places[index] for index in sorted(places))
    return CacheLayout(tuple(groups), size, _with_sharing(spec, in_order))


def _slots(
    spec: ModelSpec, indexes: Iterable[int]
) -> tuple[int, dict[int, tuple[int, int]]]:
    """Returns how many slots these layers need, and of each that has keys of its own, by
    its index, its slot and its share of it. Layers that share one are of one kind.
    """
    slots: dict[int, tuple[int, int]] = {}
    next_place: dict[int, tuple[int, int]] = {}  # by how many layers share a slot
    count = 0
    for index in indexes:
        attention = spec.layers[index].attention
        if attention is None or attention.shares_keys_of is not None:
            continue
        slot, share = next_place.get(attention.layers_a_slot, (count, 0))
        count = max(count, slot + 1)
        slots[index] = slot, share
        next_place[attention.layers_a_slot] = slot, share + 1
        if share + 1 == attention.layers_a_slot:
            del next_place[attention.layers_a_slot]
    return count, slots


def _with_sharing(
    spec: ModelSpec, places: Iterable[LayerPlace]
) -> tuple[LayerPlace | None, ...]:
    """Returns the places of all layers, given those of the layers with keys of their
    own.
    """
    own_places, of_layers = iter(places), list[LayerPlace | None]()
    for layer in spec.layers:
        source = layer.shares_keys_of
        if layer.attention is None:
            of_layers.append(None)
        else:
            of_layers.append(next(own_places) if source is None else of_layers[source])
    return tuple(of_layers)


def with_states(layout: CacheLayout, spec: ModelSpec, block_size: int) -> CacheLayout:
    """Returns a layout with the group of a model's recurrent layers, if it has any.
    Raises ConfigError if pages are too small for them.
    """
    if not spec.has_states:
        return layout
    states = state_layout(spec, _number_bytes(spec, layout, block_size), block_size)
    group = CacheGroup(state=True, pages=states.pages)
    return evolve(layout, groups=(*layout.groups, group), states=states)


def plain_layout(spec: ModelSpec, block_size: int) -> CacheLayout:
    """Returns the layout with one table for all layers that keep blocks. Raises as
    `with_states`.
    """
    return with_states(one_group(spec), spec, block_size)


def page_bytes(spec: ModelSpec, layout: CacheLayout, block_size: int) -> int:
    """Returns the bytes of a page of the cache, scales included."""
    size = layout.layers_a_page * layer_kv_bytes_per_token(spec) * block_size
    if layout.states is None:
        return size
    return size - _number_bytes(spec, layout, block_size) + layout.states.page_bytes


def _number_bytes(spec: ModelSpec, layout: CacheLayout, block_size: int) -> int:
    """Returns the bytes of keys and values in a page, without scales."""
    scale_bytes = max(kv_format.scale_bytes for kv_format in spec.kv_formats)
    token_bytes = layer_kv_bytes_per_token(spec) - scale_bytes
    return layout.layers_a_page * token_bytes * block_size


def layout_for(spec: ModelSpec, config: EngineConfig) -> CacheLayout:
    """Returns the layout of a model in an engine with these groups. Raises ConfigError if
    it has none.
    """
    groups = config.block_groups
    if len(groups) == 1 and groups[0].pages == 1:
        layout = with_states(one_group(spec), spec, config.block_size)
        is_same = True
    else:
        layout = with_states(cache_layout(spec), spec, config.block_size)
        is_same = layout.block_groups == groups
    has_room = layout.state_pages <= config.state_pages
    if spec.rank_info.parallel.pipeline == 1:
        has_room = layout.state_pages == config.state_pages
    if not (is_same and has_room):
        raise ConfigError(
            f"groups: this model's layers are of {list(layout.groups)}, not of "
            f"{list(config.groups)}"
        )
    return evolve(layout, groups=(*layout.block_groups, *config.groups[len(groups) :]))


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
