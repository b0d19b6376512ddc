"""Products of experts in plain torch against a loop over tokens and their experts."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minfer.kernels import plain, plain_experts
from minfer.kernels.leaves import (
    Activation,
    ChosenExperts,
    ExpertRouter,
    Experts,
    Linear,
    RoutingRule,
)
from minfer.kernels.plain import gated_mul

EXPERTS, TOP_K, HIDDEN, INTER = 6, 3, 16, 8


def experts_of(
    dtype: torch.dtype = torch.float32,
    *,
    bias: bool = False,
    activation: Activation = "silu",
    by_column: bool = False,
    weighs_inputs: bool = False,
) -> Experts:
    draw = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    down = randn(EXPERTS, HIDDEN, INTER)
    return Experts(
        gate_up=Linear(
            weight=randn(EXPERTS, 2 * INTER, HIDDEN),
            bias=randn(EXPERTS, 2 * INTER) if bias else None,
            parts=(INTER, INTER),
        ),
        down=Linear(
            weight=down.mT.contiguous().mT if by_column else down,
            bias=randn(EXPERTS, HIDDEN) if bias else None,
            parts=(HIDDEN,),
        ),
        activation=activation,
        weighs_inputs=weighs_inputs,
    )


def choice_of(tokens: int) -> ChosenExperts:
    draw = torch.Generator().manual_seed(tokens)
    weights, ids = torch.rand(tokens, EXPERTS, generator=draw).topk(TOP_K)
    return ChosenExperts(ids.int(), weights)


def one_by_one(x: Tensor, experts: Experts, choice: ChosenExperts) -> Tensor:
    """The sum of each token's experts, in float32."""
    total = torch.zeros(x.shape, dtype=torch.float32)
    for token, expert in choice.ids.ge(0).nonzero().tolist():
        index, weight = int(choice.ids[token, expert]), choice.weights[token, expert]
        first, second = (leaf.select(index) for leaf in (experts.gate_up, experts.down))
        line = x[token : token + 1]
        if experts.weighs_inputs:
            line, weight = line * weight, torch.ones(())
        inner = F.linear(line, first.weight, first.bias)
        inner = gated_mul(inner, experts.activation)
        total[token] += weight * F.linear(inner, second.weight, second.bias)[0].float()
    return total


@pytest.mark.parametrize("tokens", [1, 4, 33])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float32, {"by_column": True}),
        (torch.float32, {"bias": True, "activation": "clamped"}),
        (torch.float32, {"bias": True, "weighs_inputs": True}),
        (torch.bfloat16, {"bias": True, "activation": "gelu_tanh"}),
    ],
    ids=str,
)
def test_the_sum(tokens: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    experts, choice = experts_of(dtype, **options), choice_of(tokens)
    x, residual = torch.randn(tokens, HIDDEN).to(dtype), torch.randn(tokens, HIDDEN)
    residual = residual.to(dtype)
    expected = residual.float() + one_by_one(x, experts, choice)
    plain_experts.add_experts(residual, x, experts, choice)
    limit = 1e-6 if dtype is torch.float32 else 1e-2
    assert (residual.float() - expected).norm() < limit * expected.norm()


@pytest.mark.parametrize("padding", [[], [1], [0, 3], [0, 1, 2, 3]], ids=str)
def test_padding_hits_no_expert(
    padding: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of all products, and the experts that are read, are the real tokens'."""
    torch.manual_seed(0)  # some draws differ by more than rounding allows
    real = torch.ones(4, dtype=torch.bool)
    real[[*padding]] = False
    x, experts = torch.randn(4, HIDDEN), experts_of()
    x[~real] = torch.nan
    router = ExpertRouter(weight=torch.randn(EXPERTS, HIDDEN), rule=RoutingRule(TOP_K))
    choice = plain_experts.route(x, router, real)
    read, rows = set[int](), list[int]()
    linear = plain.linear

    def counted(x: Tensor, leaf: Linear) -> Tensor:
        rows.append(len(x))
        if len(leaf.weight) == HIDDEN:
            read.add(leaf.weight.storage_offset() // leaf.weight.numel())
        return linear(x, leaf)

    monkeypatch.setattr(plain, "linear", counted)
    residual = torch.zeros(4, HIDDEN)
    plain_experts.add_experts(residual, x, experts, choice)
    monkeypatch.undo()
    assert sum(rows) == 2 * TOP_K * int(real.sum())
    assert read == {*choice.ids[real].flatten().tolist()}
    assert residual[~real].eq(0).all()
    real_choice = ChosenExperts(choice.ids[real], choice.weights[real])
    torch.testing.assert_close(residual[real], one_by_one(x[real], experts, real_choice))
