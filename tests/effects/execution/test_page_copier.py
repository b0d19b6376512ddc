"""Copies of KV pages between the device and host memory."""

from queue import SimpleQueue
from typing import Any

import pytest
import torch

from minfer.effects.execution.tiers import host_pages, paged_tensors
from minfer.effects.execution.tiers.host_pages import HostPages
from minfer.effects.execution.tiers.page_copier import PageCopier
from minfer.effects.execution.tiers.paged_tensors import PagedTensor
from minfer.records.messages import Lost, Move, Moved
from minfer.records.tiers import TransferKind

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of 3 pages of the larger part, and buffers of 2."""
    monkeypatch.setattr(host_pages, "SEGMENT_BYTES", 3 * 2 * 4 * 4)
    monkeypatch.setattr(paged_tensors, "PIECE_BYTES", 2 * 2 * 4 * 4)


def ended(copier: PageCopier, move: Move) -> Moved | Lost:
    reports = SimpleQueue[Moved | Lost]()
    copier.move(move, reports.put)
    return reports.get(timeout=30)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.int8])
def test_pages_come_back_as_they_were(dtype: torch.dtype) -> None:
    """Two tensors, whose pages are their second and third dimension."""
    cache = torch.randn(2, 11, 4, device=DEVICE).to(dtype)
    two = torch.randn(1, 2, 11, 3, device=DEVICE)
    before = cache.clone(), two.clone()
    copier = PageCopier(
        [PagedTensor.of(cache.movedim(1, 0), 8), PagedTensor.of(two.movedim(2, 0), 8)]
    )
    try:
        pages, slots = (7, 2, 9, 3, 4), (0, 1, 2, 6, 4)
        assert ended(copier, Move(5, TransferKind.STORE_TO_HOST, pages, slots)) == Moved(
            5
        )
        cache.view(torch.uint8 if cache.itemsize == 1 else dtype).zero_()
        two.zero_()
        back = (10, 0, 5, 1, 8)
        assert ended(copier, Move(6, TransferKind.LOAD_FROM_HOST, slots, back)) == Moved(
            6
        )
        for now, before_page, dim in ((cache, before[0], 1), (two, before[1], 2)):
            now, before_page = now.float().cpu(), before_page.float().cpu()
            for source, target in zip(pages, back, strict=True):
                assert now.select(dim, target).equal(before_page.select(dim, source))
            assert not now.select(dim, 7).any()
        assert copier.seconds(3) > 0
    finally:
        copier.close()


def test_a_copy_that_fails_is_lost_and_others_go_on() -> None:
    copier = PageCopier([PagedTensor.of(torch.zeros(4, 1, 2, device=DEVICE), 4)])
    try:
        lost = ended(copier, Move(1, TransferKind.STORE_TO_HOST, (0,), (9,)))
        assert isinstance(lost, Lost)
        assert "9" in lost.error
        assert ended(copier, Move(2, TransferKind.STORE_TO_HOST, (0,), (3,))) == Moved(2)
    finally:
        copier.close()


def test_memory_that_cannot_be_had_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = HostPages(4, (2,), torch.float32, pinned=False)

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no more\nat all")

    monkeypatch.setattr(torch, "empty", refuse)
    assert not pages.grow()
    with pytest.raises(host_pages.NoHostMemoryError, match=r"page 3: no more$"):
        pages.run(3, 4)


def test_closed_pages_do_not_wait() -> None:
    pages = HostPages(4, (2,), torch.float32, pinned=False)
    pages.close()
    with pytest.raises(host_pages.NoHostMemoryError, match="was closed"):
        pages.run(0, 1)


@pytest.mark.usefixtures("small")
def test_runs_are_consecutive_pages_of_a_segment() -> None:
    pages = HostPages(9, (2, 4), torch.float32, pinned=False)
    assert pages.segment_pages == 3
    assert pages.runs((1, 2, 3, 4, 6, 8, 7)) == [
        (0, 1, 3),
        (2, 3, 5),
        (4, 6, 7),
        (5, 8, 9),
        (6, 7, 8),
    ]
