"""States of recurrent layers in pages of the KV cache's pool, read and written by index.

A layer's part of a state is a number of *units* of one shape: the state of a head, or the
last inputs of some channels of a convolution. A unit lies within one page.
"""

import torch
from attrs import frozen
from torch import Tensor


@frozen(eq=False)
class PagedUnits:
    """Where the units of a part of a layer's state lie.

    Unit u of a row lies in page table[row, first_page + (first_unit + u) // per_page], at
    place (first_unit + u) % per_page of it.
    """

    # [num_pages, per_page, *unit shape]: a view of the cache. A unit is contiguous; the
    # stride of pages may be larger than the units of a page, as other parts lie there too
    pages: Tensor
    first_unit: int  # of this layer, among the units of all layers
    units: int  # of this layer
    first_page: int  # the column of the table with the part's first page

    @property
    def unit_shape(self) -> tuple[int, ...]:
        """The shape of a unit."""
        return tuple(self.pages.shape[2:])


def gather_states(units: PagedUnits, table: Tensor, rows: Tensor) -> Tensor:
    """Returns the states of `rows` [n], copied: [n, units, *unit shape].

    `table` [table rows, pages of a state] int32: page ids. Does not synchronise.
    """
    pages, places = _places(units, table, rows)
    return units.pages[pages, places]


def scatter_states(
    units: PagedUnits, table: Tensor, rows: Tensor, values: Tensor
) -> None:
    """Write `values` [n, units, *unit shape], rounded to the pages' dtype, as the states
    of `rows` [n], which differ.

    `table` [table rows, pages of a state] int32: page ids. Does not synchronise.
    """
    pages, places = _places(units, table, rows)
    units.pages[pages, places] = values.to(units.pages.dtype)


def copy_states(
    units: PagedUnits, table: Tensor, rows: Tensor, targets: Tensor | None
) -> None:
    """Copy the states of `rows` [n] to those of `targets` [n]; None: nothing."""
    if targets is not None:
        scatter_states(units, table, targets, gather_states(units, table, rows))


def _places(units: PagedUnits, table: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the pages of rows' units [n, units], and their places there [1, units]."""
    per_page = units.pages.shape[1]
    unit = torch.arange(units.units, device=table.device) + units.first_unit
    columns = unit // per_page + units.first_page
    return table[rows.long()[:, None], columns].long(), (unit % per_page)[None]
