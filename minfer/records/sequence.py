"""Sequences: one sample of one request, as a cold record and hot columns.

Theory. A sequence has known tokens, and KV for some of them; there are no phases. While
it runs it is one position of the columns of `Running`, so that a step advances all
sequences with a few passes in C and touches records only where something happens:

    position 0       start        sched           base         known            last
    |---- cached ----|-- planned --|               |             |               |
    |-------------- carried by plans --------------|-- sampled, the device's own -|

`known`  tokens whose values are committed: the prompt, and the tokens sampled since.
`scheduled`  positions whose KV is computed or will be by plans in flight.
`base`   tokens known when this *generation* started (admission, or restart after a failed
         step). Inputs below it come from the host, in plans: at admission they are
         `history`, which a restart leaves unchanged. From it on the device uses its own
         last token as input. So a row with sched < base is in prefill, any other is a
         decode row.
`start`  the first position that this generation computes; everything below was a hit.

`last`   the index of the last token it may have: known > last ends it, and no input is
         due at it.
`publish_at`   when `known` reaches it, a block can be published, or the sequence has its
last
         token. `grow_at`: when `scheduled` reaches it, the table should grow, or nothing
         is left to be scheduled. So a turn finds all exceptions with one comparison per
         column.

A decode row has sched = known - 1 + (its tokens in flight): one input is always due.

`tables` have the pages of a sequence for each group of layers: where the group has a
window, entries of blocks that left it are not valid any more.

`tails` hold the known tokens from the last block boundary in `history` on that have no
key yet, the newest apart in `fresh`: copying whole tails would be a third of a turn's
cost. `chains` hold the keys, the tokens of output blocks with a key, and the leaf.
"""

from bisect import bisect
from collections.abc import Callable, Container, Mapping
from itertools import compress
from operator import attrgetter
from typing import Any, Final, TypeVar

import attrs
from attrs import frozen

from minfer.blocks.keys import Key, Keys
from minfer.blocks.prefix import ROOT
from minfer.records.policy import Rank
from minfer.records.request import Request
from minfer.values.log import Log
from minfer.values.record import evolve

T = TypeVar("T")
NEVER: Final = 2**62  # a position that no sequence reaches
Place = tuple[Rank, int, int]  # rank by policy, arrival number of the request, sample
SampleId = tuple[str, int]  # request id, sample
SampleIds = tuple[SampleId, ...]
Table = Log[int]  # the pages of a sequence in a group of layers, block by block
Tables = tuple[Table, ...]  # for each group


@frozen
class Sequence:
    """The part of a sequence that does not change while a generation runs."""

    request: Request
    sample: int
    place: Place
    arrived: float  # seconds
    # tokens known when it last entered the queue, or now if it waits
    history: tuple[int, ...]
    keys: Keys = ()  # of history's full blocks, as far as computed
    preempted: int = 0  # times
    cached: int = 0  # prompt tokens from the prefix cache at its first admission
    # Whether blocks were loaded for it from another tier, or it was decided against it,
    # since it entered the queue: it then computes what is not cached.
    chosen: bool = False

    @property
    def id(self) -> SampleId:
        """Request id and sample."""
        return self.request.id, self.sample

    @property
    def ran_before(self) -> bool:
        """Whether it, or the request that it continues, has run before."""
        return self.preempted > 0 or self.request.continues

    @property
    def reads_cache(self) -> bool:
        """Whether it may read its known tokens from the cache.

        If a prompt must be computed, its first sample does that, once.
        """
        prompt_is_computed = self.sample > 0 or len(self.history) > len(
            self.request.prompt
        )
        return prompt_is_computed or self.request.reads_cache


@frozen
class RowStates:
    """The kept states of recurrent layers that belong to a running sequence."""

    # The kept state that it starts from; it is held until the plan that opens the row
    # copies it.
    origin: Key = ROOT
    # The number of blocks of its prompt that were cached, those after the last kept state
    # included.
    shared: int = 0
    last: int = 0  # position of the last state that it started from, or saved
    # The position at which its next state will be saved: a multiple of the block size,
    # greater than the row's `scheduled`.
    save_at: int = NEVER
    # The state that it started from, and those that it was the first to save, in order:
    # it may drop them for a later one.
    kept: Keys = ()
    checkpoint: Key = ROOT  # the last one that it saved after its prompt


NO_STATES: Final = RowStates()


