"""A policy on trial: an engine under it, with the oracle as its executor, and with all
laws checked.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from math import inf, isnan
from types import SimpleNamespace
from typing import Any, Final

from attrs import define, evolve, field

from minfer.engine import step
from minfer.journal.codec import dump
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    Admitted,
    Cancel,
    Event,
    Execute,
    Executed,
    Submit,
    Tick,
    WakeAt,
)
from minfer.records.policy import Policy
from minfer.records.request import Request
from minfer.records.state import EngineState, Transition, Turn, initial
from minfer.simulation.oracle import Oracle
from minfer.testing.ledger import Ledger
from minfer.testing.trial_drafts import proposed

VOCAB: Final = 40


class PolicyError(AssertionError):
    """A policy broke a law: `law` is its name; `turns` under `config` led to it."""

    def __init__(
        self, law: str, detail: str, config: EngineConfig, turns: list[Turn]
    ) -> None:
        self.law, self.detail = law, detail.removeprefix(f"{law}: ")
        self.config, self.turns = config, tuple(turns)
        story = [f"{law}: {self.detail}", f"under {config}, after"]
        for turn in turns:
            heading = f"  turn {turn.number}, {turn.transition.state.time:.4f} s: "
            inputs = (
                event for event in turn.events if isinstance(event, Submit | Cancel)
            )
            for report in map(dump, (*inputs, *turn.transition.reasons)):
                fields = (
                    f"{key}={value}"
                    for key, value in report.pop("request", report).items()
                )
                story.append(heading + " ".join(fields).removeprefix("is="))
        super().__init__("\n".join(story))


def _is_rank(rank: Any) -> bool:
    return isinstance(rank, tuple) and all(
        isinstance(n, int | float) and not isnan(n) for n in rank
    )


_METHODS: Final = [name for name in vars(Policy) if not name.startswith("_")]
# what the protocol requires of an answer
_IS_VALID: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "rank": lambda _, answer: (
        isinstance(answer, tuple) and len(answer) == 2 and _is_rank(answer[0])
    ),
    "requeue_rank": lambda args, answer: _is_rank(answer) and answer <= args[1],
    "admit_from": lambda _, answer: _is_rank((answer,)),
    "victim": lambda args, answer: type(answer) is int and 0 < answer < len(args[1]),
    "may_preempt": lambda _, answer: isinstance(answer, bool),
    "defer": lambda _, answer: (
        isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], bool)
    ),
    "budget": lambda _, answer: type(answer) is int and answer >= 0,
    "drafts": lambda _, answer: type(answer) is int and answer >= 0,
}


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
    now: float = field(init=False, default=0.0)  # seconds
    state: EngineState = field(init=False)
    turns: list[Turn] = field(init=False, factory=list)
    _inbox: list[Event] = field(init=False, factory=list)  # events of the next turn
    # `config`, with `_call_policy` for a policy
    _watched: EngineConfig = field(init=False)
    # laws broken, and how
    _flaws: list[tuple[str, str]] = field(init=False, factory=list)
    _raised: Exception | None = field(init=False, default=None)  # the policy's first
    _oracle: Oracle = field(init=False)
    _ledger: Ledger = field(init=False)
    _budgets: list[int] = field(init=False, factory=list)  # its answers in this turn
    _deferred: set[str] = field(init=False, factory=set)  # clients deferred in this turn
    _claimed_tokens: int = field(init=False, default=0)  # requested tokens
    _busy_turns: int = field(init=False, default=0)  # turns with work
    # since when the policy makes all wait
    _idle_since: float = field(init=False, default=inf)

    def __attrs_post_init__(self) -> None:
        watch: Any = SimpleNamespace(
            **{name: partial(self._call_policy, name) for name in _METHODS}
        )
        self._watched = evolve(self.config, policy=watch)
        self._oracle = Oracle(self.config.block_size, VOCAB, self.config.groups)
        self.state = initial(self._watched)
        self._ledger = Ledger(self.config, self.state)
        # without events: so there is a turn to show, whatever happens next
        self.turn(0.0)

    def _call_policy(self, name: str, *args: Any) -> Any:
        """Call the policy twice, the second time with a deep copy of the arguments."""
        try:
            twin, ask = deepcopy(args), getattr(self.config.policy, name)
            answer = ask(*args)
            copy, unchanged, repeated = deepcopy(answer), args == twin, ask(*twin)
        except Exception as error:
            self._flaws.append(("never raises", f"{name}{args} raised {error!r}"))
            self._raised = self._raised or error
            raise  # the engine goes on without an answer: `_require` raises later
        if name == "budget":
            self._budgets.append(answer)
        if name == "defer" and _IS_VALID[name](args, answer) and answer[0]:
            self._deferred.add(args[1].client)
        report = f"{name}{args} is {copy!r}"
        if not _IS_VALID.get(name, lambda *_: True)(args, answer):
            self._flaws.append(
                (name, f"{report}; the protocol: {getattr(Policy, name).__doc__}")
            )
        if not (unchanged and answer == copy == repeated):
            self._flaws.append(
                ("purity", f"{report}, then {repeated!r}; or its arguments changed")
            )
        return answer

    def _require(self, holds: bool, law: str, detail: str) -> None:
        self._flaws += [] if holds else [(law, detail)]
        for flaw in self._flaws:
            raise PolicyError(*flaw, self.config, self.turns) from self._raised

    def tell(self, event: Submit | Cancel, gap: float = 0.0) -> None:
        """Send an event after `gap` seconds; the next turn takes it."""
        until = self.now + gap
        while self.now < until:
            self.turn(until)
        self._inbox.append(event)
        if isinstance(event, Submit):
            self._claimed_tokens += _num_tokens(event.request)

    def turn(self, until: float = inf) -> None:
        """Take a turn; the clock advances by `pace`, or if nothing runs to `until` at
        most.
        """
        transition = self._step()
        self._require(True, "", "")
        wakes = [
            command.time for command in transition.commands if isinstance(command, WakeAt)
        ]
        self._check_deadlock(idle=bool(wakes) and not self._oracle.plans)
        # Not all the way to the policy's wake-up time: another event may come before.
        short = self.hold / 100
        wake_times = [self.now + max((wake - self.now) / 2, short) for wake in wakes]
        if self._oracle.plans:
            self.now += self.pace
        else:
            self.now = min(until, *(wake_times or [until]))

    def _step(self) -> Transition:
        """Let the engine decide a turn, and the ledger check it."""
        before = self.state
        events = (Tick(self.now), *self._results(), *self._inbox)
        self._inbox = []
        self._budgets.clear()
        self._deferred.clear()
        try:
            transition = step(self._watched, before, events)
            self.turns.append(Turn(len(self.turns), before, events, transition))
            self.state = transition.state
            self._ledger.take(events, transition, self._budgets, self._deferred)
            for command in transition.commands:
                if isinstance(command, Execute):
                    self._oracle.launch(command.plan)
        except Exception as error:
            self._flaws.append((getattr(error, "law", "totality"), str(error)))
            raise PolicyError(*self._flaws[0], self.config, self.turns) from error
        return transition

    def _results(self) -> Iterator[Event]:
        """The results of the first step in flight, and the host's drafts after it."""
        if self._oracle.plans:
            results = self._oracle.collect()
            yield results
            if isinstance(results, Executed):
                yield from proposed(self._watched, self.state, results, self._oracle)

    def _check_deadlock(self, *, idle: bool) -> None:
        """Check that all requests end: within a number of turns, and without too long a
        pause.
        """
        self._idle_since = min(self._idle_since, self.now) if idle else inf
        self._busy_turns += not idle
        is_stuck = (
            self.now - self._idle_since > self.hold
            or self._busy_turns > 50 + 4 * self._claimed_tokens
        )
        report = (
            f"{self._busy_turns} turns for {self._claimed_tokens} tokens; idle from "
            f"{self._idle_since:.2f} s on"
        )
        self._require(not is_stuck, "no deadlock", report)

    def compete(
        self, request: Request, interval: int = 1, *, short: bool = False
    ) -> None:
        """Submit `request` when all rows are taken, and its equals, or short ones, every
        `interval` turns.

        While it waits, at first or preempted, `overtakes` of them may be admitted (of
        those that come `patience` seconds later, if short), and one for each earlier
        claim like theirs.
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
        for name in self.state.requests:
            self.tell(Cancel(name))

    def finish(self) -> None:
        """Check that without more events everything ends and is freed, and that the
        decisions are the same a second time.
        """
        while self.state.requests or self._oracle.plans or self._inbox:
            self.turn()
        freed = self.state.blocks.available == self.config.num_blocks
        self._require(freed, "all is freed", "not so")
        for turn in reversed(self.turns):
            same = step(self._watched, turn.before, turn.events) == turn.transition
            report = f"turn {turn.number} is decided otherwise again"
            self._require(same, "determinism", report)


def _num_tokens(request: Request) -> int:
    return len(request.prompt) + request.n * request.max_tokens
