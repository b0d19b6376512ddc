"""The memory of a cache, and its views: keys and values, and states of recurrent layers.

Theory. Without recurrent layers, each slot (models/layout/cache_layout.py) is
contiguous, with its part of all pages: [slots, ..., pages, block_size, ...]. A state
takes whole pages, with all slots. So with recurrent layers each page is contiguous: the
memory is [pages, page_bytes], and a slot is a view of it with a larger stride of pages.
"""

from collections.abc import Callable, Mapping
from math import prod

import torch
from attrs import frozen
from torch import Tensor

from minfer.effects.models.dtypes import torch_dtype
from minfer.effects.models.layout.cache_layout import CacheLayout
from minfer.effects.models.layout.state_layout import PlacedPart, StateLayout
from minfer.kernels.cache_numbers import INT8, as_bytes
from minfer.kernels.paged_states import PagedUnits

# Returns memory of a shape and a dtype.
Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]


@frozen(eq=False)
class CacheMemory:
    """All that a cache stores, and views of it."""

    data: Tensor  # all but scales
    page_dim: int  # the dimension of `data` that is pages
    # Keys and values, or latents: a view of `data`, [slots, ..., pages, block_size, ...]
    numbers: Tensor
    scales: Tensor | None  # of INT8: as `numbers` but for the last dimension, float32
    slot_page_dim: int  # the dimension of `numbers` and `scales` that is pages
    states: tuple["PagedState", ...] = ()  # of each layer, if any is recurrent

    @classmethod
    def allocate(
        cls,
        shape: tuple[int, ...],
        page_dim: int,
        dtype: torch.dtype,
        layout: CacheLayout,
        allocate: Allocate,
    ) -> "CacheMemory":
        """Returns memory whose keys and values have this shape, with its pages in
        dimension `page_dim`. Raises as `allocate`.
        """
        scales = allocate(shape[:-1], torch.float32) if dtype is INT8 else None
        if layout.states is None:
            data = allocate(shape, dtype)
            return cls(data, page_dim, data, scales, page_dim)
        pages, page_shape = shape[page_dim], (*shape[:page_dim], *shape[page_dim + 1 :])
        data = allocate((pages, layout.states.page_bytes), torch.uint8)
        numbers = data.view(dtype)[:, : prod(page_shape)].view(pages, *page_shape)
        states = _layer_states(data, layout.states)
        return cls(data, 0, numbers.movedim(0, page_dim), scales, page_dim, states)

    def page_views(self) -> list[Tensor]:
        """Returns views [pages, ...] of all that is stored; tensors of 8-bit numbers are
        viewed as bytes.
        """
        views = [as_bytes(self.data).movedim(self.page_dim, 0)]
        if self.scales is not None:
            views.append(self.scales.movedim(self.slot_page_dim, 0))
        return views


@frozen(eq=False)
class PagedState:
    """Where the state of one layer is in the pages of a cache."""

    parts: Mapping[str, PagedUnits]  # by the names of its `state_parts`

    def part(self, name: str) -> PagedUnits:
        """Returns the units of one part, which the layer has."""
        return self.parts[name]


def _layer_states(data: Tensor, states: StateLayout) -> tuple[PagedState, ...]:
    """Returns the states of all layers in memory [pages, page_bytes]."""
    return tuple(
        PagedState({placed.part.name: _units(data, placed) for placed in parts})
        for parts in states.layers
    )


def _units(data: Tensor, placed: PlacedPart) -> PagedUnits:
    """Returns the units of a part of a layer's state."""
    part, elements = placed.part, placed.units_a_page * placed.part.unit_elements
    typed = data.view(torch_dtype(placed.dtype))[:, :elements]
    return PagedUnits(
        pages=typed.view(len(data), placed.units_a_page, *part.shape),
        first_unit=placed.first_unit,
        units=part.units,
        first_page=placed.first_page,
    )
