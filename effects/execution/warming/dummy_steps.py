"""Dummy steps that launch every kernel that traffic can need of a model.

Theory. A step's launches follow from its `StepShape`. There are many shapes, but what is
compiled depends on a few counts, each independent of the others: decode rows, all inputs,
the inputs of the longest chunk, draws. Between two of the kernels' `BOUNDS` a count makes
no difference, so one count on each side of a bound represents all; where a shape is
padded to a graph's, the padded sizes are included. So some seventy steps represent all.
They are launched only to be compiled (`minfer.kernels.compiling`): no kernel runs.
"""

from collections.abc import Iterator
from itertools import product
from typing import Final

import torch
from attrs import evolve

from minfer.effects.execution.device.device_rows import SamplingNeeds, aligned
from minfer.effects.execution.device.routes import Routes
from minfer.effects.execution.device.step_shape import (
    DECODE_DIVISIONS,
    StepShape,
    bucket_of,
    max_draws,
)
from minfer.effects.execution.packing.inputs import ForwardWords
from minfer.effects.execution.running.runner import MIN_CONTEXT_TOKENS, ModelRunner
from minfer.effects.execution.warming.dummy_runner import DummyRunner
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.dtypes import torch_dtype
from minfer.effects.models.layout.shapes import max_step_drafts, padded_drafts
from minfer.kernels import linear_tunes, lora_tunes, norm, pdl, rope
from minfer.kernels.gated_rule_tunes import MAX_RECURRENT_TOKENS
from minfer.records.config import EngineConfig
from minfer.records.plan import Copy

META_DEVICE: Final = torch.device("meta")
# Counts after which another kernel, or another variant of it, is used.
BOUNDS: Final = sorted(
    {choice.tokens for rows in linear_tunes.TABLE.values() for choice in rows}
    | lora_tunes.BOUNDS
    | {
        1,
        pdl.MAX_EARLY_ROWS,
        rope.MIN_SHARED_PROGRAM_TOKENS - 1,
        norm.MIN_SHARED_PROGRAM_ROWS - 1,
    }
)
MAX_TILE_ROWS: Final = 128  # (query, head) pairs of attention's largest tile
# Of chunks that go through recurrent layers token by token, and block by block.
CHUNK_LENGTHS: Final = (MAX_RECURRENT_TOKENS, MAX_RECURRENT_TOKENS + 1)
# Decode rows, and tokens of a prompt, of the largest steps.
USUAL_ROWS: Final = 64
USUAL_PROMPT_TOKENS: Final = 512
BEYOND_MAX_CHUNKS: Final = 33  # chunks: one more than a graph has


def launch_dummy_steps(dummy_runner: DummyRunner) -> None:
    """Launch all that Triton has to compile, also for a draft model; before any plan."""
    runner = dummy_runner.runner
    _launch_row_kernels(runner)
    spec, config, drafter = runner.cached_spec, runner.config, runner.drafter
    draft = None if drafter is None else drafter.spec
    with dummy_runner.few_layers():
        for shape in (*shapes(spec, config), *drafting(spec, config, draft)):
            dummy_runner.dummy_step(shape)
            if config.adapter_slots:
                dummy_runner.dummy_step(evolve(shape, adapters=True))
            prompts = ForwardWords.of(runner.staging, shape).prefill
            draft_model = runner.draft_model
            if draft_model is not None and prompts is not None and not shape.decode_rows:
                draft_model.absorb(shape, prompts)


