"""Copies of KV blocks between the device and files."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from torch import Tensor

from minfer.effects.execution.tiers import keyed_copier, paged_tensors
from minfer.effects.execution.tiers.block_files import UnusableFileError
from minfer.effects.execution.tiers.block_folder import (
    DROPPED,
    FETCHED,
    FETCHED_BYTES,
    REFUSED,
    STORED,
    BlockFolder,
    StoppedError,
)
from minfer.effects.execution.tiers.keyed_copier import KeyedCommand, KeyedCopier
from minfer.effects.execution.tiers.paged_tensors import PagedTensor
from minfer.records.config import CacheGroup
from minfer.records.messages import FetchBlocks, Lost, Moved, StoreBlocks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KEYS = tuple(
    bytes((group,)) * bool(group) + bytes((n,)) * 32
    for group, n in ((0, 1), (1, 1), (0, 2), (0, 3))
)
PAGES = ((7,), (2, 9), (3,), (4,))


class Caches:
    """Two tensors, whose pages are their second and third dimension."""

    def __init__(self, dtype: torch.dtype, path: Path) -> None:
        self.one = (40 * torch.randn(2, 11, 4, device=DEVICE)).to(dtype)
        self.two = torch.randn(1, 2, 11, 3, device=DEVICE)
        self.folder = BlockFolder(path, 1 << 20, DEVICE)
        self.copier = KeyedCopier(self.parts, self.folder, (CacheGroup(pages=2),))

    def parts(self, pages: int, slices: int = 1) -> list[PagedTensor]:
        assert slices == 1
        views = self.one.movedim(1, 0), self.two.movedim(2, 0)
        return [PagedTensor.of(view, pages) for view in views]

    def page(self, number: int) -> tuple[Tensor, Tensor]:
        pages = self.one.float().select(1, number)
        return pages.cpu(), self.two.select(2, number).cpu()

    def ended(self, command: KeyedCommand) -> Moved | Lost:
        reports = SimpleQueue[Moved | Lost]()
        self.copier.move(command, reports.put)
        return reports.get(timeout=30)


@pytest.fixture(params=[torch.float32, torch.float8_e4m3fn, torch.int8])
def caches(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Caches]:
    """Two pages a piece."""
    monkeypatch.setattr(paged_tensors, "PIECE_BYTES", 2 * 2 * 4 * 4)
    made_caches = Caches(request.param, tmp_path)
    yield made_caches
    made_caches.copier.close()


def test_blocks_come_back_in_another_engine(caches: Caches, tmp_path: Path) -> None:
    before = {page: caches.page(page) for block in PAGES for page in block}
    assert caches.ended(StoreBlocks(5, KEYS, PAGES)) == Moved(5)
    assert caches.folder.totals()[STORED] == 4
    other_caches = Caches(caches.one.dtype, tmp_path)
    untouched = other_caches.page(6)
    back = ((10,), (0, 5), (1,), (8,))
    try:
        assert other_caches.ended(FetchBlocks(6, KEYS, back)) == Moved(6)
    finally:
        other_caches.copier.close()
    for sources, targets in zip(PAGES, back, strict=True):
        for source, target in zip(sources, targets, strict=True):
            for before_page, now in zip(
                before[source], other_caches.page(target), strict=True
            ):
                assert now.equal(before_page)
    assert all(map(torch.equal, untouched, other_caches.page(6)))
    totals = other_caches.folder.totals()
    assert totals[FETCHED] == 4
    assert totals[FETCHED_BYTES] > 5 * sum(
        page_part.page_bytes for page_part in caches.parts(1)
    )


def test_a_block_that_is_not_there_loses_the_transfer(caches: Caches) -> None:
    """And nothing is written after its report."""
    caches.ended(StoreBlocks(1, KEYS, PAGES))
    caches.folder.remove((KEYS[1],))
    lost = caches.ended(FetchBlocks(2, KEYS, PAGES))
    assert isinstance(lost, Lost)
    assert "missing" in lost.error
    assert caches.folder.totals()[REFUSED + "missing"] == 1
    caches.one.view(torch.uint8 if caches.one.itemsize == 1 else caches.one.dtype).zero_()
    assert caches.ended(FetchBlocks(3, KEYS[2:], PAGES[2:])) == Moved(3)
    assert not caches.page(7)[0].any()
    assert caches.page(3)[0].any()


def test_a_lost_transfer_is_reported_when_its_last_read_has_ended(
    caches: Caches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next transfer uses the same memory."""
    ends = list[bytes]()

    def read(folder: BlockFolder, key: bytes, *_: object) -> None:
        if key == KEYS[0]:
            raise UnusableFileError("missing", folder.name(key))
        time.sleep(0.1)
        ends.append(key)

    monkeypatch.setattr(BlockFolder, "read", read)
    assert isinstance(caches.ended(FetchBlocks(1, KEYS, PAGES)), Lost)
    before = [*ends]
    time.sleep(0.2)
    assert ends == before


def test_blocks_behind_one_that_failed_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them may take seconds, and all other fetches wait for this one."""
    monkeypatch.setattr(keyed_copier, "STORE_THREADS", 1)
    caches, reads = Caches(torch.float32, tmp_path), list[bytes]()

    def read(folder: BlockFolder, key: bytes, *_: object) -> None:
        reads.append(key)
        time.sleep(0.05)
        raise UnusableFileError("missing", folder.name(key))

    monkeypatch.setattr(BlockFolder, "read", read)
    try:
        assert isinstance(caches.ended(FetchBlocks(1, KEYS, PAGES)), Lost)
        assert len(reads) <= 2  # the second one may have begun
    finally:
        caches.copier.close()


def test_stores_that_fail_are_counted(
    caches: Caches, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise StoppedError("it is full")

    monkeypatch.setattr(BlockFolder, "write", refuse)
    assert caches.ended(StoreBlocks(1, KEYS, PAGES)) == Lost(1, "it is full")
    assert caches.folder.totals()[DROPPED] == 4


def test_costs_are_measured_and_leave_nothing(caches: Caches, tmp_path: Path) -> None:
    assert caches.copier.seconds(caches.folder, 3) > 0
    assert not list(tmp_path.glob("*/*"))
    assert not any(caches.folder.totals().values())


def test_closing_waits_for_stores(tmp_path: Path) -> None:
    caches = Caches(torch.float32, tmp_path)
    reports = SimpleQueue[Moved | Lost]()
    for number in range(20):
        caches.copier.move(StoreBlocks(number, KEYS, PAGES), reports.put)
    caches.copier.close()
    assert reports.qsize() == 20
    assert not [thread for thread in threading.enumerate() if "minfer-kv" in thread.name]
