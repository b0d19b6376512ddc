"""Rank 0's side of an engine of several ranks: the other ranks' processes.

    start_processes   of the other ranks, if torchrun has not started them
    await_joined      each has connected, with the same version and weights
    watch             a thread for each: a rank that ends, or is silent for
                      `SILENCE_SECONDS`, is the end of the engine. All others are killed,
                      as sums may wait for it
    broadcast         items, in one order for all ranks, whichever threads send them

The heartbeat of a rank is a message, as torchrun's ranks are no children of rank 0.

Between ranks, settings and items pass through that socket alone. The sockets of gloo and
NCCL, for tensors, are at loopback addresses (torch_ranks.py).
"""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final

from attrs import define, field

from minfer.effects.execution.contract import ExecutorError, ReportLoad
from minfer.effects.execution.ranks.items import Item, item_to
from minfer.effects.execution.ranks.joining import (
    JOIN_SECONDS,
    SILENCE_SECONDS,
    Joined,
    RankListener,
)
from minfer.effects.execution.ranks.rank_folder import FOLDER_VARIABLE, RankStartError
from minfer.effects.execution.ranks.rank_messages import (
    Broken,
    FromRank,
    Ready,
    TransferEnded,
    read_from_rank,
)
from minfer.effects.execution.tiers.transfer_thread import ReportEnd
from minfer.effects.models.adapters.peft_config import AdapterError
from minfer.effects.net.child import Child, spawn_child
from minfer.effects.net.framing import PeerError, Socket, frame
from minfer.records.messages import AdapterFailed, AdapterLoaded, Lost, Moved

HEARTBEAT_SECONDS: Final = 1.0  # between two messages of a rank
POLL_SECONDS: Final = 0.2  # between two looks for a lost rank
NO_TRANSFER: Final = -1

_log = logging.getLogger("minfer.executor")


class RankError(ExecutorError):
    """A rank is lost, so the engine cannot go on. Unlike other `ExecutorError`s it makes
    no step `Failed`: it leaves the executor, and the driver, and ends the engine.
    """


@define(eq=False)
class RankWorker:
    """The process of another rank, as rank 0 sees it."""

    rank: int
    process: Child | None = None  # None: torchrun's
    number: int = 0  # torchrun's process id, once it has joined
    link: Socket | None = None
    ready: threading.Event = field(factory=threading.Event)

    def send(self, data: bytes) -> None:
        """Send a framed item. Raises OSError."""
        if self.link is not None:
            self.link.sendall(data)

    def kill(self) -> None:
        """End its process at once. torchrun, which sees no more than ends, starts all
        ranks again then.
        """
        if self.process is not None:
            self.process.kill()
        elif self.number:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.number, signal.SIGKILL)


def as_transfer(number: int, end: AdapterLoaded | AdapterFailed) -> Moved | Lost:
    """Returns the end of an adapter's load as that of a transfer of this number."""
    return Lost(number, end.error) if isinstance(end, AdapterFailed) else Moved(number)


