"""Reasons, ends and wakes that differ are sentences."""

from typing import Any

import pytest

from tests.core.journal.reported import admitted, words

MOST = 8  # names in a sentence


@pytest.mark.parametrize(
    ("then", "now", "emitted"),
    [
        ([admitted("a")], [admitted("b")], "then admitted 'a', now 'b'"),
        ([], [admitted("b")], "then admitted none, now 'b'"),
        (
            [admitted("a", hit=4)],
            [admitted("a")],
            "admitted 'a': then with hit 4, cached 4, now with hit 0, cached 0",
        ),
        (
            [["QueueBlocked", "a", 1, "blocks", 3, 2]],
            [["QueueBlocked", "a", 1, "rows", 0, 0]],
            (
                "then blocked 'a' sample 1 for blocks (3 needed, 2 available), "
                "now 'a' sample 1 for rows"
            ),
        ),
        (
            [["Preempted", "a", 0, ["a", 0], 9, 8]],
            [["Preempted", "b", 0, ["a", 0], 5, 4]],
            "then preempted 'a' for itself, now 'b' for 'a'",
        ),
        (
            [["Missed", "a", 0, 1, 3]],
            [["Missed", "a", 0, 2, 3]],
            (
                "then missed the prefix of 'a' from block 1 of 3 on, "
                "now 'a' from block 2 of 3 on"
            ),
        ),
        ([["Ignored", "cancel"]], [], "then ignored event cancel, now none"),
        (
            [["Discarded", 3, 1, 4]],
            [["Discarded", 3, 2, 4]],
            "then discarded step 3 plans 1 rows 4, now step 3 plans 2 rows 4",
        ),
    ],
)
def test_a_reason_that_differs_is_a_sentence(then: Any, now: Any, emitted: str) -> None:
    assert words({"reasons": then}, {"reasons": now}) == [emitted]


def test_many_names_are_counted() -> None:
    some = [admitted(f"r{i}") for i in range(30)]
    (emitted,) = words({"reasons": some}, {})
    assert emitted.endswith(f" and {30 - MOST} more, now none")
    assert emitted.count("'r") == MOST


def test_ends_and_wakes_are_sentences() -> None:
    then = {"finished": [["a", 0, "length", 12, 0], ["b", 0, "stop", 3, 0]], "wake": 3.5}
    now = {"finished": [["b", 0, "stop", 3, 0]]}
    assert words(then, now) == [
        "then ended 'a' (length, 12 tokens), now none",
        "then asked to be woken at 3.5 s, now not at all",
    ]
