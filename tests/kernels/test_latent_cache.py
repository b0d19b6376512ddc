"""What is written to the cache of latents."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from minfer.kernels.latent_cache import write_latent
from minfer.kernels.leaves import Norm
from tests.kernels.latents import DEVICE, HALF_TYPE, NOPE

pytestmark = pytest.mark.usefixtures("poisoned")


@dataclass
class Written:
    """What `write_latent` is given: seven tokens, two of them without a slot."""

    kv: Tensor
    norm: Norm
    cos_sin: Tensor
    positions: Tensor
    slots: Tensor
    cache: Tensor
    q: Tensor

    def write(self, **options: object) -> None:
        write_latent(
            self.kv,
            self.norm,
            self.cos_sin,
            self.positions,
            self.slots,
            self.cache,
            self.q,
            **options,  # type: ignore[arg-type]  # checked by its callee
        )


def written(
    device: str,
    dtype: torch.dtype = torch.float32,
    heads: int = 3,
    latent: int = 32,
    rotated: int = 16,
) -> Written:
    draw = torch.Generator().manual_seed(0)
    kv = torch.randn(7, latent + rotated + 5, generator=draw).to(dtype).to(device)
    q = torch.randn(7, heads, NOPE + rotated, generator=draw).to(dtype).to(device)
    angles = torch.rand(50, rotated // 2, generator=draw).double() * 6
    pool = torch.full((6, 2, 4, latent + rotated), math.nan, dtype=dtype, device=device)
    return Written(
        kv[:, : latent + rotated],
        Norm((torch.rand(latent, generator=draw) + 0.5).to(dtype).to(device), 1e-5),
        torch.cat((angles.cos(), angles.sin()), 1).float().to(device),
        torch.tensor([0, 49, 3, 4, 5, 17, 17], device=device),
        torch.tensor([9, -1, 0, 23, 4, -1, 14], device=device),
        pool[:, 1],
        q[..., NOPE:],
    )


def rotated(x: Tensor, inputs: Written, interleaved: bool) -> Tensor:
    """x [tokens, heads, rotated] as complex numbers, times those of the angles."""
    cos, sin = inputs.cos_sin.double().cpu()[inputs.positions.cpu(), None].chunk(2, -1)
    wide = x.double().cpu()
    if not interleaved:
        wide = torch.stack(wide.chunk(2, -1), -1).flatten(-2)
    turned = torch.view_as_complex(wide.reshape(*wide.shape[:-1], -1, 2))
    pairs = torch.view_as_real(turned * torch.complex(cos, sin))
    return pairs.flatten(-2) if interleaved else torch.cat(pairs.unbind(-1), -1)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("apart", [True, False])
def test_what_is_written(device: str, interleaved: bool, apart: bool) -> None:
    inputs = written(device)
    kv, q = inputs.kv.clone(), inputs.q.clone()
    out = torch.full_like(q, math.nan) if apart else None
    inputs.write(out=out, interleaved=interleaved)
    assert torch.equal(inputs.kv, kv)
    query = inputs.q if out is None else out
    assert (query.cpu() - rotated(q, inputs, interleaved)).abs().max() < 1e-6
    assert out is None or torch.equal(inputs.q, q)
    latent = kv[:, :32].double().cpu()
    size = latent.square().mean(1, keepdim=True).add(inputs.norm.eps).sqrt()
    normed = latent / size * inputs.norm.weight.double().cpu()
    turned = rotated(kv[:, None, 32:], inputs, interleaved)[:, 0]
    expected = torch.cat((normed, turned), 1)
    stored = inputs.cache.flatten(0, 1).cpu()  # a copy
    slots = inputs.slots.cpu()
    has_slot = slots >= 0
    assert (stored[slots[has_slot]] - expected[has_slot]).abs().max() < 2e-6
    stored[slots[has_slot]] = math.nan
    assert stored.isnan().all()


@pytest.mark.long
@pytest.mark.parametrize(("heads", "latent", "turned"), [(20, 48, 24), (16, 512, 64)])
def test_what_is_written_at_other_shapes(heads: int, latent: int, turned: int) -> None:
    inputs, same = (written(DEVICE, HALF_TYPE, heads, latent, turned) for _ in range(2))
    inputs.write()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minfer.kernels.latent_cache.on_triton", lambda _: False)
        patch.setattr("minfer.kernels.norm.on_triton", lambda _: False)
        same.write()
    for actual, expected in ((inputs.q, same.q), (inputs.cache, same.cache)):
        torch.testing.assert_close(actual, expected, atol=0, rtol=8e-3, equal_nan=True)


@pytest.mark.parametrize("apart", [True, False])
def test_queries_are_scaled_by_position(device: str, apart: bool) -> None:
    inputs, plain_dim = written(device), NOPE - 3
    factors = torch.linspace(1, 3, 50, device=device)
    wide = inputs.q.new_empty(7, 3, NOPE + 16)
    wide[..., NOPE:] = inputs.q
    wide[..., :NOPE] = torch.arange(NOPE, device=device)
    before = wide.clone()
    source = inputs.q if apart else wide[..., NOPE:]
    inputs.q = source
    inputs.write(
        out=wide[..., NOPE:],
        interleaved=False,
        query_scales=factors,
        plain_dim=plain_dim,
    )
    of_tokens = factors[inputs.positions].double().cpu()[:, None, None]
    expected = before.double().cpu()
    expected[..., NOPE:] = rotated(before[..., NOPE:], inputs, interleaved=False)
    expected[..., 3:] *= of_tokens
    assert (wide.cpu() - expected).abs().max() < 3e-5


def test_what_does_not_fit_is_refused() -> None:
    inputs = written(DEVICE)
    with pytest.raises(ValueError, match="do not fit together"):
        replace(inputs, q=inputs.q[..., 1:]).write()
