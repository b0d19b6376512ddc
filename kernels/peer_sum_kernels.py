"""The kernel of peer_sum.py, which has its theory."""

import triton
import triton.language as tl

from minfer.kernels.pdl import follow


@triton.jit
def _load_flags(flags):
    """The flags, as other ranks store them; what they stored before is visible then."""
    if tl.target_info.is_cuda():
        asm: tl.constexpr = "ld.acquire.sys.global.b64 $0, [$1];"
        values = tl.inline_asm_elementwise(
            asm, "=l,l", [flags.to(tl.int64)], tl.int64, is_pure=False, pack=1
        )
    else:  # the interpreter
        values = tl.atomic_add(flags, 0, sem="acquire", scope="sys")
    return values


@triton.jit
def _wait_for_ranks(peer_flags, own_flags, number):
    """Wait until this program of all ranks has come to the wait of this number."""
    tl.debug_barrier()  # all threads have stored, before one of them says so
    value = tl.zeros_like(peer_flags.to(tl.int64)) + number
    tl.atomic_xchg(peer_flags, value, sem="release", scope="sys")
    while tl.min(_load_flags(own_flags), 0) < number:
        pass
    tl.debug_barrier()  # no thread reads before


@triton.jit
def add_over_ranks(  # noqa: C901  # what is compiled has few of these branches
    partial,
    out,
    halves,
    flags,
    calls,
    size,
    share,
    half,
    rank: tl.constexpr,
    ranks: tl.constexpr,
    width: tl.constexpr,
    shares: tl.constexpr,
    add: tl.constexpr,
    tile: tl.constexpr,
    max_programs: tl.constexpr,
):
    """Grid [at most `max_programs`]: program p has tiles p, p + grid, ... of each share.
    A one-shot sum has one share, which all ranks add.
    """
    program, grid = tl.program_id(0), tl.num_programs(0)
    first, step = program * tile, grid * tile
    rank_lanes = tl.minimum(tl.arange(0, width), ranks - 1)
    flag = program * ranks + rank
    peer_flags = tl.load(flags + rank_lanes).to(tl.pointer_type(tl.int64)) + flag
    own_flags = (
        tl.load(flags + rank).to(tl.pointer_type(tl.int64)) + (flag - rank) + rank_lanes
    )
    follow()
    call = tl.load(calls + program)
    shift = tl.multiple_of((call % 2) * half, 16)
    own_half = halves[rank] + shift
    for start in range(first, share, step):
        for share_index in tl.static_range(shares):
            if shares == 1 or share_index != rank:
                lane = share_index * share + start + tl.arange(0, tile)
                copied = tl.load(partial + lane, mask=lane < size)
                tl.store(own_half + lane, copied, mask=lane < size)
    _wait_for_ranks(peer_flags, own_flags, 2 * call + 1)
    for start in range(first, share, step):
        lane = start + tl.arange(0, tile)
        if shares > 1:
            lane += rank * share
        total = tl.zeros([tile], tl.float32)
        for peer in tl.static_range(ranks):
            addend = partial if peer == rank else halves[peer] + shift
            total += tl.load(addend + lane, mask=lane < size, other=0.0).to(tl.float32)
        if add:
            total += tl.load(out + lane, mask=lane < size, other=0.0).to(tl.float32)
        result = total.to(partial.dtype.element_ty)
        tl.store(out + lane, result, mask=lane < size)
        if shares > 1:
            tl.store(own_half + lane, result, mask=lane < size)
    if shares > 1:
        _wait_for_ranks(peer_flags, own_flags, 2 * call + 2)
        for start in range(first, share, step):
            for share_index in tl.static_range(shares):
                if share_index != rank:
                    lane = share_index * share + start + tl.arange(0, tile)
                    peer_half = halves[share_index] + shift
                    result = tl.load(peer_half + lane, mask=lane < size)
                    tl.store(out + lane, result, mask=lane < size)
    # The counts of all programs stay equal, whatever the grid.
    owned = program + grid * tl.arange(0, max_programs)
    tl.store(calls + owned, call + 1, mask=owned < max_programs)
