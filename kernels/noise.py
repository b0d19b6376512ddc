"""The noise of sampling, for the kernels of sample_kernels.py: a function of a row's
stream, the position and the token id, which `minfer.sampling.reference_sampler` defines.
It is computed where it is needed, and stored nowhere.
"""

import triton
import triton.language as tl


@triton.jit
def waiting(rows, streams, positions, row, ids):
    """-log(1 - v): waiting times, whose negative logarithms are the noise."""
    v = uniform(rows, streams, positions, row, ids)
    return -(tl.log(1 - v) + ((1 - (1 - v)) - v))  # the second term is what 1 - v lost


@triton.jit
def uniform(rows, streams, positions, row, ids):
    """v, between 0 and 1.

    The steps that mix bits are `STEPS64` and `STEPS32` of sample_reference.py, written
    out.
    """
    key = tl.load(streams + tl.load(rows + row)).to(tl.uint64)
    key += (tl.load(positions + row) + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9
    key = (key ^ (key >> 27)) * 0x94D049BB133111EB
    key = key ^ (key >> 31)
    x = ids.to(tl.uint32) + key.to(tl.uint32)
    x = ((x ^ (x >> 17)) * 0xED5AD4BB) ^ (key >> 32).to(tl.uint32)
    x = (x ^ (x >> 11)) * 0xAC4C1B51
    x = (x ^ (x >> 15)) * 0x31848BAB
    return tl.minimum(((x ^ (x >> 14)).to(tl.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
