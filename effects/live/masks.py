"""Masks for the rows that are sampled apart, made while the device runs.

Theory. A grammar's state is a function of grammar and tokens. So nothing of it is in the
engine's state: here is a matcher for each sample that runs, as a cache. Each time a row
of it is due, the matcher is moved to where the sample is: forward by what came, back by
what does not count any more. Who is resumed, or comes back after a preemption, finds it,
or gets a new one that is fed from the beginning.

    driver's thread    begin: whose rows, and which tokens are new to their matchers
    another thread     matchers are moved there, and make their masks, on all processors
    driver's thread    Masked: masks for the executor, and ends for the engine

Whoever has a matcher that cannot go on ends, by name, and the row draws what it likes
this once: that token does not count. So does who may not end by the grammar, where its
request bars all ends of sequence, and nothing else is left: then the output is over.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from os import cpu_count
from typing import Final, Protocol

import numpy as np
from attrs import define, frozen

from minfer.effects.text.grammars.protocol import GrammarError, Matcher, Move
from minfer.effects.text.grammars.store import Grammars
from minfer.messages import Finish
from minfer.plan import Mask, Plan
from minfer.request import Request
from minfer.sequence import SampleId
from minfer.state import EngineState

OPENERS: Final = min(16, cpu_count() or 1)  # threads in which matchers are made
STUCK: Final = "the grammar cannot go on"  # how errors begin that end a sample


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
        self._maker = ThreadPoolExecutor(1, "minfer-masks")
        self._openers = ThreadPoolExecutor(OPENERS, "minfer-matchers")

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
        return self._maker.submit(self._masked, due)

    def forget(self, samples: Iterable[SampleId]) -> None:
        """As `MaskMaker` says."""
        for name in samples:
            self._walks.pop(name, None)

    def close(self) -> None:
        """As `MaskMaker` says."""
        self._maker.shutdown(wait=False, cancel_futures=True)
        self._openers.shutdown(wait=False, cancel_futures=True)
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
        """All masks; in a thread of its own."""
        new = [one for one in due if one.walk.matcher is None]
        failed = dict(zip(new, self._openers.map(self._opened, new), strict=True))
        going = [one for one in due if failed.get(one) is None]
        moves = [
            Move(one.walk.matcher, one.back, one.tokens)
            for one in going
            if one.walk.matcher is not None
        ]
        found = dict(zip(going, self._made(moves), strict=True))
        told = [self._told(one, failed.get(one) or found[one]) for one in due]
        return Masked(
            tuple(one for one in told if isinstance(one, Mask)),
            tuple(one for one in told if isinstance(one, Finish)),
        )

    def _made(self, moves: Sequence[Move]) -> list[bytes | GrammarError]:
        try:
            return self._grammars.masks(moves)
        # A library's panic, which is of no other kind: those of the step that have a
        # grammar end, and the others go on.
        except BaseException as error:
            return [GrammarError(str(error)) for _ in moves]

    def _opened(self, due: Due) -> GrammarError | None:
        """Make a sample's matcher, at the beginning; or say why that cannot be."""
        asked = due.walk.request.sampling.structured_outputs
        if asked is None:
            raise AssertionError(f"{due.name} has no constraint")
        try:
            due.walk.matcher = self._grammars.get(asked).matcher()
        except GrammarError as error:
            return error
        # Whatever it is, the others of the step go on; and a library's panic is of no
        # other kind.
        except BaseException as error:
            return GrammarError(str(error))
        return None

    def _told(self, due: Due, bits: bytes | GrammarError) -> Mask | Finish:
        """A row's mask, or why its sample is at its end."""
        if isinstance(bits, GrammarError):
            return Finish(*due.name, due.length, "error", f"{STUCK}: {bits}")
        bits = self._barred(due, bits)
        if not np.frombuffer(bits, np.uint8).any():  # Python's takes bytes one by one
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
        there = [
            token
            for token in barred
            if token < 8 * len(bits) and bits[token // 8] >> token % 8 & 1
        ]
        if not there:  # as nearly always: masks are not copied for nothing
            return bits
        allowed = bytearray(bits)
        for token in there:
            allowed[token // 8] &= ~(1 << token % 8)
        return bytes(allowed)
