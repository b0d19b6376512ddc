"""Which masks of a call take longer than the bound."""

import threading
import time

import numpy as np
import pytest

from minfer.effects.text.grammars import slow_masks as watching
from minfer.effects.text.grammars.grammar_library import MASK_WAIT_SECONDS
from minfer.effects.text.grammars.slow_masks import UNWRITTEN, MaskWatch, WatchedCall


def late(count: int, steps: list[list[int]]) -> set[int]:
    """The lines that are late, of those that are written before each look."""
    lines = np.full((count, 2), UNWRITTEN, np.int32)
    call = WatchedCall(lines, range(count))
    for step in steps:
        lines[step, 0] = 1
        call.check_lines()
    return {*call.slow}


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([], set()),
        ([[]], set()),  # they may have been begun just now
        ([[], [0, 1, 2, 3]], set()),
        ([[], [0, 1]], {2, 3}),
        ([[0], [1, 2, 3]], set()),
        ([[], [], [0, 1, 2, 3]], {0, 1, 2, 3}),
    ],
)
def test_masks_are_late_that_take_longer_than_the_bound(
    monkeypatch: pytest.MonkeyPatch, steps: list[list[int]], expected: set[int]
) -> None:
    monkeypatch.setattr(watching, "MASK_THREADS", 4)
    assert late(4, steps) == expected


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([[], [0, 1, 2, 3]], set()),  # the last two may have waited for processors
        ([[], [0, 1, 2, 3], [5]], {4}),  # one of them was being made all the time
        ([[], [0, 1, 2, 3], [4, 5]], set()),
        ([[0], [1], [2], [3], [4, 5]], set()),
    ],
)
def test_masks_that_wait_for_a_processor_are_not_late(
    monkeypatch: pytest.MonkeyPatch, steps: list[list[int]], expected: set[int]
) -> None:
    monkeypatch.setattr(watching, "MASK_THREADS", 2)
    assert late(6, steps) == expected


@pytest.mark.long
def test_its_thread_ends_when_there_is_nothing_to_look_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watching, "MAX_IDLE_CHECKS", 2)
    watch, lines = MaskWatch(), np.zeros((1, 1), np.int32)
    for _ in range(2):
        with watch.watch(lines, [0]) as call:
            time.sleep(20 * MASK_WAIT_SECONDS)
        assert call.slow == {0}
        thread = watch._thread
        assert isinstance(thread, threading.Thread)
        thread.join(60)
        assert not thread.is_alive()
