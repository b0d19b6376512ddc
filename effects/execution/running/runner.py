"""A model on a device, with its cache, rows, graphs and staging buffer.

Theory. The device owns its rows (`device_rows.py`). To run a forward: pack its inputs and
row changes into one pinned buffer, copy that without waiting, scatter the changes; run
the step, from embedding to sampled tokens and advanced rows; copy the tokens to pinned
memory and record an event.

A step (device_step.py) can be a CUDA graph: one for each shape, captured before it is
needed (warm_up.py), or while no request waits. A step whose shape has none yet is
launched kernel by kernel, as are those with many prefill tokens, of which launching takes
less than their work.

Everything is on one stream, in order: the next step's copy may overwrite a device buffer,
as it is enqueued after all reads of it.

Runners share nothing, so there can be several in a process. A drafter has no runner of
its own: it is part of its target's steps, and uses the same rows (drafter.py).
"""

import contextlib
import time
import warnings
from collections.abc import Sequence
from typing import Final

import torch
from attrs import evolve

from minfer.effects.execution.cuda.graphs import GraphCache, watched
from minfer.effects.execution.device.backend import Backend
from minfer.effects.execution.device.device_rows import EMPTY, DeviceRows, Words
from minfer.effects.execution.device.step_shape import StepShape, max_draws, max_lines
from minfer.effects.execution.device.streams import is_gpu, new_stream, wait
from minfer.effects.execution.packing.extra_outputs import ExtraOutputs
from minfer.effects.execution.packing.inputs import max_words
from minfer.effects.execution.packing.pack_plan import Forward
from minfer.effects.execution.packing.pooling import Pooler
from minfer.effects.execution.packing.prompt_scores import Scorer
from minfer.effects.execution.packing.read_back import HostSlot
from minfer.effects.execution.running.adapter_loader import AdapterLoader
from minfer.effects.execution.running.batch_builder import BatchBuilder
from minfer.effects.execution.running.deferred_sampling import DeferredDraws
from minfer.effects.execution.running.device_step import DeviceStep
from minfer.effects.execution.running.draft_head import DraftHead
from minfer.effects.execution.running.draft_model import DraftModel, LoadedDraft
from minfer.effects.execution.running.drafter import Drafter
from minfer.effects.execution.running.head_model import LoadedHead, head_model_of
from minfer.effects.execution.running.own_model import model_of
from minfer.effects.execution.running.prefill_chunks import uses_history
from minfer.effects.execution.running.shortcuts import Shortcuts
from minfer.effects.execution.running.stage_buffers import StageBuffers
from minfer.effects.execution.running.stage_sampler import make_sampler
from minfer.effects.execution.running.unprepared_work import (
    EXTRA_OUTPUTS,
    MISSING,
    TOO_LARGE,
    UnpreparedWork,
)
from minfer.effects.models.architecture.model import Model
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.weights import Weights
from minfer.effects.models.dtypes import torch_dtype
from minfer.effects.models.layout import shapes
from minfer.effects.models.layout.cache_layout import layout_for
from minfer.effects.models.ranks import SINGLE_RANK, Communicator
from minfer.records.config import EngineConfig
from minfer.records.plan import Copy, Plan

MIN_CONTEXT_TOKENS: Final = 1024  # the shortest context by which kernels are chosen


