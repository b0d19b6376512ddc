"""Products of adapters against plain torch, for rows by themselves and in tiles."""

import pytest
import torch
from attrs import evolve, frozen
from torch import Tensor

from minfer.kernels import experts as experts_module
from minfer.kernels import lora, plain_experts, plain_lora
from minfer.kernels.experts_tunes import (
    DownTune,
    ExpertsTune,
    FewTokensTune,
    GateUpTune,
    GroupedTune,
    ManyTokensTune,
)
from minfer.kernels.leaves import AdapterSlots, ChosenExperts, Experts, Linear, Norm
from minfer.kernels.lora_tunes import LoraTune, max_tiles, tune_of
from minfer.kernels.plain_lora import AdapterTokens
from tests.circles import long

from .conftest import CUDA, drawn
from .test_quantized_linear import relative

DEVICE = "cuda" if CUDA else "cpu"
# Under the interpreter, products of bfloat16 are wrong.
DTYPE = torch.bfloat16 if CUDA else torch.float32
LIMIT = 2e-2 if CUDA else 1e-5
ROWS = LoraTune(tile=1, splits=3, depth=16, columns=16, warps=2, stages=1)
TILES = LoraTune(tile=16, splits=2, depth=32, columns=32, warps=4, stages=2)
TUNES = {"rows": ROWS, "tiles": TILES}
EXPERT_TUNES: dict[str, ExpertsTune] = {
    "few": FewTokensTune(GateUpTune(16, 64, 2, 1), DownTune(32, 32, 2, 2)),
    "many": ManyTokensTune(
        16, GroupedTune(16, 64, 4, 2, 1, False), GroupedTune(32, 32, 4, 2, 2, False)
    ),
}
pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered"),
    pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation"),
]


@frozen
class Case:
    rows: int
    inputs: int
    parts: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]  # of each slot, of each part
    rank: int = 16


FEW = Case(5, 48, (32, 16, 16), ((4, 0, 16), (16, 16, 16), (0, 0, 0)))
CASES = [
    FEW,
    *long(
        zip(
            [
                Case(1, 40, (24,), ((7,),)),
                Case(37, 64, (48, 48), ((16, 8), (3, 0)), 16),
                Case(70, 100, (40,), tuple((n,) for n in (32, 1, 20, 5)), 32),
                Case(19, 33, (50, 14), ((48, 48), (40, 0)), 48),
            ]
        )
    ),
]


def random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, DTYPE)


def slots_of(case: Case, experts: int = 0) -> AdapterSlots:
    """Slots whose numbers behind each rank are NaN."""
    each = (experts,) if experts else ()
    num_slots, num_parts = len(case.ranks), len(case.parts)
    lora_a = random(num_slots, *each, num_parts * case.rank, case.inputs)
    lora_b = random(num_slots, *each, case.rank, sum(case.parts)) * 0.2
    for slot, of_slot in enumerate(case.ranks):
        end = 0
        for part, (outputs, rank) in enumerate(zip(case.parts, of_slot, strict=True)):
            of_part = slice(part * case.rank + rank, (part + 1) * case.rank)
            lora_a[slot, ..., of_part, :] = torch.nan
            lora_b[slot, ..., rank:, end : end + outputs] = torch.nan
            end += outputs
    ranks = torch.tensor(case.ranks, dtype=torch.int32, device=DEVICE)
    return AdapterSlots(lora_a=lora_a, lora_b=lora_b, ranks=ranks, parts=case.parts)


def token_slots(rows: int, slots: int) -> Tensor:
    """Slots of tokens, of which some have none."""
    return (drawn(slots + 1, rows) - 1).to(DEVICE, torch.int32)


