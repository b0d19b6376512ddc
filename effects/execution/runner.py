"""A model on a device, with what running it takes: its cache, rows, graphs and staging.

Theory. The device owns its rows (`device_rows.py`). Running a forward is: pack its inputs
and what it changes into one pinned buffer, copy that without waiting, scatter the
changes; run the step, from embedding to tokens drawn and rows advanced; copy the tokens
to pinned memory and record an event.

A step's launches are a function of its `Kind` (kinds.py) and of what lies on the device,
so it can be a CUDA graph: one for each kind, captured before it is needed (warm_up.py),
or while nobody waits. A step whose kind has none yet is launched kernel by kernel, as are
those with so many inputs from history that launching them takes less than their work.

Everything is on one stream, in order: a device buffer can be overwritten by the next
step's copy as soon as that is enqueued.

Runners share nothing, so there can be several in a process. A draft model is a second one
of the same vocabulary: it opens the rows that the target does, with the same sampling
values (its noise is the same, so it draws what the target is likely to draw) and blocks
of its own, feeds itself for as many forwards as there shall be drafts, and is told after
the target has verified them where its rows stand. Its stream waits for the target's, and
the other way round, by events.
"""

import contextlib
import time
import warnings
from typing import Final

import torch
from attrs import evolve, frozen
from torch import Tensor

from minfer.config import EngineConfig
from minfer.effects.execution.backend import Backend
from minfer.effects.execution.beside_tokens import Errand
from minfer.effects.execution.device_rows import DeviceRows, Words, aligned
from minfer.effects.execution.graphs import GraphCache, watched
from minfer.effects.execution.kinds import Kind, most_draws
from minfer.effects.execution.late_draws import LateDraw
from minfer.effects.execution.packing import (
    Forward,
    History,
    Inputs,
    most_words,
    nobodys,
)
from minfer.effects.execution.pooling import Pooler
from minfer.effects.execution.prompt_scores import Scorer
from minfer.effects.execution.read_back import Slot
from minfer.effects.execution.sampler import Sampler
from minfer.effects.execution.shortcuts import Shortcuts
from minfer.effects.execution.streams import is_gpu, new_stream, wait
from minfer.effects.models.batch import Batch, Chunks
from minfer.effects.models.dtypes import torch_dtype
from minfer.effects.models.model import Model, forward
from minfer.effects.models.shapes import cuda_activation_bytes, padded_tokens
from minfer.effects.models.spec import ModelSpec
from minfer.effects.models.weights import Weights
from minfer.kernels.flash import FlashWork
from minfer.kernels.packages import FLASH, QUACK
from minfer.plan import Plan

CONTEXT: Final = 1024  # the shortest context by which kernels are chosen


def model_of(spec: ModelSpec, weights: Weights | Model) -> Model:
    """A step as a function of a batch and a cache."""
    if not isinstance(weights, Weights):
        return weights
    return lambda batch, cache: forward(spec, weights, batch, cache)


