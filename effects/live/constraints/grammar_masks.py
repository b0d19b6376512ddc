"""Masks of requests that have a constraint, made while the device runs.

Theory. A grammar's state is a function of grammar and tokens, so it is not part of the
engine's state: this class caches a matcher for each sample. Each time a mask of a row is
due, the matcher is moved to the sample's position: forward by new tokens, back by tokens
that do not count any more. A sample that is resumed, also after a preemption, finds its
matcher, or gets a new one that reads all its tokens.

Most masks take some ten microseconds, and those of all rows are made at once, on all
processors, during the forward that they are for (`begin`). A few take milliseconds: where
a grammar is ambiguous, or its strings are bounded. Other requests would wait for these.
So there is one bound, MASK_WAIT_SECONDS, for one mask:

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
from typing_extensions import override

from minfer.effects.live.constraints.mask_batch import STUCK_ERROR as STUCK_ERROR
from minfer.effects.live.constraints.mask_batch import MaskBatch
from minfer.effects.live.constraints.sample_grammars import (
    AllowedTokens,
    DueMask,
    SampleGrammar,
    barred_tokens,
    due_mask,
)
from minfer.effects.live.masks import MaskMaker, StepMasks, no_memory, ready_masks
from minfer.effects.text.grammars.grammar_library import (
    MASK_WAIT_SECONDS,
    GrammarError,
    Matcher,
    MatcherUpdate,
)
from minfer.effects.text.grammars.job_threads import SLOW_WORK_THREADS, JobThreads
from minfer.effects.text.grammars.mask_lines import Lines, TokenBans, fill
from minfer.effects.text.grammars.store import Grammars
from minfer.records.messages import Event, Execute, Finish, Pause
from minfer.records.plan import Plan
from minfer.records.request import Request
from minfer.records.sequence import Running, SampleId
from minfer.records.state import EngineState, Transition

ALL_TOKENS: Final = -1  # a word that allows all its tokens
NO_TOKENS: Final = frozenset[int]()


class GrammarMasks(MaskMaker):
    """A `MaskMaker`: the masks of requests that have a constraint."""

    def __init__(
        self, grammars: Grammars, block_size: int, ends: frozenset[int] = frozenset()
    ) -> None:
        """`ends`: the model's own ends of sequence."""
        self._grammars = grammars
        self._block_size = block_size
        self._ends = ends
        self._samples: dict[SampleId, SampleGrammar] = {}
        self._slow: dict[
            SampleId, SampleGrammar
        ] = {}  # those whose masks are made by threads
        self._pauses = deque[Pause]()  # to be sent to the engine
        self._threads = JobThreads(SLOW_WORK_THREADS, "minfer-masks")
        self._post: Callable[[Event], object] = self._not_connected
        self._lend: Callable[[int], Lines | None] = no_memory
        self._barring = TokenBans()

    def __len__(self) -> int:
        return len(self._samples)

    @override
    def listen(self, post: Callable[[Event], object]) -> None:
        self._post = post

    @override
    def use_memory(self, lend: Callable[[int], Lines | None]) -> None:
        self._lend = lend

    def _not_connected(self, event: Event) -> None:
        raise AssertionError(f"no engine is connected that takes {event}")

    @override
    def add_requests(self, requests: Sequence[Request]) -> tuple[Pause, ...]:
        """Returns pauses of samples without a matcher yet, and of slow ones."""
        for request in requests:
            if request.sampling.structured_outputs:
                for sample in range(request.n):
                    self._prepare(request, sample)
        pauses = tuple(self._pauses)
        self._pauses.clear()
        return pauses

    @override
    def observe(self, transition: Transition) -> None:
        """Pauses slow samples again once they are planned; makes the next mask of those
        whose last token came.
        """
        if not self._slow:
            return
        run = transition.state.running
        slow = [
            (i, grammar)
            for i, name in enumerate(run.ids)
            if (grammar := self._slow.get(name)) is not None  # threads remove some
        ]
        planned = _planned_run_ids(transition)
        for i, grammar in slow:
            if run.run_ids[i] in planned:
                self._pause(grammar)
        inflight_run_ids = {
            run_id for plan in transition.state.inflight for run_id in plan.run_ids
        }
        for i, grammar in slow:
            # In this order: a job that is done has already resumed its sample. A sample
            # that was planned only for prefill has all tokens before its first mask.
            if grammar.busy or not grammar.paused:
                continue
            if grammar.is_new or run.run_ids[i] not in inflight_run_ids:
                self._submit_mask_job(due_mask(grammar, run, i, self._block_size))

    @override
    def begin(self, plan: Plan, state: EngineState) -> "Future[StepMasks]":
        """At once, in the driver's thread, which has nothing else to do; the library
        works on all processors.
        """
        batch = self._prepare_masks(plan, state.running)
        if not (batch.moves or batch.made):  # there may be no library either
            return ready_masks(StepMasks(ends=batch.end(())))
        count, words = batch.count, self._grammars.words
        lent = self._lend(plan.step)
        is_usable = lent is not None and lent.shape[1] == words and len(lent) >= count
        lines = (
            lent if is_usable and lent is not None else np.empty((count, words), np.int32)
        )
        masked = self._write_masks(batch, lines, plan, state.running)
        if lines is lent:
            return ready_masks(evolve(masked, written=True))
        return ready_masks(evolve(masked, masks=tuple(batch.masks(plan, lines))))

    @override
    def drop(self, samples: Iterable[SampleId]) -> None:
        for name in samples:
            grammar, slow = self._samples.pop(name, None), self._slow.pop(name, None)
            if (
                grammar is None
                or slow is not None
                or grammar.busy
                or grammar.matcher is None
            ):
                continue
            constraint = grammar.request.sampling.structured_outputs
            if constraint is not None:
                self._grammars.release_matcher(
                    constraint, grammar.matcher, grammar.consumed
                )

    @override
    def close(self) -> None:
        self._threads.close()
        self._samples.clear()
        self._slow.clear()

    # --- samples ------------------------------------------------------------------------

    def _sample_grammar(self, name: SampleId, request: Request) -> SampleGrammar:
        grammar = self._samples.get(name)
        if grammar is None or grammar.request is not request:
            grammar = self._samples[name] = SampleGrammar(name, request)
            self._slow.pop(name, None)
        return grammar

    def _prepare(self, request: Request, sample: int) -> None:
        """Prepare a sample that arrives: it is paused until its matcher and first mask
        are there, which are made once it is running; in the waiting queue it needs
        neither. But if there is an idle matcher that served another output, the sample
        takes it and waits for nothing.
        """
        grammar = self._sample_grammar((request.id, sample), request)
        constraint = request.sampling.structured_outputs
        if (
            constraint is not None
            and (matcher := self._grammars.take_idle_matcher(constraint)) is not None
        ):
            self._set_matcher(grammar, matcher)
            return
        self._slow[grammar.name] = grammar
        self._pause(grammar)

    def _pause(self, grammar: SampleGrammar) -> None:
        if not grammar.paused:
            grammar.paused = True
            self._pauses.append(Pause(*grammar.name))

    # --- masks --------------------------------------------------------------------------

    def _prepare_masks(self, plan: Plan, run: Running) -> MaskBatch:
        """Returns the masks to make for a plan, a line for each of its deferred rows.

        Nearly always a row has one new token; this case runs for each row of each step,
        so it is inlined here.
        """
        batch = MaskBatch.of(plan)
        samples, ids, seqs, num_known, new_tokens = (
            self._samples,
            run.ids,
            run.seqs,
            run.known,
            run.fresh,
        )
        move, grammar_of_line, lengths = batch.moves.append, batch.samples, batch.lengths
        for line, i in enumerate(_running_indices(plan, run)):
            if i is None:  # it has ended, or was resumed
                batch.free.append(line)
                continue
            grammar, request = samples.get(ids[i]), seqs[i].request
            if grammar is None or grammar.request is not request:
                if request.sampling.structured_outputs is None:
                    batch.free.append(line)
                    continue
                grammar = self._sample_grammar(ids[i], request)
            grammar_of_line[line] = grammar
            lengths[line] = length = num_known[i] - grammar.prompt
            new, matcher = new_tokens[i], grammar.matcher
            one_more = length == grammar.consumed + 1 and new
            if one_more and matcher is not None and grammar.job is None:
                grammar.consumed, grammar.allowed = length, None
                move(MatcherUpdate(matcher, 0, new[-1:], line))
            else:
                self._prepare_row(batch, line, run, i)
            barred = (
                grammar.forbidden_tokens
                if length >= grammar.min_tokens
                else barred_tokens(grammar)
            )
            batch.barred_tokens[barred].append(line)
        return batch

    def _prepare_row(self, batch: MaskBatch, line: int, run: Running, i: int) -> None:
        """Prepare the mask of a row with other than one new token, or with a mask by a
        thread.
        """
        grammar = batch.samples[line]
        grammar.wait_for_job()  # this waits only if it was planned too early
        mask = due_mask(grammar, run, i, self._block_size)
        if mask.is_made and grammar.failed is None:
            batch.made.append(line)
            return
        grammar.allowed = None
        if grammar.matcher is None and grammar.failed is None:
            self._open_matcher(grammar)
        if grammar.failed is not None:
            batch.errors[line] = grammar.failed
        elif grammar.matcher is not None:
            batch.moves.append(
                MatcherUpdate(grammar.matcher, mask.back, mask.tokens, line)
            )

    def _write_masks(
        self, batch: MaskBatch, lines: Lines, plan: Plan, run: Running
    ) -> StepMasks:
        """Write the masks of a step; returns the samples that end."""
        batch.errors |= self._make_at_once(batch, lines)
        if batch.errors:
            self._retry_errors(batch, lines, _running_indices(plan, run), run)
        for line in batch.made:
            allowed = batch.samples[line].allowed
            if allowed is None:
                raise AssertionError(f"no mask was made for {batch.samples[line].name}")
            if isinstance(allowed.bits, GrammarError):
                batch.errors[line] = allowed.bits
            else:
                fill(lines[line], allowed.bits)
        ends: tuple[Finish, ...] = ()
        empty_lines = self._barring.clear(lines, batch.barred_tokens)
        if empty_lines or batch.errors:
            ends = batch.end(empty_lines)
        for line in batch.free:
            lines[line] = ALL_TOKENS
        return StepMasks(ends=ends)

    def _make_at_once(self, batch: MaskBatch, lines: Lines) -> dict[int, GrammarError]:
        """Make the masks of a step, but for those that are ready; returns errors by
        line.
        """
        moves = batch.moves
        try:
            errors = self._grammars.masks(moves, lines)
        # A library's panic, which is no Exception: samples of the step with a grammar
        # end, and the others continue.
        except BaseException as error:
            errors = {move.line: GrammarError(str(error)) for move in moves}
        for move in moves:
            if move.slow:
                self._mark_slow(batch.samples[move.line].request)
        return errors

    def _retry_errors(
        self, batch: MaskBatch, lines: Lines, indices: Sequence[int | None], run: Running
    ) -> None:
        """Retry failed samples whose matcher had served others before with a new matcher;
        those that fail again end with the new error.
        """
        for line in [*batch.errors]:
            grammar, i = batch.samples[line], indices[line]
            if i is None or grammar.matcher is None or not grammar.matcher.served:
                continue
            if grammar.failed is not None:
                continue
            grammar.discard_matcher()
            bits = self._mask_from_new_matcher(
                due_mask(grammar, run, i, self._block_size)
            )
            if isinstance(bits, GrammarError):
                batch.errors[line] = bits
            else:
                del batch.errors[line]
                fill(lines[line], bits)

    def _mask_from_new_matcher(self, mask: DueMask) -> bytes | GrammarError:
        """Returns the mask of an output from a new matcher, which reads all its
        tokens.
        """
        matcher = self._open_matcher(mask.grammar)
        if matcher is None:
            return mask.grammar.failed or GrammarError("there is no matcher")
        return _advance_matcher(matcher, mask)

    def _mark_slow(self, request: Request) -> None:
        """Have threads make this request's masks: a step waited too long for one."""
        for name, grammar in self._samples.items():
            if grammar.request is request:
                grammar.is_slow = True
                self._slow[name] = grammar

    def _submit_mask_job(self, mask: DueMask) -> None:
        """Have a thread make the mask of a slow sample, and resume it then; at once if
        the mask is ready, as the sample was planned for prefill.
        """
        if mask.is_made:
            mask.grammar.paused = False
            self._post(Pause(*mask.grammar.name, paused=False))
            return
        mask.grammar.job = self._threads.submit(self._run_mask_job, mask)

    def _run_mask_job(self, mask: DueMask) -> None:
        grammar = mask.grammar
        try:
            if self._samples.get(grammar.name) is grammar:  # else the sample has ended
                self._make_mask(mask)
        # Any error: otherwise the sample would stay paused forever.
        except BaseException as error:
            grammar.failed = GrammarError(f"making its mask failed: {error!r}")
        grammar.paused = False
        now = self._samples.get(grammar.name)
        # A new sample with the same id is resumed by its own job.
        if now is grammar or now is None or not now.busy:
            self._post(Pause(*grammar.name, paused=False))

    def _make_mask(self, mask: DueMask) -> None:
        """Make the mask of a slow sample; notes if the sample is not slow any more."""
        grammar = mask.grammar
        matcher = grammar.matcher or self._open_matcher(grammar)
        start = time.thread_time()
        if matcher is not None:
            bits = _advance_matcher(matcher, mask)
            if isinstance(bits, GrammarError) and matcher.served:
                grammar.discard_matcher()
                output = mask.output or mask.tokens  # the tokens, if the matcher is new
                bits = self._mask_from_new_matcher(evolve(mask, back=0, tokens=output))
                grammar.consumed = mask.length
            grammar.allowed = AllowedTokens(mask.length, bits)
        is_quick = time.thread_time() - start <= MASK_WAIT_SECONDS
        if is_quick and not grammar.is_slow and self._slow.get(grammar.name) is grammar:
            del self._slow[grammar.name]

    def _open_matcher(self, grammar: SampleGrammar) -> Matcher | None:
        """Give a sample a matcher; if that fails, it may sample no token, ever."""
        constraint = grammar.request.sampling.structured_outputs
        if constraint is None:
            raise AssertionError(f"{grammar.name} has no constraint")
        try:
            idle = (
                None
                if grammar.discarded
                else self._grammars.take_idle_matcher(constraint)
            )
            self._set_matcher(grammar, idle or self._grammars.get(constraint).matcher())
        except GrammarError as error:
            grammar.failed = error
        # Any error, also a library's panic, which is no Exception: the others of the step
        # continue.
        except BaseException as error:
            grammar.failed = GrammarError(str(error))
        return grammar.matcher

    def _set_matcher(self, grammar: SampleGrammar, matcher: Matcher) -> None:
        ends = self._ends if grammar.request.sampling.ignore_eos else NO_TOKENS
        grammar.matcher, grammar.forbidden_tokens = (
            matcher,
            ends | self._grammars.forbidden_tokens,
        )


def _running_indices(plan: Plan, run: Running) -> Sequence[int | None]:
    """Returns the indices of a plan's deferred rows among the running samples; None if a
    row's sample does not run.
    """
    if plan.run_ids == run.run_ids:
        return plan.deferred
    index_of = dict(zip(run.run_ids, range(len(run)), strict=True))
    return [index_of.get(plan.run_ids[index]) for index in plan.deferred]


def _planned_run_ids(transition: Transition) -> set[int]:
    """Returns the run ids in the turn's plans."""
    commands = transition.commands
    plans = [command.plan for command in commands if isinstance(command, Execute)]
    return {run_id for plan in plans for run_id in plan.run_ids}


def _advance_matcher(matcher: Matcher, mask: DueMask) -> bytes | GrammarError:
    """Move a matcher to where its mask is due; returns the mask."""
    try:
        matcher.rollback(mask.back)
        matcher.advance(mask.tokens)
        return matcher.mask()
    except GrammarError as error:
        return error
    except BaseException as error:  # a library's panic
        return GrammarError(str(error))