@pytest.mark.parametrize("tune", TUNES.values(), ids=TUNES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_are_added(case: Case, tune: LoraTune) -> None:
    adapters, x = slots_of(case), random(case.rows, case.inputs)
    tokens = AdapterTokens(token_slots(case.rows, len(case.ranks)))
    out = random(case.rows, sum(case.parts))
    expected = out.float()
    plain_lora.add_to_rows(expected, x, adapters, tokens.slots)
    without = out[tokens.slots < 0].clone()
    lora.add_lora(out, x, adapters, tokens, None, tune)
    torch.testing.assert_close(out.float(), expected, rtol=LIMIT, atol=10 * LIMIT)
    assert torch.equal(out[tokens.slots < 0], without)


@pytest.mark.parametrize("tune", TUNES.values(), ids=TUNES)
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_rows_are_normalised(kind: str, tune: LoraTune) -> None:
    case = FEW
    adapters, x = slots_of(case), random(case.rows, case.inputs) * 3
    bias = random(case.inputs) if kind == "layer" else None
    norm = Norm(random(case.inputs), 1e-2, bias, centered=kind == "layer")
    tokens = AdapterTokens(token_slots(case.rows, len(case.ranks)))
    expected = (out := random(case.rows, sum(case.parts))).float()
    plain_lora.add_lora(expected, x, adapters, tokens, norm)
    lora.add_lora(out, x, adapters, tokens, norm, tune)
    torch.testing.assert_close(out.float(), expected, rtol=LIMIT, atol=10 * LIMIT)


def test_chosen_constants_are_those_of_sizes() -> None:
    case = FEW
    adapters, x = slots_of(case), random(case.rows, case.inputs)
    tokens = AdapterTokens(token_slots(case.rows, len(case.ranks)))
    expected = (out := random(case.rows, sum(case.parts))).float()
    plain_lora.add_to_rows(expected, x, adapters, tokens.slots)
    lora.add_lora(out, x, adapters, tokens)
    torch.testing.assert_close(out.float(), expected, rtol=LIMIT, atol=10 * LIMIT)


@pytest.mark.parametrize("rows", [1, 8, 9, 32, 256, 8192])
@pytest.mark.parametrize("lanes", [16, 64, 256])
def test_constants_fit_their_kernels(rows: int, lanes: int) -> None:
    for inputs in (4096, 18_944, 768):
        tune = tune_of(rows, inputs, lanes)
        assert (tune.splits - 1) * tune.depth < inputs
        assert tune.tile in (1, 16, 64)
        assert tune.depth >= 16 <= tune.columns
        assert max_tiles(rows, 32, tune.tile) <= rows


@pytest.mark.parametrize("by_tiles", [False, True])
@pytest.mark.parametrize("path", EXPERT_TUNES)
def test_adapters_of_experts(
    path: str, by_tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both paths of experts, and of adapters."""
    tune = TILES if by_tiles else ROWS
    monkeypatch.setattr(lora, "_tune", lambda *_: tune)
    tokens, count, top_k, hidden, inter = 6, 3, 2, 48, 32
    gate_up_case = Case(0, hidden, (inter, inter), ((4, 16), (16, 0)))
    down_case = Case(0, inter, (hidden,), ((16,), (5,)))
    gate_up = Linear(
        weight=random(count, 2 * inter, hidden) * 0.2,
        parts=(inter, inter),
        adapters=slots_of(gate_up_case, count),
    )
    down = Linear(
        weight=random(count, hidden, inter) * 0.2,
        parts=(hidden,),
        adapters=slots_of(down_case, count),
    )
    experts = Experts(gate_up=gate_up, down=down)
    ids = torch.stack([torch.randperm(count)[:top_k] for _ in range(tokens)]).int()
    ids[1] = -1  # of padding
    choice = ChosenExperts(ids.to(DEVICE), torch.rand(tokens, top_k, device=DEVICE))
    adapters = AdapterTokens(torch.tensor([0, 1, -1, 1, 0, 1], device=DEVICE).int())
    x, residual = random(tokens, hidden), random(tokens, hidden)
    expected, without = (residual.to(torch.float32, copy=True) for _ in range(2))
    exact = Experts(gate_up=in_float32(gate_up), down=in_float32(down))
    plain_experts.add_experts(expected, x.float(), exact, choice, adapters)
    plain_experts.add_experts(without, x.float(), exact, choice)
    experts_module.add_experts(
        residual, x, experts, choice, EXPERT_TUNES[path], adapters=adapters
    )
    assert relative(residual, expected.double()) < LIMIT
    assert relative(without, expected.double()) > 10 * LIMIT


def in_float32(matrices: Linear) -> Linear:
    """Experts' matrices and adapters whose products are not rounded."""
    slots = matrices.adapters
    assert slots is not None
    return evolve(
        matrices,
        weight=matrices.weight.float(),
        adapters=evolve(slots, lora_a=slots.lora_a.float(), lora_b=slots.lora_b.float()),
    )
