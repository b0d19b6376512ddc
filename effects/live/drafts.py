"""What the host drafts: a proposer is told of every token, and asked what may follow.

Theory. All that a proposer has to know is in plans and their results: a row that is
opened says what is known of its sample, and each result says what came after. So it is
told before the engine is, and what it proposes goes into the same turn as the result
behind which it is: the engine can plan the next step with it at once. Samples under a
grammar have no drafts, as their masks would have to be made behind each draft.

Proposing takes time in which no step is planned. So a prompt is read a part a turn, and
while nothing comes of proposals, as they are not expected to pay, they are made in fewer
and fewer turns.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any, Final, Protocol

from attrs import define, field

from minfer.config import EngineConfig
from minfer.messages import Emit, Event, Execute, Executed, Failed, Propose
from minfer.plan import Open
from minfer.sequence import SampleId
from minfer.speculate.plan_drafts import may_draft
from minfer.speculate.proposer import Proposer
from minfer.speculate.settings import HOST
from minfer.state import EngineState, Transition

READ_IN_A_TURN: Final = 512  # tokens
MOST_SKIPPED: Final = 32  # turns without proposals, after others of which nothing came


class Drafts(Protocol):
    """Who says the host's drafts. In the driver's thread."""

    def heard(
        self, results: Iterable[Executed | Failed], state: EngineState
    ) -> tuple[Event, ...]:
        """Learn what a step has yielded, before the engine does; returns what may follow.

        `state` has the step in flight.
        """
        ...

    def turned(self, transition: Transition) -> None:
        """Learn what the engine has made of it."""
        ...


class NoDrafts:
    """The host drafts nothing."""

    def heard(
        self,
        results: Iterable[Executed | Failed],  # noqa: ARG002  # the protocol's
        state: EngineState,  # noqa: ARG002  # likewise
    ) -> tuple[Event, ...]:
        """As `Drafts` says: nothing."""
        return ()

    def turned(self, transition: Transition) -> None:
        """As `Drafts` says: it does not matter."""


@define(eq=False)
class Reader:
    """What the proposer was told of a sample."""

    gen: int  # the generation that it is read from
    last: int  # index of the last token that it may have
    stops: frozenset[int]
    known: int = 0  # tokens that there are
    over: bool = False  # the last of them ends it
    unread: deque[tuple[int, ...]] = field(factory=deque)  # of them, what was not told


class HostDrafts:
    """Drafts by a proposer, for an engine that has `speculation` by the host."""

    def __init__(self, config: EngineConfig, proposer: Proposer) -> None:
        how = config.speculation
        self.most = 0 if how is None else how.drafts  # of a sample
        rows = 0 if how is None else how.rows
        self.rows = rows or config.max_num_seqs  # in steps of more there are none
        self.proposer = proposer
        self.library: Any = proposer.start()
        self.readers: dict[SampleId, Reader] = {}
        self.names: dict[int, SampleId] = {}  # by generation
        self.proposed = False  # in this turn
        self.skip = 0  # so many turns
        self.skipped = 0  # the last time: twice as many, if nothing comes of it again

    def heard(
        self, results: Iterable[Executed | Failed], state: EngineState
    ) -> tuple[Event, ...]:
        """As `Drafts` says."""
        self.proposed = False
        grown = list[SampleId]()
        for result in results:
            if isinstance(result, Executed):
                grown += self._grown(state, result)
        if self.skip or len(state.running) > self.rows:  # it is read when it is asked
            self.skip = max(0, self.skip - 1)
            return ()
        self._read(grown)
        said = [self._said(name) for name in grown if not self.readers[name].over]
        found = tuple(one for one in said if one.tokens)
        self.proposed = bool(found)
        return found

    def turned(self, transition: Transition) -> None:
        """As `Drafts` says."""
        for command in transition.commands:
            if isinstance(command, Emit):
                self._forget((one.id, one.sample) for one in command.finished)
        plans = [c.plan for c in transition.commands if isinstance(c, Execute)]
        for plan in plans:
            for opened in plan.opens:
                self._opened(plan.gens[opened.index], opened, transition.state)
        if not self.proposed:
            return
        if any(plan.drafts for plan in plans):
            self.skip = self.skipped = 0
        elif plans:  # the engine has gone on without
            self.skipped = min(MOST_SKIPPED, 2 * self.skipped or 1)
            self.skip = self.skipped

    def _forget(self, samples: Iterable[SampleId]) -> None:
        """Let go of what is kept of samples that ended."""
        for name in samples:
            reader = self.readers.pop(name, None)
            if reader is not None:
                self.names.pop(reader.gen, None)
                self.library = self.proposer.ended(self.library, name)

    def _opened(self, gen: int, opened: Open, state: EngineState) -> None:
        """A sample begins, or begins again, with all that is known of it."""
        name, run = opened.name, state.running
        if name not in run.ids:
            return  # it gave way within the turn, to others of a step planned later
        request = run.seqs[run.ids.index(name)].request
        if request.lockstep or not may_draft(request, HOST):
            return
        reader = self.readers.get(name)
        if reader is not None:
            self.names.pop(reader.gen, None)
        # What came of steps after it had given way does not count.
        if reader is None or reader.known > len(opened.known):
            reader = Reader(gen, opened.last, request.stop_ids)
            self.readers[name] = reader
            self.library = self.proposer.began(
                self.library, name, request.root, opened.prompt
            )
        reader.gen = gen
        self.names[gen] = name
        self._grow(reader, opened.known[reader.known :])

    def _grown(self, state: EngineState, result: Executed) -> list[SampleId]:
        """Who has more tokens by the results of the earliest plan: of who has given way
        since, they do not count.
        """
        plan, there = state.inflight[0], set(state.running.gens)
        grown = list[SampleId]()
        if type(result.yields) is not tuple or len(result.yields) != len(plan.gens):
            return grown  # results that cannot be
        for gen, tokens in zip(plan.gens, result.yields, strict=True):
            name = self.names.get(gen)
            if tokens and name is not None and gen in there:
                self._grow(self.readers[name], tokens)
                grown.append(name)
        return grown

    def _grow(self, reader: Reader, tokens: tuple[int, ...]) -> None:
        if tokens:
            reader.known += len(tokens)
            reader.unread.append(tokens)
            stopped = not reader.stops.isdisjoint(tokens)
            reader.over = stopped or reader.known > reader.last

    def _read(self, first: list[SampleId]) -> None:
        """Tell the proposer what is new, as much as may be in a turn: `first` of those
        that have just got tokens, so that nobody waits for another one's prompt.
        """
        left = READ_IN_A_TURN
        for name in [*first, *self.readers]:
            if left <= 0:
                return
            reader = self.readers[name]
            while reader.unread and left > 0:
                tokens = reader.unread.popleft()
                if len(tokens) > left:
                    reader.unread.appendleft(tokens[left:])
                    tokens = tokens[:left]
                left -= len(tokens)
                self.library = self.proposer.grew(self.library, name, tokens)

    def _said(self, name: SampleId) -> Propose:
        """What the proposer says, if it was told all."""
        reader, tokens = self.readers[name], tuple[int, ...]()
        if not reader.unread:
            tokens = self.proposer.propose(self.library, name, self.most).tokens
        return Propose(*name, reader.known, tokens)
