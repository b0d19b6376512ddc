"""Reads a plan's results from the device: tokens and further outputs.

A forward's results are copied to host memory without waiting, and an event is recorded
after the copy; reading waits for that event only, so the next step runs meanwhile. Host
memory is used by copies in flight, so there is a ring of slots: each forward takes the
next slot, which is reused only after its plan must have been collected.
"""

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from attrs import define
from torch import Tensor

from minfer.effects.execution.contract import not_finite
from minfer.effects.execution.device.device_rows import Words
from minfer.effects.execution.device.streams import host_words, new_event
from minfer.effects.execution.packing.pack_plan import Draw
from minfer.effects.execution.packing.pooling import Vectors
from minfer.effects.execution.packing.prompt_scores import ChunkScores
from minfer.effects.execution.packing.verified import DraftOutputs
from minfer.records.messages import Executed
from minfer.records.plan import NewRow, Plan, Pooled, Yields
from minfer.records.token_logprobs import WORD_BYTES, Logprobs, TokenLogprobs
from minfer.sampling.params import MAX_LOGPROBS

DISCARDED_TOKEN = 0  # the token of a row whose generation is gone: never read


@define(eq=False)
class HostSlot:
    """One forward's host buffers: its words, and its results once `done`."""

    words: Tensor  # pinned int32
    drawn: Tensor  # pinned int32 [draws]: tokens; -1 where the logits were not finite
    # pinned int32 [draws, 2, 1 + MAX_LOGPROBS]: as `kernels.logprobs` writes them
    scores: Tensor
    done: torch.cuda.Event | None
    draw: Draw | None = None
    scored: bool = False
    vectors: Vectors | None = None  # of prompts that end
    prompt_scores: ChunkScores | None = None

    @classmethod
    def of(cls, words: int, draws: int, device: torch.device) -> "HostSlot":
        """Returns a slot for this number of words and of draws."""
        return cls(
            words=host_words((words,), device),
            drawn=host_words((draws,), device),
            scores=host_words((draws, 2, 1 + MAX_LOGPROBS), device),
            done=new_event(device),
        )

    def begin(self, draw: Draw | None, *, scored: bool) -> None:
        """Reset the slot for a forward."""
        self.draw = draw
        self.scored = scored
        self.vectors = None
        self.prompt_scores = None

    def write(self, arrays: Sequence[Words]) -> None:
        """Write parts of words into `words`, one after the other."""
        total = sum(map(len, arrays))
        np.concatenate(arrays, out=self.words.numpy()[:total])

    def fetch(
        self,
        drawn: Tensor,
        scores: Tensor,
        count: int,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Start copying the first `count` draws to the host; `stream` is the current one,
        if the caller has it.
        """
        self.drawn[:count].copy_(drawn[:count], non_blocking=True)
        if self.scored:
            self.scores[:count].copy_(scores[:count], non_blocking=True)
        if self.done is not None:
            self.done.record(stream)

    def tokens(self, draw: Draw) -> list[int]:
        """Wait for the sampled tokens; returns them in the order of `draw`. Raises
        LogitsError.
        """
        if self.done is not None:
            self.done.synchronize()
        lines, drawn_words = draw.lines, self.drawn.numpy()
        drawn_words = (
            drawn_words[: len(draw.entries)] if lines is None else drawn_words[lines]
        )
        drawn: list[int] = drawn_words.tolist()
        if -1 in drawn:
            draws = zip(draw.owners, drawn, strict=True)
            raise not_finite(owner for owner, token in draws if token < 0)
        return drawn

    def tokens_behind_drafts(
        self, draft_outputs: DraftOutputs
    ) -> Iterator[tuple[int, list[int]]]:
        """Yields the tokens sampled behind drafts, with the entries of the plan; the copy
        must be done. Raises LogitsError.
        """
        drawn: list[int] = self.drawn[: draft_outputs.end].tolist()
        for entry, owner, lines in draft_outputs.accepted_lines(drawn):
            tokens = [drawn[line] for line in lines]
            if -1 in tokens:
                raise not_finite([owner])
            yield entry, tokens

    def sampled_lines(self, draw: Draw) -> Iterator[tuple[int, int, NewRow | None]]:
        """Yields the lines of tokens that their rows yield, each with its entry of the
        plan and its owner; the copy must be done.
        """
        draw_lines: Sequence[int] = (
            range(len(draw.entries)) if draw.lines is None else draw.lines
        )
        yield from zip(draw_lines, draw.entries, draw.owners, strict=True)
        if draw.draft_outputs is not None:
            drawn = self.drawn[: draw.draft_outputs.end].tolist()
            for entry, owner, lines in draw.draft_outputs.accepted_lines(drawn):
                yield from ((line, entry, owner) for line in lines)

    def logprobs(self, draw: Draw, vocab: int) -> Iterator[tuple[int, TokenLogprobs]]:
        """Yields the log-probabilities of the tokens of rows that requested them, each
        with its entry of the plan.
        """
        drawn: list[int] = self.drawn.tolist()
        data = self.scores.numpy().astype("<i4", copy=False).tobytes()
        size = WORD_BYTES * self.scores.shape[2]
        for line, entry, owner in self.sampled_lines(draw):
            if owner is not None and owner.sampling.logprobs is not None:
                width, offset = 1 + min(owner.sampling.logprobs, vocab), 2 * size * line
                token_logprobs = TokenLogprobs.read(
                    drawn[line], data, offset, offset + size, width
                )
                yield entry, token_logprobs


class SlotRing:
    """A ring of slots."""

    def __init__(self, slots: int, words: int, draws: int, device: torch.device) -> None:
        self.slots = deque(HostSlot.of(words, draws, device) for _ in range(slots))

    def next(self) -> HostSlot:
        """Returns the least recently used slot."""
        slot = self.slots[0]
        self.slots.rotate(-1)
        return slot


def results(
    plan: Plan, slots: Sequence[HostSlot], vocab: int, reassigned: Sequence[int] = ()
) -> Executed:
    """Wait for the slots of a plan's forwards; returns the plan's results. Raises
    LogitsError.

    `reassigned` are entries of the plan whose rows have new owners by now.
    """
    yields = _yields(plan, slots, reassigned)
    pooled = _prompt_outputs(slots, len(plan.rows))
    return Executed(plan.step, yields, _logprobs(slots, len(plan.rows), vocab), pooled)


def _logprobs(slots: Sequence[HostSlot], rows: int, vocab: int) -> Logprobs:
    """Returns log-probabilities: one entry for each row, or none at all."""
    by_entry = dict[int, list[TokenLogprobs]]()
    for slot in slots:
        if slot.scored and slot.draw is not None:
            for entry, token_logprobs in slot.logprobs(slot.draw, vocab):
                by_entry.setdefault(entry, []).append(token_logprobs)
    return (
        tuple([tuple(by_entry.get(row, ())) for row in range(rows)]) if by_entry else ()
    )


def _prompt_outputs(slots: Sequence[HostSlot], rows: int) -> Pooled:
    """Returns the outputs of prompts: one entry for each row, or none at all."""
    outputs = [output for slot in slots for output in (slot.vectors, slot.prompt_scores)]
    columns = [output.read(rows) for output in outputs if output is not None]
    by_row = zip(*columns, strict=True)  # a row is pooled or scored, and in one forward
    return tuple(map(b"".join, by_row)) if columns else ()


def _yields(plan: Plan, slots: Sequence[HostSlot], reassigned: Sequence[int]) -> Yields:
    out: list[tuple[int, ...]] = [()] * len(plan.rows)
    for slot in slots:
        draw = slot.draw
        if draw is None:
            continue
        drawn = slot.tokens(draw)
        simple = draw.lines is None and draw.draft_outputs is None
        if simple and not plan.deferred:
            return tuple(zip(drawn, strict=True))
        # A row is in one forward, and sampled once.
        for entry, token in zip(draw.entries, zip(drawn, strict=True), strict=True):
            out[entry] = token
        if draw.draft_outputs is not None:
            for entry, tokens in slot.tokens_behind_drafts(draw.draft_outputs):
                out[entry] += tuple(tokens)
    for entry in reassigned:
        out[entry] = (DISCARDED_TOKEN,)
    return tuple(out)
