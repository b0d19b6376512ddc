"""Sequences: one sample of one request, cold as a record and hot as a column.

Theory. A sequence knows some tokens and has KV for some of them; there are no phases. While it
runs it is one position of the columns of `Running`, in rank order, so that a step advances all
sequences with a few passes in C and touches records only where something happens:

    position 0       start        sched           base         known            last
    |---- cached ----|-- planned --|               |             |               |
    |----------- history, carried by plans --------|-- sampled, the device's own -|

`known`  tokens whose values are committed: the prompt, and what was sampled since.
`sched`  positions whose KV is computed or will be by plans in flight.
`base`   tokens known when this *generation* started (admission, or restart after a failed step).
         Inputs below it come from `history`, in plans; from it on the device feeds itself its own
         last token. So a row with sched < base is being filled, and otherwise it decodes, which
         makes the last prompt chunk of one token a chunk like any other.
`start`  the first position that this generation computes; everything below was a hit.

`last`   the index of the last token it may have: known > last ends it, and no input is due at it.
`ripe`   when `known` reaches it, there is something to do: a block can be sealed, or the sequence
         has its last token.  `mark`: likewise for `sched`: the table should grow, or nothing is
         left to be scheduled. So a turn finds all exceptions with one comparison per column.

A decoding row has sched = known - 1 + (its tokens in flight): one input is always due.

`tails` hold the known tokens from the last block boundary at or below `base` that have not got a
key yet, the youngest apart in `fresh`: copying a tail each step would touch every token of it, a
third of a turn's cost. `chains` hold what has a key: keys, the tokens of output blocks, the leaf.
"""

from collections.abc import Iterable
from itertools import chain
from typing import Any, Final

import attrs
from attrs import frozen

from minfer.blocks import ROOT
from minfer.keys import Key
from minfer.log import Log
from minfer.policy import Rank
from minfer.record import evolve
from minfer.request import Request

Place = tuple[Rank, int, int]  # rank by policy, arrival number of the request, sample
SampleId = tuple[str, int]  # request id, sample


@frozen
class Sequence:
    """The cold half: what does not change while a generation runs."""

    request: Request
    sample: int
    place: Place
    arrived: float  # seconds
    history: tuple[int, ...]  # tokens known at the start of the generation
    keys: tuple[Key, ...] = ()  # of history's full blocks, as far as known
    preempted: int = 0  # times

    @property
    def id(self) -> SampleId:
        """Request id and sample."""
        return self.request.id, self.sample


@frozen
class Chain:
    """What a running sequence has published."""

    keys: Log[Key]  # of its full blocks, at least `sealed` of them
    sealed: int  # leading blocks of the table whose KV is committed and named
    leaf: int = ROOT  # the published block that it holds
    chunks: Log[tuple[int, ...]] = Log()  # tokens of blocks that left the tail with a key
    low: int = 0  # leading blocks of the table that were given back: they are out of the window


@frozen
class Running:
    """Columns over the running sequences, in rank order; all have the same length."""

    seqs: tuple[Sequence, ...] = ()
    ids: tuple[SampleId, ...] = ()
    gens: tuple[int, ...] = ()  # generation: unique over the life of the engine
    rows: tuple[int, ...] = ()  # device row
    starts: tuple[int, ...] = ()
    base: tuple[int, ...] = ()
    known: tuple[int, ...] = ()
    sched: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    ripe: tuple[int, ...] = ()
    mark: tuple[int, ...] = ()
    tables: tuple[Log[int], ...] = ()
    chains: tuple[Chain, ...] = ()
    tails: tuple[tuple[int, ...], ...] = ()
    fresh: tuple[tuple[int, ...], ...] = ()

    def __len__(self) -> int:
        return len(self.gens)

    def find(self, sample: SampleId) -> int | None:
        """The position of a sample, or None if it does not run."""
        return self.ids.index(sample) if sample in self.ids else None


COLUMNS: Final = tuple(a.name for a in attrs.fields(Running))


def without(run: Running, drop: Iterable[int]) -> Running:
    """`run` less the sequences at the positions `drop`."""
    gone = sorted(drop, reverse=True)
    if not gone:
        return run
    columns = []
    for name in COLUMNS:
        column = list(getattr(run, name))
        for i in gone:
            del column[i]
        columns.append(tuple(column))
    return Running(*columns)


def joined(run: Running, added: list[Running]) -> Running:
    """`run` with each single-row `added` at its place."""
    if not added:
        return run
    places = [seq.place for seq in run.seqs[-1:]]
    if all(one.seqs[0].place > p for one in added for p in places):
        spots = None  # the usual case: newcomers rank behind all, in their order
    else:
        spots = _spots(run, added)
    columns: list[tuple[Any, ...]] = []
    for name in COLUMNS:
        column, new = getattr(run, name), tuple(getattr(one, name)[0] for one in added)
        if spots is None:
            columns.append(column + new)
            continue
        out = list(column)
        for spot, value in zip(spots, new, strict=True):
            out.insert(spot, value)
        columns.append(tuple(out))
    return Running(*columns)


def _spots(run: Running, added: list[Running]) -> list[int]:
    """Where each newcomer goes, one after the other."""
    places = [seq.place for seq in run.seqs]
    spots = []
    for one in added:
        place = one.seqs[0].place
        spot = sum(p < place for p in places)
        places.insert(spot, place)
        spots.append(spot)
    return spots


def edited(run: Running, **changes: dict[int, Any]) -> Running:
    """`run` with single cells changed: column name -> {position: value}."""
    new = {}
    for name, cells in changes.items():
        if cells:
            column = list(getattr(run, name))
            for i, value in cells.items():
                column[i] = value
            new[name] = tuple(column)
    return evolve(run, **new) if new else run


def tail_of(run: Running, i: int) -> tuple[int, ...]:
    """The known tokens of the sequence at position `i` that have not got a key yet."""
    return run.tails[i] + run.fresh[i]


def tokens_of(run: Running, i: int, block_size: int) -> tuple[int, ...]:
    """All known tokens of the sequence at position `i`."""
    cut = run.base[i] // block_size * block_size
    return (
        *run.seqs[i].history[:cut],
        *chain.from_iterable(run.chains[i].chunks),
        *tail_of(run, i),
    )
