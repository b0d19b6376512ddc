"""An engine on a virtual clock, taken turn by turn, so that several can share a clock.

A step begins when its launch does and the one before it has ended. If host and device
alternate, as on a CPU, it begins when its results are collected.
"""

import math
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

from attrs import Factory, define, field

from minfer.blocks.prefix import flattened, pages_of
from minfer.engine import step
from minfer.journal.overrides import OverrideCounts
from minfer.journal.turns import Step, wrap_engine_errors
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    AdapterLoaded,
    Command,
    Event,
    Execute,
    LoadAdapter,
    Lost,
    Move,
    Moved,
    Tick,
    TransferCommand,
    WakeAt,
)
from minfer.records.plan import Plan, Yields
from minfer.records.state import EngineState, Turn, initial
from minfer.records.tiers import Tier, TransferKind
from minfer.simulation.cost import CostModel
from minfer.simulation.guesses import Guesses, proposals
from minfer.simulation.oracle import Oracle
from minfer.simulation.steady import (
    SteadyTurns,
    SteadyWalk,
    count_quiet_turns,
    is_steady,
)

NoteCache = Callable[[EngineState, EngineState], None]


@define
class _SimulatedDevice:
    """The times of steps. Each begins when its launch does and the one before it has
    ended; if host and device alternate, when its results are collected.
    """

    cost: CostModel
    done: float  # when the last step ended
    # steps in flight: the time of launch, and the duration
    flights: deque[tuple[float, float]] = Factory(deque)

    def launch(self, plan: Plan, time: float) -> float:
        """Launch a plan; returns when the host is free again."""
        self.flights.append((time, self.cost.seconds(plan)))
        return time + self.cost.launch_seconds(plan)

    def end(self, asked: float) -> float:
        """When the first step in flight ends, if its results are collected at `asked`."""
        launched, takes = self.flights.popleft()
        begins = max(self.done, launched if self.cost.overlaps else asked)
        self.done = begins + takes
        return self.done

    def decode_steadily(
        self, due: float, until: float, step_seconds: list[float]
    ) -> tuple[list[float], float]:
        """Take turns of a steady decode: the first is due at `due`, each launches a step
        that takes the next of `step_seconds`, and all are due before `until`. Returns
        their times, and when the next one is due.
        """
        flights, host, done = self.flights, self.cost.host, self.done
        overlaps, times = self.cost.overlaps, list[float]()
        for seconds in step_seconds:
            if due >= until:
                break
            times.append(due)
            free = due + host
            flights.append((free, seconds))
            launched, takes = flights.popleft()
            done = max(done, launched if overlaps else free) + takes
            due = max(free, done)
        self.done = done
        return times, due

    def forget(self, upto: int) -> None:
        """Drop the steps that a failure has discarded: all but the first `upto`."""
        while len(self.flights) > upto:
            self.flights.pop()


@define
class _SimulatedTransfers:
    """The times of transfers between tiers: one after the other to and from each, by the
    costs in the configuration.
    """

    config: EngineConfig
    busy: dict[TransferKind, float] = Factory(dict)  # until when
    due: list[tuple[float, int, Moved | Lost]] = Factory(list)  # a heap

    def begin(self, command: TransferCommand, end: Moved | Lost, now: float) -> None:
        """Begin a transfer that will end so."""
        if isinstance(command, Move):
            pages = len(command.targets)
        else:
            pages = len(flattened(command.pages))
        self.begin_pages(pages, command.kind, end, now)

    def begin_pages(
        self, pages: int, kind: TransferKind, end: Moved | Lost, now: float
    ) -> None:
        """Begin a transfer of `pages` pages."""
        tier: Tier | None
        match kind:
            case TransferKind.STORE_TO_HOST | TransferKind.LOAD_FROM_HOST:
                tier = self.config.host
            case TransferKind.STORE_TO_EXTERNAL | TransferKind.FETCH_FROM_EXTERNAL:
                tier = self.config.external_store
        if tier is None:
            return
        seconds = tier.load_seconds + pages * tier.page_seconds
        self.busy[kind] = max(now, self.busy.get(kind, now)) + seconds
        heappush(self.due, (self.busy[kind], end.number, end))

    @property
    def next(self) -> float:
        """When the next one ends."""
        return self.due[0][0] if self.due else math.inf

    def peek(self, now: float) -> list[Moved | Lost]:
        """Those that will have ended, in order; they stay."""
        return [end for time, _, end in sorted(self.due) if time <= now]

    def ended(self, now: float) -> list[Moved | Lost]:
        """Those that have ended, in order; they are dropped."""
        ends = list[Moved | Lost]()
        while self.due and self.due[0][0] <= now:
            ends.append(heappop(self.due)[2])
        return ends


