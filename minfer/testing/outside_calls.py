"""Which calls of a policy make its answers depend on more than their arguments.

A profile hook sees each function in C that a method calls: clocks, random numbers, the
addresses and hashes of objects.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any, Final

from attrs import define, field

CLOCK: Final = "clock"
RANDOMNESS: Final = "randomness"
ADDRESS: Final = "address"
_CLOCKS: Final = {"time", "monotonic", "perf_counter", "process_time", "thread_time"}
_DATES: Final = {"now", "utcnow", "today"}
_ADDRESSES: Final = {"id", "hash"}


@define
class OutsideCalls:
    """The calls that a method made, in order: (kind, name of the function)."""

    calls: list[tuple[str, str]] = field(factory=list)

    def first(self, kind: str) -> str:
        """The name of the first function of a kind that was called, or an empty text."""
        return next((name for found, name in self.calls if found == kind), "")

    def see(self, frame: FrameType, event: str, function: Any) -> None:
        """The profile hook."""
        if event != "c_call" or not (kind := _kind_of(function)):
            return
        # Hypothesis measures the time of garbage collection, which comes at any time.
        if not frame.f_globals.get("__name__", "").startswith("hypothesis"):
            self.calls.append((kind, _name_of(function)))


@contextmanager
def outside_calls() -> Iterator[OutsideCalls]:
    """Collect the calls made inside the block."""
    seen, previous = OutsideCalls(), sys.getprofile()
    sys.setprofile(seen.see)
    try:
        yield seen
    finally:
        sys.setprofile(previous)


def _kind_of(function: Any) -> str:
    name, module = function.__name__, function.__module__
    owner = getattr(function, "__self__", None)
    if module == "time" and name.removesuffix("_ns") in _CLOCKS:
        return CLOCK
    if name in _DATES and isinstance(owner, type) and owner.__module__ == "datetime":
        return CLOCK
    if name == "urandom" or any(
        kind.__name__ == "Random" for kind in type(owner).__mro__
    ):
        return RANDOMNESS
    if type(owner).__module__.startswith("numpy.random"):
        return RANDOMNESS
    return ADDRESS if module == "builtins" and name in _ADDRESSES else ""


def _name_of(function: Any) -> str:
    owner: Any = getattr(function, "__self__", None)
    has_name = isinstance(owner, type | ModuleType)
    place = owner.__name__ if has_name else type(owner).__name__
    return f"{place}.{function.__name__}"
