"""A policy on trial: an engine under it, with the oracle as its executor, and with all
laws checked.
"""

from collections import deque
from collections.abc import Callable, Iterator
from math import inf
from typing import Any, Final

from attrs import define, evolve, field

from minfer.engine import step
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    AdapterLoaded,
    Admitted,
    Cancel,
    Event,
    Execute,
    Executed,
    LoadAdapter,
    Submit,
    Tick,
    WakeAt,
)
from minfer.records.plan import Plan
from minfer.records.request import Request
from minfer.records.state import EngineState, Transition, Turn, initial
from minfer.simulation.oracle import Oracle
from minfer.testing.ledger import Ledger
from minfer.testing.policy_error import Flaw
from minfer.testing.policy_error import PolicyError as PolicyError
from minfer.testing.second_process import SecondProcess
from minfer.testing.trial_drafts import proposed
from minfer.testing.watched_policy import WatchedPolicy

VOCAB: Final = 40


# A promise of a user's policy: it raises AssertionError after a turn that breaks it.
Law = Callable[["Trial"], None]


@define
class DryDevice:
    """An executor without memory, whose tokens are all the same."""

    plans: deque[Plan] = field(factory=deque)

    def load_adapter(
        self, command: LoadAdapter, report: Callable[[AdapterLoaded], None]
    ) -> None:
        """Report a load at once."""
        report(AdapterLoaded(command.adapter, command.slot))

    def launch(self, plan: Plan) -> None:
        """Queue the plan."""
        self.plans.append(plan)

    def collect(self) -> Executed:
        """The results of the next plan."""
        plan = self.plans.popleft()
        return Executed(plan.step, tuple((0,) * most for most in plan.max_sampled_tokens))