def _rows(
    config: EngineConfig, length: int, vocab: int, device: torch.device
) -> DeviceRows:
    """The rows of a device, for sequences of so many tokens."""
    blocks = -(-length // config.block_size)
    rows = DeviceRows(config.max_num_seqs, blocks, vocab, device)
    rows.table[rows.scratch] = config.num_blocks  # the block that nobody has
    return rows


def _shortcuts(backend: Backend, *, graphs: bool) -> Shortcuts:
    """What makes a backend's steps faster, as long as it works."""
    routes = backend.routes
    return Shortcuts(
        graphs=graphs and is_gpu(backend.device),
        flash_from=routes.flash_from,
        fused=not routes.no_quack,
    )


@frozen(eq=False)
class Fed:
    """What a step's tokens are, [tokens] each, int32 unless said otherwise."""

    tokens: Tensor  # ids
    positions: Tensor
    ahead: Tensor  # the positions after them
    slots: Tensor  # int64: where their keys and values go


class ModelRunner:
    """Runs forwards of one model. What is launched is done in order."""

    def __init__(
        self,
        backend: Backend,
        spec: ModelSpec,
        weights: Weights | Model,
        config: EngineConfig,
        *,
        graphs: bool = True,
        checked: bool = False,
    ) -> None:
        """`checked`: a decode step that waits for the device, or takes memory, fails.

        Raises MemoryError or RuntimeError (torch.OutOfMemoryError) if the cache does not
        fit.
        """
        device = backend.device
        self.backend = backend
        self.spec = spec
        self.config = config
        self.model = model_of(spec, weights)
        length = min(config.max_model_len, spec.max_position_embeddings)
        self.cache = backend.make_cache(
            spec, config.num_blocks, config.block_size, length
        )
        self.rows = _rows(config, length, spec.vocab_size, device)
        self.draws = most_draws(config.max_num_seqs)
        tokens = padded_tokens(config.max_num_batched_tokens)
        self.room = most_words(self.rows, tokens, self.draws)
        self.staging = torch.zeros(self.room, dtype=torch.int32, device=device)
        self.sampler = Sampler(backend, self.rows, self.draws)
        dtype = torch_dtype(spec.dtype)
        self.pooler = Pooler(config.max_num_seqs, spec.hidden_size, dtype, device)
        self.scorer = Scorer(backend, config.max_num_seqs)
        if checked:  # torch calls its check a prototype
            warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
        self.checked = checked
        self.stream = new_stream(device)
        self.captured = backend.routes.captured  # from history, of a step with a graph
        self.shortcuts = _shortcuts(backend, graphs=graphs)
        most = cuda_activation_bytes(spec, config, self.captured + config.max_num_seqs)
        self.captures = GraphCache(device, most)
        self.wait()  # what was made on another stream is there

    def step_of_nobody(self, kind: Kind) -> None:
        """Make a step for its own sake, while none is under way: it changes no row."""
        length = self.rows.blocks * self.config.block_size
        words = nobodys(kind, self.rows.scratch, min(length, self.config.max_model_len))
        self.staging[: len(words)].copy_(torch.from_numpy(words))
        self._step(kind, dry=True)

    def capture(self, kind: Kind) -> None:
        """Have a graph of a kind, while no step is under way."""
        self.step_of_nobody(kind)
        self.shortcuts.capture()
        self.captures.capture(kind, self._step)

    def padded(self, kind: Kind) -> Kind:
        """The kind that serves another: padded if there can be a graph of it."""
        return kind.padded() if self._may_be_captured(kind) else kind

    def _may_be_captured(self, kind: Kind) -> bool:
        return self.shortcuts.graphs and kind.fits(self.captured)

    def take(self, plan: Plan) -> None:
        """Note the rows and blocks that a plan hands over."""
        rows = self.rows
        for opened in plan.opens:
            self.sampler.open(plan.rows[opened.index], opened)
            full, part = divmod(plan.starts[opened.index], self.config.block_size)
            (table,) = opened.tables  # layers are of one group here
            self.cache.clear(table[full:], part)
        for grow in plan.grows:
            rows.set_table(grow.row, grow.at, grow.blocks)
            self.cache.clear(grow.blocks)
        for copy in plan.copies:
            self.cache.copy(copy.source, copy.target, copy.count)

    def run(self, forward: Forward, slot: Slot) -> None:
        """Send what a forward needs, run it, and have its tokens sent back."""
        kind = self._with_splits(forward.kind, forward.longest)
        slot.begin(forward.draw, scored=kind.scored)
        checked = self.checked and kind in self.captures.made and not forward.asks
        with watched(self.backend.device) if checked else contextlib.nullcontext():
            self._send(slot, forward.words)
            if errand := Errand.of(forward, self.pooler, self.scorer):
                self._step(kind, errand=errand)
                errand.bring(slot)
            else:
                self._replay(kind)
            slot.fetch(self.sampler.out, self.sampler.scores, kind.draws)

    def run_late(self, late: LateDraw, slot: Slot) -> None:
        """Draw for rows that were sampled apart, and have their tokens sent back."""
        slot.begin(late.draw, scored=late.kind.scored)
        self._send(slot, late.words)
        self.sampler.masks.send(late)
        self._replay(late.kind)
        self.sampler.masks.read()
        slot.fetch(self.sampler.out, self.sampler.scores, len(late.draw.places))

    def forget(self) -> None:
        """A step failed: what rows were to be told is told again when they are opened."""
        self.rows.changes = []

    def wait(self) -> None:
        """Until nothing that was launched touches the cache any more."""
        wait(self.backend.device)

    def close(self) -> None:
        """Let go of the weights and the cache; no call may follow."""
        self.captures.made.clear()
        # All that is on the device, even if somebody keeps this object: torch gives a
        # segment back whole, and small tensors can lie at the end of the cache's.
        del self.cache, self.model, self.rows, self.staging, self.sampler
        self.pooler.sums = None

    # --- one forward --------------------------------------------------------------------
    def _with_splits(self, kind: Kind, longest: int) -> Kind:
        """The kind, for contexts of up to `longest` tokens: few differ."""
        if not kind.alone:
            return kind
        table = self.rows.blocks * self.config.block_size
        context = min(max(CONTEXT, 1 << longest.bit_length()), table)
        splits = self.backend.num_splits(kind.alone, self.spec, context)
        return kind if splits == kind.splits else evolve(kind, splits=splits)

    def _send(self, slot: Slot, inputs: Words) -> None:
        """Inputs and changes to the device in one copy; the rows change."""
        changes = self.rows.take()
        total = len(inputs) + sum(map(len, changes))
        if not total:
            return
        slot.write([inputs, *changes])
        self.staging[:total].copy_(slot.words[:total], non_blocking=True)
        if changes:
            self.backend.scatter(self.rows.arena, self.staging[len(inputs) : total])

    def _replay(self, kind: Kind) -> None:
        """A step, as its graph does it; launch by launch while there is none."""
        if not self._may_be_captured(kind):
            self._step(kind)
            return
        if (graph := self.captures.made.get(kind)) is None:
            begin = time.monotonic()
            if not self.captures.due(kind, begin):
                self._step(kind)
                self.captures.note(kind, time.monotonic() - begin)
                return
            self.shortcuts.capture()
            graph = self.captures.capture(kind, self._step)
        graph.replay()

    def _step(self, kind: Kind, dry: bool = False, errand: Errand | None = None) -> None:
        """A whole step, from what is on the device into the sampler's `out` and the rows.

        `dry`: for its own sake. The rows that feed themselves are nobody's; so is then
        what lies on the device of chunks and draws.
        """
        rows = self.rows
        inputs = Inputs.of(self.staging, kind)
        if inputs.late is not None:
            who, positions = inputs.late.unbind(0)
            self.sampler.sample_kept(who, positions, kind.wants)
            return
        who = rows.batch[: kind.alone]
        if dry:
            who = who.new_full((kind.alone,), rows.scratch)
        sampled = None
        if inputs.history is not None:
            who, sampled = inputs.history.draws.unbind(0)
        batch, ahead = self._batch(kind, inputs.history, who, sampled, dry)
        logits = self.model(errand.added(batch) if errand else batch, self.cache)
        if not kind.draws:
            return
        if sampled is not None:
            ahead = ahead.index_select(0, sampled)
        if inputs.apart is not None:
            now, kept = (who, who) if dry else inputs.apart.unbind(0)
            self.sampler.keep(logits, kept)
            who = now
        self.sampler.sample(logits, who, ahead, kind.wants)

    def _batch(
        self,
        kind: Kind,
        history: History[Tensor] | None,
        who: Tensor,
        sampled: Tensor | None,
        dry: bool,
    ) -> tuple[Batch, Tensor]:
        """The packed step, and the position after each of its tokens."""
        selves = who[: kind.alone]
        chunks = None if history is None else self._chunks(kind, history.chunks)
        fed = self._gathered(kind, history, selves, dry)
        fused = self.shortcuts.fused and self.backend.fuses(
            kind.alone + kind.tokens, self.spec.intermediate_size
        )
        batch = Batch(
            tokens=fed.tokens,
            positions=fed.positions,
            slots=fed.slots,
            sample=sampled,
            table=self.rows.table,
            rows=selves,
            contexts=fed.ahead[: kind.alone],
            chunks=chunks,
            splits=kind.splits,
            fused=fused and self.shortcuts.may_take(QUACK),
        )
        return batch, fed.ahead

    def _gathered(
        self, kind: Kind, history: History[Tensor] | None, selves: Tensor, dry: bool
    ) -> Fed:
        """The inputs of rows that feed themselves, then those from history."""
        rows = self.rows
        count = kind.alone + kind.tokens
        # Zeros, as no kernel fills them.
        make = selves.new_zeros if dry else selves.new_empty
        tokens, positions, ahead = make((3, aligned(count)))[:, :count].unbind(0)
        slots = make(count, dtype=torch.int64)
        fed = Fed(tokens, positions, ahead, slots)
        self.backend.gather(
            rows=selves,
            given=None if history is None else history.tokens,
            last=rows.last,
            next_=rows.next,
            table=rows.table,
            block_size=self.config.block_size,
            tokens=fed.tokens,
            positions=fed.positions,
            ahead=fed.ahead,
            slots=fed.slots,
        )
        return fed

    def _chunks(self, kind: Kind, words: Tensor) -> Chunks:
        """From `words` [4, chunks]; flash-attn's work is not captured."""
        rows, starts, counts, offsets = words
        flash = None
        flash_from = self.shortcuts.flash_from
        wanted = 0 < flash_from <= kind.longest and kind.tokens > self.captured
        if wanted and self.shortcuts.may_take(FLASH):
            flash = FlashWork.of(rows, starts, counts, self.rows.table, kind.longest)
        return Chunks(rows, starts, counts, offsets, kind.longest, flash)
