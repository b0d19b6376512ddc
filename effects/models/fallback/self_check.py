"""Checks a paged model of transformers against itself: its logits with its own attention.

Random tokens are run in packed chunks through scattered blocks, and whole through the
model's own eager attention. A wrong mask, position or scale causes errors of tenths of
the logits' spread; in float32 the order of summation causes 1e-5, and more in deep
models.

Sequences are longer than every window: a config's `sliding_window` is set to a few tokens
for the time of the check, on both sides, as one of thousands would take minutes. Windows
that do not follow from it are checked as they are.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from attrs import evolve, frozen
from torch import Tensor

from minfer.effects.models.architecture.batch import BatchRow, make_batch
from minfer.effects.models.architecture.cache import PagedCache
from minfer.effects.models.architecture.layers import Layer
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.fallback.paged import PAGED, paged_model
from minfer.effects.models.fallback.quantized import QuantizedLinear, without_rounding

# From a spec, a number of blocks and their size to the CPU's cache.
CacheMaker = Callable[[ModelSpec, int, int], PagedCache]

# The largest error of checked logits, as a share of their spread.
TOLERANCE: Final = 1e-3
BLOCK_SIZE: Final = 4
MIN_LENGTH: Final = 11  # tokens of each of two sequences, at least
CHECK_WINDOW: Final = 4  # for the time of the check
TOKENS_BEYOND_WINDOW: Final = 7  # tokens behind a window
TOKEN_STRIDE: Final = 7919  # spreads token ids over the vocabulary


@frozen
class CheckSizes:
    """How many tokens the two sequences have, and where their blocks are."""

    length: int

    @property
    def blocks(self) -> int:
        """Blocks of both sequences; the rows' tables take turns."""
        return 2 * -(-self.length // BLOCK_SIZE)

    @property
    def tables(self) -> tuple[list[int], list[int]]:
        """Each sequence's blocks: scattered, not in order."""
        return [*range(self.blocks - 1, -1, -2)], [*range(0, self.blocks, 2)]

    @property
    def steps(self) -> tuple[tuple[tuple[int, int], tuple[int, int]], ...]:
        """Of each step and sequence, the first token and the end."""
        end = self.length
        return (
            ((0, 5), (0, 1)),
            ((5, 6), (1, end - 1)),
            ((6, end), (end - 1, end)),
        )


def self_check(spec: ModelSpec, model: Any, make_cache: CacheMaker) -> float:
    """Returns the largest error of paged logits compared with the model's own eager ones,
    relative to their spread.
    """
    with _narrow(spec, model.config) as spec:
        return _largest_error(spec, model, make_cache)


@contextlib.contextmanager
def _narrow(spec: ModelSpec, config: Any) -> Iterator[ModelSpec]:
    """Have the windows of a model be few tokens, where its config's `sliding_window` says
    them; yields the spec of that.
    """
    windows = {window for window in spec.windows if window is not None}
    stated = getattr(config, "sliding_window", None)
    if not isinstance(stated, int) or windows != {stated} or stated <= CHECK_WINDOW:
        yield spec
        return
    config.sliding_window = CHECK_WINDOW
    try:
        yield evolve(spec, layers=tuple(map(_narrowed, spec.layers)))
    finally:
        config.sliding_window = stated


def _narrowed(layer: Layer) -> Layer:
    """Returns the layer with a short window, if it has one."""
    attention = layer.attention
    if attention is None or attention.window is None:
        return layer
    return evolve(layer, attention=evolve(attention, window=CHECK_WINDOW))


def _largest_error(spec: ModelSpec, model: Any, make_cache: CacheMaker) -> float:
    windows = [window for window in spec.windows if window is not None]
    sizes = CheckSizes(
        max([MIN_LENGTH, *(window + TOKENS_BEYOND_WINDOW for window in windows)])
    )
    ids = torch.arange(2 * sizes.length) * TOKEN_STRIDE % spec.vocab_size
    ids = ids.view(2, sizes.length)
    step, cache = paged_model(model), make_cache(spec, sizes.blocks, BLOCK_SIZE)
    errors = []
    with torch.inference_mode(), in_float32(model):
        model.set_attn_implementation("eager")
        own_logits = model(input_ids=ids, use_cache=False).logits
        model.set_attn_implementation(PAGED)
        for spans in sizes.steps:
            rows = [
                BatchRow(ids[i, start:stop].numpy(), start, sizes.tables[i], stop - start)
                for i, (start, stop) in enumerate(spans)
            ]
            expected = torch.cat(
                [own_logits[i, start:stop] for i, (start, stop) in enumerate(spans)]
            )
            difference = step(make_batch(rows, BLOCK_SIZE), cache) - expected
            errors.append(difference.square().mean(-1).sqrt().max())
    return float(torch.stack(errors).max() / own_logits.std())


@contextlib.contextmanager
def in_float32(model: Any) -> Iterator[None]:
    """Run every module on float32 copies of its own parameters, which live as long as it
    runs, and products with quantized matrices on activations that are not rounded.

    In half precision, rounding may send a token to another expert, which hides real
    errors.
    """
    own_data: dict[Any, Tensor] = {}

    def widen(module: Any, *_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            own_data[parameter], parameter.data = parameter.data, parameter.data.float()

    def restore(module: Any, *_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data = own_data.pop(parameter)

    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, QuantizedLinear):
                stack.callback(setattr, module, "leaf", module.leaf)
                module.leaf = without_rounding(module.leaf)
            stack.callback(module.register_forward_pre_hook(widen).remove)
            stack.callback(module.register_forward_hook(restore, always_call=True).remove)
        yield
