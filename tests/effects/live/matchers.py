"""Grammars that tests make up: matchers that tell what they are asked, cost what they are
told to, and threads that do their jobs when the test says so.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from attrs import define, field

from minfer.effects.live.constraints.sample_grammars import DueMask
from minfer.effects.text.grammars.grammar_library import (
    MASK_WAIT_SECONDS,
    GrammarError,
    MatcherUpdate,
)
from minfer.effects.text.grammars.mask_lines import Lines
from minfer.records.request import Request, SamplingParams
from minfer.sampling.structured import StructuredOutputs
from tests.effects.text.grammars.one_by_one import OneByOne

REQUESTED = StructuredOutputs(regex="any")
EOS = 1
FIRST = 2  # the token that a `Counting` matcher wants first
WORDS = 20  # tokens that it counts with


@define
class Clock:
    """Stands in for `time`: it moves where a matcher costs something."""

    now: float = 0.0

    def monotonic(self) -> float:
        return self.now

    thread_time = monotonic


@define
class Walker:
    """A matcher that allows as many tokens as it has taken, and the end of sequence."""

    clock: Clock = field(factory=Clock)
    taken: list[int] = field(factory=list)
    broken: bool = False
    calls: list[str] = field(factory=list)
    cost: float = 0.0  # seconds, of a mask
    served: int = 0

    def restart(self) -> None:
        self.calls.append("restart")
        if self.broken:
            raise GrammarError("its last output ended with an error")
        self.taken.clear()

    def advance(self, tokens: Sequence[int]) -> None:
        self.calls.append(f"advance {len(tokens)}")
        self.taken += tokens

    def rollback(self, count: int) -> None:
        self.calls.append(f"rollback {count}")
        del self.taken[len(self.taken) - count :]

    def mask(self) -> bytes:
        self.clock.now += self.cost
        if self.broken:
            raise GrammarError("too much work")
        return self.bits()

    def bits(self) -> bytes:
        return bytes([1 << EOS | len(self.taken) << 2, 0, 0, 0])


class Counting(Walker):
    """Allows one token, which says how many came before it."""

    def bits(self) -> bytes:
        assert self.taken == counted(len(self.taken))
        return (1 << FIRST + len(self.taken) % WORDS).to_bytes(4, "little")


def counted(length: int) -> list[int]:
    """The output of so many tokens that a `Counting` matcher lets through."""
    return [FIRST + i % WORDS for i in range(length)]


@define
class Compiler(OneByOne):
    """Keeps the matchers that it gives out."""

    kind: type[Walker] = Walker
    clock: Clock = field(factory=Clock)
    costs: list[float] = field(factory=list)  # of the matchers to come
    made: list[Walker] = field(factory=list)
    error: BaseException | None = None  # in place of the next matcher

    def compile(self, _: StructuredOutputs) -> Any:
        return self

    def matcher(self) -> Walker:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        cost = self.costs.pop(0) if self.costs else 0.0
        self.made.append(self.kind(self.clock, cost=cost))
        return self.made[-1]

    def masks(
        self, updates: Sequence[MatcherUpdate], lines: Lines
    ) -> dict[int, GrammarError]:
        errors = super().masks(updates, lines)
        for move in updates:
            walker: Any = move.matcher
            move.slow = walker.cost > MASK_WAIT_SECONDS
        return errors


@define(eq=False)
class Job:
    """What a thread is to do."""

    name: str  # of the request that it is for
    do: Callable[[], object]
    done: "Future[None]" = field(factory=Future)


@define
class ByHand:
    """Stands in for a pool of threads: jobs are done when the test says so."""

    jobs: list[Job] = field(factory=list)

    def submit(self, do: Callable[[DueMask], object], due: DueMask) -> "Future[None]":
        self.jobs.append(Job(due.grammar.name[0], partial(do, due)))
        return self.jobs[-1].done

    def run(self, max_jobs: int = 100, *, but: str = "") -> None:
        """Do the oldest of them, `but` those for one request."""
        for job in [job for job in self.jobs if job.name != but][:max_jobs]:
            self.jobs.remove(job)
            if job.done.set_running_or_notify_cancel():
                job.do()
                job.done.set_result(None)

    def close(self) -> None:
        for job in self.jobs:
            job.done.cancel()


def ask(name: str, **settings: Any) -> Request:
    """A request with a constraint."""
    params = SamplingParams(structured_outputs=REQUESTED, **settings.pop("sampling", {}))
    fields = {"max_tokens": 20, "stop_ids": frozenset({EOS}), **settings}
    return Request(
        id=name, prompt=(5, 6, 7), sampling=params, needs_host_mask=True, **fields
    )
