"""How long each request of a run waited in the queue, for what, and who went first: a
fold over turns.

Theory. All samples in the queue wait for what its head waits for. So there is a clock for
each cause, which runs while the head waits for that cause; the waits of a sample are the
differences of the clocks between its entry into the queue and its admission. A turn costs
one look at the head, and an admission one look at each sample that waits.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from attrs import define, field

from minfer.analysis.near_prefix import (
    OneTokenEdit,
    is_costlier,
    one_token_edit,
    packed,
)
from minfer.blocks.keys import Key
from minfer.planning.schedule import queue_blocked_by
from minfer.records.config import EngineConfig
from minfer.records.messages import Admitted, Ended, Preempted, Submit
from minfer.records.request import Request
from minfer.records.sequence import SampleId, SampleIds
from minfer.records.state import Turn

MAX_COMPARED_PROMPTS: Final = 32  # the last ones, with which a prompt is compared


@define
class QueueTimes:
    """The waits of all samples of a request."""

    seconds: dict[str, float] = field(factory=dict)  # by cause
    preempted: int = 0  # times
    preempted_for_later: int = 0  # of these, for requests that had arrived later
    # Others that were admitted while it waited, or that it was preempted for; and of
    # these, those that had arrived later.
    admitted: int = 0
    later: int = 0
    prompt: int = 0  # tokens, at its first admission
    hit: int = 0  # of these, those that were cached
    shared: int = 0  # most leading tokens that it shares with one of the last prompts,
    shared_with: str = ""  # which is that of this request
    # The prompt that misses the cache by one token, as an edit of that of `edit_with`.
    edit: OneTokenEdit | None = None
    edit_with: str = ""

    @property
    def waited(self) -> float:
        """All its waits, in seconds."""
        return sum(self.seconds.values())


@define
class _Waiting:
    """A sample in the queue."""

    arrival: int
    since: Mapping[str, float]  # the clocks of causes when it entered


@define(eq=False)
class QueueFold:
    """The waits of the requests of a run, by id; if an id is used again, those of its
    last request.
    """

    config: EngineConfig
    times: dict[str, QueueTimes] = field(factory=dict)
    _clocks: dict[str, float] = field(factory=dict, init=False)
    _waiting: dict[SampleId, _Waiting] = field(factory=dict, init=False)
    _arrivals: dict[str, int] = field(factory=dict, init=False)
    _prompts: dict[str, tuple[Key, bytes]] = field(factory=dict, init=False)
    _requests: dict[str, Request] = field(factory=dict, init=False)

    def turn(self, turn: Turn) -> None:
        """Fold a turn."""
        before, state = turn.before, turn.transition.state
        if before.waiting:
            cause = queue_blocked_by(self.config, before)
            spent = self._clocks.get(cause, 0.0) + state.time - before.time
            self._clocks[cause] = spent
        for event in turn.events:
            if isinstance(event, Submit) and event.request.id not in before.requests:
                self._note_arrival(event.request)
        for reason in turn.transition.reasons:
            if isinstance(reason, Admitted):
                self._note_admission(reason)
            elif isinstance(reason, Preempted):
                self._note_preemption(reason, before.running.ids)
            elif isinstance(reason, Ended):
                self._leave((reason.id, reason.sample))

    def end(self) -> Mapping[str, QueueTimes]:
        """The waits of all requests; a wait without an end counts up to the last turn."""
        for name in [*self._waiting]:
            self._leave(name)
        return self.times

    def _note_arrival(self, request: Request) -> None:
        self.times[request.id] = QueueTimes()
        self._arrivals[request.id] = len(self._arrivals)
        self._requests[request.id] = request
        for sample in range(request.n):
            self._enter((request.id, sample))

    def _enter(self, name: SampleId) -> None:
        arrival = self._arrivals.get(name[0], -1)
        self._waiting[name] = _Waiting(arrival, dict(self._clocks))

    def _leave(self, name: SampleId) -> _Waiting | None:
        """Add the wait of a sample that leaves the queue, if it is there."""
        waiting = self._waiting.pop(name, None)
        times = self.times.get(name[0])
        if waiting is not None and times is not None:
            for cause, now in self._clocks.items():
                if spent := now - waiting.since.get(cause, 0.0):
                    times.seconds[cause] = times.seconds.get(cause, 0.0) + spent
        return waiting

    def _note_admission(self, reason: Admitted) -> None:
        admitted = self._leave((reason.id, reason.sample))
        for name, waiting in self._waiting.items():
            if name[0] != reason.id and name[0] in self.times:
                times = self.times[name[0]]
                times.admitted += 1
                times.later += admitted is not None and admitted.arrival > waiting.arrival
        if reason.prompt and not reason.sample and reason.id in self._requests:
            self._compare_prompt(self._requests.pop(reason.id), reason)

    def _note_preemption(self, reason: Preempted, running: SampleIds) -> None:
        times = self.times.get(reason.id)
        if times is not None:
            arrivals = self._arrivals
            is_later = arrivals.get(reason.by[0], -1) > arrivals[reason.id]
            times.preempted += 1
            times.preempted_for_later += is_later
            # one that does not run yet is admitted next, and counted then
            if reason.by in running and reason.by[0] != reason.id:
                times.admitted += 1
                times.later += is_later
        self._enter((reason.id, reason.sample))

    def _compare_prompt(self, request: Request, reason: Admitted) -> None:
        """Compare a prompt with the last ones, and keep it."""
        times, tokens = self.times[request.id], packed(request.prompt)
        times.prompt, times.hit = reason.known, reason.hit
        size = self.config.block_size
        for name, edit in self._edits(request, tokens):
            if edit.at > times.shared:
                times.shared, times.shared_with = edit.at, name
            if is_costlier(
                edit, times.edit, known=reason.known, hit=reason.hit, size=size
            ):
                times.edit, times.edit_with = edit, name
        self._prompts[request.id] = request.root, tokens
        if len(self._prompts) > MAX_COMPARED_PROMPTS:
            del self._prompts[next(iter(self._prompts))]

    def _edits(
        self, request: Request, tokens: bytes
    ) -> Iterator[tuple[str, OneTokenEdit]]:
        for name, (root, earlier) in self._prompts.items():
            if root == request.root:
                yield name, one_token_edit(tokens, earlier)