@define
class Trial:
    """An engine under `config.policy`, run turn by turn. Raises PolicyError when a law is
    broken.
    """

    config: EngineConfig
    pace: float = 1.0  # seconds that a step takes
    overtakes: int = 8  # newcomers that may be admitted first, see `compete`
    patience: float = 10.0  # seconds after which shorter newcomers count
    hold: float = 1.0  # seconds that the policy may keep an idle engine waiting
    laws: tuple[Law, ...] = ()  # of the user, called with the trial after each turn
    # With all laws of the engine; without, a turn takes a fifth of the time.
    thorough: bool = True
    now: float = field(init=False, default=0.0)  # seconds
    state: EngineState = field(init=False)
    turns: list[Turn] = field(init=False, factory=list)  # all so far, the last at the end
    watched: WatchedPolicy = field(init=False)
    _inbox: list[Event] = field(init=False, factory=list)  # events of the next turn
    _watched_config: EngineConfig = field(init=False)  # `config` under `watched`
    _flaws: list[Flaw] = field(init=False, factory=list)
    _device: Any = field(init=False)
    _ledger: Ledger = field(init=False)
    _claimed_tokens: int = field(init=False, default=0)  # requested tokens
    _busy_turns: int = field(init=False, default=0)  # turns with work
    # since when the policy makes all wait
    _idle_since: float = field(init=False, default=inf)

    def __attrs_post_init__(self) -> None:
        self.watched = WatchedPolicy(self.config.policy, self._flaws, calls=[])
        watched: Any = self.watched
        self._watched_config = evolve(self.config, policy=watched)
        self._device = DryDevice()
        if self.thorough:
            self._device = Oracle(self.config.block_size, VOCAB, self.config.groups)
        try:
            self.state = initial(self._watched_config)
        except Exception as error:
            raise self._error() from error  # `start` raised
        self._ledger = Ledger(self.config, self.state)
        # without events: so there is a turn to show, whatever happens next
        self.turn(0.0)

    def _require(self, holds: bool, law: str, detail: str) -> None:
        self._flaws += [] if holds else [Flaw(law, detail)]
        if self._flaws:
            raise self._error() from self.watched.raised

    def _error(self) -> PolicyError:
        flaw = self._flaws[0]
        return PolicyError(flaw.law, flaw.detail, self.config, self.turns, flaw.method)

    def tell(self, event: Submit | Cancel, gap: float = 0.0) -> None:
        """Send an event after `gap` seconds; the next turn takes it."""
        until = self.now + gap
        while self.now < until:
            self.turn(until)
        self._inbox.append(event)
        if isinstance(event, Submit):
            self._claimed_tokens += _num_tokens(event.request)

    def turn(self, until: float = inf) -> None:
        """Take a turn; the clock advances by `pace`, or to `until` at most if nothing
        runs.
        """
        transition = self._step()
        self._check_promises()
        self._require(True, "", "")
        wakes = [
            command.time for command in transition.commands if isinstance(command, WakeAt)
        ]
        self._check_deadlock(idle=bool(wakes) and not self._device.plans)
        # Not all the way to the policy's wake-up time: another event may come before.
        short = self.hold / 100
        wake_times = [self.now + max((wake - self.now) / 2, short) for wake in wakes]
        if self.has_work:
            self.now += self.pace
        else:
            self.now = min(until, *(wake_times or [until]))

    def advance(self, seconds: float, max_turns: int) -> None:
        """Go on for some seconds, in at most `max_turns` turns: the last step takes the
        rest of the time.
        """
        until = self.now + seconds
        for _ in range(max_turns):
            if self.now < until:
                self.turn(until)
        if self._device.plans:
            self.now = max(self.now, until)

    @property
    def has_work(self) -> bool:
        """Whether an event or a step's results are still to come."""
        return bool(self._inbox or self._device.plans)

    def _step(self) -> Transition:
        """Let the engine decide a turn, and the ledger check it."""
        before = self.state
        events = (Tick(self.now), *self._results(), *self._inbox)
        self._inbox = []
        watched = self.watched
        watched.begin_turn()
        try:
            transition = step(self._watched_config, before, events)
            self.turns.append(Turn(len(self.turns), before, events, transition))
            self.state = transition.state
            if self.thorough:
                self._ledger.take(events, transition, watched.budgets, watched.deferred)
            for command in transition.commands:
                if isinstance(command, Execute):
                    self._device.launch(command.plan)
                elif isinstance(command, LoadAdapter):
                    self._device.load_adapter(command, self._inbox.append)
        except Exception as error:
            self._flaws.append(Flaw(getattr(error, "law", "totality"), str(error)))
            raise self._error() from (watched.raised or error)
        return transition

    def _check_promises(self) -> None:
        """Check the user's laws after the turn."""
        for law in self.laws:
            try:
                law(self)
            except AssertionError as error:
                name = getattr(law, "__name__", type(law).__name__)
                detail = str(error) or (law.__doc__ or "broken").strip().split("\n")[0]
                self._flaws.append(Flaw(name, detail))

    def _results(self) -> Iterator[Event]:
        """The results of the first step in flight, and the host's drafts after it."""
        if self._device.plans:
            results = self._device.collect()
            yield results
            if isinstance(results, Executed) and self.thorough:
                yield from proposed(
                    self._watched_config, self.state, results, self._device
                )

    def _check_deadlock(self, *, idle: bool) -> None:
        """Check that all requests end: within a number of turns, and without too long a
        pause.
        """
        self._idle_since = min(self._idle_since, self.now) if idle else inf
        self._busy_turns += not idle
        waited = self.now - self._idle_since
        report = (
            f"requests wait, and nothing runs: idle from {self._idle_since:.2f} s on, "
            f"for {waited:.2f} s; a policy may wait for {self.hold:g} s, by the option "
            "`hold`"
        )
        self._require(waited <= self.hold, "no deadlock", report)
        report = f"{self._busy_turns} turns for {self._claimed_tokens} tokens"
        is_stuck = self._busy_turns > 50 + 4 * self._claimed_tokens
        self._require(not is_stuck, "no deadlock", report)

    def compete(
        self, request: Request, interval: int = 1, *, short: bool = False
    ) -> None:
        """Submit `request` when all rows are taken, and rivals every `interval` turns:
        equal requests, or short ones.

        While `request` waits, for its first admission or after a preemption, at most
        `overtakes` rivals may be admitted; and as many more as the tokens that the
        requests before it claim would serve. Of short rivals only those count that come
        at least `patience` seconds after it.
        """
        rival = request
        if short:
            rival = evolve(request, prompt=request.prompt[:1], n=1, max_tokens=1)
        present = {seq.request for seq in (*self.state.waiting, *self.state.running.seqs)}
        present |= {event.request for event in self._inbox if isinstance(event, Submit)}
        # Claimed but unused tokens may go to later requests: fair shares do that.
        allowed = self.overtakes + sum(map(_num_tokens, present)) // _num_tokens(rival)
        for number in range(self.config.max_num_seqs):
            self.tell(Submit(evolve(request, id=f"early{number}")))
        self.turn(self.now + self.pace)
        self.tell(Submit(request))
        # Short ones must come faster than they end.
        rows = self.config.max_num_seqs if short else 1
        late_from = self.now + (self.patience if short else 0)
        passed = set[str]()
        for number in range(150):
            if number % interval == 0:
                name = "late" if self.now >= late_from else "soon"
                for row in range(rows):
                    self.tell(Submit(evolve(rival, id=f"{name}{number}.{row}")))
            self.turn(self.now + self.pace)
            if any(seq.request.id == request.id for seq in self.state.waiting):
                reasons = self.turns[-1].transition.reasons
                passed |= {
                    reason.id
                    for reason in reasons
                    if isinstance(reason, Admitted) and "late" in reason.id
                }
            report = (
                f"{request.id} waits while {len(passed)} later ones go first; "
                f"{allowed} may"
            )
            self._require(len(passed) <= allowed, "bounded starvation", report)
            if request.id not in self.state.requests:
                break
        self.cancel_all()

    def cancel_all(self) -> None:
        """Cancel all requests that have not ended."""
        for name in self.state.requests:
            self.tell(Cancel(name))

    def compare_with(self, second: SecondProcess) -> None:
        """Check that a second process decides all turns as this one did."""
        events = [turn.events for turn in self.turns]
        other = second.compare(self.config, events, self.watched.calls or [])
        if other is not None:
            self._flaws.append(Flaw("set order", other.detail, other.method))
            del self.turns[other.turn + 1 :]
        self._require(True, "", "")

    def finish(self) -> None:
        """Check that without more events all requests end and all blocks are freed, and
        that each turn is the same when it is decided a second time.
        """
        while self.state.requests or self.has_work:
            self.turn()
        self.watched.calls, calls = None, self.watched.calls
        freed = self.state.blocks.available == self.config.num_blocks
        report = "at the end no request is left, but blocks are still in use"
        self._require(freed, "all is freed", report)
        for turn in reversed(self.turns if self.watched.twice else ()):
            same = step(self._watched_config, turn.before, turn.events) == turn.transition
            report = f"turn {turn.number}, decided a second time, is another"
            self._require(same, "determinism", report)
        self.watched.calls = calls


def _num_tokens(request: Request) -> int:
    return len(request.prompt) + request.n * request.max_tokens
