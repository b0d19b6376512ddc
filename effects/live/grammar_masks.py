"""Masks of requests that have a constraint, made while the device runs.

Theory. A grammar's state is a function of grammar and tokens. So nothing of it is in the
engine's state: here is a matcher for each sample, as a cache. Each time a row of it is
due, the matcher is moved to where the sample is: forward by what came, back by what does
not count any more. Who is resumed, or comes back after a preemption, finds it, or gets a
new one that is fed from the beginning.

Most masks take some ten microseconds, and those of all rows are made at once, on all
processors, while the forward runs that they are for (`begin`). A few take milliseconds:
where a grammar is ambiguous, or its strings are bounded. Their neighbours would wait for
these. So there is one bound, MASK_WAIT, for one mask:

    a request arrives                 a thread makes the first mask of each sample, unless
                                      it gets a matcher that served others (idle.py)
    a thread makes a sample's mask    the sample is paused, and so skips steps, until the
                                      mask is there
    a thread made it within the       the sample's masks are made with those of others
    bound                             from then on
    a mask that was made with those   threads make all further masks of that request
    of others exceeded the bound

Whoever has a matcher that cannot go on ends, by name, and the row draws what it likes
this once: that token does not count. So does who may not end by the grammar, where its
request bars all ends of sequence, and nothing else is left: then the output is over.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Final

import numpy as np
from attrs import evolve

from minfer.effects.live.mask_batch import STUCK as STUCK
from minfer.effects.live.mask_batch import Batch
from minfer.effects.live.masks import Masked, at_once, lends_nothing
from minfer.effects.live.walks import Allowed, Due, Walk, barred, due_at
from minfer.effects.text.grammars.lines import Barring, Lines, fill
from minfer.effects.text.grammars.protocol import (
    MASK_WAIT,
    GrammarError,
    Matcher,
    Move,
)
from minfer.effects.text.grammars.store import Grammars
from minfer.effects.text.grammars.threads import FOR_SLOW, Threads
from minfer.messages import Event, Execute, Finish, Pause
from minfer.plan import Plan
from minfer.request import Request
from minfer.sequence import Running, SampleId
from minfer.state import EngineState, Transition

ANY: Final = -1  # a word that allows all its tokens
NOTHING: Final = frozenset[int]()


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
        self._slow: dict[SampleId, Walk] = {}  # those whose masks threads make
        self._pauses = deque[Pause]()  # that the engine is to be told
        self._threads = Threads(FOR_SLOW, "minfer-masks")
        self._post: Callable[[Event], object] = self._nobody
        self._lend: Callable[[int], Lines | None] = lends_nothing
        self._barring = Barring()

    def __len__(self) -> int:
        return len(self._walks)

    def listen(self, post: Callable[[Event], object]) -> None:
        """As `MaskMaker` says."""
        self._post = post

    def write_to(self, lend: Callable[[int], Lines | None]) -> None:
        """As `MaskMaker` says."""
        self._lend = lend

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
        """As `MaskMaker` says: slow samples that were planned are paused again; of those
        whose last token came, the next mask is made.
        """
        if not self._slow:
            return
        run = transition.state.running
        slow = [
            (i, walk)
            for i, name in enumerate(run.ids)
            if (walk := self._slow.get(name)) is not None  # threads take some out
        ]
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
        batch = self._due(plan, state.running)
        if not (batch.moves or batch.made):  # then there may be no library either
            return at_once(Masked(ends=batch.end(())))
        count, words = batch.count, self._grammars.words
        lent = self._lend(plan.step)
        fits = lent is not None and lent.shape[1] == words and len(lent) >= count
        lines = lent if fits and lent is not None else np.empty((count, words), np.int32)
        masked = self._written(batch, lines, plan, state.running)
        if lines is lent:
            return at_once(evolve(masked, written=True))
        return at_once(evolve(masked, masks=tuple(batch.masks(plan, lines))))

    def forget(self, samples: Iterable[SampleId]) -> None:
        """As `MaskMaker` says."""
        for name in samples:
            walk, slow = self._walks.pop(name, None), self._slow.pop(name, None)
            if walk is None or slow is not None or walk.busy or walk.matcher is None:
                continue
            asked = walk.request.sampling.structured_outputs
            if asked is not None:
                self._grammars.give_back(asked, walk.matcher, walk.given)

    def close(self) -> None:
        """As `MaskMaker` says."""
        self._threads.close()
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
        are made when it has a seat. Who waits in line needs neither; but where a matcher
        is idle that served another output, it takes that, and nothing has to be waited
        for.
        """
        walk = self._walk((request.id, sample), request)
        asked = request.sampling.structured_outputs
        if asked is not None and (idle := self._grammars.idle(asked)) is not None:
            self._give(walk, idle)
            return
        self._slow[walk.name] = walk
        self._pause(walk)

    def _pause(self, walk: Walk) -> None:
        if not walk.paused:
            walk.paused = True
            self._pauses.append(Pause(*walk.name))

    # --- masks --------------------------------------------------------------------------

    def _due(self, plan: Plan, run: Running) -> Batch:
        """The masks that are to be made for a plan, a line for each of its rows apart.

        Nearly always a row goes on by the token that came last; what is done then is done
        for each row of each step, so it is written down here and not called.
        """
        batch = Batch.of(plan)
        walks, ids, seqs, known, fresh = (
            self._walks,
            run.ids,
            run.seqs,
            run.known,
            run.fresh,
        )
        move, of_line, lengths = batch.moves.append, batch.walks, batch.lengths
        for line, i in enumerate(_places(plan, run)):
            if i is None:  # it has ended, or begins again
                batch.free.append(line)
                continue
            walk, request = walks.get(ids[i]), seqs[i].request
            if walk is None or walk.request is not request:
                if request.sampling.structured_outputs is None:
                    batch.free.append(line)
                    continue
                walk = self._walk(ids[i], request)
            of_line[line] = walk
            lengths[line] = length = known[i] - walk.prompt
            new, matcher = fresh[i], walk.matcher
            one_more = length == walk.given + 1 and new
            if one_more and matcher is not None and walk.job is None:
                walk.given, walk.allowed = length, None
                move(Move(matcher, 0, new[-1:], line))
            else:
                self._due_otherwise(batch, line, run, i)
            never = walk.never if length >= walk.min_tokens else barred(walk)
            batch.barred[never].append(line)
        return batch

    def _due_otherwise(self, batch: Batch, line: int, run: Running, i: int) -> None:
        """The mask of a row that does not just go on, or was made by a thread."""
        walk = batch.walks[line]
        walk.settle()  # it was planned too early, if that takes any time
        due = due_at(walk, run, i, self._block_size)
        if due.is_made and walk.failed is None:
            batch.made.append(line)
            return
        walk.allowed = None
        if walk.matcher is None and walk.failed is None:
            self._open(walk)
        if walk.failed is not None:
            batch.errors[line] = walk.failed
        elif walk.matcher is not None:
            batch.moves.append(Move(walk.matcher, due.back, due.tokens, line))

    def _written(self, batch: Batch, lines: Lines, plan: Plan, run: Running) -> Masked:
        """Write the masks of a step; returns who of it is at its end."""
        batch.errors |= self._make_at_once(batch, lines)
        if batch.errors:
            self._try_anew(batch, lines, _places(plan, run), run)
        for line in batch.made:
            last = batch.walks[line].allowed
            if last is None:
                raise AssertionError(f"no mask was made for {batch.walks[line].name}")
            if isinstance(last.bits, GrammarError):
                batch.errors[line] = last.bits
            else:
                fill(lines[line], last.bits)
        ends: tuple[Finish, ...] = ()
        empty = self._barring.clear(lines, batch.barred)
        if empty or batch.errors:
            ends = batch.end(empty)
        for line in batch.free:
            lines[line] = ANY
        return Masked(ends=ends)

    def _make_at_once(self, batch: Batch, lines: Lines) -> dict[int, GrammarError]:
        """The masks of a step, but for those that are there."""
        moves = batch.moves
        try:
            errors = self._grammars.masks(moves, lines)
        # A library's panic, which is of no other kind: those of the step that have a
        # grammar end, and the others go on.
        except BaseException as error:
            errors = {one.line: GrammarError(str(error)) for one in moves}
        for one in moves:
            if one.late:
                self._was_late(batch.walks[one.line].request)
        return errors

    def _try_anew(
        self, batch: Batch, lines: Lines, places: Sequence[int | None], run: Running
    ) -> None:
        """Of those who cannot go on, whoever had a matcher that served others before goes
        through a new one; as far as that gets is as far as its output may.
        """
        for line in [*batch.errors]:
            walk, i = batch.walks[line], places[line]
            if i is None or walk.matcher is None or not walk.matcher.served:
                continue
            if walk.failed is not None:
                continue
            walk.spoil()
            bits = self._anew(due_at(walk, run, i, self._block_size))
            if isinstance(bits, GrammarError):
                batch.errors[line] = bits
            else:
                del batch.errors[line]
                fill(lines[line], bits)

    def _anew(self, due: Due) -> bytes | GrammarError:
        """The mask of an output that goes through a new matcher, with all its tokens."""
        matcher = self._open(due.walk)
        if matcher is None:
            return due.walk.failed or GrammarError("there is no matcher")
        return _moved(matcher, due)

    def _was_late(self, request: Request) -> None:
        """A step waited too long for a mask: threads make those of this request."""
        for name, walk in self._walks.items():
            if walk.request is request:
                walk.late = True
                self._slow[name] = walk

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
        try:
            if self._walks.get(walk.name) is walk:  # else it has left meanwhile
                self._make(due)
        # Whatever it is: a sample that stayed paused would wait for ever.
        except BaseException as error:
            walk.failed = GrammarError(f"making its mask failed: {error!r}")
        walk.paused = False
        now = self._walks.get(walk.name)
        # Who has its id by now is told by a job of its own.
        if now is walk or now is None or not now.busy:
            self._post(Pause(*walk.name, paused=False))

    def _make(self, due: Due) -> None:
        """The mask of a slow sample, and whether it is slow any more."""
        walk = due.walk
        matcher = walk.matcher or self._open(walk)
        begun = time.thread_time()
        if matcher is not None:
            bits = _moved(matcher, due)
            if isinstance(bits, GrammarError) and matcher.served:
                walk.spoil()
                whole = due.whole or due.tokens  # of one that was given it just now
                bits = self._anew(evolve(due, back=0, tokens=whole))
                walk.given = due.length
            walk.allowed = Allowed(due.length, bits)
        quick = time.thread_time() - begun <= MASK_WAIT
        if quick and not walk.late and self._slow.get(walk.name) is walk:
            del self._slow[walk.name]

    def _open(self, walk: Walk) -> Matcher | None:
        """Give a sample a matcher; if there can be none, it may draw nothing, ever."""
        asked = walk.request.sampling.structured_outputs
        if asked is None:
            raise AssertionError(f"{walk.name} has no constraint")
        try:
            idle = None if walk.spoilt else self._grammars.idle(asked)
            self._give(walk, idle or self._grammars.get(asked).matcher())
        except GrammarError as error:
            walk.failed = error
        # Whatever it is, the others of the step go on; and a library's panic is of no
        # other kind.
        except BaseException as error:
            walk.failed = GrammarError(str(error))
        return walk.matcher

    def _give(self, walk: Walk, matcher: Matcher) -> None:
        ends = self._ends if walk.request.sampling.ignore_eos else NOTHING
        walk.matcher, walk.never = matcher, ends | self._grammars.never


def _places(plan: Plan, run: Running) -> Sequence[int | None]:
    """Where the rows apart of a plan are among those that run; None: nowhere."""
    if plan.gens == run.gens:
        return plan.apart
    places = dict(zip(run.gens, range(len(run)), strict=True))
    return [places.get(plan.gens[index]) for index in plan.apart]


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
