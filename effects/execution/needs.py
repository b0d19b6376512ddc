"""Every kernel that traffic can need of a model in an engine of some sizes, as data.

Theory. A step's launches follow from its `Kind` and the model's sizes. So the steps
themselves say what they need: a runner whose weights, cache and rows are nowhere (torch's
meta device) makes one step of each kind that differs, and what it launches is noted
(`minfer.kernels.specialization`). Kinds are many, but what is compiled differs in a few
counts only, each of which matters by itself: rows that feed themselves, all inputs, the
inputs of the longest chunk, draws. Between two of the kernels' `BOUNDS` a count makes no
difference, so one beside each bound stands for all; and where a kind is padded to a
graph's, its sizes are among these.

Layers that are alike launch alike: each that differs is here once, and the last once
more, as it alone leaves out what nobody asked for.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any, Final

import torch
import torch.nn.functional as F
from attrs import evolve
from torch import Tensor
from torch.overrides import TorchFunctionMode

from minfer.config import EngineConfig
from minfer.effects.execution.backend import Cache
from minfer.effects.execution.cuda_backend import CudaBackend
from minfer.effects.execution.device_rows import Wants, aligned
from minfer.effects.execution.draft_model import DraftOf
from minfer.effects.execution.inputs import Inputs
from minfer.effects.execution.kinds import DECODE, Kind, bucket_of, most_draws
from minfer.effects.execution.routes import Routes
from minfer.effects.execution.runner import CONTEXT, ModelRunner
from minfer.effects.models.batch import Batch
from minfer.effects.models.dtypes import torch_dtype
from minfer.effects.models.model import Model
from minfer.effects.models.shapes import captured_tokens, drafts_from, most_drafts
from minfer.effects.models.spec import ModelSpec
from minfer.effects.models.weights import Weights, empty_weights
from minfer.kernels import linear_tunes, norm, pdl, rope
from minfer.kernels.attention_tunes import Kind as Heads
from minfer.kernels.attention_tunes import decode_tune, known_dim
from minfer.kernels.specialization import Specialization, recorded
from minfer.kernels.target import Capability

NOWHERE: Final = torch.device("meta")
# Counts up to which a kernel is one, and beyond which another.
BOUNDS: Final = sorted(
    {choice.tokens for rows in linear_tunes.TABLE.values() for choice in rows}
    | {1, pdl.MOST, rope.MANY - 1, norm.MANY - 1}
)
ROWS: Final = 128  # (query, head) pairs of attention's largest tile
FEW: Final = 33  # chunks: one more than a graph has


def needed(
    spec: ModelSpec,
    config: EngineConfig,
    capability: Capability,
    draft: ModelSpec | None = None,
) -> list[Specialization]:
    """All that Triton is to compile for a GPU of this compute capability, which need not
    be there; for a draft model, too.
    """
    with recorded(capability) as found, torch.inference_mode(), Shapes():
        runner = nowhere(spec, config, draft)
        _besides(runner)
        for kind in (*kinds(spec, config), *drafting(spec, config, draft)):
            runner.step_of_nobody(kind)
            prompts = Inputs.of(runner.staging, kind).history
            if runner.draft is not None and prompts is not None and not kind.alone:
                runner.draft.absorb(kind, prompts)
    return found


class Shapes(TorchFunctionMode):
    """What torch takes a thousand times as long for, to find out what shape something has
    that is nowhere: it imports its compiler for that.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear:
            x, weight = args[:2]
            return x.new_empty(x.shape[0], weight.shape[0])
        if func is F.embedding:
            ids, weight = args[:2]
            return weight.new_empty(*ids.shape, weight.shape[1])
        if func is Tensor.addmm_:
            return args[0]
        if func is torch.empty_like:
            return args[0].new_empty(args[0].shape)
        return func(*args, **(kwargs or {}))


def nowhere(
    spec: ModelSpec, config: EngineConfig, draft: ModelSpec | None = None
) -> ModelRunner:
    """A runner of the models' layers that differ, on no device."""
    captured = captured_tokens(spec, config.max_num_batched_tokens)
    why = "it is not Triton's"
    routes = Routes(captured=captured, no_flash=why, no_quack=why)
    few, model = _few_layers(spec)
    drafts = None if draft is None else DraftOf(*_few_layers(draft))
    backend = CudaBackend(NOWHERE, routes)
    return ModelRunner(backend, few, model, config, draft=drafts)


def _few_layers(spec: ModelSpec) -> tuple[ModelSpec, Weights | Model]:
    """A model of those layers that differ, and its weights."""
    layers = (*dict.fromkeys(spec.layers), spec.layers[-1])
    few = evolve(spec, layers=layers)
    if spec.parameters:
        return few, _attention_of(few)
    return few, empty_weights(few, spec.dtype, "meta")


def _attention_of(spec: ModelSpec) -> Model:
    """What transformers' own models launch of these kernels: attention."""

    def model(batch: Batch, cache: Cache) -> Tensor:
        tokens = len(batch.tokens)
        dtype = torch_dtype(spec.dtype)
        for index, layer in enumerate(spec.layers):
            width = layer.attention.q_size + 2 * layer.attention.kv_size
            qkv = torch.empty(tokens, width, dtype=dtype, device=NOWHERE)
            cache.attend(batch, index, qkv)
        rows = tokens if batch.sample is None else len(batch.sample)
        return torch.empty(rows, spec.vocab_size, dtype=dtype, device=NOWHERE)

    return model


def counts(most: int) -> list[int]:
    """Counts up to `most` that stand for all: on both sides of each bound."""
    sides = {side for bound in BOUNDS for side in (bound, bound + 1)}
    return sorted({min(side, most) for side in sides} - {0})


