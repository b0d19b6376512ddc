"""Masks for the rows that are sampled apart, made while the device runs.

Theory. A grammar's state is a function of grammar and tokens. So nothing of it is in the
engine's state: here is a matcher for each sample that runs, as a cache. Each time a row
of it is due, the matcher is moved to where the sample is: forward by what came, back by
what does not count any more. Who is resumed, or comes back after a preemption, finds it,
or gets a new one that is fed from the beginning.

    driver's thread    begin: whose rows, and which tokens are new to their matchers
    threads            advance, mask: the library lets other threads run meanwhile
    driver's thread    Masked: masks for the executor, and ends for the engine

Whoever has a matcher that cannot go on ends, by name, and the row draws what it likes
this once: that token does not count. So does who may not end by the grammar, where its
request bars all ends of sequence, and nothing else is left: then the output is over.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from os import cpu_count
from typing import Final, Protocol

from attrs import define, frozen

from minfer.effects.text.grammars.protocol import Matcher
from minfer.effects.text.grammars.store import Grammars
from minfer.messages import Finish
from minfer.plan import Mask, Plan
from minfer.request import Request
from minfer.sequence import SampleId
from minfer.state import EngineState

THREADS: Final = min(16, cpu_count() or 1)
STUCK: Final = "the grammar cannot go on"  # how errors begin that end a sample
FEW: Final = 4  # rows, for which it is not worth it to wake one more thread


@frozen
class Masked:
    """What rows that are sampled apart may draw, and who of them is at its end."""

    masks: tuple[Mask, ...] = ()
    ends: tuple[Finish, ...] = ()


class MaskMaker(Protocol):
    """Who says what rows that are sampled apart may draw."""

    def begin(self, plan: Plan, state: EngineState) -> "Future[Masked]":
        """Start to make the masks of a plan that was launched; `state` knows its rows."""
        ...

    def forget(self, samples: Iterable[SampleId]) -> None:
        """Let go of what is kept of samples that ended."""
        ...

    def close(self) -> None:
        """Let go of all."""
        ...


class NoMasks:
    """Every row may draw any token."""

    def begin(self, plan: Plan, state: EngineState) -> "Future[Masked]":  # noqa: ARG002  # the protocol's
        """As `MaskMaker` says: at once."""
        done: Future[Masked] = Future()
        done.set_result(Masked())
        return done

    def forget(self, samples: Iterable[SampleId]) -> None:
        """As `MaskMaker` says: there is nothing."""

    def close(self) -> None:
        """As `MaskMaker` says: there is nothing."""


@define(eq=False)
class Walk:
    """A sample's matcher, and how many of its output tokens that was given."""

    request: Request
    given: int = 0
    matcher: Matcher | None = None  # made by the thread that needs it


@frozen(eq=False)
class Due:
    """A row that needs a mask."""

    index: int  # in the plan's columns
    name: SampleId
    walk: Walk
    back: int  # tokens that its matcher has to take back first
    tokens: tuple[int, ...]  # that it has to take then
    length: int  # of the output by then


class GrammarMasks:
    """The masks of requests that have a constraint."""

    def __init__(
        self, grammars: Grammars, block_size: int, ends: frozenset[int] = frozenset()
    ) -> None:
        """`ends`: the model's own ends of sequence."""
        self._grammars = grammars
        self._block_size = block_size
        self._ends = ends
        self._walks: dict[SampleId, Walk] = {}
        # One that waits for the others: rows of a plan are divided between these.
        self._one = ThreadPoolExecutor(1, "minfer-masks")
        self._many = ThreadPoolExecutor(THREADS, "minfer-mask")

    def __len__(self) -> int:
        return len(self._walks)

    def begin(self, plan: Plan, state: EngineState) -> "Future[Masked]":
        """As `MaskMaker` says."""
        gens = {plan.gens[index]: index for index in plan.apart}
        run = state.running
        due = [
            self._due(state, i, gens[gen])
            for i, gen in enumerate(run.gens)
            if gen in gens and run.seqs[i].request.sampling.structured_outputs
        ]
        return self._one.submit(self._masked, due)

    def forget(self, samples: Iterable[SampleId]) -> None:
        """As `MaskMaker` says."""
        for name in samples:
            self._walks.pop(name, None)

    def close(self) -> None:
        """As `MaskMaker` says."""
        self._one.shutdown(wait=False, cancel_futures=True)
        self._many.shutdown(wait=False, cancel_futures=True)
        self._walks.clear()

    def _due(self, state: EngineState, i: int, index: int) -> Due:
        """What the matcher of the sample at `i` is to be told. In the driver's thread."""
        run = state.running
        seq = run.seqs[i]
        walk = self._walks.get(seq.id)
        if walk is None or walk.request is not seq.request:
            walk = self._walks[seq.id] = Walk(seq.request)
        prompt = len(seq.request.prompt)
        length = run.known[i] - prompt
        back = max(0, walk.given - length)
        new = run.inputs(i, prompt + walk.given - back, run.known[i], self._block_size)
        walk.given = length
        return Due(index, seq.id, walk, back, new, length)

    def _masked(self, due: Sequence[Due]) -> Masked:
        """All masks; in the thread that waits for the others."""
        count = max(1, min(THREADS, len(due) // FEW))
        parts = [due[at::count] for at in range(count)]
        if len(parts) > 1:
            found = [*self._many.map(self._each, parts)]
        else:
            found = [self._each(part) for part in parts]
        every = [one for part in found for one in part]
        return Masked(
            tuple(one for one in every if isinstance(one, Mask)),
            tuple(one for one in every if isinstance(one, Finish)),
        )

    def _each(self, due: Sequence[Due]) -> list[Mask | Finish]:
        return [self._row(one) for one in due]

    def _row(self, due: Due) -> Mask | Finish:
        """A row's mask, or why its sample is at its end."""
        try:
            bits = self._barred(due, _moved(self._grammars, due).mask())
        # Whatever it is, the others of the step go on; and a library's panic is of no
        # other kind.
        except BaseException as error:
            why = f"{STUCK}: {error}"
            return Finish(*due.name, due.length, "error", why)
        if bits.count(0) == len(bits):  # `any` would look at 19,000 bytes one by one
            return Finish(*due.name, due.length)
        return Mask(due.index, bits)

    def _barred(self, due: Due, bits: bytes) -> bytes:
        """A mask without the tokens that may not end the output yet, or never."""
        request = due.walk.request
        sampling = request.sampling
        barred = set[int]()
        if sampling.ignore_eos:
            barred |= self._ends
        if due.length < sampling.min_tokens:
            barred |= request.stop_ids
        if not barred:
            return bits
        allowed = bytearray(bits)
        for token in barred:
            if token < 8 * len(allowed):
                allowed[token // 8] &= ~(1 << token % 8)
        return bytes(allowed)


def _moved(grammars: Grammars, due: Due) -> Matcher:
    """A sample's matcher, where the sample is. Raises GrammarError."""
    walk = due.walk
    asked = walk.request.sampling.structured_outputs
    if walk.matcher is None:
        if asked is None:
            raise AssertionError(f"{due.name} has no constraint")
        walk.matcher = grammars.get(asked).matcher()
    walk.matcher.rollback(due.back)
    walk.matcher.advance(due.tokens)
    return walk.matcher
