"""A rank other than 0: it does what rank 0 broadcasts, in the same order.

Its executor is of the same kind as rank 0's. Results are waited for and dropped, as rank
0 has the same; an error that rank 0 does not have too ends this process, and so the
engine. So does the end of the connection: rank 0 has ended.
"""

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from attrs import define, field

from minfer.effects.execution.ranks.items import (
    AddAdapter,
    Capture,
    Close,
    Collect,
    Discard,
    DummyStep,
    Fetch,
    Item,
    Launch,
    LoadOnRank,
    RemoveAdapter,
    Replay,
    Sample,
    Store,
    Swap,
    Want,
    item_from,
)
from minfer.effects.execution.ranks.joining import find_rank_0
from minfer.effects.execution.ranks.rank_messages import (
    MAX_MESSAGE_BYTES,
    Alive,
    Broken,
    FromRank,
    RankPrepared,
    Ready,
    TransferEnded,
    read_settings,
)
from minfer.effects.execution.ranks.worker_group import HEARTBEAT_SECONDS, as_transfer
from minfer.effects.execution.torch_executor import TorchExecutor
from minfer.effects.net.framing import PeerError, Socket, framed, read_frame
from minfer.records.messages import (
    Failed,
    LoadAdapter,
    Lost,
    Moved,
)


@define(eq=False)
class Leader:
    """The connection to rank 0."""

    link: Socket
    settings: Mapping[str, Any]  # of rank 0
    lock: threading.Lock = field(factory=threading.Lock)  # held while sending

    @classmethod
    def connect(cls, folder: Path, rank: int) -> "Leader":
        """Connect to the rank 0 that made the folder. Raises RankStartError, PeerError
        and OSError.
        """
        link = find_rank_0(folder, rank)
        leader = cls(link, read_settings(link).values)
        threading.Thread(target=leader._beat, name="minfer-beat", daemon=True).start()
        return leader

    def join(self, versions: Mapping[str, str]) -> None:
        """Report the versions of the engine that this rank has prepared. Raises
        OSError.
        """
        self.send(RankPrepared(os.getpid(), dict(versions)))

    def send(self, message: FromRank) -> None:
        """Send a message. Raises OSError."""
        with self.lock:
            self.link.sendall(framed(message))

    def _beat(self) -> None:
        """Send heartbeats until rank 0 has ended."""
        ended = threading.Event()
        while not ended.wait(HEARTBEAT_SECONDS):
            try:
                self.send(Alive())
            except OSError:
                os._exit(1)

    def items(self) -> "Items":
        """Returns the items of rank 0, which a thread reads: so that its end is noticed
        at once, whatever this process waits for.
        """
        return Items(self.link)


class Items:
    """Items that rank 0 has sent."""

    def __init__(self, link: Socket) -> None:
        self._queue: SimpleQueue[Item] = SimpleQueue()
        self._link = link
        threading.Thread(target=self._read, name="minfer-items", daemon=True).start()

    def next(self) -> Item:
        """Returns the next item; waits for it."""
        return self._queue.get()

    def _read(self) -> None:
        while True:
            try:
                item = item_from(read_frame(self._link, MAX_MESSAGE_BYTES))
            except (PeerError, OSError):
                os._exit(1)  # rank 0 has ended
            self._queue.put(item)
            if isinstance(item, Close):
                return


def run_rank_loop(executor: TorchExecutor, leader: Leader) -> None:
    """Run the items of rank 0 until `Close`. Raises what a step raises, and RuntimeError
    for a step that failed on this rank alone.
    """

    def report(end: Moved | Lost) -> None:
        reason = end.error if isinstance(end, Lost) else None
        leader.send(TransferEnded(end.number, reason))

    items = leader.items()
    leader.send(Ready())
    failed: Failed | None = None
    while not isinstance(item := items.next(), Close):
        # Sent by other threads, so between any two others:
        if isinstance(item, Want):
            executor.want(item.keys, item.engine)
            continue
        if isinstance(item, AddAdapter | RemoveAdapter | LoadOnRank):
            _apply_adapter_item(executor, item, report)
            continue
        if failed is not None and not isinstance(item, Discard):
            raise RuntimeError(f"step {failed.step} failed on this rank: {failed.error}")
        failed = None
        match item:
            case Collect():
                result = executor.collect()
                failed = result if isinstance(result, Failed) else None
            case Swap(command) | Store(command) | Fetch(command):
                executor.move(command, report)
            case Launch() | Sample() | Discard():
                _apply_plan_item(executor, item)
            case DummyStep() | Capture() | Replay():
                _apply_step_item(executor, item)


def _apply_adapter_item(
    executor: TorchExecutor,
    item: AddAdapter | RemoveAdapter | LoadOnRank,
    report: Callable[[Moved | Lost], None],
) -> None:
    """Do what rank 0 does with an adapter. Raises ValueError for a rank without any."""
    if (adapters := executor.adapters) is None:
        raise ValueError("rank 0 has adapters, and this rank has no slots of them")
    match item:
        case AddAdapter(number, digest, folder):
            adapters.begin_adding(
                digest,
                folder,
                lambda error: report(Lost(number, error) if error else Moved(number)),
            )
        case RemoveAdapter(digest):
            adapters.remove(digest)
        case LoadOnRank(number, adapter, slot):
            adapters.load(
                LoadAdapter(adapter, slot), lambda end: report(as_transfer(number, end))
            )


def _apply_plan_item(executor: TorchExecutor, item: Launch | Sample | Discard) -> None:
    match item:
        case Launch(plan):
            executor.launch(plan)
        case Sample(command):
            executor.sample(command)
        case Discard():
            executor.discard()


def _apply_step_item(executor: TorchExecutor, item: DummyStep | Capture | Replay) -> None:
    match item:
        case DummyStep(shape):
            with executor.between_steps():
                executor.dummy_runner.dummy_step(shape)
        case Capture(shape):
            executor.capture(shape)
        case Replay(shape):
            with executor.between_steps():
                executor.dummy_runner.replay(shape)


def fail(leader: Leader, error: BaseException) -> None:
    """Report to rank 0 why this rank ends."""
    leader.send(Broken(str(error) or repr(error)))