def large_shapes(runner: ModelRunner) -> list[StepShape]:
    """Returns the shapes of the largest steps that have no graph, or that run kernels of
    other packages: of one prompt, and of several beside decode rows; each with and
    without history, if kernels differ by that.
    """
    uses_packages = runner.shortcuts.flash or runner.shortcuts.fused
    config, routes = runner.config, runner.backend.routes
    budget, rows = config.max_num_batched_tokens, min(config.max_num_seqs, USUAL_ROWS)
    chunks = min(config.max_num_seqs, max(1, budget // USUAL_PROMPT_TOKENS))
    prompt_shapes = [_prompts(budget, 1)]
    if chunks > 1 and budget > rows:
        several = _prompts(budget - rows, chunks)
        several = evolve(several, longest=-(-several.tokens // chunks))
        beside = evolve(several, decode_rows=rows, draws=rows + chunks)
        prompt_shapes.append(runner.with_splits(beside, MIN_CONTEXT_TOKENS))
    histories = [*_histories(routes)] or [None]
    return [
        evolve(shape, history=history)
        for shape in prompt_shapes
        if uses_packages or not runner.may_be_captured(shape)
        for history in reversed(histories)
    ]


def counts(max_count: int) -> list[int]:
    """Returns counts up to `max_count` that represent all of them: on both sides of each
    bound.
    """
    sides = {side for bound in BOUNDS for side in (bound, bound + 1)}
    return sorted({min(side, max_count) for side in sides} - {0})


def shapes(spec: ModelSpec, config: EngineConfig) -> list[StepShape]:
    """Returns step shapes that represent all, each once."""
    seqs, budget = config.max_num_seqs, config.max_num_batched_tokens
    routes = Routes.for_device(spec, config, META_DEVICE)
    inputs = [_prompts(tokens, 1) for tokens in counts(budget)]
    draws = [_prompts(min(budget, 2 * n), n) for n in counts(min(seqs, budget))]
    unsampled = evolve(_prompts(1, 1), draws=0)
    beside = [_prompt_beside(decode_rows, budget) for decode_rows in counts(seqs)]
    unpadded = [
        *_decoding(routes, config),
        *inputs,
        *draws,
        *_lengths(budget),
        *(evolve(_prompts(budget, 1), history=n) for n in _histories(routes)),
        unsampled,
        *beside,
        *(_chunks(seqs, budget) if spec.has_states else ()),
    ]
    padded = [shape.padded(seqs) for shape in unpadded if shape.fits(routes.captured)]
    return [*dict.fromkeys((*unpadded, *padded))]


def _histories(routes: Routes) -> range:
    """Returns the histories before expanded latents, or before chunks whose contexts are
    dequantized, that launch different kernels.
    """
    if routes.may_dequantize:
        return range(1)
    return range(2 if routes.may_expand else 0)


def _chunks(seqs: int, budget: int) -> Iterator[StepShape]:
    """Yields prefill chunks of all numbers and lengths that recurrent layers distinguish,
    among few inputs and many.
    """
    numbers = {min(1 << power, seqs) for power in range(seqs.bit_length() + 1)}
    for chunks, longest in product(sorted(numbers), CHUNK_LENGTHS):
        least = chunks + longest - 1
        for tokens in (least, max(least, pdl.MAX_EARLY_ROWS + 1)):
            if tokens <= budget:
                yield evolve(_prompts(tokens, chunks), longest=longest)


def _lengths(budget: int) -> Iterator[StepShape]:
    """Yields chunks of all lengths that attention distinguishes, among few inputs and
    many.
    """
    for longest in (1 << power for power in range(MAX_TILE_ROWS.bit_length())):
        for tokens in (
            longest,
            max(longest, BEYOND_MAX_CHUNKS),
            max(longest, pdl.MAX_EARLY_ROWS + 1),
        ):
            if tokens <= budget:
                yield evolve(_prompts(tokens, 1), longest=longest)


def _decoding(routes: Routes, config: EngineConfig) -> Iterator[StepShape]:
    """Yields pure decode steps whose attention kernels differ."""
    seen = set[object]()
    for decode_rows in range(1, bucket_of(config.max_num_seqs, DECODE_DIVISIONS) + 1):
        for splits in _split_choices(routes, config, decode_rows):
            if (variant := _kernel_key(routes, decode_rows, splits)) not in seen:
                seen.add(variant)
                yield StepShape(decode_rows=decode_rows, draws=decode_rows, splits=splits)


def drafting(
    spec: ModelSpec, config: EngineConfig, draft: ModelSpec | None
) -> Iterator[StepShape]:
    """Yields steps in which all decode rows have drafts, and whose kernels differ."""
    spec_config = config.speculation
    if spec_config is None:
        return
    room, longest = (
        max_step_drafts(config),
        bucket_of(config.max_num_seqs, DECODE_DIVISIONS),
    )
    sizes = {
        *counts(longest),
        *(bucket_of(n, DECODE_DIVISIONS) for n in range(1, longest + 1)),
    }
    draft_counts = sorted(
        {padded_drafts(n) for n in range(1, spec_config.drafts + 1)}
        | {spec_config.drafts}
    )
    routes = Routes.for_device(spec, config, META_DEVICE)
    drafts_by = None if draft is None else Routes.for_device(draft, config, META_DEVICE)
    seen = set[object]()
    for decode_rows, drafts in product(sorted(sizes), draft_counts):
        if decode_rows * drafts > room:
            continue
        shape = StepShape(
            decode_rows=decode_rows,
            draws=decode_rows,
            verified=decode_rows,
            drafts=drafts,
        )
        shape = evolve(shape, proposes=draft is not None)
        for splits in _split_choices(routes, config, decode_rows):
            for draft_splits in (
                _split_choices(drafts_by, config, decode_rows) if drafts_by else {()}
            ):
                variant = (
                    drafts,  # how many rows attention's programs have
                    sum(bound < shape.decode_inputs for bound in BOUNDS),
                    routes.variants(0, splits),
                    drafts_by and _kernel_key(drafts_by, decode_rows, draft_splits),
                    drafts_by and _kernel_key(drafts_by, 2 * decode_rows, draft_splits),
                )
                if variant not in seen:
                    seen.add(variant)
                    yield evolve(shape, splits=splits, draft_splits=draft_splits)


def _split_choices(
    routes: Routes, config: EngineConfig, rows: int
) -> set[tuple[int, ...]]:
    """Returns the splits of contexts of any length, for this number of rows."""
    longest = -(-routes.context // config.block_size) * config.block_size
    contexts = {
        min(MIN_CONTEXT_TOKENS << i, longest) for i in range(longest.bit_length())
    }
    return {routes.splits(rows, context) for context in contexts}


def _kernel_key(routes: Routes, rows: int, splits: tuple[int, ...]) -> object:
    """Returns a key of the attention kernels for this number of rows, and splits."""
    return sum(bound < rows for bound in BOUNDS), routes.variants(rows, splits)


def _prompts(tokens: int, chunks: int) -> StepShape:
    """Returns a step of prompts alone."""
    longest = tokens - chunks + 1
    return StepShape(
        decode_rows=0, draws=chunks, tokens=tokens, chunks=chunks, longest=longest
    )


def _prompt_beside(decode_rows: int, budget: int) -> StepShape:
    """Returns a step of a prompt beside decode rows."""
    tokens = max(1, min(64, budget - decode_rows))
    return evolve(_prompts(tokens, 1), decode_rows=decode_rows, draws=decode_rows + 1)


def _launch_row_kernels(runner: ModelRunner) -> None:
    """Launch what does not depend on a step's inputs: changes of rows, and all ways to
    sample.
    """
    for pairs in (1, pdl.MAX_EARLY_ROWS):
        runner.backend.scatter(runner.rows.arena, runner.staging[: 2 * pairs])
    if runner.config.state_pages:  # from and to pages that no row owns
        page = runner.config.num_blocks
        runner.cache.copy([Copy(page, page + 1, runner.config.block_size)])
    specs = [runner.spec, *([] if runner.drafter is None else [runner.drafter.spec])]
    dtypes = dict.fromkeys(torch_dtype(spec.dtype) for spec in specs)
    vocab, device = runner.spec.vocab_size, runner.backend.device
    columns = len(runner.spec.vocab_rows)  # this rank's
    for draws, dtype in product(counts(max_draws(runner.config.max_num_seqs)), dtypes):
        lines = torch.zeros(2, aligned(draws), dtype=torch.int32, device=device)
        rows, positions = lines[:, :draws]
        logits = torch.zeros(draws, vocab, dtype=dtype, device=device)
        logits_part = torch.zeros(draws, columns, dtype=dtype, device=device)
        runner.backend.keep(logits_part, rows, logits_part, runner.rows.scratch)
        runner.backend.hide(logits, rows, runner.sampler.masks.lines[:draws])
        for filtered, scored, shaped in product((False, True), repeat=3):
            needs = SamplingNeeds(filtered=filtered, scored=scored, shaped=shaped)
            runner.sampler.sample(logits_part, rows, positions, needs)
        # Stages before the last sample nothing, and take tokens.
        out, state = runner.sampler.out, runner.rows.state
        runner.backend.advance(rows, positions, positions, positions, state, out)
