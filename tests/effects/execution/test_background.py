"""Work for quiet moments."""

import threading
import time

import pytest
from attrs import define, field

from minfer.effects.execution.running.background import Background
from tests.effects.waiting import until

WAIT = 0.02


@define
class Owner:
    """An executor, as its background sees one."""

    pieces: int
    quiet: bool = True
    lock: threading.Lock = field(factory=threading.Lock)
    done: list[float] = field(factory=list)
    locked: list[bool] = field(factory=list)

    def piece(self) -> bool:
        self.locked.append(self.lock.locked())
        self.done.append(time.monotonic())
        self.pieces -= 1
        return self.pieces > 0

    def background(self) -> Background:
        return Background(self.piece, quiet=lambda: self.quiet, lock=self.lock, wait=WAIT)


def test_all_of_it_is_done_with_the_lock_and_then_the_thread_ends() -> None:
    owner = Owner(3)
    background = owner.background()
    background.start()
    thread = background.thread
    assert thread is not None
    background.start()
    assert background.thread is thread
    thread.join(5)
    assert not thread.is_alive()
    assert owner.locked == [True] * 3
    background.close()


def test_nothing_is_done_while_a_plan_is_on_its_way_or_came_just_now() -> None:
    owner = Owner(2, quiet=False)
    background = owner.background()
    background.start()
    time.sleep(3 * WAIT)
    assert not owner.done
    background.note_work()
    requested = background.last_work
    owner.quiet = True
    until(lambda: bool(owner.done))
    assert owner.done[0] - requested >= WAIT
    background.close()


def test_nothing_is_begun_after_it_is_closed() -> None:
    owner = Owner(1 << 30)
    background = owner.background()
    background.start()
    until(lambda: len(owner.done) > 1)
    background.close()
    count = len(owner.done)
    time.sleep(2 * WAIT)
    assert len(owner.done) == count


def test_it_ends_with_the_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner(5, quiet=False)
    background = owner.background()
    monkeypatch.setattr(threading, "main_thread", lambda: threading.Thread())
    background.start()
    assert background.thread is not None
    background.thread.join(5)
    assert not background.thread.is_alive()
    assert not owner.done
