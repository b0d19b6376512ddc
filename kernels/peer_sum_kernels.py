"""The kernel of peer_sum.py, which has its theory."""

import triton
import triton.language as tl

from minfer.kernels.pdl import follow


@triton.jit
def _seen(flags):
    """The flags, as other ranks store them; what they stored before is visible then."""
    if tl.target_info.is_cuda():
        asm: tl.constexpr = "ld.acquire.sys.global.b64 $0, [$1];"
        found = tl.inline_asm_elementwise(
            asm, "=l,l", [flags.to(tl.int64)], tl.int64, is_pure=False, pack=1
        )
    else:  # the interpreter
        found = tl.atomic_add(flags, 0, sem="acquire", scope="sys")
    return found


@triton.jit
def _meet(theirs, ours, number):
    """Wait until this program of all ranks has come to the wait of this number."""
    tl.debug_barrier()  # all threads have stored, before one of them says so
    value = tl.zeros_like(theirs.to(tl.int64)) + number
    tl.atomic_xchg(theirs, value, sem="release", scope="sys")
    while tl.min(_seen(ours), 0) < number:
        pass
    tl.debug_barrier()  # no thread reads before


@triton.jit
def add_over_ranks(  # noqa: C901  # what is compiled has few of these branches
    part,
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
    most: tl.constexpr,
):
    """Grid [at most `most`]: program p has tiles p, p + grid, ... of each share. A
    one-shot sum has one share, which all ranks add.
    """
    program, grid = tl.program_id(0), tl.num_programs(0)
    first, step = program * tile, grid * tile
    each = tl.minimum(tl.arange(0, width), ranks - 1)
    flag = program * ranks + rank
    theirs = tl.load(flags + each).to(tl.pointer_type(tl.int64)) + flag
    ours = tl.load(flags + rank).to(tl.pointer_type(tl.int64)) + (flag - rank) + each
    follow()
    call = tl.load(calls + program)
    shift = tl.multiple_of((call % 2) * half, 16)
    mine = halves[rank] + shift
    for at in range(first, share, step):
        for of in tl.static_range(shares):
            if shares == 1 or of != rank:
                lane = of * share + at + tl.arange(0, tile)
                copied = tl.load(part + lane, mask=lane < size)
                tl.store(mine + lane, copied, mask=lane < size)
    _meet(theirs, ours, 2 * call + 1)
    for at in range(first, share, step):
        lane = at + tl.arange(0, tile)
        if shares > 1:
            lane += rank * share
        total = tl.zeros([tile], tl.float32)
        for of in tl.static_range(ranks):
            there = part if of == rank else halves[of] + shift
            total += tl.load(there + lane, mask=lane < size, other=0.0).to(tl.float32)
        if add:
            total += tl.load(out + lane, mask=lane < size, other=0.0).to(tl.float32)
        result = total.to(part.dtype.element_ty)
        tl.store(out + lane, result, mask=lane < size)
        if shares > 1:
            tl.store(mine + lane, result, mask=lane < size)
    if shares > 1:
        _meet(theirs, ours, 2 * call + 2)
        for at in range(first, share, step):
            for of in tl.static_range(shares):
                if of != rank:
                    lane = of * share + at + tl.arange(0, tile)
                    there = halves[of] + shift
                    result = tl.load(there + lane, mask=lane < size)
                    tl.store(out + lane, result, mask=lane < size)
    # The counts of all programs stay equal, whatever the grid.
    owned = program + grid * tl.arange(0, most)
    tl.store(calls + owned, call + 1, mask=owned < most)
