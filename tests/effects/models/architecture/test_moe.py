"""A shared expert that is as wide as the others: one more of them, or a dense one."""

from typing import Any, cast

import pytest
import torch
from attrs import evolve
from torch import Tensor

from minfer.effects.models.architecture import moe_step
from minfer.effects.models.architecture.linear import WeightMaker
from minfer.effects.models.architecture.model_step import ModelStep
from minfer.effects.models.architecture.moe import MoE
from minfer.effects.models.architecture.moe_step import feed_moe
from minfer.effects.models.architecture.moe_weights import MoEWeights, empty_moe
from minfer.effects.models.architecture.product_context import ProductContext
from minfer.effects.models.architecture.quantization import Quantization
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.checkpoint.random_weights import random_weights
from minfer.effects.models.formats.on_load import OnLoad
from minfer.effects.models.ranks import SINGLE_RANK, Parallel, RankInfo
from minfer.kernels.leaves import INT8
from tests.effects.tiny_families import VARIANTS, written

MAKE = WeightMaker("float32", "cpu")
# With a gate; without one, its weight is 1 whatever the others are scaled by; and weights
# of inputs.
KEYS = [("Qwen3Next", "one key head"), ("KimiLinear", "groups"), ("Llama4", "chunks")]
every_kind = pytest.mark.parametrize("key", KEYS, ids=" ".join)


def layer(key: tuple[str, str]) -> tuple[MoE, MoEWeights]:
    """A layer with experts, of random weights."""
    spec = parse_spec(written(key[0], VARIANTS[key]))
    weights = random_weights(spec, "float32", device="cpu")
    return next(
        (sizes.feed_forward, layer.feed_forward)
        for sizes, layer in zip(spec.layers, weights.layers, strict=True)
        if isinstance(sizes.feed_forward, MoE)
        and isinstance(layer.feed_forward, MoEWeights)
    )


def fed(sizes: MoE, weights: MoEWeights, tokens: int) -> Tensor:
    products, nothing = ProductContext(on_gpu=False), cast(Any, None)
    draw = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, sizes.hidden_size, generator=draw)
    feed_moe(sizes, weights, hidden, ModelStep(nothing, nothing, SINGLE_RANK, products))
    return hidden


@every_kind
def test_it_shares_the_memory_of_the_others(key: tuple[str, str]) -> None:
    _, weights = layer(key)
    one_more, shared = weights.with_shared, weights.shared
    assert one_more is not None
    assert shared is not None
    for whole, routed, last in (
        (one_more.experts.gate_up, weights.experts.gate_up, shared.gate_up),
        (one_more.experts.down, weights.experts.down, shared.down),
    ):
        assert whole.weight.data_ptr() == routed.weight.data_ptr()
        assert whole.weight[-1].data_ptr() == last.weight.data_ptr()
        assert len(whole.weight) == len(routed.weight) + 1
        assert whole.parts == routed.parts == last.parts
    assert one_more.router.weight is weights.router.weight


@every_kind
def test_few_tokens_get_what_a_dense_feed_forward_adds(
    key: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, weights = layer(key)
    dense: list[int] = []
    add_shared = moe_step._add_shared

    def counted(*args: Any) -> None:
        dense.append(len(args[3]))
        add_shared(*args)

    monkeypatch.setattr(moe_step, "_add_shared", counted)
    monkeypatch.setattr(moe_step, "MAX_TOKENS_WITH_SHARED", 5)
    few, many = fed(sizes, weights, 5), fed(sizes, weights, 6)
    assert dense == [6]
    without = evolve(weights, with_shared=None)
    for made, tokens in ((few, 5), (many, 6)):
        torch.testing.assert_close(made, fed(sizes, without, tokens))


def test_it_is_a_dense_feed_forward_where_it_cannot_be_one_more() -> None:
    sizes, _ = layer(KEYS[0])
    assert empty_moe(sizes, MAKE).with_shared is not None
    assert sizes.shared is not None
    wider = evolve(sizes, shared=evolve(sizes.shared, intermediate_size=48))
    assert empty_moe(wider, MAKE).with_shared is None
    # The others get what a product makes of the residual stream, even if as wide.
    latent = evolve(sizes, latent_size=sizes.hidden_size)
    assert not latent.has_equal_shared
    by_expert = RankInfo(1, Parallel(tensor=2, by_expert=True))
    assert empty_moe(sizes.for_rank(by_expert), MAKE).with_shared is None
    by_channel = RankInfo(1, Parallel(tensor=2))
    assert empty_moe(sizes.for_rank(by_channel), MAKE).with_shared is not None
    # What the CPU packs is no part of another matrix.
    quantized = evolve(MAKE, quantization=Quantization(OnLoad(INT8)))
    assert empty_moe(sizes, quantized).with_shared is None