def kinds(spec: ModelSpec, config: EngineConfig) -> list[Kind]:
    """Kinds of steps that stand for all, each once."""
    seqs, budget = config.max_num_seqs, config.max_num_batched_tokens
    inputs = [_prompts(tokens, 1) for tokens in counts(budget)]
    draws = [_prompts(min(budget, 2 * n), n) for n in counts(min(seqs, budget))]
    nobody = evolve(_prompts(1, 1), draws=0)
    beside = [_beside(alone, budget) for alone in counts(seqs)]
    made = [*_decoding(spec, config), *inputs, *draws, *_lengths(budget), nobody, *beside]
    captured = captured_tokens(spec, budget)
    padded = [one.padded() for one in made if one.fits(captured)]
    return [*dict.fromkeys((*made, *padded))]


def _lengths(budget: int) -> Iterator[Kind]:
    """Chunks of all lengths that attention tells apart, among few inputs and many."""
    for longest in (1 << power for power in range(ROWS.bit_length())):
        for tokens in (longest, max(longest, FEW), max(longest, pdl.MOST + 1)):
            if tokens <= budget:
                yield evolve(_prompts(tokens, 1), longest=longest)


def _decoding(spec: ModelSpec, config: EngineConfig) -> Iterator[Kind]:
    """Steps of rows that feed themselves: those whose attention differs."""
    seen = set[object]()
    for alone in range(1, bucket_of(config.max_num_seqs, DECODE) + 1):
        for splits in _cuts(spec, config, alone):
            if (variant := _tuned(spec, alone, splits)) not in seen:
                seen.add(variant)
                yield Kind(alone=alone, draws=alone, splits=splits)


def drafting(
    spec: ModelSpec, config: EngineConfig, draft: ModelSpec | None
) -> Iterator[Kind]:
    """Steps in which all rows that feed themselves have drafts: those that differ."""
    how = config.speculation
    if how is None:
        return
    room, longest = most_drafts(config), bucket_of(config.max_num_seqs, DECODE)
    sizes = {*counts(longest), *(bucket_of(n, DECODE) for n in range(1, longest + 1))}
    most = sorted({drafts_from(n) for n in range(1, how.drafts + 1)} | {how.drafts})
    seen = set[object]()
    for alone, drafts in product(sorted(sizes), most):
        if alone * drafts > room:
            continue
        kind = Kind(alone=alone, draws=alone, verified=alone, drafts=drafts)
        kind = evolve(kind, proposes=draft is not None)
        for splits in _cuts(spec, config, alone):
            for others in _cuts(draft, config, alone) if draft is not None else {1}:
                variant = (
                    drafts,  # how many rows attention's programs have
                    sum(bound < kind.fed for bound in BOUNDS),
                    splits > 1,
                    draft and _tuned(draft, alone, others),
                    draft and _tuned(draft, 2 * alone, others),
                )
                if variant not in seen:
                    seen.add(variant)
                    yield evolve(kind, splits=splits, draft_splits=others)


def _cuts(spec: ModelSpec, config: EngineConfig, rows: int) -> set[int]:
    """Ranges that contexts of so many rows are cut into, of any length."""
    length = min(config.max_model_len, spec.max_position_embeddings)
    longest = -(-length // config.block_size) * config.block_size
    contexts = {min(CONTEXT << i, longest) for i in range(longest.bit_length())}
    splits_of = CudaBackend(NOWHERE, Routes()).num_splits
    return {splits_of(rows, spec, context) for context in contexts}


def _tuned(spec: ModelSpec, rows: int, splits: int) -> object:
    """What tells kernels apart of so many rows that are cut so."""
    element = torch_dtype(spec.kv_dtype).itemsize
    heads = Heads(element, known_dim(spec.head_dim))
    tune = decode_tune(heads, rows * spec.kv_heads, splits)
    return sum(bound < rows for bound in BOUNDS), tune, splits > 1


def _prompts(tokens: int, chunks: int) -> Kind:
    """A step of prompts alone."""
    longest = tokens - chunks + 1
    return Kind(alone=0, draws=chunks, tokens=tokens, chunks=chunks, longest=longest)


def _beside(alone: int, budget: int) -> Kind:
    """A prompt beside rows that feed themselves."""
    tokens = max(1, min(64, budget - alone))
    return evolve(_prompts(tokens, 1), alone=alone, draws=alone + 1)


def _besides(runner: ModelRunner) -> None:
    """What does not depend on a step's inputs: changes of rows, and every way to draw."""
    for pairs in (1, pdl.MOST):
        runner.backend.scatter(runner.rows.arena, runner.staging[: 2 * pairs])
    specs = [runner.spec, *([] if runner.draft is None else [runner.draft.spec])]
    dtypes = dict.fromkeys(torch_dtype(spec.dtype) for spec in specs)
    vocab = runner.spec.vocab_size
    for draws, dtype in product(counts(most_draws(runner.config.max_num_seqs)), dtypes):
        who, positions = runner.staging[: 2 * aligned(draws)].view(2, -1)[:, :draws]
        logits = torch.empty((draws, vocab), dtype=dtype, device=NOWHERE)
        runner.backend.keep(logits, who, logits, runner.rows.scratch)
        runner.backend.hide(logits, who, runner.sampler.masks.lines[:draws])
        for filtered, scored, shaped in product((False, True), repeat=3):
            wants = Wants(filtered=filtered, scored=scored, shaped=shaped)
            runner.sampler.sample(logits, who, positions, wants)
