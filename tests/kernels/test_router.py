"""The kernel's choice of experts is the reference's."""

from typing import Literal

import pytest
import torch
from attrs import evolve
from torch import Tensor

from minfer.kernels import plain_experts
from minfer.kernels.leaves import ChosenExperts, ExpertRouter, RoutingRule
from minfer.kernels.router import route
from tests.circles import long

from .conftest import CUDA

DEVICE = "cuda" if CUDA else "cpu"
DEEPSEEK_V3 = RoutingRule(
    8, "sigmoid", scaling=2.5, groups=8, kept_groups=4, ranked_by="best_two"
)
# A rule, experts, and whether there is a correction.
CASES = [
    (RoutingRule(1), 4, False),
    (RoutingRule(2), 8, False),  # Mixtral
    (RoutingRule(8), 128, False),  # Qwen3
    (RoutingRule(4, normalise=False), 60, True),  # Qwen2's shape
    (RoutingRule(3, "sigmoid", scaling=1.5), 13, True),
    (RoutingRule(2, min_sum=0.4), 12, True),  # Ernie's shape
    (RoutingRule(4, "sigmoid", added=0.2), 32, True),  # LFM2's
    (RoutingRule(3, "sigmoid", logit_cap=1.5), 12, True),  # Laguna's
    (RoutingRule(5, "sigmoid", normalise=False), 5, False),
    (RoutingRule(1, "sigmoid", by_logits=True, normalise=False), 16, False),  # Llama 4
    (RoutingRule(6, normalise=False, scaling=16, groups=8, kept_groups=3), 160, False),
    (RoutingRule(3, groups=5, kept_groups=2, ranked_by="best_two"), 35, True),
    *long(
        [
            (DEEPSEEK_V3, 256, True),
            (RoutingRule(8, "sigmoid", scaling=2.827), 384, True),  # Kimi K2
            (RoutingRule(16), 512, False),
            (RoutingRule(2, groups=3, kept_groups=3), 12, True),  # all groups are kept
        ]
    ),
]
cases = pytest.mark.parametrize(("rule", "experts", "corrected"), CASES, ids=str)
pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    # exp in sigmoid, and NaN as input
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered"),
    pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation"),
]


def router(
    rule: RoutingRule,
    experts: int,
    hidden: int = 16,
    corrected: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = DEVICE,
) -> ExpertRouter:
    draw = torch.Generator().manual_seed(experts)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(device)

    return ExpertRouter(
        weight=randn(experts, hidden).to(dtype),
        bias=randn(experts).to(dtype) if experts % 2 else None,
        correction=randn(experts) / 4 if corrected else None,
        rule=rule,
    )


def tokens(count: int, hidden: int = 16, dtype: torch.dtype = torch.float32) -> Tensor:
    draw = torch.Generator().manual_seed(count)
    return torch.randn(count, hidden, generator=draw).to(DEVICE, dtype)


