"""What is not allowed is -inf, and all else as it was kept."""

import pytest
import torch

from minfer.kernels import masked_logits, plain

from .conftest import CUDA

DEVICE = "cuda" if CUDA else "cpu"


def kept(rows: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    gen = torch.Generator().manual_seed(vocab)
    return torch.randn(rows, vocab, generator=gen).to(DEVICE, dtype)


def words(rows: int, vocab: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(rows)
    count = -(-vocab // masked_logits.BITS)
    bits = torch.randint(-(2**31), 2**31, (rows, count), generator=gen)
    return bits.to(DEVICE, torch.int32)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100, 257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_kernel_and_reference_are_the_same(
    vocab: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # so small that there are several programs
    monkeypatch.setattr(masked_logits, "CHUNK", 64)
    logits, masks = kept(5, vocab, dtype), words(4, vocab)
    masks[1], masks[2] = -1, 0
    device_rows = torch.tensor([3, 0, 4, 3], dtype=torch.int32, device=DEVICE)
    masked = masked_logits.mask_logits(logits, device_rows, masks)
    assert torch.equal(masked, plain.mask_logits(logits, device_rows, masks))
    assert torch.equal(masked[1], logits[0])
    assert bool((masked[2] == -torch.inf).all())
    for draw, row in ((0, 3), (3, 3)):
        for token in range(vocab):
            bit = int(masks[draw, token // 32]) >> (token % 32) & 1
            value = logits[row, token] if bit else -torch.inf
            assert masked[draw, token] == value


@pytest.mark.parametrize("vocab", [1, 33, 257])
def test_logits_are_kept_of_all_rows_but_the_scratch_row(
    vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masked_logits, "STORE_CHUNK", 64)
    logits, scratch = kept(6, vocab, torch.float32), 9
    places = [4, scratch, 0, 5, scratch, 1]
    device_rows = torch.tensor(places, dtype=torch.int32, device=DEVICE)
    old = kept(10, vocab, torch.float32) + 1
    new, same = old.clone(), old.clone()
    masked_logits.store_logits(logits, device_rows, new, scratch)
    plain.store_logits(logits, device_rows, same, scratch)
    assert torch.equal(new, same)
    source_of = {4: 0, 0: 2, 5: 3, 1: 5}
    for line in range(10):
        assert torch.equal(
            new[line], logits[source_of[line]] if line in source_of else old[line]
        )


@pytest.mark.skipif(not CUDA, reason="real vocabularies are for the GPU")
@pytest.mark.parametrize("vocab", [151_936, 128_256, 50_257])
def test_real_vocabularies(vocab: int) -> None:
    logits, masks = kept(200, vocab, torch.bfloat16), words(130, vocab)
    device_rows = torch.randperm(200, device="cuda")[:130].int()
    masked = masked_logits.mask_logits(logits, device_rows, masks)
    assert torch.equal(masked, plain.mask_logits(logits, device_rows, masks))
    out, reference = torch.zeros_like(logits), torch.zeros_like(logits)
    device_rows[::3] = 199
    masked_logits.store_logits(logits[:130], device_rows, out, 199)
    plain.store_logits(logits[:130], device_rows, reference, 199)
    assert torch.equal(out, reference)
