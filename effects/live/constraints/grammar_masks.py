"""Masks of requests that have a constraint, made while the device runs.

Theory. A grammar's state is a function of grammar and tokens, so it is not part of the
engine's state: this class caches a matcher for each sample. Each time a mask of a row is
due, the matcher is moved to the sample's position: forward by new tokens, back by tokens
that do not count any more. A sample that is resumed, also after a preemption, finds its
matcher, or gets a new one that reads all its tokens.

Most masks take some ten microseconds, and those of all rows are made at once, on all
processors, during the forward that they are for (`begin`). A few take milliseconds: where
a grammar is ambiguous, or its strings are bounded. Other requests would wait for these.
So there is one bound, MASK_WAIT, for one mask:

    a request arrives                 a thread makes the first mask of each sample, unless
                                      a used matcher is idle (idle_matchers.py)
    a thread makes a sample's mask    the sample is paused, and so skips steps, until the
                                      mask is there
    a thread made it within the       the sample's masks are made with those of others
    bound                             from then on
    a mask that was made with those   threads make all further masks of that request
    of others exceeded the bound

A sample whose matcher cannot continue ends with an error, and its row samples any token
once more: that token does not count. A sample also ends if its grammar allows only ends
of sequence, all of which its request bars: then the output is complete.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Final

import numpy as np
from attrs import evolve

from minfer.effects.live.constraints.mask_batch import STUCK as STUCK
from minfer.effects.live.constraints.mask_batch import Batch
from minfer.effects.live.constraints.walks import Allowed, Due, Walk, barred, due_at
from minfer.effects.live.masks import Masked, at_once, lends_nothing
from minfer.effects.text.grammars.job_threads import FOR_SLOW, JobThreads
from minfer.effects.text.grammars.mask_lines import Lines, TokenBans, fill
from minfer.effects.text.grammars.protocol import (
    MASK_WAIT,
    GrammarError,
    Matcher,
    MatcherUpdate,
)
from minfer.effects.text.grammars.store import Grammars
from minfer.records.messages import Event, Execute, Finish, Pause
from minfer.records.plan import Plan
from minfer.records.request import Request
from minfer.records.sequence import Running, SampleId
from minfer.records.state import EngineState, Transition

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
        self._slow: dict[SampleId, Walk] = {}  # those whose masks are made by threads
        self._pauses = deque[Pause]()  # to be sent to the engine
        self._threads = JobThreads(FOR_SLOW, "minfer-masks")
        self._post: Callable[[Event], object] = self._not_connected
        self._lend: Callable[[int], Lines | None] = lends_nothing
        self._barring = TokenBans()

    def __len__(self) -> int:
        return len(self._walks)

    def listen(self, post: Callable[[Event], object]) -> None:
        """As `MaskMaker` says."""
        self._post = post

    def write_to(self, lend: Callable[[int], Lines | None]) -> None:
        """As `MaskMaker` says."""
        self._lend = lend

    def _not_connected(self, event: Event) -> None:
        raise AssertionError(f"no engine is connected that takes {event}")

    def arrived(self, requests: Sequence[Request]) -> tuple[Pause, ...]:
        """As `MaskMaker` says: returns pauses of samples without a matcher yet, and of
        slow ones.
        """
        for request in requests:
            if request.sampling.structured_outputs:
                for sample in range(request.n):
                    self._prepare(request, sample)
        told = tuple(self._pauses)
        self._pauses.clear()
        return told

    def turned(self, transition: Transition) -> None:
        """As `MaskMaker` says: pauses slow samples again once they are planned; makes the
        next mask of those whose last token came.
        """
        if not self._slow:
            return
        run = transition.state.running
        slow = [
            (i, walk)
            for i, name in enumerate(run.ids)
            if (walk := self._slow.get(name)) is not None  # threads remove some
        ]
        planned = _planned(transition)
        for i, walk in slow:
            if run.gens[i] in planned:
                self._pause(walk)
        flying = {gen for plan in transition.state.inflight for gen in plan.gens}
        for i, walk in slow:
            # In this order: a job that is done has already resumed its sample. A sample
            # that was planned only for prefill has all tokens before its first mask.
            if walk.busy or not walk.paused:
                continue
            if walk.is_new or run.gens[i] not in flying:
                self._make_alone(due_at(walk, run, i, self._block_size))

    def begin(self, plan: Plan, state: EngineState) -> "Future[Masked]":
        """As `MaskMaker` says: at once, in the driver's thread, which has nothing else to
        do; the library works on all processors.
        """
        batch = self._due(plan, state.running)
        if not (batch.moves or batch.made):  # there may be no library either
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
                self._grammars.release_matcher(asked, walk.matcher, walk.given)

    def close(self) -> None:
        """As `MaskMaker` says."""
        self._threads.close()
        self._walks.clear()
        self._slow.clear()

    # --- samples ------------------------------------------------------------------------

    def _walk(self, name: SampleId, request: Request) -> Walk:
        walk = self._walks.get(name)
        if walk is None or walk.request is not request:
            walk = self._walks[name] = Walk(name, request)
            self._slow.pop(name, None)
        return walk

    def _prepare(self, request: Request, sample: int) -> None:
        """Prepare a sample that arrives: it is paused until its matcher and first mask
        are there, which are made once it is running; in the waiting queue it needs
        neither. But if there is an idle matcher that served another output, the sample
        takes it and waits for nothing.
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
        """Returns the masks to make for a plan, a line for each of its deferred rows.

        Nearly always a row has one new token; this case runs for each row of each step,
        so it is inlined here.
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
            if i is None:  # it has ended, or was resumed
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
                move(MatcherUpdate(matcher, 0, new[-1:], line))
            else:
                self._due_otherwise(batch, line, run, i)
            never = walk.never if length >= walk.min_tokens else barred(walk)
            batch.barred[never].append(line)
        return batch

    def _due_otherwise(self, batch: Batch, line: int, run: Running, i: int) -> None:
        """Prepare the mask of a row with other than one new token, or with a mask by a
        thread.
        """
        walk = batch.walks[line]
        walk.settle()  # this waits only if it was planned too early
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
            batch.moves.append(MatcherUpdate(walk.matcher, due.back, due.tokens, line))

    def _written(self, batch: Batch, lines: Lines, plan: Plan, run: Running) -> Masked:
        """Write the masks of a step; returns the samples that end."""
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
        """Make the masks of a step, but for those that are ready; returns errors by
        line.
        """
        moves = batch.moves
        try:
            errors = self._grammars.masks(moves, lines)
        # A library's panic, which is no Exception: samples of the step with a grammar
        # end, and the others continue.
        except BaseException as error:
            errors = {one.line: GrammarError(str(error)) for one in moves}
        for one in moves:
            if one.slow:
                self._was_late(batch.walks[one.line].request)
        return errors

    def _try_anew(
        self, batch: Batch, lines: Lines, places: Sequence[int | None], run: Running
    ) -> None:
        """Retry failed samples whose matcher had served others before with a new matcher;
        those that fail again end with the new error.
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
        """Returns the mask of an output from a new matcher, which reads all its
        tokens.
        """
        matcher = self._open(due.walk)
        if matcher is None:
            return due.walk.failed or GrammarError("there is no matcher")
        return _moved(matcher, due)

    def _was_late(self, request: Request) -> None:
        """Have threads make this request's masks: a step waited too long for one."""
        for name, walk in self._walks.items():
            if walk.request is request:
                walk.late = True
                self._slow[name] = walk

    def _make_alone(self, due: Due) -> None:
        """Have a thread make the mask of a slow sample, and resume it then; at once if
        the mask is ready, as the sample was planned for prefill.
        """
        if due.is_made:
            due.walk.paused = False
            self._post(Pause(*due.walk.name, paused=False))
            return
        due.walk.job = self._threads.submit(self._alone, due)

    def _alone(self, due: Due) -> None:
        walk = due.walk
        try:
            if self._walks.get(walk.name) is walk:  # else the sample has ended
                self._make(due)
        # Any error: otherwise the sample would stay paused forever.
        except BaseException as error:
            walk.failed = GrammarError(f"making its mask failed: {error!r}")
        walk.paused = False
        now = self._walks.get(walk.name)
        # A new sample with the same id is resumed by its own job.
        if now is walk or now is None or not now.busy:
            self._post(Pause(*walk.name, paused=False))

    def _make(self, due: Due) -> None:
        """Make the mask of a slow sample; notes if the sample is not slow any more."""
        walk = due.walk
        matcher = walk.matcher or self._open(walk)
        begun = time.thread_time()
        if matcher is not None:
            bits = _moved(matcher, due)
            if isinstance(bits, GrammarError) and matcher.served:
                walk.spoil()
                whole = due.whole or due.tokens  # the tokens, if the matcher is new
                bits = self._anew(evolve(due, back=0, tokens=whole))
                walk.given = due.length
            walk.allowed = Allowed(due.length, bits)
        quick = time.thread_time() - begun <= MASK_WAIT
        if quick and not walk.late and self._slow.get(walk.name) is walk:
            del self._slow[walk.name]

    def _open(self, walk: Walk) -> Matcher | None:
        """Give a sample a matcher; if that fails, it may sample no token, ever."""
        asked = walk.request.sampling.structured_outputs
        if asked is None:
            raise AssertionError(f"{walk.name} has no constraint")
        try:
            idle = None if walk.spoilt else self._grammars.idle(asked)
            self._give(walk, idle or self._grammars.get(asked).matcher())
        except GrammarError as error:
            walk.failed = error
        # Any error, also a library's panic, which is no Exception: the others of the step
        # continue.
        except BaseException as error:
            walk.failed = GrammarError(str(error))
        return walk.matcher

    def _give(self, walk: Walk, matcher: Matcher) -> None:
        ends = self._ends if walk.request.sampling.ignore_eos else NOTHING
        walk.matcher, walk.never = matcher, ends | self._grammars.never


def _places(plan: Plan, run: Running) -> Sequence[int | None]:
    """Returns the indices of a plan's deferred rows among the running samples; None if a
    row's sample does not run.
    """
    if plan.gens == run.gens:
        return plan.deferred
    places = dict(zip(run.gens, range(len(run)), strict=True))
    return [places.get(plan.gens[index]) for index in plan.deferred]


def _planned(transition: Transition) -> set[int]:
    """Returns the generations in the turn's plans."""
    commands = transition.commands
    plans = [one.plan for one in commands if isinstance(one, Execute)]
    return {gen for plan in plans for gen in plan.gens}


def _moved(matcher: Matcher, due: Due) -> bytes | GrammarError:
    """Move a matcher to where its mask is due; returns the mask."""
    try:
        matcher.rollback(due.back)
        matcher.advance(due.tokens)
        return matcher.mask()
    except GrammarError as error:
        return error
    except BaseException as error:  # a library's panic
        return GrammarError(str(error))
