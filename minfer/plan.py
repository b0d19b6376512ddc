"""A plan: the work of one step, as the executor gets it.

A plan speaks positions. It says which device rows take part, how many inputs each takes
from which position on, and how much it may yield; token values are in it only where the
host must supply them, in `fills`: the next step can be planned before the last one's
tokens are known. What a row needs besides (its table, its sampling parameters) was sent
when it was opened, or as it changed.

Contract of an executor:

- Plans are executed in order. Within a plan: `opens`, then `grows`, then `copies`, then
  the rows.
- A row that is not in `fills` feeds itself: its input is the last token it sampled, at
  the position after its last input; `starts` then is the latest position that can be, and
  exact unless a plan in flight may yield less than its most.
- Row i yields from min(1, most[i]) to most[i] tokens; where most is 0 it yields none (a
  chunk of a prompt that goes on). With `repeat` = k the plan stands for k forwards: row i
  takes part in the first max(1, most[i]) of them, feeding itself.
- A failure is reported once, for the earliest plan that failed, and after it no plan that
  had been handed over will touch the cache any more.
"""

from itertools import chain
from typing import Any

from attrs import frozen

from minfer.request import Request

Yields = tuple[tuple[int, ...], ...]  # token ids per row


def tokens_of(yields: Any) -> tuple[int, ...] | None:
    """All tokens of results, row after row; None of what is no tuple of tuples of whole
    numbers.
    """
    if type(yields) is not tuple or not set(map(type, yields)) <= {tuple}:
        return None
    tokens = tuple(chain.from_iterable(yields))
    return tokens if set(map(type, tokens)) <= {int} else None


@frozen
class Fill:
    """Inputs from history for one row: `tokens` at positions starts[index] and on."""

    index: int  # in the plan's columns
    tokens: tuple[int, ...]


@frozen
class Open:
    """A row is taken over by a new generation: all that the device keeps for it."""

    index: int
    request: Request
    sample: int
    table: tuple[int, ...]  # blocks


@frozen
class Grow:
    """A row's table gets more blocks, from entry `at` on."""

    row: int
    at: int
    blocks: tuple[int, ...]


@frozen
class Copy:
    """The first `count` positions of block `source` are copied to block `target`."""

    source: int
    target: int
    count: int


@frozen
class Plan:
    """One step. The columns have one entry per row that takes part, in batch order."""

    step: int
    gens: tuple[int, ...]  # generation of the sequence in the row
    rows: tuple[int, ...]  # device rows
    starts: tuple[int, ...]  # position of the first input, or the latest it may be
    counts: tuple[int, ...]  # inputs in the first forward
    most: tuple[int, ...]  # tokens the row may yield
    fills: tuple[Fill, ...] = ()
    opens: tuple[Open, ...] = ()
    grows: tuple[Grow, ...] = ()
    copies: tuple[Copy, ...] = ()
    repeat: int = 1  # forwards
