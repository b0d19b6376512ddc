"""Products of INT8 matrices with rows of INT8 activations on the CPU.

Theory. Products of 8-bit integers are summed exactly in 32 bits, whatever the order of
the sum, so each row's result is independent of its neighbours and of the library. VNNI's
instruction adds four products of unsigned by signed bytes to 32 bits. Processors without
it add two such products in 16 bits, which saturate: 2 * 255 * 127 > 32,767. There,
activations of 7 bits fit (2 * 128 * 128 = 32,768, of the sign that fits), and a number of
8 bits is the sum of two such halves: a row is multiplied as two rows, of one pass over
the matrix. A product of few rows takes the time in which the matrix is read.

Libraries differ in what they do, by processor and version. So what multiplies is chosen
once: of the `ROUTES` whose sums of random extremes equal those of float64 (exact), with
up to 20,000 inputs, the fastest with a small matrix. All of these give the same results.
On an AMD EPYC with AVX-512, oneDNN (of torch 2.13) has only its reference loop for these
products, which takes 1,000 times as long as FBGEMM.
"""

import functools
import math
import time
import warnings
from collections.abc import Callable
from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor

from minfer.kernels.leaves import INT8_PART

MAX_MAGNITUDE: Final = 127
CHECKED_INPUTS: Final = (64, 896, 20_000)
CHECKED_ROWS: Final = (1, 2, 8, 64)
CHECKED_OUTPUTS: Final = 16
TIMED_SIZE: Final = 512  # inputs, and outputs
TIMED_ROWS: Final = 8
TIMED_RUNS: Final = 3
SMALLEST: Final = torch.finfo(torch.float32).tiny
# n / 2 - 1/4 and n / 2 + 1/4, rounded, are the whole numbers whose sum is n.
HALVES: Final = torch.tensor((-0.25, 0.25)).view(2, 1, 1)


@frozen
class Route:
    """A way to multiply."""

    name: str
    pack: Callable[[Tensor], Any]  # a matrix [outputs, inputs] int8, in its own layout
    # Of whole numbers [rows, inputs] float32, from -127 to 127, with a matrix: exact,
    # then rounded to float32.
    sums: Callable[[Tensor, Any], Tensor]


@frozen(eq=False)
class PackedInt8:
    """A matrix in a route's layout."""

    route: Route
    weight: Any
    scales: Tensor  # [1, outputs] float32

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Returns x @ weight.T + bias [rows, outputs], as `quantized.linear` does."""
        wide = x.float()
        largest = torch.linalg.vector_norm(wide, math.inf, -1, keepdim=True)
        rows = largest.div_(MAX_MAGNITUDE).clamp_min_(SMALLEST)  # of a row of zeros
        total = self.route.sums(wide.div(rows).round_(), self.weight)
        total.mul_(rows).mul_(self.scales)
        return (total if bias is None else total.add_(bias)).to(x.dtype)


def pack(weight: Tensor, scales: Tensor) -> PackedInt8:
    """Returns a matrix [outputs, inputs] int8 with scales [outputs, 1] float32."""
    route = chosen_route()
    return PackedInt8(route, route.pack(weight.contiguous()), scales.t().contiguous())


@functools.cache
def chosen_route() -> Route:
    """Returns the fastest route that is exact on this processor."""
    return next(filter(is_exact, sorted(ROUTES, key=seconds)), INT_MM)


def seconds(route: Route) -> float:
    """Returns the shortest time of a small product: 8 rows, 512 inputs and outputs.
    Infinite where this build of torch lacks it.
    """
    weight = torch.ones(TIMED_SIZE, TIMED_SIZE, dtype=torch.int8)
    rows, times = torch.ones(TIMED_ROWS, TIMED_SIZE), []
    try:
        packed = route.pack(weight)
        for _ in range(TIMED_RUNS):
            begin = time.perf_counter()
            route.sums(rows, packed)
            times.append(time.perf_counter() - begin)
    except (RuntimeError, NotImplementedError):
        return math.inf
    return min(times)


def is_exact(route: Route) -> bool:
    """Whether a route's sums are exact, for matrices and rows of the largest numbers."""
    random = torch.Generator().manual_seed(0)
    for inputs in CHECKED_INPUTS:
        shape = (max(CHECKED_ROWS) + CHECKED_OUTPUTS, inputs)
        signs = torch.randint(0, 2, shape, generator=random, dtype=torch.int8) * 2 - 1
        signs[::2, ::2] = 1  # half of them add up
        numbers = signs * MAX_MAGNITUDE
        weight, rows = numbers[:CHECKED_OUTPUTS], numbers[CHECKED_OUTPUTS:]
        expected = (rows.double() @ weight.t().double()).float()
        try:
            packed = route.pack(weight)
            all_equal = all(
                torch.equal(route.sums(rows[:n].float(), packed), expected[:n])
                for n in CHECKED_ROWS
            )
        except (RuntimeError, NotImplementedError):  # this build of torch lacks it
            return False
        if not all_equal:
            return False
    return True


