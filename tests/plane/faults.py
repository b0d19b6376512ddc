"""What goes wrong: steps that fail, hang or lie, disks that fill, a process that is
killed.
"""

import errno
import os
from collections import Counter, deque
from collections.abc import Callable
from random import Random
from typing import Any

from minfer.effects.live.journal.journal_writer import JournalWriter
from minfer.records.messages import Executed, Failed
from minfer.records.plan import Plan
from minfer.records.state import Turn
from minfer.simulation.oracle import Oracle
from minfer.testing.ledger import Ledger
from tests.plane.loop import Died, VirtualLoop

POISON = range(100, 109)  # seeds of requests whose every step fails
WATCHDOG = 30.0  # seconds after which a step that gave no result counts as failed
STEPS = ("explode", "lost", "fail", "garble")  # what may become of a step
CHANCES = {
    "fail": 0.05,
    "lost": 0.02,
    "garble": 0.04,
    "late": 0.05,
    "short write": 0.2,
    "disk full": 0.01,
    "poison": 0.1,
    "leave": 0.3,
    "slow": 0.3,
    "bad": 0.2,
    "aside": 0.2,
    "storm": 0.5,
    "jump": 0.5,
    "burst": 0.5,
    "twin": 0.3,
}


class Faults:
    """Seeded trouble: each kind has its chance, and what happened is counted."""

    def __init__(self, rng: Random) -> None:
        self.rng, self.tally, self.odds = rng, Counter[str](), dict[str, float]()

    def begin(self) -> None:
        """Each run leaves some kinds out, and some leave out all: then answers must be
        whole.
        """
        sound = self.rng.random() < 0.15
        for kind, chance in CHANCES.items():
            happens = self.rng.random() < 0.5 and not sound
            self.odds[kind] = chance * self.rng.choice((0.3, 1, 2)) * happens

    def hits(self, kind: str, rng: Random | None = None) -> bool:
        """Whether it happens now."""
        hit = (rng or self.rng).random() < self.odds.get(kind, 0.0)
        self.tally[kind] += hit
        return hit


class Faulty(Oracle):
    """An oracle whose steps take time and go wrong; `post` is for results that come too
    late.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        faults: Faults,
        post: Callable[[Executed], None],
        block_size: int,
        vocab: int,
    ) -> None:
        super().__init__(block_size, vocab)
        self.loop, self.faults, self.post, self.rng = loop, faults, post, faults.rng
        self.fates: deque[tuple[float, str]] = (
            deque()
        )  # of plans: when they are over, and how
        self.seeds: dict[int, int] = {}  # by row
        self.pace, self.last = self.rng.choice((0.001, 0.01, 0.03)), 0.0

    def launch(self, plan: Plan) -> None:
        self.pause()
        super().launch(plan)
        self.seeds |= {plan.rows[row.index]: row.sampling.seed for row in plan.opens}
        fate = next((kind for kind in STEPS if self.faults.hits(kind)), "")
        if any(self.seeds[row] in POISON for row in plan.rows):
            fate = "poison"
        takes = self.pace * self.rng.uniform(0.1, 2) + WATCHDOG * (fate == "lost")
        takes += self.rng.uniform(0.5, 5) * self.faults.hits("late")
        self.last = max(self.last, self.loop.now) + takes
        self.fates.append((self.last, fate))

    def pause(self, *_: object) -> None:
        """Let the event loop's thread run for a while."""
        self.loop.pump(self.rng.choice((0, 0, 1, 3)))

    def due(self) -> float:
        """When the earliest step is over; now, if there is none."""
        return self.fates[0][0] if self.fates else self.loop.now

    def collect(self) -> Executed | Failed:
        self.pause()
        _, fate = self.fates.popleft()
        if fate in ("", "garble"):
            executed = super().collect()
            return (
                self._garbled(executed)
                if fate and isinstance(executed, Executed)
                else executed
            )
        self.faults.tally[f"steps: {fate}"] += 1
        if fate == "explode":
            raise RuntimeError("the device is gone")
        if fate == "lost" and self.rng.random() < 0.5:
            self.loop.call_later(
                self.rng.random(), self.post, Executed(self.plans[0].step, ((1,),))
            )
        return self.fail(fate, halfway=self.rng.random() < 0.5)

    def fail(self, error: str, *, halfway: bool) -> Failed:
        self.fates.clear()
        self.last = self.loop.now
        return super().fail(error, halfway=halfway)

    def _garbled(self, executed: Executed) -> Executed:
        """Results that cannot be; what was queued behind them is discarded, and
        runs or not.
        """
        yields = executed.yields
        event = self.rng.choice(
            [
                Executed(executed.step, (*yields, (1,))),
                Executed(executed.step, tuple((*y, *[1] * 9) for y in yields)),
                Executed(
                    executed.step, tuple((self.vocab * 9999,) * len(y) for y in yields)
                ),
                Executed(executed.step, tuple((-1,) * len(y) for y in yields)),
                *[Executed(plan.step, yields) for plan in self.plans],
            ]
        )
        if event != executed:  # of rows that yield nothing some of these are right
            self.faults.tally["steps: garble"] += 1
            if self.plans and self.rng.random() < 0.5:
                self.fail("", halfway=False)
            self.fates = deque((due_time, "") for due_time, _ in self.fates)
        return event


class Disk:
    """Module `os` as the journal sees it, over a disk that fills up and
    writes by halves.
    """

    def __init__(self, faults: Faults) -> None:
        self.faults, self.full, self.files = faults, False, set[int]()
        self.left: int | None = None  # writes until the process is killed in one

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, *arguments: Any) -> int:
        self.files.add(file := os.open(*arguments))
        return file

    def close(self, file: int) -> None:
        self.files.remove(file)
        os.close(file)

    def write(self, file: int, data: bytes) -> int:
        cut = self.faults.rng.randrange(len(data))
        if self.full or self.faults.hits("disk full"):
            self.full = True
            os.write(file, data[:cut])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.left == 0:
            os.write(file, data[:cut])
            raise Died
        self.left = self.left and self.left - 1
        return os.write(
            file, data[: cut + 1] if self.faults.hits("short write") else data
        )


class Recorder:
    """The journal's writer; all turns, and how many of them it has; and the last turn of
    all.
    """

    def __init__(
        self,
        writer: JournalWriter,
        pause: Callable[[], None],
        disk: Disk,
        dies: int,
        *,
        audit: bool,
    ) -> None:
        self.writer, self.pause, self.disk, self.dies, self.audit = (
            writer,
            pause,
            disk,
            dies,
            audit,
        )
        self.log, self.kept, self.close = list[Turn](), 0, writer.close
        self.ledger: Ledger | None = None

    def __call__(self, turn: Turn) -> None:
        self.pause()
        if turn.number == self.dies:
            self.disk.left = self.disk.faults.rng.choice((0, 0, 1))
        self.writer(turn)
        self.log.append(turn)
        self.kept = len(self.log) if self.writer.failed is None else self.kept
        if turn.number == self.dies:
            raise Died
        if self.audit:
            if self.ledger is None:
                self.ledger = Ledger.at(self.writer.config, turn.before)
            self.ledger.take(turn.events, turn.transition)
        self.pause()


class Pool:
    """The journal's thread: what it makes is there some turns later."""

    def __init__(self, *_: object) -> None:
        self.left, self.result = 0, lambda: None

    def submit(self, func: Callable[..., Any], *args: Any, **options: Any) -> "Pool":
        result = func(*args, **options)
        self.left, self.result = 3, lambda: result
        return self

    def done(self) -> bool:
        self.left -= 1
        return self.left < 0

    def shutdown(self) -> None: ...