class ModelRunner:
    """Runs forwards of one model, in order."""

    def __init__(
        self,
        backend: Backend,
        spec: ModelSpec,
        weights: Weights | Model,
        config: EngineConfig,
        *,
        graphs: bool = True,
        checked: bool = False,
        draft: LoadedDraft | LoadedHead | None = None,
        ranks: Communicator = SINGLE_RANK,
        keeps_logits: bool = False,
        adapters: AdapterLoader | None = None,
    ) -> None:
        """`checked`: a decode step that waits for the device, or allocates memory, fails.
        `keeps_logits`: any step may have deferred sampling, so all graphs support it.
        `ranks` run the model together, with the `adapters` of rows.

        Raises MemoryError or RuntimeError (torch.OutOfMemoryError) if the cache does not
        fit.
        """
        device = backend.device
        self.backend = backend
        self.spec = spec
        self.config = config
        # prefill tokens of a step with a graph, at most
        self.captured = backend.routes.captured
        draws = max_draws(config.max_num_seqs)
        inputs = self.captured + draws if graphs else 0  # of a graph, at most
        self.stage_buffers = StageBuffers.of(ranks, spec, inputs, device)
        # Of several ranks, shapes are captured only where rank 0 says so: not in a step.
        self.ranks = ranks
        self.has_other_ranks = ranks.rank_info.parallel.ranks > 1
        length = min(config.max_model_len, spec.max_position_embeddings)
        self.cached_spec = cached_spec = spec.with_head_layer()
        self.cache = backend.make_cache(
            cached_spec,
            config.num_blocks,
            config.block_size,
            length,
            layout_for(cached_spec, config),
        )
        self.adapters = adapters
        if adapters is not None:
            weights = adapters.with_slots(weights)
        self.rows = DeviceRows.of(config, length, spec.vocab_size, device)
        specs = [cached_spec, *([draft.spec] if isinstance(draft, LoadedDraft) else [])]
        slots = config.num_blocks * config.block_size
        batch_builder = BatchBuilder(
            backend,
            self.rows,
            config.block_size,
            padding_from=slots
            if any(model_spec.has_experts for model_spec in specs)
            else 0,
        )
        self.drafter: Drafter | None = None
        match draft:
            case LoadedDraft(draft_spec, draft_weights):
                model = model_of(draft_spec, draft_weights)
                self.drafter = DraftModel.open(
                    draft_spec, model, batch_builder, config, length
                )
            case LoadedHead(head_weights):
                head = head_model_of(spec, weights, head_weights, ranks)
                self.drafter = DraftHead.open(head, self.cache, batch_builder)
        self.drafts = shapes.max_step_drafts(config)
        self.lines = max_lines(config)
        tokens = shapes.padded_tokens(config.max_num_batched_tokens)
        self.max_words = max_words(self.rows, tokens, draws, self.drafts)
        self.staging = torch.zeros(self.max_words, dtype=torch.int32, device=device)
        self.sampler = make_sampler(
            ranks,
            backend,
            self.rows,
            draws,
            self.lines,
            keeps_previous=self.draft_model is not None,
        )
        sizes = config.max_num_seqs, spec.hidden_size
        self.pooler = Pooler(*sizes, torch_dtype(spec.dtype), device)
        self.scorer = Scorer(backend, config.max_num_seqs)
        if checked:  # torch calls its check a prototype
            warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
        self.checked = checked
        self.stream = new_stream(device)
        self.shortcuts = Shortcuts.of(backend.routes, graphs=graphs and is_gpu(device))
        self.step = DeviceStep(
            model_of(spec, weights, ranks, self.stage_buffers),
            self.cache,
            self.rows,
            self.staging,
            batch_builder,
            self.drafter,
            self.sampler,
            backend.routes,
            self.shortcuts,
        )
        activation_bytes = shapes.cuda_activation_bytes(
            spec, config, self.captured + config.max_num_seqs
        )
        self.captures = GraphCache(device, activation_bytes)
        self.unprepared = UnpreparedWork.of(device)
        self.keeps_logits = keeps_logits and self.shortcuts.graphs
        self.wait()  # for work on other streams

    @property
    def draft_model(self) -> DraftModel | None:
        """The draft model, if the drafter is one."""
        return self.drafter if isinstance(self.drafter, DraftModel) else None

    @property
    def separates_drafts(self) -> bool:
        """Whether rows with drafts are a forward of their own beside prompts: where steps
        have graphs, of which there cannot be one for each combination.
        """
        return self.shortcuts.graphs

    def padded(self, shape: StepShape) -> StepShape:
        """Returns the shape whose graph serves this shape: padded if it can have a
        graph.
        """
        if self.keeps_logits and not shape.deferred_draws:
            shape = evolve(shape, keeps_logits=True)
        if not self.may_be_captured(shape):
            return shape
        return shape.padded(self.config.max_num_seqs)

    def may_be_captured(self, shape: StepShape) -> bool:
        """Returns whether steps of a shape have a graph."""
        return self.shortcuts.graphs and shape.fits(self.captured)

    def apply_changes(self, plan: Plan) -> None:
        """Apply a plan's changes of rows and blocks."""
        rows = self.rows
        caches = [self.cache, *(self.drafter.caches if self.drafter else ())]
        if isinstance(self.drafter, DraftHead) and plan.opens:
            self.drafter.open_rows([plan.rows[opened.index] for opened in plan.opens])
        for opened in plan.opens:
            self.sampler.open(plan.rows[opened.index], opened)
            full_blocks, first_slot = divmod(
                plan.starts[opened.index], self.config.block_size
            )
            groups = self.config.block_groups  # a state is not cleared
            for group, table in zip(groups, opened.tables, strict=False):
                for page in range(group.pages):
                    for cache in caches:
                        cache.clear(
                            table[full_blocks * group.pages + page :: group.pages],
                            first_slot,
                        )
        for grow in plan.grows:
            rows.set_table(grow.row, grow.at, grow.blocks, grow.group)
            for cache in caches:
                cache.clear(grow.blocks)
        for save in plan.saves:
            if save.inside:
                rows.set_saved(plan.rows[save.index], save.pages)
        if plan.copies:
            for cache in caches:
                cache.copy(plan.copies)

    def run(self, forward: Forward, slot: HostSlot, saves: Sequence[Copy] = ()) -> None:
        """Send a forward's words, run it, save states, and start copying its tokens to
        the host: once these have arrived, what was saved can be moved to other tiers.
        """
        shape = self.with_splits(forward.shape, forward.longest)
        routes, size = self.backend.routes, self.config.block_size
        if uses_history(shape, forward, routes, size):
            shape = evolve(shape, history=forward.history)
        slot.begin(forward.draw, scored=shape.scored)
        checked = (
            self.checked
            and shape in self.captures.graphs
            and not forward.has_extra_outputs
            and not saves
        )
        with watched(self.backend.device) if checked else contextlib.nullcontext():
            self._send(slot, forward.words)
            if extra := ExtraOutputs.of(forward, self.pooler, self.scorer):
                self._launch(shape, EXTRA_OUTPUTS, extra)
                extra.fetch(slot)
            else:
                self._replay(shape)
            if saves:
                self.cache.copy(saves)
            out, scores = self.sampler.out, self.sampler.scores
            slot.fetch(out, scores, shape.lines, self.stream)

    def catch_up(
        self, forwards: Sequence[tuple[StepShape, Words]], slot: HostSlot
    ) -> None:
        """Have the draft model compute chunks of rows; row changes are sent before."""
        slot.begin(None, scored=False)
        self._send(slot, EMPTY)
        if self.draft_model is not None:
            self.draft_model.catch_up(forwards)

    def run_deferred(self, deferred: DeferredDraws, slot: HostSlot) -> None:
        """Run deferred draws, and start copying their tokens to the host."""
        slot.begin(deferred.draw, scored=deferred.shape.scored)
        self._send(slot, deferred.words)
        self.sampler.masks.send(deferred, self.stream)
        self._replay(deferred.shape)
        self.sampler.masks.read(self.stream)
        count = len(deferred.draw.entries)
        slot.fetch(self.sampler.out, self.sampler.scores, count, self.stream)

    def forget(self) -> None:
        """Drop unsent row changes after a failed step: rows are opened again."""
        self.rows.changes = []
        self.unprepared.parts.clear()

    def wait(self) -> None:
        """Wait until no launched work uses the cache any more."""
        wait(self.backend.device)

    def close(self) -> None:
        """Release the weights and the cache; no call may follow."""
        self.captures.graphs.clear()
        # Drop all tensors on the device, even if this object stays referenced: torch
        # frees whole segments, and small tensors can be at the end of the cache's.
        del self.step, self.cache, self.rows, self.staging, self.sampler
        del self.drafter, self.stage_buffers
        if self.adapters is not None:
            self.adapters.close()
        self.pooler.sums = None

    # --- one forward --------------------------------------------------------------------

    def with_context_splits(self, shape: StepShape, context: int) -> StepShape:
        """Returns the shape with the splits for contexts of up to `context` tokens."""
        splits = drafting = tuple[int, ...]()
        if shape.decode_rows:
            splits = self.backend.routes.splits(shape.decode_rows, context)
        if self.drafter is not None and shape.proposes:
            drafting = self.drafter.splits(shape, context)
        if (splits, drafting) == (shape.splits, shape.draft_splits):
            return shape
        return evolve(shape, splits=splits, draft_splits=drafting)

    def with_splits(self, shape: StepShape, longest: int) -> StepShape:
        """Returns the shape with the splits for contexts of up to `longest` tokens,
        rounded up so that there are few different ones.
        """
        if not shape.decode_rows:
            return shape
        table = self.rows.blocks * self.config.block_size
        return self.with_context_splits(
            shape, min(max(MIN_CONTEXT_TOKENS, 1 << longest.bit_length()), table)
        )

    def _send(self, slot: HostSlot, inputs: Words) -> None:
        """Send inputs and row changes to the device in one copy, and apply the
        changes.
        """
        changes = self.rows.take()
        total = len(inputs) + sum(map(len, changes))
        if not total:
            return
        slot.write([inputs, *changes])
        self.staging[:total].copy_(slot.words[:total], non_blocking=True)
        if changes:
            self.backend.scatter(self.rows.arena, self.staging[len(inputs) : total])

    def _replay(self, shape: StepShape) -> None:
        """Run a step by its graph; kernel by kernel while there is none."""
        if not self.may_be_captured(shape):
            self._launch(shape, TOO_LARGE)
            return
        if (graph := self.captures.find(shape)) is None:
            if self.has_other_ranks or not self.captures.is_due(shape):
                self.captures.note(shape, self._launch(shape, MISSING))
                return
            graph = self._capture(shape)
        self.stage_buffers.replay(graph, shape.inputs)

    def _capture(self, shape: StepShape) -> torch.cuda.CUDAGraph:
        """Capture the graph of a shape while a step waits for it."""
        self.shortcuts.capture()
        begin = time.monotonic()
        try:
            graph = self.captures.capture(shape, self.step)
        except torch.OutOfMemoryError:
            self.captures.full = True
            raise
        self.unprepared.note_capture(shape, time.monotonic() - begin)
        return graph

    def _launch(
        self, shape: StepShape, reason: str, extra: ExtraOutputs | None = None
    ) -> float:
        """Launch a step kernel by kernel; `reason` says why not by a graph. Returns how
        long that took the host, in seconds.
        """
        begin = time.monotonic()
        self.step(shape, extra=extra)
        seconds = time.monotonic() - begin
        if self.shortcuts.graphs:
            self.unprepared.note_launch(shape, reason, seconds)
        return seconds