def description() -> str:
    """Returns what multiplies, and which instructions the processor has for it."""
    extensions = [
        name
        for name, is_supported in (
            ("AVX2", torch.cpu._is_avx2_supported()),
            ("AVX-512", torch.cpu._is_avx512_supported()),
            ("VNNI", torch.cpu._is_vnni_supported()),
            ("AMX", torch.cpu._is_amx_tile_supported()),
        )
        if is_supported
    ]
    names = ", ".join(extensions) or "no AVX2"
    return f"{chosen_route().name}, exact on this processor ({names})"


def _onednn_pack(weight: Tensor) -> Any:
    unit_scales = torch.ones(len(weight))
    zeros = torch.zeros(len(weight), dtype=torch.int64)
    return torch.ops.onednn.qlinear_prepack(weight, None), unit_scales, zeros


def _onednn_sums(numbers: Tensor, packed: Any) -> Tensor:
    weight, unit_scales, zeros = packed
    sums: Tensor = torch.ops.onednn.qlinear_pointwise(
        numbers.to(torch.int8), 1.0, 0, weight, unit_scales, zeros, None, 1.0, 0,
        torch.float32, "none", [], "",
    )  # fmt: skip
    return sums


def _fbgemm_pack(weight: Tensor) -> Any:
    unit_scales = torch.ones(len(weight), dtype=torch.float64)
    zeros = torch.zeros(len(weight), dtype=torch.int64)
    engines = torch.backends.quantized
    before = engines.engine
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch.ao's quantized tensors will go
        typed = torch._make_per_channel_quantized_tensor(weight, unit_scales, zeros, 0)
        try:
            engines.engine = "fbgemm"
            return torch.ops.quantized.linear_prepack(typed, None)
        finally:
            engines.engine = before


def _fbgemm(numbers: Tensor, zero: int, packed: Any) -> Tensor:
    """Returns sums of numbers from -`zero` to 255 - `zero`, which are rounded."""
    multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
    sums: Tensor = multiply(numbers, 1.0, zero, packed)
    return sums


def _fbgemm_whole(numbers: Tensor, packed: Any) -> Tensor:
    return _fbgemm(numbers, 128, packed)


def _fbgemm_pack_halves(weight: Tensor) -> list[Any]:
    return [
        _fbgemm_pack(columns.contiguous())
        for columns in torch.split(weight, INT8_PART, 1)
    ]


def _fbgemm_halves(numbers: Tensor, packed: list[Any]) -> Tensor:
    """Sums of parts of the inputs are exact in float32, and their sum in float64."""
    halves = torch.add(numbers * 0.5, HALVES).flatten(0, 1)
    if 2 * numbers.shape[1] <= INT8_PART:
        lower, upper = _fbgemm(halves, 64, packed[0]).chunk(2)
        return lower.add_(upper)
    chunk_pairs = zip(torch.split(halves, INT8_PART, 1), packed, strict=True)
    sums = [
        _fbgemm(numbers_chunk.contiguous(), 64, matrix_chunk).double()
        for numbers_chunk, matrix_chunk in chunk_pairs
    ]
    lower, upper = functools.reduce(Tensor.add_, sums).chunk(2)
    return lower.add_(upper).float()


def _int_mm(numbers: Tensor, packed: Any) -> Tensor:
    return torch._int_mm(numbers.to(torch.int8), packed).float()


INT_MM: Final = Route("torch._int_mm", lambda weight: weight.t(), _int_mm)
ROUTES: Final = (
    Route("oneDNN", _onednn_pack, _onednn_sums),
    Route("FBGEMM", _fbgemm_pack, _fbgemm_whole),
    Route("FBGEMM, rows in two halves of 7 bits", _fbgemm_pack_halves, _fbgemm_halves),
    INT_MM,
)
