"""Masks of requests that have a constraint, made while the device runs.

Theory. A grammar's state is a function of grammar and tokens. So nothing of it is in the
engine's state: here is a matcher for each sample, as a cache. Each time a row of it is
due, the matcher is moved to where the sample is: forward by what came, back by what does
not count any more. Who is resumed, or comes back after a preemption, finds it, or gets a
new one that is fed from the beginning.

Most masks take some ten microseconds, and those of all rows are made at once, on all
processors, while the forward runs that they are for (`begin`). A few take milliseconds:
where a grammar is ambiguous, or its strings are bounded. Their neighbours would wait for
these; so a *slow* sample is paused, its mask is made by a thread of its own, and it is
planned for one token once that is there:

    a request arrives                 its samples are slow, and paused
    a mask of a slow one is there     it may be planned; if it was quick, it is slow no
                                      more: at first; later, if several in a row were
    a slow one was planned            it is paused again
    the masks of a step took long     all who were in it are slow, until they are seen
                                      one by one

Whoever has a matcher that cannot go on ends, by name, and the row draws what it likes
this once: that token does not count. So does who may not end by the grammar, where its
request bars all ends of sequence, and nothing else is left: then the output is over.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import repeat
from os import cpu_count
from typing import Final

import numpy as np

from minfer.effects.live.masks import Masked, at_once
from minfer.effects.live.walks import Allowed, Due, Walk, due_at, without_barred
from minfer.effects.text.grammars.protocol import GrammarError, Matcher, Move
from minfer.effects.text.grammars.store import Grammars
from minfer.messages import Event, Execute, Finish, Pause
from minfer.plan import Mask, Plan
from minfer.request import Request
from minfer.sequence import SampleId
from minfer.state import EngineState, Transition

# For masks of slow samples: the driver, and what the library does at once, need the rest.
THREADS: Final = max(1, min(8, (cpu_count() or 1) // 2))
STUCK: Final = "the grammar cannot go on"  # how errors begin that end a sample
QUICK: Final = 5e-4  # seconds of a processor, for one mask
IN_A_ROW: Final = 8  # quick masks, after which a sample that was slow is so no more
# Seconds: masks of a step that took so long, and so much for each, have slow ones in it.
LONG: Final = 2e-3
LONG_EACH: Final = 3e-5


class GrammarMasks:
    """A `MaskMaker`: the masks of requests that have a constraint."""

    def __init__(
        self, grammars: Grammars, block_size: int, ends: frozenset[int] = frozenset()
    ) -> None:
        """`ends`: the model's own ends of sequence."""
        self._grammars = grammars
        self._block_size = block_size
        self._ends = ends
        self._walks: dict[SampleId, Walk] = {}
        self._slow: dict[SampleId, Walk] = {}  # some of these
        self._pauses = deque[Pause]()  # that the engine is to be told
        self._threads = ThreadPoolExecutor(THREADS, "minfer-masks")
        self._post: Callable[[Event], object] = self._nobody

    def __len__(self) -> int:
        return len(self._walks)

    def listen(self, post: Callable[[Event], object]) -> None:
        """As `MaskMaker` says."""
        self._post = post

    def _nobody(self, event: Event) -> None:
        raise AssertionError(f"nobody listens to {event}")

    def arrived(self, requests: Sequence[Request]) -> tuple[Pause, ...]:
        """As `MaskMaker` says: those whose matcher is not there yet, and slow ones."""
        for request in requests:
            if request.sampling.structured_outputs:
                for sample in range(request.n):
                    self._prepare(request, sample)
        told = tuple(self._pauses)
        self._pauses.clear()
        return told

    def turned(self, transition: Transition) -> None:
        """As `MaskMaker` says: slow samples that were planned are paused again, if others
        run whom they would hold up; of those whose last token came, the next mask is
        made.
        """
        if not self._slow:
            return
        run = transition.state.running
        slow = [
            (i, walk)
            for i, name in enumerate(run.ids)
            if (walk := self._slow.get(name)) is not None  # threads take some out
        ]
        if len(run) > 1:  # even if all are slow: most may have been in a step with one
            planned = _planned(transition)
            for i, walk in slow:
                if run.gens[i] in planned:
                    self._pause(walk)
        flying = {gen for plan in transition.state.inflight for gen in plan.gens}
        for i, walk in slow:
            # In this order: a job that is done has said that it may go on. Who was never
            # planned but to be filled knows all tokens before its first mask.
            if walk.busy or not walk.paused:
                continue
            if walk.is_new or run.gens[i] not in flying:
                self._make_alone(due_at(walk, run, i, self._block_size))

    def begin(self, plan: Plan, state: EngineState) -> "Future[Masked]":
        """As `MaskMaker` says: at once, in the driver's thread. It has nothing else to
        do, and the library works on all processors.
        """
        gens = {plan.gens[index]: index for index in plan.apart}
        run = state.running
        due = []
        for i, gen in enumerate(run.gens):
            seq = run.seqs[i]
            if gen in gens and seq.request.sampling.structured_outputs:
                walk = self._walk(seq.id, seq.request)
                walk.settle()  # it was planned too early, if that takes any time
                due.append(due_at(walk, run, i, self._block_size, gens[gen]))
        self._make_at_once([one for one in due if not one.is_made])
        told = [self._told(one) for one in due]
        return at_once(
            Masked(
                tuple(one for one in told if isinstance(one, Mask)),
                tuple(one for one in told if isinstance(one, Finish)),
            )
        )

    def forget(self, samples: Iterable[SampleId]) -> None:
        """As `MaskMaker` says."""
        for name in samples:
            self._walks.pop(name, None)
            self._slow.pop(name, None)

    def close(self) -> None:
        """As `MaskMaker` says."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._walks.clear()
        self._slow.clear()

    # --- who is where -------------------------------------------------------------------

    def _walk(self, name: SampleId, request: Request) -> Walk:
        walk = self._walks.get(name)
        if walk is None or walk.request is not request:
            walk = self._walks[name] = Walk(name, request)
            self._slow.pop(name, None)
        return walk

    def _prepare(self, request: Request, sample: int) -> None:
        """A sample arrives: it may draw once its matcher and first mask are there, which
        are made when it has a seat. Who waits in line needs neither.
        """
        walk = self._walk((request.id, sample), request)
        self._slow[walk.name] = walk
        self._pause(walk)

    def _pause(self, walk: Walk) -> None:
        if not walk.paused:
            walk.paused = True
            self._pauses.append(Pause(*walk.name))

    # --- masks --------------------------------------------------------------------------

    def _make_at_once(self, due: Sequence[Due]) -> None:
        """The masks of a step, but for those that are there."""
        for one in due:
            if one.walk.matcher is None:
                self._open(one.walk)
        moves = [
            Move(one.walk.matcher, one.back, one.tokens)
            for one in due
            if one.walk.matcher is not None
        ]
        begun = time.monotonic()
        try:
            made = iter(self._grammars.masks(moves))
        # A library's panic, which is of no other kind: those of the step that have a
        # grammar end, and the others go on.
        except BaseException as error:
            made = repeat(GrammarError(str(error)))
        long = time.monotonic() - begun > LONG + LONG_EACH * len(moves)
        for one in due:
            walk = one.walk
            if walk.matcher is not None:
                walk.allowed = Allowed(one.length, next(made))
            if long:
                walk.quick_left = IN_A_ROW
                self._slow[walk.name] = walk

    def _make_alone(self, due: Due) -> None:
        """Have a thread make the mask of a slow sample, and say so; unless it is there,
        as the sample was planned to be filled.
        """
        if due.is_made:
            due.walk.paused = False
            self._post(Pause(*due.walk.name, paused=False))
            return
        due.walk.job = self._threads.submit(self._alone, due)

    def _alone(self, due: Due) -> None:
        walk = due.walk
        if walk.matcher is None:
            self._open(walk)
        begun = time.thread_time()
        if walk.matcher is not None:
            walk.allowed = Allowed(due.length, _moved(walk.matcher, due))
        if time.thread_time() - begun > QUICK:
            walk.quick_left = IN_A_ROW
        else:
            walk.quick_left -= 1
        if walk.quick_left <= 0 and self._slow.get(walk.name) is walk:
            del self._slow[walk.name]
        walk.paused = False
        now = self._walks.get(walk.name)
        # Who has its id by now is told by a job of its own.
        if now is walk or now is None or not now.busy:
            self._post(Pause(*walk.name, paused=False))

    def _open(self, walk: Walk) -> None:
        """Make a sample's matcher; if that cannot be, it may draw nothing, ever."""
        asked = walk.request.sampling.structured_outputs
        if asked is None:
            raise AssertionError(f"{walk.name} has no constraint")
        try:
            walk.matcher = self._grammars.get(asked).matcher()
        except GrammarError as error:
            walk.failed = error
        # Whatever it is, the others of the step go on; and a library's panic is of no
        # other kind.
        except BaseException as error:
            walk.failed = GrammarError(str(error))

    def _told(self, due: Due) -> Mask | Finish:
        """A row's mask, or why its sample is at its end."""
        walk = due.walk
        bits: bytes | GrammarError | None = walk.failed
        if bits is None and walk.allowed is not None:
            bits = walk.allowed.bits
        if bits is None:
            raise AssertionError(f"no mask was made for {walk.name}")
        if isinstance(bits, GrammarError):
            return Finish(*walk.name, due.length, "error", f"{STUCK}: {bits}")
        bits = without_barred(walk, due.length, bits, self._ends)
        if not np.frombuffer(bits, np.uint8).max():  # `any` takes bytes one by one
            return Finish(*walk.name, due.length)
        return Mask(due.index, bits)


def _planned(transition: Transition) -> set[int]:
    """Generations that the turn's plans have."""
    commands = transition.commands
    plans = [one.plan for one in commands if isinstance(one, Execute)]
    return {gen for plan in plans for gen in plan.gens}


def _moved(matcher: Matcher, due: Due) -> bytes | GrammarError:
    """The mask of a matcher that was moved where it is due."""
    try:
        matcher.rollback(due.back)
        matcher.advance(due.tokens)
        return matcher.mask()
    except GrammarError as error:
        return error
    except BaseException as error:  # a library's panic
        return GrammarError(str(error))