@frozen
class Chain:
    """The published blocks of a running sequence."""

    keys: Log[Key]  # of its full blocks, at least `sealed` of them
    # by group: leading blocks of the table whose KV is committed and published
    sealed: tuple[int, ...]
    # of the published block that it holds in the group without a window
    leaf: Key = ROOT
    # tokens of blocks with a key, which left the tail
    chunks: Log[tuple[int, ...]] = Log()
    # by group: leading blocks of the table that were released, outside the window
    low: tuple[int, ...] = (0,)
    states: RowStates = NO_STATES

    def with_states(self, states: RowStates) -> "Chain":
        """The same blocks with other states; in a third of the time of `evolve`."""
        return Chain(self.keys, self.sealed, self.leaf, self.chunks, self.low, states)


@frozen(slots=False)  # so that `evolve` copies it faster, without its constructor
class Running:
    """Columns over the running sequences, in rank order; all have the same length."""

    seqs: tuple[Sequence, ...] = ()
    ids: SampleIds = ()
    run_ids: tuple[int, ...] = ()  # unique over the life of the engine
    rows: tuple[int, ...] = ()  # device row
    starts: tuple[int, ...] = ()
    num_known_at_admission: tuple[int, ...] = ()
    known: tuple[int, ...] = ()
    scheduled: tuple[int, ...] = ()
    last_index: tuple[int, ...] = ()
    publish_at: tuple[int, ...] = ()
    grow_at: tuple[int, ...] = ()
    tables: tuple[Tables, ...] = ()
    chains: tuple[Chain, ...] = ()
    tails: tuple[tuple[int, ...], ...] = ()
    fresh: tuple[tuple[int, ...], ...] = ()

    def __len__(self) -> int:
        return len(self.run_ids)

    def tokens(self, i: int, block_size: int) -> tuple[int, ...]:
        """All known tokens of the sequence at position `i`."""
        history = self.seqs[i].history
        tokens = list(history[: len(history) // block_size * block_size])
        for chunk in self.chains[i].chunks:
            tokens += chunk
        tokens += self.tails[i]
        tokens += self.fresh[i]
        return tuple(tokens)

    def inputs(self, i: int, start: int, stop: int, block_size: int) -> tuple[int, ...]:
        """Known tokens of the sequence at position `i`, from `start` to before `stop`."""
        history = self.seqs[i].history
        if stop <= len(history):
            return history[start:stop]
        # in the tail, as tokens with a key are not
        first = len(self.chains[i].keys) * block_size
        if start < first:
            return self.tokens(i, block_size)[start:stop]
        return (self.tails[i] + self.fresh[i])[start - first : stop - first]


# Whether a sequence's next token depends on the host.
is_bound: Final[Callable[[Sequence], bool]] = attrgetter("request.needs_host_mask")
COLUMNS: Final = tuple(a.name for a in attrs.fields(Running))
_columns: Final = attrgetter(*COLUMNS)


def less(column: tuple[T, ...], out: list[int]) -> tuple[T, ...]:
    """`column` without the entries at the positions `out`, which are sorted."""
    if not out:
        return column
    entries = list(column)
    for i in reversed(out):
        del entries[i]
    return tuple(entries)


def without(run: Running, removed: list[int]) -> Running:
    """`run` without the sequences at the positions `removed`, which are sorted."""
    return (
        Running(*[less(column, removed) for column in _columns(run)]) if removed else run
    )


def joined(run: Running, added: list[Running]) -> Running:
    """`run` with the single-row `added`, which are in rank order, at their places.

    Entries before the first of them are not moved: mostly that is all of them, and a
    column is copied once.
    """
    places = [_place_among(run, row) for row in added]
    first = places[0] if places else len(run)
    tails = [list(column[first:]) for column in _columns(run)]
    for place, row in reversed([*zip(places, added, strict=True)]):
        for tail, new in zip(tails, _columns(row), strict=True):
            tail[place - first : place - first] = new
    pairs = zip(_columns(run), tails, strict=True)
    return Running(*[column[:first] + tuple(tail) for column, tail in pairs])


def _place_among(run: Running, row: Running) -> int:
    return bisect(run.seqs, row.seqs[0].place, key=attrgetter("place"))


def edited_column(column: tuple[T, ...], cells: Mapping[int, T]) -> tuple[T, ...]:
    """`column` with other values at some positions."""
    new = list(column)
    for i, value in cells.items():
        new[i] = value
    return tuple(new)


def edited(run: Running, **changes: dict[int, Any]) -> Running:
    """`run` with single cells changed: column name -> {position: value}."""
    new = {}
    for name, cells in changes.items():
        if cells:
            new[name] = edited_column(getattr(run, name), cells)
    return evolve(run, **new) if new else run


def positions(run: Running, run_ids: Container[int]) -> list[int]:
    """The positions of the given generations, in order."""
    return (
        list(compress(range(len(run)), map(run_ids.__contains__, run.run_ids)))
        if run_ids
        else []
    )
