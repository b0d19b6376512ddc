"""How long a full line takes to move, from how it moved lately."""

from types import SimpleNamespace
from typing import Any

from minfer.effects.serving.access.retry_after import (
    MAX_RETRY_SECONDS,
    MIN_RETRY_SECONDS,
    WINDOW_SECONDS,
    QueuePace,
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def job(n: int) -> Any:
    return SimpleNamespace(request=SimpleNamespace(n=n))


def test_the_estimate_follows_the_pace_of_the_queue() -> None:
    clock = Clock()
    pace = QueuePace(clock)
    assert pace.seconds(1000) == MIN_RETRY_SECONDS  # nothing is known
    for _ in range(10):
        clock.now += 1.0
        pace.note_end(job(2))
    clock.now += 1.0
    assert pace.seconds(20) == 10  # 20 samples passed in the 10 s since the first
    assert pace.seconds(1) == MIN_RETRY_SECONDS
    assert pace.seconds(10**6) == MAX_RETRY_SECONDS


def test_what_was_long_ago_is_forgotten() -> None:
    clock = Clock()
    pace = QueuePace(clock)
    pace.note_end(job(1))
    clock.now = WINDOW_SECONDS + 1
    assert pace.seconds(50) == MIN_RETRY_SECONDS
