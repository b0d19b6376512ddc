"""What a profile says of kernels that overlap."""

from typing import Any

from bench.kernel_profile import by_kernel, launches


def kernel(name: str, start: float, us: float) -> dict[str, Any]:
    grid = [1, 2, 1]
    return {"cat": "kernel", "name": name, "ts": start, "dur": us, "args": {"grid": grid}}


def test_only_what_ends_later_is_added() -> None:
    events = [
        {"cat": "cpu_op", "name": "add", "ts": 0, "dur": 1000},
        kernel("first", 100, 10),
        kernel("waits", 105, 20),
        kernel("hidden", 106, 4),
        kernel("first", 130, 10),
    ]
    found = launches(events)
    assert [(launch.name, launch.added_us) for launch in found] == [
        ("first", 10),
        ("waits", 15),
        ("hidden", 0),
        ("first", 15),
    ]
    first, waits, hidden = by_kernel(found, steps=2)
    assert first == {
        "kernel": "first",
        "grid": (1, 2, 1),
        "launches": 1,
        "us": 10,
        "added_us": 12.5,
    }
    assert (waits["added_us"], hidden["added_us"]) == (7.5, 0)
    assert launches([]) == []
