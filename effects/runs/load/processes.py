"""Several client processes, which begin together and report to this one.

One event loop of Python reads some tens of thousands of events a second; a server on a
GPU writes as many tokens. So a load is spread over processes: each has an event loop of
its own, and a share of the lanes. Whether they kept up is measured, not assumed: each
says what share of a core it used.
"""

import asyncio
import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.sharedctypes import Synchronized
from typing import Final, cast

from attrs import Factory, define, frozen

from minfer.effects.runs.load.client import Client, Counts
from minfer.effects.runs.load.load import Load
from minfer.effects.runs.load.record import LoadError, Record

MOST: Final = 8  # processes, unless asked for
_LEAD: Final = 0.05  # seconds until all begin
_EVERY: Final = 0.25  # seconds between reports
_GARBAGE: Final = 100_000  # objects between collections
_STOP: Final = 10.0  # seconds that processes have to report after they were stopped


@frozen
class Part:
    """What one process did."""

    records: list[Record]
    cpu: float  # share of a core that it used


@frozen
class Outcome:
    """What all did."""

    records: list[Record]  # by number
    seconds: float  # until the last answer ended, or the load was stopped
    cpu: tuple[float, ...]  # share of a core, of each process
    stopped: bool = False  # before its end
    lost: int = 0  # processes that died


def share(total: int, parts: int, place: int) -> int:
    """The share of one of `parts` that divide something among them."""
    return total // parts + (place < total % parts)


def default_processes(max_concurrency: int | None) -> int:
    """As many as there are cores, up to 8, and no more than requests at once."""
    allowed = getattr(os, "sched_getaffinity", None)  # not on every system
    cores = len(allowed(0)) if allowed else os.cpu_count() or 1
    return max(1, min(MOST, cores, max_concurrency or MOST))


def put(
    load: Load, processes: int = 1, show: Callable[[Counts], None] | None = None
) -> Outcome:
    """Put a load on its server, and wait for it; an interrupt stops it.

    `show` is told how far it is. Raises LoadError if all processes die.
    """
    processes = min(processes, load.max_concurrency or processes)
    context = multiprocessing.get_context("spawn")
    line = cast("Synchronized[int]", context.Value("q", 0))
    crew = _Crew(show or (lambda _: None))
    try:
        for place in range(processes):
            ours, theirs = context.Pipe()
            lanes = load.max_concurrency
            own = None if lanes is None else share(lanes, processes, place)
            process = context.Process(
                target=_work, args=(theirs, line, load, own), daemon=True
            )
            with _interrupts_are_ours():
                process.start()
            theirs.close()
            crew.join(ours, process)
        return crew.work()
    finally:
        crew.end()


@define
class _Crew:
    """The processes, as this one sees them."""

    show: Callable[[Counts], None]
    pipes: list[Connection] = Factory(list)
    processes: list[SpawnProcess] = Factory(list)
    parts: dict[int, Part] = Factory(dict)
    counts: dict[int, Counts] = Factory(dict)
    gone: set[int] = Factory(set)

    def join(self, pipe: Connection, process: SpawnProcess) -> None:
        """Take one in."""
        self.pipes.append(pipe)
        self.processes.append(process)

    def work(self) -> Outcome:
        """Have them begin together, and wait for their reports. Raises LoadError."""
        for i, pipe in enumerate(self.pipes):
            try:
                pipe.recv()  # it is ready
            except EOFError:
                raise LoadError(self._died(i)) from None
        begin = time.monotonic() + _LEAD
        self._tell(begin)
        stopped = False
        try:
            self._listen(None)
        except KeyboardInterrupt:
            stopped = True
            self._tell(None)
            self._listen(time.monotonic() + _STOP)
        if not self.parts:
            raise LoadError(self._died(0))
        records = [one for part in self.parts.values() for one in part.records]
        records.sort(key=lambda one: one.number)
        last = max((one.ended for one in records), default=0.0)
        cpu = tuple(self.parts[i].cpu for i in sorted(self.parts))
        return Outcome(records, last, cpu, stopped, len(self.pipes) - len(self.parts))

    def end(self) -> None:
        """Let nobody stay behind."""
        for process in self.processes:
            process.join(0.2 if len(self.parts) == len(self.processes) else 0)
            if process.is_alive():
                process.terminate()
                process.join()

    def _tell(self, what: float | None) -> None:
        """Say when to begin, or None: to stop."""
        for pipe in self.pipes:
            with suppress(OSError):  # it has ended
                pipe.send(what)

    def _listen(self, until: float | None) -> None:
        """Take reports until all have ended, or until a time."""
        while left := set(range(len(self.pipes))) - self.parts.keys() - self.gone:
            if until is not None and time.monotonic() > until:
                return
            for ready in wait([self.pipes[i] for i in left], _EVERY):
                self._take(self.pipes.index(cast(Connection, ready)))
            self.show(sum(self.counts.values(), Counts()))

    def _take(self, i: int) -> None:
        """Take one report of a process."""
        try:
            said = self.pipes[i].recv()
        except EOFError:
            self.gone.add(i)
            return
        if isinstance(said, Part):
            self.parts[i] = said
        else:
            self.counts[i] = said

    def _died(self, i: int) -> str:
        self.processes[i].join(1)
        code = self.processes[i].exitcode
        return f"client process {i} died (exit code {code}); try fewer --processes"


@contextmanager
def _interrupts_are_ours() -> Iterator[None]:
    """Processes that start meanwhile are not interrupted by Ctrl-C: they are told."""
    try:
        was = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not the main thread, which alone is interrupted
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, was)


def _work(
    pipe: Connection, line: "Synchronized[int]", load: Load, lanes: int | None
) -> None:
    """What a process does: waits for the beginning, works, reports."""
    _many_files()
    gc.freeze()
    gc.set_threshold(_GARBAGE)  # a collection stops the clock of every stream
    pipe.send(None)
    begin = pipe.recv()
    if begin is None:  # stopped before it began
        pipe.send(Part([], 0.0))
        return
    pipe.send(asyncio.run(_client(pipe, line, load, lanes, begin)))


async def _client(
    pipe: Connection,
    line: "Synchronized[int]",
    load: Load,
    lanes: int | None,
    begin: float,
) -> Part:
    """Run this process's share, report how far it is, and stop when told to."""

    def take() -> int:
        with line.get_lock():
            number = line.value
            line.value += 1
        return number

    await asyncio.sleep(max(0.0, begin - time.monotonic()))
    client = Client(load, lanes, take, begin)
    loop = asyncio.get_running_loop()

    def told() -> None:
        loop.remove_reader(pipe.fileno())
        client.stop()

    loop.add_reader(pipe.fileno(), told)
    reporter = asyncio.create_task(_report(pipe, client))
    cpu, wall = time.process_time(), time.monotonic()
    records = await client.run()
    busy = (time.process_time() - cpu) / max(1e-9, time.monotonic() - wall)
    reporter.cancel()
    loop.remove_reader(pipe.fileno())
    pipe.send(client.counts)
    return Part(records, busy)


async def _report(pipe: Connection, client: Client) -> None:
    while True:
        await asyncio.sleep(_EVERY)
        pipe.send(client.counts)


def _many_files() -> None:
    """Allow as many connections as the system does."""
    with suppress(ImportError, ValueError, OSError):  # not on every system
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
