"""The kernels' noise against what it is meant to be."""

import pytest
import torch
import triton
import triton.language as tl

from minfer.kernels import noise
from minfer.sampling import reference_sampler as meaning

from .conftest import CUDA

pytestmark = pytest.mark.usefixtures("poisoned")


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
# Its arguments' types are Triton's.
def waiting_times(rows, streams, positions, out, count: tl.constexpr):  # type: ignore[no-untyped-def]
    ids = tl.arange(0, count)
    tl.store(out + ids, noise.waiting(rows, streams, positions, 0, ids))


@pytest.mark.long
def test_noise_is_precise_where_it_is_large() -> None:
    device, count = "cuda" if CUDA else "cpu", 1 << 16
    out = torch.empty(count, device=device)
    stream, position = meaning.stream(5, 1), 1234
    rows = torch.zeros(1, dtype=torch.int32, device=device)
    signed = stream - 2**64 if stream >= 2**63 else stream
    streams = torch.tensor([signed], device=device)
    positions = torch.tensor([position], device=device)
    waiting_times[1,](rows, streams, positions, out, count, num_warps=32)
    key = meaning.draw_key(stream, position)
    bits = torch.tensor([meaning.noise_bits(key, token) for token in range(count)])
    v = ((bits.float() + 0.5) * 2**-32).clamp(max=meaning.LARGEST_V).double()
    expected = -torch.log1p(-v)
    assert expected.min() < 1e-4
    error = out.double().cpu() / expected - 1
    assert error.abs().max() < 4e-7
    assert error.mean().abs() < 1e-8
