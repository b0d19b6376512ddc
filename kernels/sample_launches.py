"""The launches of `sample.py`'s kernels, in their order, and the memory between them:
`scan` for all rows; `bound` and `gather` if some are filtered; `finish`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from minfer.kernels.bounds import BOUND_WORDS, MASSES
from minfer.kernels.sample_kernels import bound, choose, finish, gather, scan

SCAN_WARPS = 4
BOUND_WARPS = 8
GATHER_WARPS = 4
FINISH_WARPS = 8
Arguments = dict[str, Any]  # of kernels, by name
Exchange = Callable[[Tensor], Tensor]  # of [rows, columns], the columns of all ranks


class ProgramSizes(NamedTuple):
    """The sizes of programs and groups; powers of two."""

    chunk: int  # by a program of `scan`
    group: int  # whose largest logit, and mass, are stored
    span: int  # by a program of `gather`
    block: int  # of it at once
    tile: int  # by a pass over a list
    samples: int  # logits from which an edge is guessed
    waits: float  # about how many surely kept tokens are listed
    max_unguessed: int  # tokens that may be kept and are listed without a guess


class Workspace(NamedTuple):
    """The memory between the kernels, and the division of a row."""

    sizes: ProgramSizes
    num_chunks: int  # of a row: programs of `scan`
    group: int  # tokens of a group
    groups: int  # of a row
    pad: int  # these, as a power of two
    tops: Tensor  # [rows, groups]: the largest logit of each,
    sums: Tensor  # its mass,
    moments: Tensor  # and its mass times depth
    lists: Tensor  # [rows, width]: tokens of which it is not clear whether they are kept
    counts: Tensor  # [rows]: their number
    bad: Tensor  # [rows], with the next: the results of `sample`
    out: Tensor

    @classmethod
    def of(
        cls, sizes: ProgramSizes, logits: Tensor, rows: Tensor, *, filtered: bool
    ) -> "Workspace":
        """The memory for rows of logits. If none is filtered, groups are chunks, and a
        list holds a winner of each.
        """
        count, vocab = logits.shape
        num_chunks = triton.cdiv(vocab, sizes.chunk)
        group = sizes.group if filtered else sizes.chunk
        width = vocab if filtered else num_chunks
        groups = num_chunks * sizes.chunk // group
        # Rounded to 16 bytes, so that a kernel is compiled once.
        aligned = triton.cdiv(count, 4) * 4
        tops, sums, moments = logits.new_empty(3, aligned, groups, dtype=torch.float32)
        counts, bad, out = rows.new_empty(3, aligned)[:, :count]
        return cls(
            sizes=sizes,
            num_chunks=num_chunks,
            group=group,
            groups=groups,
            pad=triton.next_power_of_2(groups),
            tops=tops,
            sums=sums,
            moments=moments,
            lists=rows.new_empty(count, width),
            counts=counts,
            bad=bad,
            out=out,
        )

    @property
    def list_arguments(self) -> Arguments:
        """The lists, as arguments."""
        width = self.lists.shape[1]
        return {"lists": self.lists, "width": width, "counts": self.counts}


def launch_scan(
    row_arguments: Arguments, noise: Arguments, workspace: Workspace, *, filtered: bool
) -> None:
    """Read all logits: find winners, and the largest logit and mass of each group."""
    scan[workspace.num_chunks, len(workspace.lists)](
        **row_arguments,
        **noise,
        **workspace.list_arguments,
        tops=workspace.tops,
        sums=workspace.sums,
        moments=workspace.moments,
        num_chunks=workspace.num_chunks,
        first=0,
        values=workspace.tops,
        filtered=filtered,
        divided=False,
        chunk=workspace.sizes.chunk,
        group=workspace.group,
        num_warps=SCAN_WARPS,
    )


def launch_divided(
    row_arguments: Arguments,
    noise: Arguments,
    sizes: ProgramSizes,
    first: int,
    exchange: Exchange,
) -> tuple[Tensor, Tensor]:
    """Sample from this rank's columns, of tokens from `first` on, and those of the
    others; returns the results of `sample`.
    """
    logits, rows = row_arguments["logits"], row_arguments["rows"]
    count, columns = logits.shape
    aligned, num_chunks = triton.cdiv(count, 4) * 4, columns // sizes.chunk
    # Of each chunk the largest logit, the winner's logit, and the winner. Bits are
    # exchanged as integers.
    own_winners = rows.new_empty(3, aligned, num_chunks)
    counts, bad, out = rows.new_empty(3, aligned)[:, :count]
    tops, values = own_winners[:2].view(torch.float32)
    scan[num_chunks, count](
        **row_arguments,
        **noise,
        tops=tops,
        sums=tops,
        moments=tops,
        lists=own_winners[2],
        counts=counts,
        width=num_chunks,
        num_chunks=num_chunks,
        first=first,
        values=values,
        filtered=False,
        divided=True,
        chunk=sizes.chunk,
        group=sizes.chunk,
        num_warps=SCAN_WARPS,
    )
    all_winners = (
        exchange(own_winners.view(3 * aligned, num_chunks))
        .contiguous()
        .view(3, aligned, -1)
    )
    tops, values = all_winners[:2].view(torch.float32)
    num_chunks = all_winners.shape[2]
    of_logits = {"logits", "stride"}
    choose[count,](
        **{
            name: argument
            for name, argument in row_arguments.items()
            if name not in of_logits
        },
        **noise,
        tops=tops,
        values=values,
        lists=all_winners[2],
        num_chunks=num_chunks,
        out=out,
        bad=bad,
        pad=triton.next_power_of_2(num_chunks),
    )
    return out, bad


def launch_bound(row_arguments: Arguments, workspace: Workspace) -> Arguments:
    """Find depths that bound the edges of the filters; returns the bounds as
    arguments.
    """
    tops = workspace.tops
    bounds = {
        "tops": tops,
        "bounds": tops.new_empty(len(tops), BOUND_WORDS.value),
        "masses": workspace.lists.new_empty(len(tops), MASSES.value, dtype=torch.int64),
    }
    bound[len(workspace.lists),](
        **row_arguments,
        **bounds,
        sums=workspace.sums,
        moments=workspace.moments,
        groups=workspace.groups,
        group=workspace.group,
        pad=workspace.pad,
        samples=workspace.sizes.samples,
        max_unguessed=workspace.sizes.max_unguessed,
        waits=workspace.sizes.waits,
        num_warps=BOUND_WARPS,
    )
    return bounds


def launch_gather(
    row_arguments: Arguments, noise: Arguments, bounds: Arguments, workspace: Workspace
) -> None:
    """List the tokens within these depths, and sum the masses of those before them."""
    gather[
        triton.cdiv(row_arguments["vocab"], workspace.sizes.span), len(workspace.lists)
    ](
        **row_arguments,
        **noise,
        **bounds,
        **workspace.list_arguments,
        groups=workspace.groups,
        chunk=workspace.sizes.span,
        block=min(workspace.sizes.span, workspace.sizes.block),
        group=workspace.group,
        num_warps=GATHER_WARPS,
    )


def launch_finish(
    row_arguments: Arguments,
    noise: Arguments,
    bounds: Arguments,
    workspace: Workspace,
    *,
    filtered: bool,
) -> None:
    """Find the edges in the lists, and the winner of the kept tokens."""
    finish[len(workspace.lists),](
        **row_arguments,
        **noise,
        **bounds,
        **workspace.list_arguments,
        out=workspace.out,
        bad=workspace.bad,
        groups=workspace.groups,
        filtered=filtered,
        pad=workspace.pad,
        tile=workspace.sizes.tile,
        num_warps=FINISH_WARPS,
    )
