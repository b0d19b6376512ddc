"""Clients take turns, small bodies go first, and none is lost."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from minfer.effects.text.job_queue import JobQueue


def test_clients_take_turns() -> None:
    line = JobQueue[str]()
    for i in range(3):
        line.add(f"large {i}", "greedy", 4000)
    line.add("one", "other", 9000)
    assert [line.take() for _ in range(5)] == [
        "large 0",
        "one",
        "large 1",
        "large 2",
        None,
    ]


def test_the_smallest_of_a_client_goes_first() -> None:
    line = JobQueue[str]()
    for size in (30, 10, 20, 10):
        line.add(f"{size} after {len(line)}", "a", size)
    jobs = [line.take() for _ in range(4)]
    assert jobs == ["10 after 1", "10 after 3", "20 after 2", "30 after 0"]


def test_a_place_that_is_kept_for_small_ones() -> None:
    line = JobQueue[str]()
    line.add("large", "a", 100)
    line.add("small", "b", 10)
    assert line.take(max_size=50) == "small"
    assert line.take(max_size=50) is None
    assert line.take() == "large"


def test_who_leaves_is_out_of_the_line() -> None:
    line = JobQueue[str]()
    places = [line.add(str(i), "a", 5) for i in range(3)]
    line.remove(places[1])
    line.remove(places[1])
    assert len(line) == line.count("a") == 2
    assert line.count("b") == 0
    assert [line.take(), line.take(), line.take()] == ["0", "2", None]
    line.remove(places[0])
    assert len(line) == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5)), max_size=30))
def test_turns_are_fair_whatever_comes(jobs: list[tuple[str, int]]) -> None:
    line = JobQueue[str]()
    for client, size in jobs:
        line.add(client, client, size)
    left, had = Counter(client for client, _ in jobs), Counter[str]()
    for _ in jobs:
        job = line.take()
        assert job is not None
        left[job] -= 1
        had[job] += 1
        waiting = [had[client] for client in left if left[client]]
        assert max(waiting, default=0) - min(waiting, default=0) <= 1
    assert line.take() is None
    assert not +left
