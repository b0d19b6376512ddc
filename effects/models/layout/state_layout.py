"""Where the states of a model's recurrent layers are in the pages of its cache.

Theory. A sequence's *state* is what all recurrent layers keep of it at one position. It
is a bundle of pages of the pool that holds keys and values, so blocks and states share
one memory, and a state is copied, evicted and moved as a block is. Its layers' parts
consist of units (state_parts.py). Units of one kind, of all layers, follow one
another, as many whole ones in a page as fit; the next kind begins in another page. So
unit u of a layer's part is in page

    first_page + (first_unit + u) // units_a_page

of the bundle, at place (first_unit + u) % units_a_page of that page.

Example: Qwen3-Next 80B has 24 KiB of keys and values of a token in its 12 layers with
attention, in bfloat16, so a page of 64 tokens has 1.5 MiB. Each of the 32 heads of its 36
recurrent layers has a state of 128 x 128 numbers in float32: 24 of them are in a page,
and all 1,152 in 48 pages. The inputs of its convolutions, 36 x 64 units of 3 x 128
numbers in bfloat16, are in 2 pages more.
"""

from collections import Counter
from math import ceil, prod
from typing import Final

from attrs import frozen

from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.state_parts import StatePart
from minfer.effects.models.dtypes import dtype_bytes
from minfer.values.checks import ConfigError

# Pages begin at multiples of as many bytes, as kernels read whole lines of memory.
PAGE_ALIGNMENT: Final = 128


@frozen
class PlacedPart:
    """Where a part of a layer's state is in the pages of a bundle."""

    part: StatePart
    dtype: str
    first_page: int  # of the units of its kind
    first_unit: int  # of its own, among these
    units_a_page: int


@frozen
class StateLayout:
    """How the recurrent layers of a model share the pages of a state."""

    pages: int  # of a state
    page_bytes: int  # of a page of the cache, without scales of INT8
    layers: tuple[tuple[PlacedPart, ...], ...]  # the parts of each layer; none: no state


@frozen
class _Kind:
    """Units of all layers that share pages: those of one shape and dtype."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit."""
        return prod(self.shape) * dtype_bytes(self.dtype)


def part_dtype(spec: ModelSpec, part: StatePart) -> str:
    """Returns the dtype of a part of a layer's state."""
    return spec.state_dtype if part.dtype == "state" else spec.dtype


def state_bytes(spec: ModelSpec) -> int:
    """Returns the bytes of a sequence's state, without padding of pages."""
    return sum(
        part.units * part.unit_elements * dtype_bytes(part_dtype(spec, part))
        for layer in spec.layers
        for part in layer.state_parts
    )


def state_layout(spec: ModelSpec, block_bytes: int, block_size: int) -> StateLayout:
    """Returns the layout of the states of a model whose pages hold `block_bytes` of keys
    and values, those of `block_size` tokens. Raises ConfigError if a page is too small
    for a unit.
    """
    page_bytes = ceil(block_bytes / PAGE_ALIGNMENT) * PAGE_ALIGNMENT
    counts = Counter[_Kind]()
    for layer in spec.layers:
        for part in layer.state_parts:
            counts[_Kind(part.shape, part_dtype(spec, part))] += part.units
    first_pages, pages = dict[_Kind, int](), 0
    for kind, units in counts.items():
        if kind.unit_bytes > page_bytes:
            raise _page_too_small(kind, block_bytes, block_size)
        first_pages[kind] = pages
        pages += ceil(units / (page_bytes // kind.unit_bytes))
    placed, layers = Counter[_Kind](), []
    for layer in spec.layers:
        parts = []
        for part in layer.state_parts:
            kind = _Kind(part.shape, part_dtype(spec, part))
            parts.append(
                PlacedPart(
                    part,
                    kind.dtype,
                    first_pages[kind],
                    placed[kind],
                    page_bytes // kind.unit_bytes,
                )
            )
            placed[kind] += part.units
        layers.append(tuple(parts))
    return StateLayout(pages, page_bytes, tuple(layers))


def _page_too_small(kind: _Kind, block_bytes: int, block_size: int) -> ConfigError:
    blocks = ceil(kind.unit_bytes / block_bytes)
    needed = block_size * (1 << (blocks - 1).bit_length())
    shape = " x ".join(map(str, kind.shape))
    return ConfigError(
        f"a block of {block_size} token(s) (--block-size) is a page of {block_bytes} "
        f"bytes, which must have room for a unit of the recurrent layers' state: "
        f"{shape} numbers in {kind.dtype}, {kind.unit_bytes} bytes; use --block-size "
        f"{needed}"
    )
