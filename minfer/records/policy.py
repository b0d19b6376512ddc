"""Scheduling policy: who goes first, who is preempted, how much a step takes, and whether
to wait.

A policy is an object with twelve pure functions. It decides order and amounts only: the
engine ensures, whatever a policy answers, that blocks are conserved, budgets are kept and
no sequence is planned twice. A policy's own state is part of `EngineState` and is passed
in; policy objects hold none.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, Final, Protocol

from attrs import frozen
from attrs.exceptions import FrozenInstanceError

from minfer.records.request import Request
from minfer.records.step_times import StepTimes

ADAPTER_PASSES: Final = 4  # of `Policy.adapter_passes`, unless a policy says otherwise
Rank = tuple[float, ...]  # lower goes first; the engine breaks ties by arrival


@frozen
class Load:
    """The load of the engine, on which a policy may base its decisions for a step."""

    time: float  # of this turn, seconds
    waiting: int  # samples that wait
    running: int  # running sequences, with those that this step admits
    available: int  # blocks free or evictable
    arrived: float  # arrival time of the head of the queue, seconds; now if none waits
    # Tokens a step may take, from the configuration; for `Policy.budget`, no more than
    # the configuration's `itl_target` allows.
    budget: int
    seats: int = 0  # sequences that may run at once, from the configuration
    step: int = 0  # number of the step that is planned
    # Whether all running and newly admitted sequences are paused: if no other is
    # admitted, there is no step, and its number stays until one of them continues.
    paused: bool = False
    # These four are for `Policy.budget`, if the configuration has an `itl_target`.
    decoding: int = 0  # decode rows of this step
    # Prompt tokens that are still to be computed, as if all prompts in the queue were as
    # long as the first.
    prompt_tokens: int = 0
    min_prefill_tokens: int = 1  # from the configuration
    step_times: StepTimes | None = None  # durations of recent steps

    def budget_within(self, seconds: float) -> int:
        """The tokens with which a step of decode rows and prefill takes about `seconds`:
        one for each decode row, and a multiple of `min_prefill_tokens`, which is not 0.

        It is `budget` if there are no decode rows, which would wait for the step; and if
        the configuration has no `itl_target`, as durations are not measured then.
        """
        if not self.decoding or self.step_times is None:
            return self.budget
        tokens = self.step_times.tokens_within(seconds)
        tokens -= tokens % self.min_prefill_tokens
        return self.decoding + max(self.min_prefill_tokens, tokens)


class Policy(Protocol):
    """The questions of the engine. Every answer must be a function of the arguments
    alone.

    The answers here are those of first come, first served: a policy overrides only what
    differs.
    """

    def start(self) -> Any:
        """Return the policy's first state: an immutable value."""
        return None

    def rank(self, state: Any, request: Request, time: float) -> tuple[Rank, Any]:
        """Return the rank of a new request in the queue, and the new state. Lower goes
        first.

        It is called once for each request, when it arrives; all of its samples have this
        rank, until `requeue_rank` is called after a preemption. `time` is the time of
        this turn in seconds, on a clock that begins anywhere. To age requests, add a
        constant of the request to its arrival, as in `(time + 10 * request.priority,)`:
        it then goes before those of the next, less urgent priority that came up to 10 s
        earlier.

        For one that brings a place along (`Continuation.place`), only the new state is
        used.
        """
        return (), state

    def requeue_rank(
        self, state: Any, rank: Rank, request: Request, arrived: float, done: int
    ) -> Rank:
        """Return the rank of a sequence preempted with `done` output tokens; never behind
        `rank`.
        """
        return rank

    def admit_from(self, state: Any, load: Load) -> float:
        """Return the time from which the head of the queue may start; now or earlier: at
        once.

        Infinity waits for another event; it is ignored while nothing runs.
        """
        return load.time

    def defer(
        self, state: Any, request: Request, load: Load, came: int
    ) -> tuple[bool, Any]:
        """Return whether a client is deferred for now: its next request is `request`, and
        this step has admitted `came` of its samples.

        It is not called while nothing runs, nor for a sequence that was preempted.
        """
        return False, state

    def admitted(self, state: Any, rank: Rank, request: Request, load: Load) -> Any:
        """Return the state after a sample starts for the first time; `load` is from just
        before it.
        """
        return state

    def ended(self, state: Any, request: Request, output: int, ran: bool) -> Any:
        """Return the state after a sample has ended after `output` tokens; `ran`: it ever
        ran.
        """
        return state

    def victim(self, state: Any, ranks: tuple[Rank, ...]) -> int:
        """Return the victim to preempt, as an index into the sorted `ranks`; never the
        first.
        """
        return len(ranks) - 1

    def may_preempt(self, state: Any, waiting: Rank, running: Rank) -> bool:
        """Return whether the head of the queue may preempt the last running sequence."""
        return False

    def budget(self, state: Any, load: Load) -> int:
        """Return the tokens to schedule in this step; the engine keeps it within its
        limits.
        """
        return load.budget

    def drafts(self, state: Any, load: Load, most: int) -> int:
        """Return how many drafts a row may have in this step; the engine keeps it within
        `most`.
        """
        return most

    def adapter_passes(self, state: Any, load: Load) -> int:
        """Return how many samples with one adapter may be admitted, during its stay on
        the device, before a sample that waits for a slot for its own adapter. More let
        the batch stay larger, and fewer shorten that sample's wait.
        """
        return ADAPTER_PASSES


FIELDS_ADVICE: Final = (
    "a policy is frozen: make its settings fields, as in `@attrs.frozen` and "
    "`seconds: float = 10.0` in the class, without __init__"
)


def _with_advice(init: Callable[..., None]) -> Callable[..., None]:
    """The `__init__` of a policy; where it sets an attribute, its error says what to
    write.
    """

    @wraps(init)
    def explained(*args: Any, **settings: Any) -> None:
        try:
            init(*args, **settings)
        except FrozenInstanceError as error:
            error.add_note(FIELDS_ADVICE)
            raise

    return explained


@frozen
class FirstCome(Policy):
    """First come, first served.

    Guarantee: a request is admitted after all that arrived before it, a finite number
    each of which ends. The latest arrival is preempted when blocks run out.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        init = cls.__dict__.get("__init__")
        if init is not None:
            cls.__init__ = _with_advice(init)  # type: ignore[method-assign]  # it is the same
