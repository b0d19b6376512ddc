"""Programmatic dependent launch: a kernel starts to prepare while the one before it runs.

Theory. At batch 1 a step is a chain of kernels of few microseconds, whose gaps and first
loads matter. From Hopper on, a kernel launched with `early` starts once all programs of
the one before called `follow`. It loads data that no kernel writes (weights, older than
the kernel before), and calls `follow` itself: that waits until the one before is complete
and its writes are visible. Only after that may it read what kernels write, or write:
other kernels may still read there. As all kernels do so, a kernel completes after all
before it, and waiting for one is waiting for all. Other kernels (torch's, cuBLAS's) start
after all before them, and let the next start when they end.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minfer.kernels.target import HOPPER, capability

# The most rows for which launches dominate: at 256 a step got 1 % slower.
MAX_EARLY_ROWS = 64


def early(x: Tensor) -> bool:
    """Whether a kernel that calls `follow` is launched early for this tensor
    (`launch_pdl`).
    """
    return x.shape[0] <= MAX_EARLY_ROWS and capability(x.device) >= HOPPER


def arrivals(device: torch.device, size: int) -> Tensor:
    """Zeros for counts: a kernel resets them to zero. The first call of a size must not
    be captured.

    Kernels of two streams (engines of one process) may run at once: each stream has its
    own.
    """
    stream = 0
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device).cuda_stream
    return _zeros(device, size, stream)


@cache
def _zeros(device: torch.device, size: int, _stream: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int32, device=device)


@triton.jit
def arrive(counts, index):
    """Count this program, which has stored its share, at counts[index]; returns the count
    before.

    counts: of `arrivals`. The last program may read all shares, and resets its count to
    zero.
    """
    tl.debug_barrier()  # all threads have stored, before one of them counts
    return tl.atomic_add(counts + index, 1, sem="acq_rel", scope="gpu")


@triton.jit
def follow():
    """Let the next kernel start; wait for the one before."""
    if tl.target_info.cuda_capability_geq(9, 0):
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def follow_first():
    """Wait for the kernel before; then let the next start. What kernels before this one
    wrote, the next may then load before it waits, past the first cache (".cg"), which may
    hold what was there earlier.
    """
    if tl.target_info.cuda_capability_geq(9, 0):
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def prefetch(pointers):
    """Prefetch the 32 bytes at each of these addresses to the L2 cache."""
    if tl.target_info.cuda_capability_geq(9, 0):
        asm: tl.constexpr = (
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;"  # it has to return something
        )
        tl.inline_asm_elementwise(
            asm, "=r,l", [pointers.to(tl.int64)], tl.int32, is_pure=False, pack=1
        )
