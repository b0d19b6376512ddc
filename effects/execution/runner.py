"""A model on a device, with what running it takes: its cache, rows, graphs and staging.

Theory. The device owns its rows (`device_rows.py`). Running a forward is: pack its inputs
and what it changes into one pinned buffer, copy that without waiting, scatter the
changes; run the step, from embedding to tokens drawn and rows advanced; copy the tokens
to pinned memory and record an event.

A step's launches are a function of its `StepShape` (step_shape.py) and of what lies on
the device, so it can be a CUDA graph: one for each shape, captured before it is needed
(warm_up.py), or while no request waits. A step whose shape has none yet is launched
kernel by kernel, as are those with so many prefill tokens that launching them takes less
than their work.

Everything is on one stream, in order: a device buffer can be overwritten by the next
step's copy as soon as that is enqueued.

Runners share nothing, so there can be several in a process. A draft model is no runner:
it is part of its target's steps, and works on the same rows (draft_model.py).
"""

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
from attrs import evolve, frozen
from torch import Tensor

from minfer.config import EngineConfig
from minfer.effects.execution.backend import Backend, Cache
from minfer.effects.execution.beside_tokens import Errand
from minfer.effects.execution.device_rows import EMPTY, DeviceRows, Words
from minfer.effects.execution.draft_model import DraftModel, DraftOf
from minfer.effects.execution.feeding import Feeder, Step, chunks_of, sampled, verified_of
from minfer.effects.execution.graphs import GraphCache, watched
from minfer.effects.execution.inputs import History, Inputs, dummy_words, most_words
from minfer.effects.execution.judging import judge, spread
from minfer.effects.execution.late_draws import LateDraw
from minfer.effects.execution.packing import Forward
from minfer.effects.execution.pooling import Pooler
from minfer.effects.execution.prompt_scores import Scorer
from minfer.effects.execution.read_back import Slot
from minfer.effects.execution.rejecting import Guess
from minfer.effects.execution.sampler import Sampler
from minfer.effects.execution.shortcuts import Shortcuts
from minfer.effects.execution.step_shape import StepShape, most_draws, most_lines
from minfer.effects.execution.streams import is_gpu, new_stream, wait
from minfer.effects.models import shapes
from minfer.effects.models.batch import Batch, Chunks
from minfer.effects.models.dtypes import torch_dtype
from minfer.effects.models.model import Model, forward
from minfer.effects.models.spec import ModelSpec
from minfer.effects.models.weights import Weights
from minfer.kernels.flash import FlashWork
from minfer.kernels.packages import FLASH, QUACK
from minfer.plan import Plan

CONTEXT: Final = 1024  # the shortest context by which kernels are chosen


@frozen(eq=False)
class OwnModel:
    """A step by minfer's own forward pass, as a function of a batch and a cache."""

    spec: ModelSpec
    weights: Weights

    def __call__(self, batch: Batch, cache: Cache) -> Tensor:
        """Logits [sampled, vocab] of a packed step."""
        return forward(self.spec, self.weights, batch, cache)

    def with_few_layers(self) -> "OwnModel":
        """The model cut behind a layer of each kind and one more, as the last layer is
        narrowed to the sampled tokens: it launches the same kernels, fewer times.
        """
        layers = self.spec.layers
        count = max(layers.index(layer) for layer in layers) + 2
        return OwnModel(
            self.spec, evolve(self.weights, layers=self.weights.layers[:count])
        )