@define
class _SimulatedLoads:
    """The times of loads of adapters: one after the other."""

    seconds: float  # of each
    due: deque[tuple[float, AdapterLoaded]] = Factory(deque)

    def begin(self, adapter: str, slot: int, now: float) -> None:
        """Begin a load."""
        begins = max(now, self.due[-1][0]) if self.due else now
        self.due.append((begins + self.seconds, AdapterLoaded(adapter, slot)))

    @property
    def next(self) -> float:
        """When the next one ends."""
        return self.due[0][0] if self.due else math.inf

    def ended(self, now: float) -> list[AdapterLoaded]:
        """Those that have ended, in order; they are dropped."""
        ends = list[AdapterLoaded]()
        while self.next <= now:
            ends.append(self.due.popleft()[1])
        return ends


@define
class SimulatedEngine:
    """An engine and its device on a virtual clock: `due`, `take`, `launch`, and again.

    The first override of the policy is a PolicyWarning, or an error, see `overrides`; and
    so is a method that is never called.
    """

    config: EngineConfig
    executor: Oracle
    cost: CostModel
    state: EngineState = Factory(lambda self: initial(self.config), takes_self=True)
    free: float = 0.0  # when the host is free; at first, when it starts
    number: int = 0  # of the next turn
    step: Step = step
    guesses: Guesses = field(factory=Guesses)  # of drafts
    overrides: OverrideCounts = field(factory=OverrideCounts)  # of the policy
    idle: int = field(init=False, default=0)  # turns in a row without event and plan
    _wake: float = field(init=False)
    _device: _SimulatedDevice = field(init=False)
    _transfers: _SimulatedTransfers = field(init=False)
    _loads: _SimulatedLoads = field(init=False)
    # when the results of the first step in flight are collected, once that is known
    _collects: float | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self.overrides.check_methods(self.config.policy)
        self._device = _SimulatedDevice(self.cost, self.free)
        for plan in self.state.inflight:
            self._device.launch(plan, self.free)
        self._transfers = _SimulatedTransfers(self.config)
        for transfer in self.state.tiers.transfers:
            read = (
                ()
                if transfer.kind.to_device
                else pages_of(self.state.blocks.prefix, transfer.keys)
            )
            pages = len(transfer.targets or read)  # a store by keys has no targets
            self._transfers.begin_pages(
                pages, transfer.kind, Moved(transfer.number), self.free
            )
        self._loads = _SimulatedLoads(self.cost.adapter)
        for index, slot in enumerate(self.state.adapters.slots):
            if slot.loading:
                self._loads.begin(slot.adapter, index, self.free)
        self._wake = self.free if self.state.requests else math.inf

    def due(self, arrival: float) -> float:
        """The time of the next turn if the next arrival comes at `arrival`; infinity if
        there is none. Steps in flight are waited for, whatever arrives.
        """
        if self._collects is None and self._device.flights:
            self._collects = max(self.free, self._device.end(self.free))
        if self._collects is not None:
            return self._collects
        moved = min(self._transfers.next, self._loads.next)
        return max(self.free, min(self._wake, arrival, moved))

    def take_steady(
        self, until: float, note_cache: NoteCache | None = None
    ) -> SteadyTurns | None:
        """Take the next turns at once, as far as they are steady decode and due before
        `until`; None if the next is none. `due` must have been called. `note_cache` gets
        the states before and after each turn that may have cached or evicted blocks.
        """
        if self._collects is None or not self.state.time <= self._collects < until:
            return None
        until = min(until, self._loads.next)
        max_turns, yields = self._steady_yields()
        if not max_turns:
            return None
        walk = SteadyWalk(self.config, self.number, self.state, yields)
        while self._collects < until and len(walk.times) < max_turns:
            before = walk.state
            goes_on = self._take_up_to_block_turn(walk, until, max_turns)
            after = walk.state
            if note_cache and after.blocks.prefix is not before.blocks.prefix:
                note_cache(before, after)
            if not goes_on or (
                self.config.has_tiers and not is_steady(self.config, after)
            ):
                break
        if not walk.times:
            return None
        span = walk.done()
        self.executor.plans = deque(span.after.inflight)
        self.state = span.after
        self.number += len(span.times)
        self.idle, self._wake = 0, math.inf
        return span

    def _steady_yields(self) -> tuple[int, Yields]:
        """The number of steps for which a decode may be steady, and what each yields."""
        if self.step is not step or not is_steady(self.config, self.state):
            return 0, ()
        max_turns, yields = self.executor.steady_yields()
        is_valid = max(yields, default=(0,))[0] < self.config.vocab_size
        return (max_turns, yields) if is_valid else (0, ())

    def _take_up_to_block_turn(
        self, walk: SteadyWalk, until: float, max_turns: int
    ) -> bool:
        """Take the quiet turns that follow, and a turn that changes blocks or leaves out
        sequences. Returns whether such a turn was taken, and steady ones may follow.
        """
        run, max_turns = walk.state.running, max_turns - len(walk.times)
        rows = len(run)
        positions = sum(run.scheduled) + rows  # that the step planned next reads
        max_quiet = min(count_quiet_turns(self.config, walk.state), max_turns)
        quiet_until = min(until, self._transfers.next)
        times = self._steady_times(rows, positions, quiet_until, max_quiet)
        now, commands = self._collects, None
        if now is not None and now < until and len(times) < max_turns:
            ends = self._transfers.peek(now)
            commands = walk.take_block_turn([*times, now], ends)
            if commands is not None:
                self._transfers.ended(now)
                positions += rows * len(times)
                # The step that is planned reads nothing of these.
                for i in walk.left_out:
                    positions -= walk.state.running.scheduled[i] + 1
                self._steady_times(rows - len(walk.left_out), positions, until, 1)
                self._begin_transfers(commands)
        if commands is None and times:
            walk.take_quiet(times)
        return commands is not None and not walk.left_out

    def _steady_times(
        self, rows: int, positions: int, until: float, max_turns: int
    ) -> list[float]:
        """The times of the next turns, all of a steady decode and before `until`, of
        which the first plans a step of `rows` rows that reads `positions` of the KV
        cache; the host and the device go on from the last.
        """
        due = self._collects
        if max_turns < 1 or due is None or due >= until:
            return []
        step_seconds = self.cost.decode_times(rows, positions, max_turns)
        times, self._collects = self._device.decode_steadily(due, until, step_seconds)
        self.free = times[-1] + self.cost.host
        return times

    def take(self, now: float, arrived: list[Event]) -> Turn:
        """Take the turn that is due `now`, with all that has arrived."""
        events: list[Event] = [Tick(now)]
        if self._collects is not None:
            results = [self.executor.collect()]
            events += results
            events += proposals(self.config, self.state, results, self.guesses)
            self._collects = None
        events += self._transfers.ended(now)
        events += self._loads.ended(now)
        events += arrived
        self.free = now
        with wrap_engine_errors(self.number, self.state):
            transition = self.step(self.config, self.state, tuple(events))
        turn = Turn(self.number, self.state, tuple(events), transition)
        self.overrides.fold_and_warn(turn, self.config.policy)
        return turn

    def launch(self, turn: Turn) -> None:
        """Go on after a turn: launch its plans."""
        transition = turn.transition
        self.state = transition.state
        self.number += 1
        plans = [c.plan for c in transition.commands if isinstance(c, Execute)]
        self.idle = 0 if plans or len(turn.events) > 1 else self.idle + 1
        self._device.forget(len(self.state.inflight) - len(plans))
        self.free += self.cost.host
        for plan in plans:
            self.executor.launch(plan)
            self.free = self._device.launch(plan, self.free)
        self._begin_transfers(transition.commands)
        wakes = (c.time for c in transition.commands if isinstance(c, WakeAt))
        self._wake = min(wakes, default=math.inf)

    def _begin_transfers(self, commands: tuple[Command, ...]) -> None:
        """Begin the transfers among these commands."""
        for command in commands:
            if isinstance(command, TransferCommand):
                ends = list[Moved | Lost]()
                self.executor.move(command, ends.append)
                self._transfers.begin(command, ends[0], self.free)
            elif isinstance(command, LoadAdapter):
                self._loads.begin(command.adapter, command.slot, self.free)
