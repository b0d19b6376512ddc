"""Copies of whole pages, against plain indexing."""

import pytest
import torch

from minfer.kernels.page_copy import BLOCK, copy_pages


@pytest.mark.parametrize("words", [16, BLOCK, BLOCK + 16, 2 * BLOCK - 16])
@pytest.mark.parametrize("count", [1, 5])
def test_whole_pages_are_copied(device: str, words: int, count: int) -> None:
    generator = torch.Generator().manual_seed(words)
    data = torch.randint(0, 256, (12, 8 * words), generator=generator).byte().to(device)
    before = data.clone()
    sources, targets = torch.randperm(12, generator=generator)[: 2 * count].chunk(2)
    copy_pages(data, torch.stack((sources, targets), 1).to(device))
    expected = before.clone()
    expected[targets] = before[sources]
    assert torch.equal(data, expected)
