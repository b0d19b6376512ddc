"""INT8 and 4-bit matrices in the layouts of the CPU's libraries."""

import time

import pytest
import torch
from attrs import evolve
from torch import Tensor

from minfer.kernels import cpu_int4, cpu_int8, plain_experts, quantized
from minfer.kernels.leaves import (
    FP8,
    INT8,
    MXFP4,
    ChosenExperts,
    Experts,
    Linear,
    Scheme,
    int4,
)

ROWS = (1, 2, 3, 8, 64, 130)


def leaf(
    scheme: Scheme,
    outputs: int,
    inputs: int,
    dtype: torch.dtype,
    *,
    bias: bool = False,
) -> Linear:
    """A random leaf, as it is stored."""
    matrix = torch.randn(outputs, inputs)
    weight, scales, zeros, factors = quantized.quantize(matrix, scheme, dtype)
    return Linear(
        weight=weight,
        factors=factors,
        bias=torch.randn(outputs).to(dtype) if bias else None,
        scheme=scheme,
        scales=scales,
        zeros=zeros,
        parts=(outputs,),
    )


def rows_of(count: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """Random activations, in which a row is 0 and one has an outlier."""
    x = torch.randn(count, inputs)
    x[count // 2, 0] = 100.0
    x[count - 1] *= count == 1
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(48, 64), (31, 129), (16, 3_000)])
def test_int8_products_are_the_references(
    dtype: torch.dtype, bias: bool, outputs: int, inputs: int
) -> None:
    stored = leaf(INT8, outputs, inputs, dtype, bias=bias)
    packed = quantized.prepare(stored)
    assert isinstance(packed.packed, cpu_int8.PackedInt8)
    assert packed.weight.is_meta
    assert packed.inputs == inputs
    for count in ROWS:
        x = rows_of(count, inputs, dtype)
        assert quantized.linear(x, packed).equal(quantized.linear(x, stored))


@pytest.mark.parametrize("scheme", [INT8, int4(32)], ids=lambda scheme: scheme.name)
def test_a_row_is_independent_of_the_others(scheme: Scheme) -> None:
    packed = quantized.prepare(leaf(scheme, 96, 256, torch.bfloat16))
    x = rows_of(64, 256, torch.bfloat16)
    together = quantized.linear(x, packed)
    for i in range(len(x)):
        assert quantized.linear(x[i : i + 1], packed).equal(together[i : i + 1])


def extremes(sign: int) -> tuple[Tensor, Tensor]:
    """The largest numbers, whose products all add up, or cancel out: rows, and a
    matrix.
    """
    rows, weight = torch.full((3, 4_864), 127.0), torch.full((32, 4_864), 127)
    rows[0], weight[::3] = -127, -128
    rows[:, ::2] *= sign
    return rows, weight.to(torch.int8)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_chosen_route_is_exact(sign: int) -> None:
    rows, weight = extremes(sign)
    route = cpu_int8.chosen_route()
    want = (rows.double() @ weight.t().double()).float()
    assert route.sums(rows, route.pack(weight)).equal(want)


def test_a_slow_route_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(numbers: Tensor, packed: object) -> Tensor:
        time.sleep(0.02)
        return cpu_int8.INT_MM.sums(numbers, packed)

    routes = (evolve(cpu_int8.INT_MM, name="slow", sums=slow), cpu_int8.INT_MM)
    monkeypatch.setattr(cpu_int8, "ROUTES", routes)
    cpu_int8.chosen_route.cache_clear()
    assert cpu_int8.chosen_route() is cpu_int8.INT_MM
    monkeypatch.undo()
    cpu_int8.chosen_route.cache_clear()