def model_of(spec: ModelSpec, weights: Weights | Model) -> Model:
    """A step as a function of a batch and a cache."""
    return OwnModel(spec, weights) if isinstance(weights, Weights) else weights


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
        draft: DraftOf | None = None,
        keeps: bool = False,
    ) -> None:
        """`checked`: a decode step that waits for the device, or takes memory, fails.
        `keeps`: rows may be sampled apart in any step, so that graphs are for both.

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
        self.rows = DeviceRows.of(config, length, spec.vocab_size, device)
        self.feeder = Feeder(backend, self.rows, config.block_size)
        self.draft: DraftModel | None = None
        if draft is not None:
            model = model_of(draft.spec, draft.weights)
            self.draft = DraftModel.open(draft.spec, model, self.feeder, config, length)
        draws, self.drafts = most_draws(config.max_num_seqs), shapes.most_drafts(config)
        self.lines = most_lines(config)
        tokens = shapes.padded_tokens(config.max_num_batched_tokens)
        self.room = most_words(self.rows, tokens, draws, self.drafts)
        self.staging = torch.zeros(self.room, dtype=torch.int32, device=device)
        modelled = self.draft is not None
        self.sampler = Sampler(backend, self.rows, draws, self.lines, remembers=modelled)
        sizes = config.max_num_seqs, spec.hidden_size
        self.pooler = Pooler(*sizes, torch_dtype(spec.dtype), device)
        self.scorer = Scorer(backend, config.max_num_seqs)
        if checked:  # torch calls its check a prototype
            warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
        self.checked = checked
        self.stream = new_stream(device)
        self.captured = backend.routes.captured  # from history, of a step with a graph
        self.shortcuts = Shortcuts.of(backend.routes, graphs=graphs and is_gpu(device))
        most = shapes.cuda_activation_bytes(
            spec, config, self.captured + config.max_num_seqs
        )
        self.captures = GraphCache(device, most)
        self.keeps = keeps and self.shortcuts.graphs
        self.wait()  # what was made on another stream is there

    def dummy_step(self, shape: StepShape) -> None:
        """Make a step for its own sake, while none is under way: it changes no row."""
        length = self.rows.blocks * self.config.block_size
        words = dummy_words(
            shape, self.rows.scratch, min(length, self.config.max_model_len)
        )
        self.staging[: len(words)].copy_(torch.from_numpy(words))
        self._step(shape, dry=True)

    @contextlib.contextmanager
    def few_layers(self) -> Iterator[None]:
        """Cut the models short, for steps that are launched for their kernels' sake."""
        whole: list[tuple[ModelRunner | DraftModel, OwnModel]] = [
            (one, one.model)
            for one in (self, self.draft)
            if one is not None and isinstance(one.model, OwnModel)
        ]
        try:
            for one, model in whole:
                one.model = model.with_few_layers()
            yield
        finally:
            for one, model in whole:
                one.model = model

    def capture(self, shape: StepShape) -> None:
        """Have a graph of a kind, while no step is under way. A step before it loads what
        its launches need, which a capture must not.
        """
        with self.few_layers():
            self.dummy_step(shape)
        self.shortcuts.capture()
        self.captures.capture(shape, self._step)

    def rehearsed(self, shape: StepShape) -> Callable[[], object]:
        """Something that makes a step of a kind for its own sake as often as it is
        called, by a graph where such steps have one. While none is under way.
        """
        shape = self._with_splits(self.padded(shape), CONTEXT)
        if not self._may_be_captured(shape):
            return lambda: self.dummy_step(shape)
        if shape not in self.captures.made:
            self.capture(shape)
        graph = self.captures.made[shape]
        self.dummy_step(shape)  # what the graph reads is nobody's
        self.rows.batch.fill_(self.rows.scratch)
        self.rows.apart.fill_(self.rows.scratch)
        return graph.replay

    @property
    def parts_drafts(self) -> bool:
        """Whether rows with drafts are a forward of their own beside prompts: where steps
        have graphs, of which there cannot be one for each combination.
        """
        return self.shortcuts.graphs

    def padded(self, shape: StepShape) -> StepShape:
        """The kind that serves another: padded if there can be a graph of it."""
        if self.keeps and not shape.late:
            shape = evolve(shape, apart=True)
        return shape.padded() if self._may_be_captured(shape) else shape

    def _may_be_captured(self, shape: StepShape) -> bool:
        return self.shortcuts.graphs and shape.fits(self.captured)

    def take(self, plan: Plan) -> None:
        """Note the rows and blocks that a plan hands over."""
        rows = self.rows
        caches = [self.cache] if self.draft is None else [self.cache, self.draft.cache]
        for opened in plan.opens:
            self.sampler.open(plan.rows[opened.index], opened)
            full, part = divmod(plan.starts[opened.index], self.config.block_size)
            (table,) = opened.tables  # layers are of one group here
            for cache in caches:
                cache.clear(table[full:], part)
        for grow in plan.grows:
            rows.set_table(grow.row, grow.at, grow.blocks)
            for cache in caches:
                cache.clear(grow.blocks)
        if plan.copies:
            for cache in caches:
                cache.copy(plan.copies)

    def run(self, forward: Forward, slot: Slot) -> None:
        """Send what a forward needs, run it, and have its tokens sent back."""
        shape = self._with_splits(forward.shape, forward.longest)
        slot.begin(forward.draw, scored=shape.scored)
        checked = self.checked and shape in self.captures.made and not forward.asks
        with watched(self.backend.device) if checked else contextlib.nullcontext():
            self._send(slot, forward.words)
            if errand := Errand.of(forward, self.pooler, self.scorer):
                self._step(shape, errand=errand)
                errand.bring(slot)
            else:
                self._replay(shape)
            out, scores = self.sampler.out, self.sampler.scores
            slot.fetch(out, scores, shape.lines, self.stream)

    def catch_up(self, forwards: Sequence[tuple[StepShape, Words]], slot: Slot) -> None:
        """Have the draft model alone take chunks of rows; the rows change before."""
        slot.begin(None, scored=False)
        self._send(slot, EMPTY)
        if self.draft is not None:
            self.draft.catch_up(forwards)

    def run_late(self, late: LateDraw, slot: Slot) -> None:
        """Draw for rows that were sampled apart, and have their tokens sent back."""
        slot.begin(late.draw, scored=late.shape.scored)
        self._send(slot, late.words)
        self.sampler.masks.send(late, self.stream)
        self._replay(late.shape)
        self.sampler.masks.read(self.stream)
        count = len(late.draw.places)
        slot.fetch(self.sampler.out, self.sampler.scores, count, self.stream)

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
        del self.feeder, self.draft
        self.pooler.sums = None

    # --- one forward --------------------------------------------------------------------
    def cut(self, shape: StepShape, context: int) -> StepShape:
        """The kind, for contexts of up to so many tokens."""
        splits = drafting = 1
        if shape.decode_rows:
            splits = self.backend.num_splits(shape.decode_rows, self.spec, context)
        if self.draft is not None and shape.proposes:
            drafting = self.draft.num_splits(shape, context)
        if (splits, drafting) == (shape.splits, shape.draft_splits):
            return shape
        return evolve(shape, splits=splits, draft_splits=drafting)

    def _with_splits(self, shape: StepShape, longest: int) -> StepShape:
        """The kind, for contexts of up to `longest` tokens: few differ."""
        if not shape.decode_rows:
            return shape
        table = self.rows.blocks * self.config.block_size
        return self.cut(shape, min(max(CONTEXT, 1 << longest.bit_length()), table))

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

    def _replay(self, shape: StepShape) -> None:
        """A step, as its graph does it; launch by launch while there is none."""
        if not self._may_be_captured(shape):
            self._step(shape)
            return
        if (graph := self.captures.find(shape)) is None:
            begin = time.monotonic()
            if not self.captures.due(shape, begin):
                self._step(shape)
                self.captures.note(shape, time.monotonic() - begin)
                return
            self.shortcuts.capture()
            graph = self.captures.capture(shape, self._step)
        graph.replay()

    def _step(
        self, shape: StepShape, dry: bool = False, errand: Errand | None = None
    ) -> None:
        """A whole step, from what is on the device into the sampler's `out` and the rows.

        `dry`: for its own sake. The rows that feed themselves are nobody's; so is then
        what lies on the device of chunks and draws.
        """
        rows = self.rows
        inputs = Inputs.of(self.staging, shape)
        if inputs.late is not None:
            late = inputs.late
            self.sampler.sample_kept(late.rows, late.positions, shape.wants)
            return
        decoding = rows.batch[: shape.decode_rows]
        if dry:
            decoding = decoding.new_full((shape.decode_rows,), rows.scratch)
        if inputs.history is not None:
            decoding = inputs.history.draws[0, : shape.decode_rows]
        step = Step(decoding, None, inputs.history, dry)
        if inputs.drafts is not None:
            guesses = list[Guess]()
            if self.draft is not None and shape.proposes:
                own = evolve(step, history=None)
                guesses = self.draft.propose(shape, own, inputs.drafts, self.sampler)
            step = spread(self.backend, rows, step, inputs.drafts, guesses)
        decode_inputs = self.feeder.decode_inputs(step)
        verified = None
        if inputs.drafts is not None:
            verified = verified_of(shape, inputs.drafts, decode_inputs)
        batch = self.feeder.batch(
            step,
            decode_inputs,
            sampled(shape, inputs),
            None if inputs.history is None else self._chunks(shape, inputs.history),
            splits=shape.splits,
            fused=self._fuses(shape),
            verified=verified,
        )
        logits = self.model(errand.added(batch) if errand else batch, self.cache)
        self._draw(shape, inputs, step, decode_inputs.ahead, logits)

    def _draw(
        self,
        shape: StepShape,
        inputs: Inputs[Tensor],
        step: Step,
        positions: Tensor,
        logits: Tensor,
    ) -> None:
        """From a step's logits to tokens; `positions` are those after its inputs."""
        if not shape.draws:
            return
        who, ahead = step.decoding, positions[: shape.draws]
        if inputs.history is not None:
            who, drawn = inputs.history.draws.unbind(0)
            ahead = positions.index_select(0, drawn)
        first, others = logits[: shape.draws], logits[shape.draws :]
        if shape.apart:
            lines = inputs.apart
            if lines is None:
                lines = self.rows.apart[:, : shape.draws]
            now, kept = (who, who) if step.dry else lines.unbind(0)
            self.sampler.keep(first, kept)
            who = now
        here = step.contests[0] if step.contests else None
        self.sampler.sample(first, who, ahead, shape.wants, contest=here)
        if step.further is not None:
            # Of those who are sampled apart nobody has drawn: they are not among `who`.
            those = evolve(step, decoding=who[: shape.decode_rows])
            judge(self.sampler, shape, those, others)

    def _fuses(self, shape: StepShape) -> bool:
        fuses = self.shortcuts.fused and self.backend.fuses(
            shape.decode_inputs + shape.tokens, self.spec.intermediate_size
        )
        return fuses and self.shortcuts.may_take(QUACK)

    def _chunks(self, shape: StepShape, history: History[Tensor]) -> Chunks:
        """Where flash-attn serves them, its work; that is not captured."""
        flash = None
        flash_from = self.shortcuts.flash_from
        wanted = 0 < flash_from <= shape.longest and shape.tokens > self.captured
        if wanted and self.shortcuts.may_take(FLASH):
            rows, starts, counts, _ = history.chunks
            flash = FlashWork.of(rows, starts, counts, self.rows.table, shape.longest)
        return chunks_of(shape, history, flash)
