"""The sum over ranks of a part that each of them has, in memory that all ranks can read,
added to the residual stream.

Theory. Tensor parallel ranks need a sum of [tokens, hidden] twice in each layer. At few
tokens its time is latency alone: NCCL takes 12 us of 8 KiB on two H100s, of which the
bytes take 0.02. In a *one-shot* sum each rank copies its part to a buffer of its own that
the others can read (NVLink), waits until all have done so, and adds the parts of all. In
a *two-shot* sum each rank adds one share of the elements only, waits again, and reads the
other shares, added; so it reads 2 (n - 1) / n times the message instead of (n - 1) times.
Both add in rank order in float32, and the residual last, so results are bit-equal on
all ranks, whichever of the two it was.

How ranks wait. Program p of a rank waits for programs p of the others, which copied the
elements that it will read, and for no others: there are no barriers of all programs. Each
rank has a flag for each program and rank, in memory that the others can write. A program
stores the number of its wait to its flags of all ranks (release, system scope), and polls
its own ones (acquire) until none is less. Numbers follow from a count of calls in device
memory, which the kernel itself advances: nothing on the host changes, so that a CUDA
graph can be replayed. They only grow (64 bits), so flags need no reset, and a rank that
is ahead does no harm.

Why two halves are enough. Calls use the halves of the buffer in turn. A rank writes a
half again in call k + 2, after its call k + 1 is complete, of which each program saw
flags of all ranks of call k + 1. Each rank stores these after its call k is complete, for
kernels of a stream run one after the other (pdl.py keeps that). So all have read what
they read in call k. Within a two-shot call a rank overwrites only its own share of its
own buffer, which no other rank reads before the second wait.

All programs of a launch must run at once, and all ranks must make the same calls, of one
stream. There are at most `PROGRAMS` of at most 512 threads, for which 32 multiprocessors
have room. A rank that is gone makes the others wait forever: who watches the processes
has to end them.
"""

from typing import Final

import torch
import triton
from attrs import frozen
from torch import Tensor

from minfer.kernels.pdl import early
from minfer.kernels.peer_sum_kernels import add_over_ranks

PROGRAMS: Final = 128  # the most of a launch; a power of 2, equal on all ranks
FLAG_BYTES: Final = 8  # of a flag
# Elements of a tile and warps of its program: of small messages, which are to be spread
# over many programs, and of large ones.
SMALL_TILE: Final = 1024, 4
LARGE_TILE: Final = 4096, 16


@frozen
class PeerBuffer:
    """The memory of all ranks, as one of them sees it. Before the first call, all flags
    are zero on all ranks.
    """

    rank: int
    halves: tuple[Tensor, ...]  # [2 * half] of each rank, of the model's dtype
    flags: Tensor  # int64 [ranks]: addresses of each rank's `flag_bytes`
    calls: Tensor  # int64 [PROGRAMS], on this rank alone: how many calls there were
    owners: tuple[object, ...] = ()  # what keeps the memory of all ranks mapped

    @property
    def half(self) -> int:
        """The most elements of a part."""
        return len(self.halves[0]) // 2


def flag_bytes(ranks: int) -> int:
    """Returns the size of the flags of a rank."""
    return PROGRAMS * ranks * FLAG_BYTES


def peer_sum(
    partial: Tensor,
    buffer: PeerBuffer,
    residual: Tensor | None = None,
    two_shot: bool = False,
) -> None:
    """residual += sum over ranks of `partial`, or without `residual`: partial = that sum.

    Both [tokens, hidden] and contiguous, of one dtype; no more elements than a half. All
    ranks call this with equal shapes, and `two_shot` (a two-shot sum) equal.
    """
    size, ranks = partial.numel(), len(buffer.halves)
    if size > buffer.half or partial.dtype != buffer.halves[0].dtype:
        raise ValueError(
            f"{size} elements of {partial.dtype} for buffers of {buffer.half}"
        )
    num_summed = triton.cdiv(size, ranks) if two_shot else size
    tile, warps = SMALL_TILE if num_summed <= PROGRAMS * SMALL_TILE[0] else LARGE_TILE
    # A share has whole tiles, so that vectors are aligned.
    share = triton.cdiv(num_summed, tile) * tile
    out = partial if residual is None else residual
    add_over_ranks[min(PROGRAMS, share // tile),](
        partial=partial,
        out=out,
        halves=buffer.halves,
        flags=buffer.flags,
        calls=buffer.calls,
        size=size,
        share=share,
        half=buffer.half,
        rank=buffer.rank,
        ranks=ranks,
        width=triton.next_power_of_2(ranks),
        shares=ranks if two_shot else 1,
        add=residual is not None,
        tile=tile,
        max_programs=PROGRAMS,
        num_warps=warps,
        launch_pdl=early(partial),
    )


def reference(partials: list[Tensor], residual: Tensor | None = None) -> Tensor:
    """Returns what `peer_sum` stores, of the parts of all ranks."""
    total = torch.zeros_like(partials[0], dtype=torch.float32)
    for partial in partials:
        total += partial
    if residual is not None:
        total += residual
    return total.to(partials[0].dtype)
