"""Checks a paged model of transformers against itself: its logits with its own attention.

Random tokens are run in packed chunks through scattered blocks, and whole through the
model's own eager attention. A wrong mask, position or scale causes errors of tenths of
the logits' spread; in float32 the order of summation causes 1e-5, and more in deep
models.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

from minfer.effects.models.batch import BatchRow, make_batch
from minfer.effects.models.cache import PagedCache
from minfer.effects.models.fallback.paged import PAGED, paged_model
from minfer.effects.models.spec import ModelSpec

# From a spec, a number of blocks and their size to the CPU's cache.
CacheMaker = Callable[[ModelSpec, int, int], PagedCache]

# The largest error of checked logits, as a share of their spread.
TOLERANCE: Final = 1e-3
BLOCK_SIZE: Final = 4
BLOCKS: Final = 8
LENGTH: Final = 11  # tokens of each of two sequences
TABLES: Final = ([5, 1, 3], [0, 6, 2])
# Steps: of each sequence, the first token and the end.
STEPS: Final = (((0, 5), (0, 1)), ((5, 6), (1, 10)), ((6, 11), (10, 11)))
PRIME: Final = 7919  # spreads token ids over the vocabulary


def self_check(spec: ModelSpec, model: Any, make_cache: CacheMaker) -> float:
    """Returns the largest error of paged logits compared with the model's own eager ones,
    relative to their spread.
    """
    ids = (torch.arange(2 * LENGTH) * PRIME % spec.vocab_size).view(2, LENGTH)
    step, cache = paged_model(model), make_cache(spec, BLOCKS, BLOCK_SIZE)
    errors = []
    with torch.inference_mode(), in_float32(model):
        model.set_attn_implementation("eager")
        own = model(input_ids=ids, use_cache=False).logits
        model.set_attn_implementation(PAGED)
        for cuts in STEPS:
            rows = [
                BatchRow(ids[i, a:b].numpy(), a, TABLES[i], b - a)
                for i, (a, b) in enumerate(cuts)
            ]
            right = torch.cat([own[i, a:b] for i, (a, b) in enumerate(cuts)])
            gap = step(make_batch(rows, BLOCK_SIZE), cache) - right
            errors.append(gap.square().mean(-1).sqrt().max())
    return float(torch.stack(errors).max() / own.std())


@contextlib.contextmanager
def in_float32(model: Any) -> Iterator[None]:
    """Run every module on float32 copies of its own parameters, which live as long as it
    runs.

    In half precision, rounding may send a token to another expert, which hides real
    errors.
    """
    kept: dict[Any, Tensor] = {}

    def widen(module: Any, *_: Any) -> None:
        for one in module.parameters(recurse=False):
            kept[one], one.data = one.data, one.data.float()

    def restore(module: Any, *_: Any) -> None:
        for one in module.parameters(recurse=False):
            one.data = kept.pop(one)

    with contextlib.ExitStack() as stack:
        for module in model.modules():
            stack.callback(module.register_forward_pre_hook(widen).remove)
            stack.callback(module.register_forward_hook(restore, always_call=True).remove)
        yield
