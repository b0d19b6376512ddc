"""The driver: one loop over any executor. It takes events, folds `step`, performs
commands.

All that is nondeterministic enters here, as events of a turn: arrivals, cancels, results,
time. A turn is handed to `record` before its commands are performed, so that a journal
holds everything that was reported to clients. Rows whose masks are made by the host are
sampled later than the others: `minfer.effects.live.engine.deferred_rows`.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from minfer.effects.execution.contract import Executor
from minfer.effects.live.engine.deferred_rows import DeferredSampling
from minfer.effects.live.engine.host_drafts import HostDraftSource, NoHostDrafts
from minfer.effects.live.engine.policy_warnings import PolicyWarnings
from minfer.effects.live.masks import MaskMaker, NoMasks
from minfer.engine import step
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    AdapterFailed,
    Command,
    Emit,
    Event,
    Execute,
    Executed,
    Failed,
    FetchBlocks,
    LoadAdapter,
    Move,
    StoreBlocks,
    Submit,
    Tick,
    WakeAt,
)
from minfer.records.state import EngineState, Transition, Turn, initial


class Recorder(Protocol):
    """Gets every turn before its commands are performed: a journal."""

    def __call__(self, turn: Turn) -> None:
        """Record a turn."""
        ...

    def close(self, state: EngineState) -> None:
        """End the record; `state` is the last."""
        ...


# Begins the load of an adapter, whose end it reports, from any thread.
BeginAdapterLoad = Callable[[LoadAdapter, Callable[[Event], None]], None]


def refuse_adapters(command: LoadAdapter, report: Callable[[Event], None]) -> None:
    """Report that there is nothing that could load an adapter."""
    error = "this engine has no adapters"
    report(AdapterFailed(command.adapter, command.slot, error))


class Driver:
    """An engine that runs: the pure state, an inbox of events, and an executor.

    `post` may be called from any thread; `turn` from one thread only.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        *,
        clock: Callable[[], float] = time.monotonic,
        record: Recorder | None = None,
        masks: MaskMaker | None = None,
        drafts: HostDraftSource | None = None,
    ) -> None:
        """`masks` makes the masks of rows with deferred sampling; None: any token.
        `drafts` makes the host's drafts.
        """
        self.config = config
        self.clock = clock
        self.record = record
        maker = NoMasks() if masks is None else masks
        self.deferred = DeferredSampling(executor, maker, self.post)
        self.drafts = NoHostDrafts() if drafts is None else drafts
        self.state: EngineState = initial(config)
        self.inbox: deque[Event] = deque()
        self.policy_warnings = PolicyWarnings(config.policy)
        # Takes the ends of transfers, from any thread.
        self.report: Callable[[Event], None] = self.post
        self.load_adapter: BeginAdapterLoad = refuse_adapters
        self.turns = 0  # turns taken so far
        self.last_events: tuple[Event, ...] = ()  # of the last turn
        # When a turn is due even without events, on the clock.
        self.wake: float | None = None

    @property
    def executor(self) -> Executor:
        """The executor that takes the steps."""
        return self.deferred.executor

    @property
    def busy(self) -> bool:
        """Whether requests are being served or events wait."""
        return bool(self.inbox or self.state.inflight or self.state.requests)

    def post(self, event: Event) -> None:
        """Add an event to the next turn."""
        self.inbox.append(event)

    def turn(self, before: Callable[[Transition], None] | None = None) -> Transition:
        """Take one turn; waits for the earliest step in flight, if there is one. `before`
        gets the transition before its commands are performed.
        """
        events = self._collect_events()
        transition = step(self.config, self.state, events)
        if self.record is not None:
            self.record(Turn(self.turns, self.state, events, transition))
        self.turns += 1
        self.state = transition.state
        self.last_events = events
        self.policy_warnings.observe(transition.reasons)
        self.deferred.observe(transition)
        self.drafts.observe(transition)
        if before is not None:
            before(transition)
        self._perform(transition.commands)
        return transition

    def _collect_events(self) -> tuple[Event, ...]:
        """Returns the next turn's events, in their order."""
        results = self._collect_results()
        posted = [self.inbox.popleft() for _ in range(len(self.inbox))]
        # Ends before results: tokens that these rows have sampled do not count.
        ends = self.deferred.take_ends()
        # Pauses come last: events that resume a sample may be followed by its next pause.
        requests = [event.request for event in posted if isinstance(event, Submit)]
        pauses = self.deferred.masks.add_requests(requests)
        now = Tick(self.clock())
        proposals = self.drafts.read_results(results, self.state)
        return (now, *ends, *results, *proposals, *posted, *pauses)

    def _collect_results(self) -> tuple[Executed | Failed, ...]:
        """Returns the results of the earliest step in flight, if there is one."""
        if not self.state.inflight:
            return ()
        self.deferred.sample_step(self.state.inflight[0].step)
        result = self.executor.collect()
        self.deferred.sample_ready()
        return (result,)

    def _perform(self, commands: Iterable[Command]) -> None:
        """Perform a turn's commands; the caller sends what it emits."""
        self.wake = None
        for command in commands:
            match command:
                case Execute(plan):
                    self.deferred.launch(plan)
                case Move() | StoreBlocks() | FetchBlocks():
                    self.executor.move(command, self.report)
                case LoadAdapter():
                    self.load_adapter(command, self.report)
                case WakeAt(moment):
                    self.wake = moment
                case Emit(finished=finished):
                    self.deferred.masks.drop((end.id, end.sample) for end in finished)

    def close(self) -> None:
        """Close the executor and end the record."""
        self.deferred.masks.close()
        self.executor.close()
        if self.record is not None:
            self.record.close(self.state)