@define(eq=False)
class Transfers:
    """Transfers that have not ended on all ranks."""

    ranks: int
    lock: threading.Lock = field(factory=threading.Lock)
    # By number: how many ranks are not done, the first loss, and what to call at the end.
    open: dict[int, "tuple[int, Lost | None, ReportEnd]"] = field(factory=dict)
    # Those of adapters are numbered from -2 down; others have numbers of the core's.
    last_adapter_number: int = NO_TRANSFER

    def begin_reading(self) -> "tuple[int, SimpleQueue[Moved | Lost]]":
        """Note that the other ranks begin to read an adapter; returns the number of their
        reports, and where their end appears.
        """
        ended: SimpleQueue[Moved | Lost] = SimpleQueue()
        with self.lock:
            self.last_adapter_number -= 1
            number = self.last_adapter_number
            self.open[number] = (self.ranks - 1, None, ended.put)
        return number, ended

    def begin_load(self, report: ReportLoad) -> tuple[int, ReportLoad]:
        """Note that all ranks begin to load an adapter; returns the number of their
        reports, and where this rank reports.
        """
        first: list[AdapterLoaded | AdapterFailed] = []

        def report_all(end: Moved | Lost) -> None:
            of_rank_0 = first[0]
            if isinstance(end, Lost):
                report(AdapterFailed(of_rank_0.adapter, of_rank_0.slot, end.error))
            else:
                report(of_rank_0)

        with self.lock:
            self.last_adapter_number -= 1
            number = self.last_adapter_number

        def note_rank_0(end: AdapterLoaded | AdapterFailed) -> None:
            first.append(end)
            self.note(as_transfer(number, end))

        self.begin(number, report_all)
        return number, note_rank_0

    def begin(self, number: int, report: ReportEnd) -> ReportEnd:
        """Note a transfer that begins on all ranks; returns where they report."""
        with self.lock:
            self.open[number] = (self.ranks, None, report)
        return self.note

    def note(self, end: Moved | Lost) -> None:
        """Note that one rank is done."""
        with self.lock:
            num_pending, lost, report = self.open[end.number]
            lost = lost or (end if isinstance(end, Lost) else None)
            if num_pending > 1:
                self.open[end.number] = (num_pending - 1, lost, report)
                return
            del self.open[end.number]
        report(lost or end)


