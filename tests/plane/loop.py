"""One thread, a virtual clock: an event loop that never sleeps, and the engine's thread
in it.

Time stands still while callbacks run, and jumps to the next timer when none is left. What
other threads would do are callbacks too: jobs of pools, and the engine, one turn at a
time. Within a turn the engine lets some callbacks of the loop run (`pump`), as a thread
would.
"""

import asyncio
import heapq
from collections.abc import Callable
from itertools import count
from random import Random
from typing import Any

MAX_CALLBACKS = 30_000  # callbacks of one run


class StuckError(
    Exception
): ...  # nothing will ever happen again, or there is no end to it


class Died(BaseException): ...  # the process is killed here


class _NotDueError(Exception): ...  # the engine would wait, for some seconds or for news


class _Task(
    asyncio.Task[Any]
):  # its hash is its number: sets of tasks iterate alike everywhere
    def __init__(self, number: int, *args: Any, **options: Any) -> None:
        self.number = number
        super().__init__(*args, **options)

    def __hash__(self) -> int:
        return self.number


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop without a selector, whose clock moves when nothing else can."""

    _ready: Any  # of BaseEventLoop: callbacks that are due, in order
    _scheduled: Any  # and timers, a heap

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self.rng, self.now, self.ran, self.errors = rng, 0.0, 0, list[Any]()
        self.died = self.create_future()  # the process was killed
        self.set_exception_handler(lambda _, context: self.errors.append(context))
        tasks = count()
        self.set_task_factory(
            lambda loop, coro, **options: _Task(next(tasks), coro, loop=loop, **options)
        )

    def time(self) -> float:
        return self.now

    def pump(self, max_callbacks: int) -> None:
        """Run up to `max_callbacks` that are due, unless this is within a task."""
        for _ in range(
            max_callbacks
            if self.is_running() and asyncio.current_task(self) is None
            else 0
        ):
            if self._ready:
                handle = self._ready.popleft()
                self.ran += 1
                if not handle.cancelled():
                    handle._run()

    def _run_once(self) -> None:
        timers = self._scheduled
        while timers and timers[0].cancelled():
            heapq.heappop(timers)._scheduled = False
        if self.ran > MAX_CALLBACKS or not (self._ready or timers):
            raise StuckError(f"after {self.ran} callbacks, at {self.now:.3f} s")
        if not self._ready:
            self.now = max(self.now, timers[0].when())
        while timers and timers[0].when() <= self.now:
            timers[0]._scheduled = False
            self._ready.append(heapq.heappop(timers))
        self.pump(len(self._ready))

    def run_in_executor(  # type: ignore[override]  # a task is a future
        self, _: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Task[Any]:
        return self.create_task(self.in_thread(func, *args))

    async def in_thread(self, func: Callable[..., Any], *args: Any, **_: Any) -> Any:
        """Call `func` as a thread would: somewhat later."""
        await asyncio.sleep(self.rng.choice((0, 0, 0.001, 0.05)))
        return func(*args)

    def _write_to_self(self) -> None: ...  # there is no selector to wake

    def _timer_handle_cancelled(self, handle: Any) -> None: ...  # it goes when it is due


class Condition:
    """`threading.Condition` for one thread that never blocks."""

    thread: "EngineThread | None" = None

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def wait(self, timeout: float) -> None:
        raise _NotDueError(max(timeout, 1e-6))  # a real clock moves on meanwhile

    def notify_all(self) -> None:
        if self.thread is not None and self.thread.waits:
            self.thread.after(0.0)


class EngineThread:
    """`threading.Thread` for `EngineWorker._run`: the same loop, one callback for each
    turn.
    """

    timer: asyncio.TimerHandle | None = None
    alive = waits = collects = False

    def __init__(self, target: Any, name: str) -> None:
        self.worker, self.name = target.__self__, name
        self.worker.posted.thread = self

    def start(self) -> None:
        loop: Any = asyncio.get_running_loop()
        self.loop: VirtualLoop = loop
        self.alive = not loop.died.done()  # else there is no process any more
        self.after(0.0)

    def is_alive(self) -> bool:
        return self.alive

    def join(self) -> None:
        while self.alive and self.timer is not None:
            self.loop.now = max(self.loop.now, self.timer.when())
            self._go()

    def after(self, seconds: float) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self.timer = self.loop.call_later(seconds, self._go) if self.alive else None

    def _go(self) -> None:
        """Go on, to where a thread would block."""
        try:
            self._step()
        except _NotDueError as wait:
            self.waits = True
            self.after(wait.args[0])
        except Died:
            self.alive = False
            self.loop.died.set_result(None)
        except BaseException as error:  # as in EngineWorker._run
            self.alive = False
            self.worker._fail(error)

    def _step(self) -> None:
        driver, self.waits = self.worker.driver, False
        if not self.collects:
            self.alive = self.worker._has_work()
            if not self.alive or driver.state.inflight:
                self.collects = self.alive
                return self.after(max(0.0, driver.executor.due() - self.loop.now))
        self.collects = False
        self.worker._turn()
        return self.after(self.loop.rng.choice((0.0, 0.0, 0.0, 0.0005)))
