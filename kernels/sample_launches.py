"""The launches of `sample.py`'s kernels, in their order, and the memory between them:
`scan` for all rows; `bound` and `gather` if some are filtered; `finish`.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from minfer.kernels.bounds import FACTS, MASSES
from minfer.kernels.sample_kernels import bound, finish, gather, scan

SCAN_WARPS = 4
BOUND_WARPS = 8
GATHER_WARPS = 4
FINISH_WARPS = 8
Arguments = dict[str, Any]  # of kernels, by name


class Sizes(NamedTuple):
    """The sizes of programs and groups; powers of two."""

    chunk: int  # by a program of `scan`
    group: int  # whose largest logit, and mass, are stored
    span: int  # by a program of `gather`
    block: int  # of it at once
    tile: int  # by a pass over a list
    samples: int  # logits from which an edge is guessed
    waits: float  # about how many surely kept tokens are listed
    few: int  # up to so many tokens that may be kept are listed without a guess


class Space(NamedTuple):
    """The memory between the kernels, and the division of a row."""

    sizes: Sizes
    parts: int  # chunks of a row: programs of `scan`
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
    def of(cls, sizes: Sizes, logits: Tensor, who: Tensor, *, filtered: bool) -> "Space":
        """The memory for rows of logits. If none is filtered, groups are chunks, and a
        list holds a winner of each.
        """
        rows, vocab = logits.shape
        parts = triton.cdiv(vocab, sizes.chunk)
        group = sizes.group if filtered else sizes.chunk
        width = vocab if filtered else parts
        groups = parts * sizes.chunk // group
        # Rounded to 16 bytes, so that a kernel is compiled once.
        aligned = triton.cdiv(rows, 4) * 4
        tops, sums, moments = logits.new_empty(3, aligned, groups, dtype=torch.float32)
        counts, bad, out = who.new_empty(3, aligned)[:, :rows]
        return cls(
            sizes=sizes,
            parts=parts,
            group=group,
            groups=groups,
            pad=triton.next_power_of_2(groups),
            tops=tops,
            sums=sums,
            moments=moments,
            lists=who.new_empty(rows, width),
            counts=counts,
            bad=bad,
            out=out,
        )

    @property
    def listed(self) -> Arguments:
        """The lists, as arguments."""
        width = self.lists.shape[1]
        return {"lists": self.lists, "width": width, "counts": self.counts}


def launch_scan(
    asked: Arguments, noise: Arguments, space: Space, *, filtered: bool
) -> None:
    """Read all logits: find winners, and the largest logit and mass of each group."""
    scan[space.parts, len(space.lists)](
        **asked,
        **noise,
        **space.listed,
        tops=space.tops,
        sums=space.sums,
        moments=space.moments,
        parts=space.parts,
        filtered=filtered,
        chunk=space.sizes.chunk,
        group=space.group,
        num_warps=SCAN_WARPS,
    )


def launch_bound(asked: Arguments, space: Space) -> Arguments:
    """Find depths that bound the edges of the filters; returns the bounds as
    arguments.
    """
    tops = space.tops
    known = {
        "tops": tops,
        "bounds": tops.new_empty(len(tops), FACTS.value),
        "masses": space.lists.new_empty(len(tops), MASSES.value, dtype=torch.int64),
    }
    bound[len(space.lists),](
        **asked,
        **known,
        sums=space.sums,
        moments=space.moments,
        groups=space.groups,
        group=space.group,
        pad=space.pad,
        samples=space.sizes.samples,
        few=space.sizes.few,
        waits=space.sizes.waits,
        num_warps=BOUND_WARPS,
    )
    return known


def launch_gather(
    asked: Arguments, noise: Arguments, known: Arguments, space: Space
) -> None:
    """List the tokens within these depths, and sum the masses of those before them."""
    gather[triton.cdiv(asked["vocab"], space.sizes.span), len(space.lists)](
        **asked,
        **noise,
        **known,
        **space.listed,
        groups=space.groups,
        chunk=space.sizes.span,
        block=min(space.sizes.span, space.sizes.block),
        group=space.group,
        num_warps=GATHER_WARPS,
    )


def launch_finish(
    asked: Arguments,
    noise: Arguments,
    known: Arguments,
    space: Space,
    *,
    filtered: bool,
) -> None:
    """Find the edges in the lists, and the winner of the kept tokens."""
    finish[len(space.lists),](
        **asked,
        **noise,
        **known,
        **space.listed,
        out=space.out,
        bad=space.bad,
        groups=space.groups,
        filtered=filtered,
        pad=space.pad,
        tile=space.sizes.tile,
        num_warps=FINISH_WARPS,
    )
