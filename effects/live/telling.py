"""What an engine tells its listeners: what each turn brought, and that it serves nobody
any more.

Theory. A turn is one message however many requests it concerns, told once all of it has
been done. Only who starts is told before, if a listener asks for that: the step that runs
them may be the last thing that the process does.

A death is told without the lock that guards who is served. Listeners take locks of their
own, and who holds those comes here for that one: they would wait for each other. But
whom it concerns is known while the lock is held. So it is noted then, and whoever lets go
of the lock tells of it.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from minfer.config import EngineConfig
from minfer.effects.live.client import About, Died, Listener, Message, News
from minfer.effects.live.emits import column_of, joined, logprobs_of, pooled_of
from minfer.messages import Admitted, Emit, Event, Submit
from minfer.runs.drafts import Drafted
from minfer.schedule import waits_for
from minfer.sequence import Place
from minfer.state import EngineState, Transition


class Telling:
    """Who listens to an engine, and what they have not been told yet."""

    def __init__(self, config: EngineConfig, lock: threading.Condition) -> None:
        """`lock` guards who is served."""
        self._config = config
        self._lock = lock
        self._holders = 0  # calls, one within the other, that hold it by `locked`
        self._listeners: list[Listener] = []
        self._early = False  # who starts is told before the step
        self._untold: Died | None = None  # as long as the lock is held
        # Seconds in which somebody waited, by what who was next in line waited for; made
        # anew, never changed.
        self._waits: Mapping[str, float] = {}

    def listen(self, listener: Listener, *, early: bool = False) -> None:
        """As `EngineClient` says."""
        self._listeners.append(listener)
        self._early = self._early or early

    def tell(self, message: Message) -> None:
        """Have all listeners hear it; the caller does not hold the lock."""
        for hear in self._listeners:
            hear(message)

    # --- a turn -------------------------------------------------------------------------

    def decided(
        self, before: EngineState, events: Iterable[Event], transition: Transition
    ) -> None:
        """A turn has been decided, and nothing of it done: note how long somebody has
        waited, and tell who starts, if that is wanted.
        """
        self._note_waits(before, transition.state)
        if self._is_early(transition):
            self.tell(
                News(
                    time=transition.state.time,
                    arrived=_arrived(events),
                    places=_places(events, transition.state),
                    reasons=_reasons(transition),
                    waits=self._waits,
                )
            )

    def news_of(
        self,
        events: Iterable[Event],
        transition: Transition,
        drafts: Sequence[Drafted],
    ) -> News | None:
        """What a turn brought that is not told yet, if anything."""
        emits = [one for one in transition.commands if isinstance(one, Emit)]
        said = self._is_early(transition)
        reasons = () if said else _reasons(transition)
        arrived = () if said else _arrived(events)
        finished = tuple(done for emit in emits for done in emit.finished)
        ids = joined([emit.ids for emit in emits])
        if not (ids or finished or arrived or reasons):
            return None
        return News(
            time=transition.state.time,
            ids=ids,
            tokens=joined([emit.tokens for emit in emits]),
            logprobs=logprobs_of(emits),
            pooled=pooled_of(emits),
            drafts=column_of(drafts, ids),
            finished=finished,
            arrived=arrived,
            places={} if said else _places(events, transition.state),
            reasons=reasons,
            waits=self._waits,
        )

    def _note_waits(self, before: EngineState, after: EngineState) -> None:
        if before.waiting:
            cause = waits_for(self._config, before)
            spent = self._waits.get(cause, 0.0) + after.time - before.time
            self._waits = {**self._waits, cause: spent}

    def _is_early(self, transition: Transition) -> bool:
        """Whether who came, and all reasons, are told before the turn's step runs."""
        return self._early and any(
            isinstance(one, Admitted) for one in transition.reasons
        )

    # --- a death ------------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock, and tell of a death that was noted meanwhile."""
        with self._lock:
            self._holders += 1
            try:
                yield
            finally:
                self._holders -= 1
            outermost = not self._holders
        if outermost:
            self.tell_death()

    def died(self, ids: tuple[str, ...], why: str) -> None:
        """Note a death, and of whom nothing more will come; the caller holds the lock."""
        self._untold = Died(ids, why)

    def tell_death(self) -> None:
        """Tell of a death that nobody was told of; the caller does not hold the lock."""
        with self._lock:
            died, self._untold = self._untold, None
        if died is not None:
            self.tell(died)


def _arrived(events: Iterable[Event]) -> tuple[str, ...]:
    """The requests that came in line."""
    return tuple(event.request.id for event in events if isinstance(event, Submit))


def _places(events: Iterable[Event], state: EngineState) -> dict[str, Place]:
    """The places of the rounds of searches that came in line and brought none along."""
    came = [event.request for event in events if isinstance(event, Submit)]
    found = {
        one.id: state.requests.get(one.id)
        for one in came
        if one.search is not None and one.place is None
    }
    return {name: live.place for name, live in found.items() if live is not None}


def _reasons(transition: Transition) -> tuple[About, ...]:
    """What the engine says of requests besides their tokens and ends."""
    return tuple(one for one in transition.reasons if isinstance(one, About))