def same(choice: ChosenExperts, expected: ChosenExperts) -> None:
    assert choice.ids.dtype == torch.int32
    assert choice.weights.dtype == torch.float32
    assert torch.equal(choice.ids, expected.ids)
    torch.testing.assert_close(choice.weights, expected.weights, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("on_device", [True, False])
def test_logits_choose_where_scores_are_equal(on_device: bool) -> None:
    """float32 rounds the sigmoid of each to 1."""
    rule = RoutingRule(2, "sigmoid", by_logits=True, normalise=False)
    weight = torch.tensor([[30.0], [20.0], [40.0], [0.0]], device=DEVICE)
    chooser = ExpertRouter(weight=weight, rule=rule)
    x = torch.ones(1, 1, device=DEVICE)
    choice = (route if on_device else plain_experts.route)(x, chooser)
    assert choice.ids.tolist() == [[2, 0]]
    assert choice.weights.tolist() == [[1.0, 1.0]]


@cases
def test_the_choice(rule: RoutingRule, experts: int, corrected: bool) -> None:
    chooser, x = router(rule, experts, corrected=corrected), tokens(2)
    same(route(x, chooser), plain_experts.route(x, chooser))


@cases
def test_of_equal_scores_the_lower_id(
    rule: RoutingRule, experts: int, corrected: bool
) -> None:
    """Logits are one of three, so most are equal."""
    x = torch.eye(2, device=DEVICE)
    draw = torch.Generator().manual_seed(experts)
    weight = torch.randint(-1, 2, (experts, 2), generator=draw).to(DEVICE).float()
    correction = torch.zeros(experts, device=DEVICE) if corrected else None
    chooser = ExpertRouter(weight=weight, correction=correction, rule=rule)
    choice = route(x, chooser)
    same(choice, plain_experts.route(x, chooser))
    if rule.groups == 1:
        for row, ids in enumerate(choice.ids.tolist()):
            order = sorted(
                range(experts), key=lambda expert: (-weight[expert, row].item(), expert)
            )
            assert ids == order[: rule.top_k]


@pytest.mark.parametrize(
    ("ranked_by", "kept_groups"), [("best", [0, 0]), ("best_two", [0, 1])]
)
def test_what_ranks_a_group(
    ranked_by: Literal["best", "best_two"], kept_groups: list[int]
) -> None:
    """A row whose best score is in the group of the best sum, and one where it is not."""
    shares = [[0.50, 0.01, 0.20, 0.20, 0.05, 0.04], [0.30, 0.02, 0.20, 0.25, 0.12, 0.11]]
    weight = torch.tensor(shares, device=DEVICE).log().t().contiguous()
    rule = RoutingRule(2, groups=3, kept_groups=1, ranked_by=ranked_by)
    choice = route(torch.eye(2, device=DEVICE), ExpertRouter(weight=weight, rule=rule))
    assert [ids[0] // 2 for ids in choice.ids.tolist()] == kept_groups


@pytest.mark.parametrize(
    ("weight", "x"),
    [(torch.float32, torch.float16), (torch.float16, torch.float16)],
    ids=str,
)
def test_logits_are_of_the_weights_dtype(weight: torch.dtype, x: torch.dtype) -> None:
    chooser, rows = router(RoutingRule(3), 9, dtype=weight), tokens(2, dtype=x)
    same(route(rows, chooser), plain_experts.route(rows, chooser))


def test_padding_gets_no_expert() -> None:
    chooser, x = router(RoutingRule(2), 6), tokens(4)
    x[1] = torch.nan
    x[3] = torch.inf
    real = torch.tensor([True, False, True, False], device=DEVICE)
    choice, expected = route(x, chooser, real), plain_experts.route(x, chooser, real)
    assert torch.equal(choice.ids, expected.ids)
    assert choice.ids[[1, 3]].eq(-1).all()
    assert torch.equal(choice.ids[::2], route(x[::2], chooser).ids)
    torch.testing.assert_close(choice.weights[::2], expected.weights[::2])


@pytest.mark.parametrize(
    "rule", [RoutingRule(3), RoutingRule(3, groups=3, kept_groups=2)]
)
def test_ids_exist_and_differ_even_if_logits_are_nan(rule: RoutingRule) -> None:
    chooser, x = router(rule, 6), tokens(2)
    x[0] = torch.nan
    for ids in route(x, chooser).ids.tolist():
        assert len({*ids} & {*range(6)}) == 3


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("hidden", "dtype"), [(16, torch.float32), *long([(2500, torch.float16)])], ids=str
)
def test_a_shared_expert_is_one_more(
    gated: bool, hidden: int, dtype: torch.dtype
) -> None:
    """Its id is behind the others'; its weight, which no rule scales, 1 or its gate's."""
    rule = RoutingRule(3, "sigmoid", scaling=2.5)
    chooser, x = router(rule, 12, hidden, corrected=True), tokens(4, hidden, dtype)
    draw = torch.Generator().manual_seed(1)
    gate = torch.randn(1, hidden, generator=draw).to(DEVICE, dtype) / hidden**0.5
    shared = evolve(chooser, shared=True, shared_gate=gate if gated else None)
    real = torch.tensor([True, True, True, False], device=DEVICE)
    routed, choice = route(x, chooser, real), route(x, shared, real)
    same(choice, plain_experts.route(x, shared, real))
    assert torch.equal(choice.ids[:, :3], routed.ids)
    assert torch.equal(choice.weights[:, :3], routed.weights)
    assert choice.ids[:, 3].tolist() == [12, 12, 12, -1]
    expected = (x.double() @ gate[0].double()).sigmoid() if gated else torch.ones(4)
    torch.testing.assert_close(choice.weights[:, 3], expected.float().to(DEVICE))


def test_no_tokens() -> None:
    choice = route(tokens(0), router(RoutingRule(2), 4))
    assert choice.ids.shape == choice.weights.shape == (0, 2)


def test_the_reference(device: str) -> None:
    chooser, x = router(RoutingRule(2), 7, device=device), tokens(1).to(device)
    same(route(x, chooser), plain_experts.route(x, chooser))


@pytest.mark.skipif(not CUDA, reason="real shapes are for the GPU")
@cases
def test_many_tokens(rule: RoutingRule, experts: int, corrected: bool) -> None:
    chooser, x = router(rule, experts, 64, corrected), tokens(3000, 64)
    choice, expected = route(x, chooser), plain_experts.route(x, chooser)
    rows = (choice.ids == expected.ids).all(1)  # scores may differ in the last place
    assert rows.float().mean() > 0.999
    torch.testing.assert_close(
        choice.weights[rows], expected.weights[rows], rtol=1e-4, atol=1e-6
    )
