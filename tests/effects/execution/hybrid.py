"""A tiny model with recurrent layers beside attention, as a function of a batch and a
cache: it has no types of layers, so that it tests what an executor keeps of rows.
"""

from functools import partial
from typing import Any

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from minfer.effects.execution.cpu.cpu_backend import CpuBackend
from minfer.effects.models.architecture.batch import Batch, BatchRow, make_batch
from minfer.effects.models.architecture.model_step import ModelStep
from minfer.effects.models.architecture.product_context import ProductContext
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.architecture.state_parts import StatePart
from minfer.effects.models.layout.cache_layout import plain_layout
from minfer.effects.models.ranks import SINGLE_RANK
from minfer.kernels.gated_rule import gated_rule
from minfer.kernels.rule_arguments import DecayGates
from minfer.kernels.short_conv import short_conv
from minfer.kernels.state_work import StateWork
from tests.effects.execution.tiny_engine import VOCAB
from tests.effects.stateful import with_parts
from tests.effects.tiny_model import CONFIG

HIDDEN, HEADS, KEY, VALUE, WIDTH = 32, 2, 4, 6, 3
SIZES = [KEY, KEY, HEADS * VALUE]
STATE = StatePart("heads", HEADS, (KEY, VALUE), "state")
INPUTS = StatePart("inputs", sum(SIZES) // 4, (WIDTH - 1, 4), "activations")
RECURRENT = (STATE, INPUTS)
TEST_BLOCK = 8


def spec_of(**changes: Any) -> ModelSpec:
    """Layers with attention, two of which are recurrent, too."""
    spec = evolve(parse_spec({**CONFIG, "vocab_size": VOCAB}), **changes)
    return with_parts(spec, (), RECURRENT, RECURRENT)


@frozen(eq=False)
class Hybrid:
    """The model: random weights."""

    spec: ModelSpec
    embed: Tensor = field(init=False)
    head: Tensor = field(init=False)
    attention: list[tuple[Tensor, Tensor]] = field(init=False)
    recurrent: list[dict[str, Tensor]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        draw = torch.Generator().manual_seed(3)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw).div_(shape[-1] ** 0.5)

        layers = range(len(self.spec.layers))
        parts = {
            "embed": 4 * randn(VOCAB, HIDDEN),
            "head": 4 * randn(VOCAB, HIDDEN),
            "attention": [(2 * randn(64, HIDDEN), randn(HIDDEN, 32)) for _ in layers],
            "recurrent": [
                {
                    "into": 2 * randn(sum(SIZES), HIDDEN),
                    "conv": randn(sum(SIZES), WIDTH),
                    "decay": randn(HEADS, HIDDEN),
                    "beta": randn(HEADS, HIDDEN),
                    "out": 3 * randn(HIDDEN, HEADS * VALUE),
                }
                for _ in layers
            ],
        }
        for name, value in parts.items():
            object.__setattr__(self, name, value)

    def __call__(self, batch: Batch, cache: Any) -> Tensor:
        """Returns logits [sampled, vocab]."""
        hidden = self.embed[batch.tokens.long()]
        for index, layer in enumerate(self.spec.layers):
            into, out = self.attention[index]
            hidden = hidden + cache.attend(batch, index, hidden @ into.T) @ out.T
            if layer.state_parts:
                hidden = hidden + self._recur(batch, cache, index, hidden)
        sampled = hidden if batch.sample is None else hidden[batch.sample.long()]
        return sampled @ self.head.T

    def _recur(self, batch: Batch, cache: Any, index: int, hidden: Tensor) -> Tensor:
        weights = self.recurrent[index]
        step = ModelStep(batch, cache, SINGLE_RANK, ProductContext(on_gpu=False))
        inputs = [hidden @ weights[name].T for name in ("into", "decay", "beta")]
        o = step.update_states(index, partial(self._update_states, weights), *inputs)
        return o.flatten(1) @ weights["out"].T

    @staticmethod
    def _update_states(
        weights: dict[str, Tensor],
        state: Any,
        work: StateWork,
        x: Tensor,
        raw: Tensor,
        beta: Tensor,
    ) -> Tensor:
        x = short_conv(x, weights["conv"], None, "silu", state.part("inputs"), work)
        query, key, value = x.split_with_sizes(SIZES, 1)
        return gated_rule(
            query[:, None],
            key[:, None],
            value.view(len(value), HEADS, VALUE),
            DecayGates(raw, torch.zeros(HEADS), torch.full((HEADS,), 0.2)),
            beta,
            state.part("heads"),
            work,
            l2_eps=1e-6,
        )

    def tokens(self, prompt: tuple[int, ...], count: int) -> list[int]:
        """Greedy tokens, each computed from all tokens before it at once."""
        known = list(prompt)
        layout = plain_layout(self.spec, TEST_BLOCK)
        for _ in range(count):
            blocks = -(-len(known) // TEST_BLOCK)
            state = range(blocks, blocks + layout.state_pages)
            cache = CpuBackend().make_cache(
                self.spec, state.stop, TEST_BLOCK, 1000, layout
            )
            row = BatchRow(known, 0, range(blocks), 1, state)
            logits = self(make_batch([row], TEST_BLOCK), cache)
            known.append(int(logits[0].argmax()))
        return known[len(prompt) :]
