"""Reports an engine's outputs to its listeners: the outputs of each turn, and the
engine's death.

Theory. A turn is one message however many requests it concerns, sent after all its
commands have been performed. Only admissions are reported before the step runs, if a
listener requests that: the step may be the last thing that the process does.

A death is reported without holding the lock that guards the served requests. Listeners
take locks of their own, and threads that hold those take this lock, too: that would be a
deadlock. But the ids of the requests concerned are known only while the lock is held. So
the death is noted then, and reported by the thread that releases the lock.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from minfer.analysis.drafts import StepDrafts
from minfer.effects.live.client import (
    EngineDied,
    EngineMessage,
    Listener,
    RequestReason,
    TurnOutputs,
)
from minfer.effects.live.engine.output_columns import (
    concat,
    drafts_column,
    logprobs_column,
    pooled_column,
)
from minfer.planning.schedule import queue_blocked_by
from minfer.records.config import EngineConfig
from minfer.records.messages import Admitted, Emit, Event, Submit
from minfer.records.sequence import Place
from minfer.records.state import EngineState, Transition


class OutputReporter:
    """An engine's listeners, and the outputs that they have not received yet."""

    def __init__(self, config: EngineConfig, lock: threading.Condition) -> None:
        """`lock` guards the served requests."""
        self._config = config
        self._lock = lock
        self._holders = 0  # nested calls that hold the lock by `locked`
        self._listeners: list[Listener] = []
        self._early = False  # report admissions before the step
        self._death: EngineDied | None = None  # while the lock is held
        # Seconds in which requests waited, by what blocked the head of the queue;
        # replaced, never changed.
        self._waits: Mapping[str, float] = {}

    def listen(self, listener: Listener, *, early: bool = False) -> None:
        """As `EngineClient` says."""
        self._listeners.append(listener)
        self._early = self._early or early

    def send(self, message: EngineMessage) -> None:
        """Send a message to all listeners; the caller does not hold the lock."""
        for listener in self._listeners:
            listener(message)

    # --- a turn -------------------------------------------------------------------------

    def report_admissions(
        self, before: EngineState, events: Iterable[Event], transition: Transition
    ) -> None:
        """Note the waiting time of a turn that was decided but not performed yet, and
        report its admissions, if a listener requests that.
        """
        self._note_waits(before, transition.state)
        if self._is_early(transition):
            self.send(
                TurnOutputs(
                    time=transition.state.time,
                    arrived=_arrivals(events),
                    places=_places(events, transition.state),
                    reasons=_reasons(transition),
                    waits=self._waits,
                )
            )

    def outputs_of(
        self,
        events: Iterable[Event],
        transition: Transition,
        drafts: Sequence[StepDrafts],
    ) -> TurnOutputs | None:
        """Returns a turn's outputs that were not reported yet, if any."""
        emits = [command for command in transition.commands if isinstance(command, Emit)]
        reported_early = self._is_early(transition)
        reasons = () if reported_early else _reasons(transition)
        arrived = () if reported_early else _arrivals(events)
        finished = tuple(end for emit in emits for end in emit.finished)
        ids = concat([emit.ids for emit in emits])
        if not (ids or finished or arrived or reasons):
            return None
        return TurnOutputs(
            time=transition.state.time,
            ids=ids,
            tokens=concat([emit.tokens for emit in emits]),
            logprobs=logprobs_column(emits),
            pooled=pooled_column(emits),
            drafts=drafts_column(drafts, ids),
            finished=finished,
            arrived=arrived,
            places={} if reported_early else _places(events, transition.state),
            reasons=reasons,
            waits=self._waits,
        )

    def _note_waits(self, before: EngineState, after: EngineState) -> None:
        if before.waiting:
            cause = queue_blocked_by(self._config, before)
            spent = self._waits.get(cause, 0.0) + after.time - before.time
            self._waits = {**self._waits, cause: spent}

    def _is_early(self, transition: Transition) -> bool:
        """Returns whether arrivals and all reasons are reported before the turn's step
        runs.
        """
        return self._early and any(
            isinstance(reason, Admitted) for reason in transition.reasons
        )

    # --- a death ------------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock, and report a death that was noted meanwhile."""
        with self._lock:
            self._holders += 1
            try:
                yield
            finally:
                self._holders -= 1
            outermost = not self._holders
        if outermost:
            self.report_death()

    def note_death(self, ids: tuple[str, ...], reason: str) -> None:
        """Note a death, and the requests that get no more outputs; the caller holds the
        lock.
        """
        self._death = EngineDied(ids, reason)

    def report_death(self) -> None:
        """Report a death that was noted; the caller does not hold the lock."""
        with self._lock:
            death, self._death = self._death, None
        if death is not None:
            self.send(death)


def _arrivals(events: Iterable[Event]) -> tuple[str, ...]:
    """Returns the requests that entered the waiting queue."""
    return tuple(event.request.id for event in events if isinstance(event, Submit))


def _places(events: Iterable[Event], state: EngineState) -> dict[str, Place]:
    """Returns the queue places of new beam search rounds that had none of their own."""
    requests = [event.request for event in events if isinstance(event, Submit)]
    records = {
        request.id: state.requests.get(request.id)
        for request in requests
        if request.continuation.beam_round is not None and not request.continues
    }
    return {name: record.place for name, record in records.items() if record is not None}


def _reasons(transition: Transition) -> tuple[RequestReason, ...]:
    """Returns the engine's reports about requests, besides tokens and ends."""
    return tuple(
        reason for reason in transition.reasons if isinstance(reason, RequestReason)
    )
