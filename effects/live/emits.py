"""What the emits of one turn hold, as columns over all of its samples."""

from itertools import chain
from typing import TypeVar

from minfer.messages import Emit
from minfer.plan import Logprobs, Pooled

T = TypeVar("T")


def joined(columns: list[tuple[T, ...]]) -> tuple[T, ...]:
    """Columns one after the other; the usual one as it is."""
    return columns[0] if len(columns) == 1 else tuple(chain.from_iterable(columns))


def logprobs_of(emits: list[Emit]) -> Logprobs:
    """The column of log-probabilities, if anybody asked for some."""
    if not any(emit.logprobs for emit in emits):
        return ()
    return joined([emit.logprobs or ((),) * len(emit.ids) for emit in emits])


def pooled_of(emits: list[Emit]) -> Pooled:
    """The column of pooled vectors, if there are any."""
    if not any(emit.pooled for emit in emits):
        return ()
    return joined([emit.pooled or (b"",) * len(emit.ids) for emit in emits])