@pytest.mark.long
@pytest.mark.parametrize("route", cpu_int8.ROUTES, ids=lambda route: route.name)
def test_a_route_is_chosen_only_if_it_is_exact(
    route: cpu_int8.Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(numbers: Tensor, packed: object) -> Tensor:
        sums = route.sums(numbers, packed)
        sums[-1, -1] += len(numbers) == 64  # of many rows only
        return sums

    def absent(_: Tensor) -> object:
        raise NotImplementedError("there is no such library")

    rows, weight = extremes(1)
    saturates = not torch.equal(
        route.sums(rows, route.pack(weight)),
        (rows.double() @ weight.t().double()).float(),
    )
    assert cpu_int8.is_exact(route) is not saturates
    for broken in (evolve(route, sums=wrong), evolve(route, pack=absent)):
        assert not cpu_int8.is_exact(broken)
        monkeypatch.setattr(cpu_int8, "ROUTES", (broken,))
        cpu_int8.chosen_route.cache_clear()
        assert cpu_int8.chosen_route() is cpu_int8.INT_MM
    monkeypatch.undo()
    cpu_int8.chosen_route.cache_clear()
    assert cpu_int8.chosen_route().name in cpu_int8.description()


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("outputs", [16, 128, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int4_products_are_those_of_the_dequantized_matrix(
    group: int, zeros: bool, outputs: int, dtype: torch.dtype
) -> None:
    stored = leaf(int4(group, zeros=zeros), outputs, 256, dtype, bias=True)
    packed = quantized.prepare(stored)
    assert (packed.packed is None) == (outputs == 20)
    step = torch.finfo(dtype).eps * (16 if dtype is torch.float32 else 1)
    for count in (1, 5, cpu_int4.MIN_DEQUANTIZED_ROWS - 1, cpu_int4.MIN_DEQUANTIZED_ROWS):
        x = rows_of(count, 256, dtype)
        matrix = quantized.dequantize(stored).double()
        assert stored.bias is not None
        want = x.double() @ matrix.t() + stored.bias.double()
        size = x.double().abs() @ matrix.t().abs() + stored.bias.double().abs()
        error = (quantized.linear(x, packed).double() - want).abs()
        assert (error <= step * (size + 1)).all()


def test_other_layouts_of_int4_are_multiplied_by_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed = quantized.prepare(leaf(int4(32), 64, 64, torch.bfloat16))
    x = rows_of(cpu_int4.MIN_DEQUANTIZED_ROWS, 64, torch.bfloat16)
    want = quantized.linear(x, packed)
    monkeypatch.setattr(cpu_int4, "block_size", lambda: 0)
    torch.testing.assert_close(quantized.linear(x, packed), want, rtol=0.02, atol=0.1)


def test_matrices_that_no_library_multiplies_stay_as_they_are() -> None:
    for stored in (
        leaf(FP8, 32, 64, torch.bfloat16),
        leaf(MXFP4, 32, 64, torch.bfloat16),
        leaf(int4(32), 32, 64, torch.float16),
        evolve(
            leaf(INT8, 32, 64, torch.bfloat16), weight=torch.empty(32, 64, device="meta")
        ),
    ):
        assert quantized.prepare(stored) is stored


@pytest.mark.parametrize(
    "scheme", [INT8, int4(32), MXFP4], ids=lambda scheme: scheme.name
)
def test_experts_multiply_with_their_own_matrices(scheme: Scheme) -> None:
    dtype = torch.bfloat16
    gate_ups = [leaf(scheme, 2 * 32, 64, dtype) for _ in range(4)]
    down = [leaf(scheme, 64, 32, dtype) for _ in range(4)]

    def stacked(leaves: list[Linear]) -> Linear:
        def both(name: str) -> Tensor:
            return torch.stack([getattr(leaf, name) for leaf in leaves])

        return evolve(leaves[0], weight=both("weight"), scales=both("scales"))

    stored = Experts(gate_up=stacked(gate_ups), down=stacked(down))
    packed = Experts(
        gate_up=plain_experts.prepare(stored.gate_up),
        down=plain_experts.prepare(stored.down),
    )
    x = rows_of(5, 64, dtype)
    ids = torch.tensor([[0, 1], [1, 3], [-1, -1], [3, 0], [1, 0]], dtype=torch.int32)
    choice = ChosenExperts(ids, torch.rand(5, 2))
    residuals = []
    for experts in (stored, packed):
        residual = torch.zeros(5, 64)
        plain_experts.add_experts(residual, x, experts, choice)
        residuals.append(residual)
    torch.testing.assert_close(
        *residuals, rtol=0.05, atol=0.05 * residuals[0].abs().max().item()
    )
