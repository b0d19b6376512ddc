"""Rank 0's side of the other ranks."""

import socket
from contextlib import ExitStack
from threading import Thread

import pytest

from minfer.effects.execution.ranks.items import Collect, Item, Want, item_from, item_to
from minfer.effects.execution.ranks.worker_group import RankWorker, WorkerGroup
from minfer.effects.net.framing import FrameReader, frame

LARGEST = 2**20


def test_all_ranks_get_items_in_one_order_whichever_threads_tell_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread has an item after the first rank has got the one before."""
    want, collect = Want((b"key",), "engine"), Collect()
    with ExitStack() as stack:
        workers, ends = WorkerGroup(3, {}), list[socket.socket]()
        for worker in workers.workers:
            worker.link, end = map(stack.enter_context, socket.socketpair())
            ends.append(end)
        other_thread = Thread(target=lambda: workers.broadcast(want))
        send = RankWorker.send

        def sent(worker: RankWorker, data: bytes) -> None:
            send(worker, data)
            if worker.rank == 1 and data == frame(item_to(collect)):
                other_thread.start()
                other_thread.join(0.2)  # as long as it would need, if it did not wait

        monkeypatch.setattr(RankWorker, "send", sent)
        workers.broadcast(collect)
        other_thread.join()
        assert [received(end, 2) for end in ends] == [[collect, want]] * 2


def received(end: socket.socket, count: int) -> list[Item]:
    """So many items that came to a rank."""
    reader, frames = FrameReader(LARGEST), list[bytes]()
    end.settimeout(5)
    while len(frames) < count:
        frames += reader.feed(end.recv(LARGEST))
    return [item_from(frame) for frame in frames]