@define(eq=False)
class WorkerGroup:
    """The worker processes of an engine: the ranks other than 0.

    If one of them is lost, all of `on_loss` are called, in order, once, and from any
    thread. Two places fill it: `start_ranks` (live/engine/ranks.py), once this process
    has joined torch.distributed, with what ends the waits there; and `run_engine`
    (cluster/engine_server/engine_process.py), once the model is loaded, with the end of
    the process, which comes first. A program with `LLM` goes on without its engine.
    """

    count: int  # of ranks, with rank 0
    versions: Mapping[str, str]  # of minfer and the weights: the same on all ranks
    workers: list[RankWorker] = field(init=False)
    transfers: Transfers = field(init=False)
    on_loss: list[Callable[[], None]] = field(factory=list)
    lost: str = ""  # why the engine cannot go on
    closing: bool = False
    lock: threading.Lock = field(factory=threading.Lock)
    # Held until all ranks were sent an item.
    broadcasting: threading.Lock = field(factory=threading.Lock)
    # What removes the folder in which ranks meet.
    resources: contextlib.ExitStack = field(factory=contextlib.ExitStack)

    def __attrs_post_init__(self) -> None:
        self.workers = [RankWorker(rank) for rank in range(1, self.count)]
        self.transfers = Transfers(self.count)

    # --- starting -----------------------------------------------------------------------

    def start_processes(
        self, folder: Path, environments: list[Mapping[str, str]]
    ) -> None:
        """Start the processes of ranks 1 and on, each with more variables in its
        environment. Raises OSError.
        """
        for worker, extra_variables in zip(self.workers, environments, strict=True):
            rank_variables = {"RANK": str(worker.rank), FOLDER_VARIABLE: str(folder)}
            worker.process = spawn_child(
                "minfer", variables={**rank_variables, **extra_variables}
            )

    def await_joined(self, listener: RankListener) -> None:
        """Wait until all have connected. Raises RankStartError for one that is late, or
        has another version or other weights.
        """
        deadline = time.monotonic() + JOIN_SECONDS
        missing_ranks = {worker.rank for worker in self.workers}
        while missing_ranks:
            if joined := listener.joined():
                self._accept(joined)
                missing_ranks.discard(joined.rank)
            for worker in self.workers:
                exit_code = None if worker.process is None else worker.process.poll()
                if exit_code is not None:
                    raise RankStartError(
                        f"rank {worker.rank} ended with {exit_code} before it joined; "
                        f"its error is above"
                    )
            if time.monotonic() > deadline:
                raise RankStartError(
                    f"rank {min(missing_ranks)} has not joined within "
                    f"{JOIN_SECONDS:.0f} s; look for its error, and start it again"
                )

    def _accept(self, joined: Joined) -> None:
        """Take a rank that has joined. Raises RankStartError for another engine's."""
        rank, reported = joined.rank, joined.prepared.about
        worker = next((w for w in self.workers if w.rank == rank), None)
        if worker is None or worker.link is not None:
            joined.link.close()
            return
        worker.link = joined.link
        for name, version in self.versions.items():
            if reported.get(name) != version:
                raise RankStartError(
                    f"rank {rank} has another {name}, {reported.get(name)}, than rank 0, "
                    f"{version}; start all ranks with the same"
                )
        worker.number = joined.prepared.process

    # --- running ------------------------------------------------------------------------

    def await_ready(self) -> None:
        """Wait until all ranks have their weights and caches. Raises RankStartError."""
        for worker in self.workers:
            while not self.lost and not worker.ready.wait(0.2):
                pass
        if self.lost:
            raise RankStartError(self.lost)

    def await_end(self, ended: "SimpleQueue[Moved | Lost]") -> None:
        """Wait until the other ranks have read an adapter. Raises AdapterError if one
        cannot, and RankError.
        """
        while True:
            try:
                end = ended.get(timeout=POLL_SECONDS)
            except Empty:
                self.check()
                continue
            if isinstance(end, Lost):
                raise AdapterError(end.error)
            return

    def watch(self) -> None:
        """Watch all ranks, each in a thread, until they end."""
        for worker in self.workers:
            name = f"minfer-rank-{worker.rank}"
            threading.Thread(
                target=self._watch, args=(worker, worker.link), name=name, daemon=True
            ).start()

    def check(self) -> None:
        """Raise RankError if a rank is lost."""
        if self.lost:
            raise RankError(self.lost)

    def broadcast(self, item: Item) -> None:
        """Send all other ranks the item that they do next, from any thread. Raises
        RankError.
        """
        self.check()
        data = frame(item_to(item))
        with self.broadcasting:
            for worker in self.workers:
                try:
                    worker.send(data)
                except OSError as error:
                    self._handle_loss(worker, f"its connection is closed ({error})")
                    self.check()

    def _watch(self, worker: RankWorker, link: Socket) -> None:
        """Read a rank's messages until it ends."""
        try:
            while True:
                self._read(worker, read_from_rank(link))
        except BlockingIOError:  # each read has its time: see `RankListener`
            reason = f"it has been silent for {SILENCE_SECONDS:.0f} s"
        except (PeerError, OSError):
            exit_code = None if worker.process is None else worker.process.wait(1.0)
            reason = "it has ended" + ("" if exit_code is None else _exit_text(exit_code))
        self._handle_loss(worker, reason)

    def _read(self, worker: RankWorker, message: FromRank) -> None:
        match message:
            case Ready():
                worker.ready.set()
            case TransferEnded(number, reason):
                self.transfers.note(
                    Moved(number) if reason is None else Lost(number, reason)
                )
            case Broken(reason):
                self._handle_loss(worker, reason)

    def _handle_loss(self, worker: RankWorker, reason: str) -> None:
        """End the engine after the loss of a rank."""
        with self.lock:
            if self.lost or self.closing:
                return
            self.lost = f"rank {worker.rank} of {self.count} is lost: {reason}"
        self.kill()
        _log.error("%s", self.lost)
        for callback in self.on_loss:
            callback()

    def kill(self) -> None:
        """End all other ranks at once."""
        for worker in self.workers:
            worker.kill()

    def abandon(self) -> None:
        """End all other ranks at once, and wait for their ends."""
        self.kill()
        self.close()

    def close(self) -> None:
        """Wait until the other ranks, which have got `Close`, have ended."""
        with self.lock:
            self.closing = True
        for worker in self.workers:
            if (
                worker.process is not None
                and worker.process.wait(SILENCE_SECONDS) is None
            ):
                worker.kill()
                worker.process.wait()
            if worker.link is not None:
                worker.link.close()

    def remove_folder(self) -> None:
        """Remove the folder, once this process has left torch.distributed: while NCCL
        runs, a thread of torch's opens its file again and again, and waits for minutes if
        that is gone.
        """
        self.resources.close()


def _exit_text(exit_code: int) -> str:
    return (
        f" with {exit_code}"
        if exit_code >= 0
        else f" by {signal.Signals(-exit_code).name}"
    )
