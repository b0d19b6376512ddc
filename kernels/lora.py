"""Adds the low-rank products of adapters to a step's products, of all its rows at once.

Theory. An adapter (LoRA, Hu et al. 2021) changes a matrix W to W + B @ A, where A has few
rows, its *rank*. W + B @ A is not stored: x @ W.T is computed for all rows, whatever
their adapters, and x @ A.T @ B.T of each row's own adapter is added (Punica, Chen et al.
2023; S-LoRA, Sheng et al. 2023). Adapters lie in *slots*; a row has the slot of its
request, or -1. The first product, to [rows, rank], is the *shrink*; the second one, which
adds to the result, the *expand*: two launches for a product, of all A's of the matrices
fused in it. Slots have room for one rank; a smaller one is not read beyond it, and a
matrix that an adapter does not change has rank 0: a program of it ends after three loads.

Bytes. Rank 16 on all seven matrices of a 7B's layer has 0.5 % of its bytes. A decode step
reads the adapters of its rows once, at best: 32 different ones are 17 % of the weights.

Rows. Up to `SINGLE_ROWS` rows have programs of their own, without a sort. More are
grouped by slot once a step: `group_rows` counts each slot's rows, and cuts them into
tiles; `order_rows` lists them. There are at most min(rows, slots) + rows // tile tiles,
which is the grid, whatever the rows have: no host waits for a count, so a CUDA graph
holds it all. A tile reads its slot's matrices once for all of its rows, by tensor cores.
A row's bits do not depend on its place in a tile (experts.py).

A norm before the product is computed in the shrink, as in fused_linear.py: it multiplies
with the factors, and sums squares; the expand scales.

The inputs of a shrink may be split among programs, as few rows are few programs. Each
stores its sums in float32, and the expand adds them in order: bits are the same each
time.

Experts. A row is a pair of a token and one of its experts, a group a slot and an expert.
What is added to gates and ups goes into their product before the activation: the kernels
of experts.py read it. What is added to the outputs of experts is weighed as they are, and
added to the residual.
"""

from functools import cache

import torch
import triton
from attrs import field, frozen
from torch import Tensor

from minfer.kernels import on_triton, plain_lora
from minfer.kernels.fused_linear import normalised_before
from minfer.kernels.leaves import AdapterSlots, ChosenExperts, Norm
from minfer.kernels.lora_kernels import (
    expand_rows,
    expand_tiles,
    group_rows,
    order_rows,
    shrink_rows,
    shrink_tiles,
)
from minfer.kernels.lora_tunes import LoraTune, max_tiles, tune_of
from minfer.kernels.pdl import arrivals, early
from minfer.kernels.plain_lora import AdapterTokens

CHUNK = 1024  # rows of a program that groups them
GROUP_WARPS = 4
MIN_LANES = 16  # of tensor cores
MAX_GROUPS = 1 << 14  # that one program counts; rows of more are not grouped


@frozen(eq=False)
class _Tiles:
    """The rows of each group, in tiles."""

    order: Tensor  # [rows]
    starts: Tensor  # [groups]
    tiles: Tensor  # [1 + 3 * max_tiles]
    max_tiles: int


def add_lora(
    out: Tensor,
    x: Tensor,
    adapters: AdapterSlots,
    tokens: AdapterTokens,
    norm: Norm | None = None,
    tune: LoraTune | None = None,
) -> None:
    """Add normalise(x) @ A.T @ B.T of each token's adapter to `out` [tokens, outputs], in
    place; x [tokens, inputs], rows contiguous; without a norm, of rows as they are. Call
    it before a CUDA graph captures it. tune: constants instead of the computed ones
    (lora_tunes.py).
    """
    if not _fits(out, x):
        plain_lora.add_lora(out, x, adapters, tokens, norm)
        return
    x, norm = normalised_before(x, norm)
    rows, slots = len(x), len(adapters.lora_a)
    tune = tune or _tune(adapters, rows)
    grouped = None if tune.tile == 1 else _tiles_of(tokens, slots, tune.tile)
    of_step = _Rows(tokens.slots, None, rows)
    _add(out, x, adapters, of_step, grouped, tune, norm)


def _tiles_of(tokens: AdapterTokens, slots: int, tile: int) -> _Tiles:
    """Returns the tokens of each slot, grouped once a step."""
    found: _Tiles | None = tokens.groups.get(tile)
    if found is None:
        found = tokens.groups[tile] = _grouped(tokens.slots, None, slots, 1, tile)
    return found


@frozen(eq=False)
class ExpertAdapters:
    """The adapters of a step's pairs of a token and an expert, of one layer."""

    tokens: AdapterTokens
    choice: ChosenExperts
    _tiles: dict[int, _Tiles] = field(factory=dict, init=False)

    def add(self, out: Tensor, x: Tensor, adapters: AdapterSlots) -> None:
        """Add x @ A.T @ B.T of each pair's adapter and expert to `out` [pairs, outputs],
        in place; x [tokens, inputs] or [pairs, inputs], rows contiguous, on a GPU.
        """
        slots, experts = adapters.lora_a.shape[:2]
        pairs = len(out)
        tune = _tune(adapters, pairs if slots * experts <= MAX_GROUPS else 1)
        rows = _Rows(self.tokens.slots, self.choice.ids, pairs, pairs // max(1, len(x)))
        grouped = None
        if tune.tile > 1:
            grouped = self._tiles.get(tune.tile)
            if grouped is None:
                slots_of = self.tokens.slots
                grouped = _grouped(slots_of, self.choice.ids, slots, experts, tune.tile)
                self._tiles[tune.tile] = grouped
        _add(out, x, adapters, rows, grouped, tune)


def _fits(out: Tensor, x: Tensor) -> bool:
    """Whether the kernels take such tensors."""
    return on_triton(x) and len(x) > 0 and out.stride(1) == x.stride(1) == 1


def _tune(adapters: AdapterSlots, rows: int) -> LoraTune:
    return tune_of(rows, int(adapters.lora_a.shape[-1]), _lanes(adapters))


def _lanes(adapters: AdapterSlots) -> int:
    lanes: int = triton.next_power_of_2(adapters.rank)
    return max(MIN_LANES, lanes)


def _grouped(
    slots: Tensor, ids: Tensor | None, num_slots: int, experts: int, tile: int
) -> _Tiles:
    """Group tokens by slot, or pairs by slot and expert."""
    rows, top_k = len(slots), 1
    if ids is not None:
        rows, top_k = ids.numel(), ids.shape[1]
    groups = num_slots * experts
    num_tiles = max_tiles(rows, groups, tile)
    tiles = _Tiles(
        order=slots.new_empty(rows),
        starts=slots.new_empty(groups),
        tiles=slots.new_empty(1 + 3 * num_tiles),
        max_tiles=num_tiles,
    )
    places = slots.new_empty(rows)
    grid = (triton.cdiv(rows, CHUNK),)
    group_rows[grid](
        slots=slots,
        ids=ids,
        places=places,
        starts=tiles.starts,
        tiles=tiles.tiles,
        counts=arrivals(slots.device, 1 + groups),
        rows=rows,
        max_tiles=num_tiles,
        top_k=top_k,
        experts=experts,
        groups=groups,
        tile=tile,
        chunk=CHUNK,
        lanes=triton.next_power_of_2(groups),
        num_warps=GROUP_WARPS,
        launch_pdl=early(slots),
    )
    order_rows[grid](
        slots=slots,
        ids=ids,
        places=places,
        starts=tiles.starts,
        order=tiles.order,
        rows=rows,
        top_k=top_k,
        experts=experts,
        chunk=CHUNK,
        num_warps=GROUP_WARPS,
        launch_pdl=early(slots),
    )
    return tiles


@frozen(eq=False)
class _Rows:
    """Rows that adapters are added to."""

    slots: Tensor  # [tokens]
    ids: Tensor | None  # [tokens, top_k] experts
    count: int
    x_rows: int = 1  # rows with the same row of x

    @property
    def top_k(self) -> int:
        """Rows of a token."""
        return 1 if self.ids is None else int(self.ids.shape[1])


def _add(
    out: Tensor,
    x: Tensor,
    adapters: AdapterSlots,
    rows: _Rows,
    grouped: _Tiles | None,
    tune: LoraTune,
    norm: Norm | None = None,
) -> None:
    """Launch a shrink and an expand."""
    parts, lanes = len(adapters.parts), _lanes(adapters)
    shape = (tune.splits, rows.count, parts)
    sums = x.new_empty(*shape, lanes, dtype=torch.float32)
    squares = None if norm is None else x.new_empty(shape, dtype=torch.float32)
    shrunk = _Shrunk(sums, squares, x.shape[1], norm)
    _shrink(shrunk, x, adapters, rows, grouped, tune)
    _expand(out, shrunk, adapters, rows, grouped, tune)


@frozen(eq=False)
class _Shrunk:
    """What shrinks return."""

    sums: Tensor  # [splits, rows, parts, lanes] float32
    squares: Tensor | None  # [splits, rows, parts] float32; None: there is no norm
    inputs: int
    norm: Norm | None


def _shrink(
    shrunk: _Shrunk,
    x: Tensor,
    adapters: AdapterSlots,
    rows: _Rows,
    grouped: _Tiles | None,
    tune: LoraTune,
) -> None:
    splits, _, parts, lanes = shrunk.sums.shape
    depths = triton.cdiv(shrunk.inputs, tune.depth)
    span = triton.cdiv(depths, splits) * tune.depth
    common = {
        "x": x,
        "x_stride": x.stride(0),
        "lora_a": adapters.lora_a,
        "slot_stride": adapters.lora_a.stride(0),
        "expert_stride": _expert_stride(adapters.lora_a),
        "ranks": adapters.ranks,
        "ranks_stride": adapters.ranks.stride(0),
        "sums": shrunk.sums,
        "squares": shrunk.squares,
        "norm": None if shrunk.norm is None else shrunk.norm.weight,
        "rows": rows.count,
        "x_rows": rows.x_rows,
        "parts": parts,
        "size": shrunk.inputs,
        "rank": adapters.rank,
        "lanes": lanes,
        "span": span,
        "depth": tune.depth,
        "num_warps": tune.warps,
        "launch_pdl": early(x),
    }
    if grouped is None:
        shrink_rows[rows.count, parts, splits](
            slots=rows.slots, ids=rows.ids, top_k=rows.top_k, **common
        )
    else:
        shrink_tiles[grouped.max_tiles, parts, splits](
            order=grouped.order,
            starts=grouped.starts,
            tiles=grouped.tiles,
            max_tiles=grouped.max_tiles,
            experts=_experts(adapters.lora_a),
            tile=tune.tile,
            stages=tune.stages,
            **common,
        )


def _expand(
    out: Tensor,
    shrunk: _Shrunk,
    adapters: AdapterSlots,
    rows: _Rows,
    grouped: _Tiles | None,
    tune: LoraTune,
) -> None:
    splits, _, parts, lanes = shrunk.sums.shape
    column_tiles = _column_tiles(adapters.parts, tune.columns, out.device)
    common = {
        "lora_b": adapters.lora_b,
        "slot_stride": adapters.lora_b.stride(0),
        "expert_stride": _expert_stride(adapters.lora_b),
        "ranks": adapters.ranks,
        "ranks_stride": adapters.ranks.stride(0),
        "sums": shrunk.sums,
        "squares": shrunk.squares,
        "eps": 0.0 if shrunk.norm is None else shrunk.norm.eps,
        "out": out,
        "out_stride": out.stride(0),
        "column_tiles": column_tiles,
        "rows": rows.count,
        "parts": parts,
        "size": shrunk.inputs,
        "columns": adapters.lora_b.shape[-1],
        "lanes": lanes,
        "splits": splits,
        "cols": tune.columns,
        "num_warps": tune.warps,
        "launch_pdl": early(out),
    }
    if grouped is None:
        expand_rows[rows.count, len(column_tiles)](
            slots=rows.slots, ids=rows.ids, top_k=rows.top_k, **common
        )
    else:
        expand_tiles[grouped.max_tiles, len(column_tiles)](
            order=grouped.order,
            starts=grouped.starts,
            tiles=grouped.tiles,
            max_tiles=grouped.max_tiles,
            experts=_experts(adapters.lora_b),
            tile=tune.tile,
            **common,
        )


def _experts(matrices: Tensor) -> int:
    """Returns the experts of the slots of a matrix; 1 if it is of none."""
    return int(matrices.shape[1]) if matrices.dim() == 4 else 1


def _expert_stride(matrices: Tensor) -> int:
    return int(matrices.stride(1)) if matrices.dim() == 4 else 0


@cache
def _column_tiles(parts: tuple[int, ...], columns: int, device: torch.device) -> Tensor:
    """Returns the tiles of columns of matrices that are fused in one: of each its part,
    its first column, and the part's end.
    """
    tiles, end = list[tuple[int, int, int]](), 0
    for part, outputs in enumerate(parts):
        start, end = end, end + outputs
        tiles += [(part, first, end) for first in range(start, end, columns)]
    return torch.tensor(tiles, dtype=torch.int32, device=device)
