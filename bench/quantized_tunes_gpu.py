"""Tilings of products of many tokens with quantized matrices, on a GPU.

    python -m bench.quantized_tunes_gpu

Of Qwen2.5-7B's products, for 64 to 512 tokens: the fastest tilings of the kernel of
kernels/fused_linear.py beside what the tables choose (kernels/quantized_tunes.py) and
beside cuBLAS in bfloat16, in microseconds, in CUDA graphs over rotated weights. INT8
matrices are multiplied with rows that are rounded to INT8, which is timed too. Each
tiling's result is compared with the table's before it is timed. What the result file has
is not measured again. `--device cpu` tries the script, with TRITON_INTERPRET=1.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product as combinations
from math import ceil
from typing import Any, Final
from unittest.mock import patch

import torch
from attrs import evolve, frozen
from torch import Tensor
from triton.runtime.errors import OutOfResources

from bench.gpu_times import microseconds
from bench.results import run, write
from minfer import kernels
from minfer.kernels import fused_linear, quantized_linear
from minfer.kernels.compiling import compile_launches
from minfer.kernels.leaves import FP8_BLOCKS, INT8, Linear, Scheme, int4
from minfer.kernels.linear_tunes import LinearTune
from minfer.kernels.quantized_kernels import round_rows

SCHEMES: Final = {
    "int4": int4(128),
    "int4_zeros": int4(128, zeros=True),
    "int8": INT8,
    "fp8_blocks": FP8_BLOCKS,
}
FP8_BELOW_2: Final = 0b1011_1111  # bits of numbers whose magnitudes are below 2
# Of the random numbers, by their storage.
DEVIATIONS: Final = {"uint8": 4.6, "int8": 58.0, "float8_e4m3fn": 0.5}
ROTATED_BYTES: Final = 220e6  # of weights in a graph: more than the L2 cache has
MIN_COPIES: Final = 3
PROCESSORS: Final = 132
SHARED_BYTES: Final = 227 << 10  # of a processor
REGISTERS: Final = 64 << 10  # of a processor
THREADS: Final = 32  # of a warp
MAX_SUMS: Final = 128  # in a thread's registers
PRODUCTS_PER_CLOCK: Final = 2048  # of bfloat16, of a processor
L2_BYTES_PER_CLOCK: Final = 32  # to a processor
DECODING_CLOCKS: Final = 0.05  # of a weight in 4 bits: 6 instructions, 128 in a clock
SPLIT_COST: Final = 0.05  # share of time, for each doubling
MAX_ERROR: Final = 0.02  # of products, relative
SHOWN: Final = 5
Call = Callable[[], Tensor]


@frozen
class LayerProduct:
    """A product of a layer."""

    name: str
    inputs: int
    outputs: int  # of the matrix: gates and what they multiply
    gated: bool = False
    adds: bool = False


PRODUCTS: Final = (
    LayerProduct("qkv", 3584, 4608),
    LayerProduct("out", 3584, 3584, adds=True),
    LayerProduct("gate, up", 3584, 2 * 18_944, gated=True),
    LayerProduct("down", 18_944, 3584, adds=True),
)


def random_leaf(scheme: Scheme, outputs: int, inputs: int, device: str) -> Linear:
    """Returns a matrix of random numbers, whose products are about as large as rows."""
    shape, storage = (outputs, inputs // scheme.numbers), getattr(torch, scheme.storage)
    low, high = (-100, 100) if scheme is INT8 else (0, 256)
    dtype = torch.int8 if scheme is INT8 else torch.uint8
    weight = torch.randint(low, high, shape, device=device, dtype=dtype)
    if scheme is FP8_BLOCKS:
        weight = (weight & FP8_BELOW_2).view(storage)
    groups = scheme.groups(inputs)
    scale_dtype = torch.float32 if scheme.scales else torch.bfloat16
    drawn = torch.rand(outputs, groups, device=device) + 0.5
    scales = (drawn / DEVIATIONS[scheme.storage] / inputs**0.5).to(scale_dtype)
    zeros = torch.randint(6, 10, (outputs, groups), device=device, dtype=torch.uint8)
    return Linear(
        weight=weight,
        scheme=scheme,
        scales=scales,
        zeros=zeros if scheme.zeros else None,
        parts=(outputs,),
    )


@frozen(eq=False)
class Case:
    """A product with copies of its weights, of a number of tokens."""

    of: LayerProduct
    leaves: tuple[Linear, ...]
    x: Tensor
    residual: Tensor

    @classmethod
    def of_product(
        cls, of: LayerProduct, leaves: tuple[Linear, ...], tokens: int
    ) -> "Case":
        """Returns the product of random rows."""
        device = leaves[0].weight.device
        # The interpreter does not multiply bfloat16.
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        x = torch.randn(tokens, of.inputs, device=device, dtype=dtype)
        return cls(of, leaves, x, x.new_zeros(tokens, of.outputs))

    def calls(self, tune: LinearTune | None) -> list[Call]:
        """The product with each copy; without a tiling, as the tables choose."""
        once = self._by_table if tune is None else partial(self._by_kernel, tune)
        return [partial(once, leaf) for leaf in self.leaves]

    def plain_calls(self, matrices: Sequence[Linear]) -> list[Call]:
        """The product in bfloat16, with each matrix, by cuBLAS."""
        return [partial(self._product, fused_linear, matrix) for matrix in matrices]

    def _by_table(self, leaf: Linear) -> Tensor:
        return self._product(quantized_linear, leaf)

    def _product(self, module: Any, leaf: Linear) -> Tensor:
        if self.of.adds:
            module.linear_add(self.residual, self.x, leaf)
            return self.residual
        out: Tensor
        if self.of.gated:
            out = module.norm_gated(self.x, None, leaf)
        else:
            out = module.linear(self.x, leaf)
        return out

    def _by_kernel(self, tune: LinearTune, leaf: Linear) -> Tensor:
        x, scaled = self.x, None
        if leaf.scheme is INT8:
            x, scales = round_rows(x, torch.int8)
            scaled = scales, self.x.dtype
        out = self.residual if self.of.adds else None
        gated = self.of.gated
        return fused_linear.launch(x, leaf, tune, gated=gated, out=out, scaled=scaled)

    def error(self, tune: LinearTune, expected: Tensor) -> float:
        """The relative error of a tiling's result."""
        self.residual.zero_()
        out = self.calls(tune)[0]()
        error = (out.float() - expected.float()).norm() / expected.float().norm()
        self.residual.zero_()
        return float(error)


def tilings(of: LayerProduct, tokens: int, scheme: Scheme) -> list[LinearTune]:
    """Tilings for this number of tokens, the most promising first."""
    promises = dict[LinearTune, float]()
    for rows, lines, depth, splits, warps, stages, swapped in combinations(
        (64, 128, 256), (64, 128, 256), (64, 128), (1, 2, 4), (4, 8), (3, 4, 5), (0, 1)
    ):
        if rows > max(64, tokens) or (scheme is INT8 and depth < 128):
            continue
        columns = lines // (1 + of.gated)
        tune = LinearTune(rows, columns, depth, splits, warps, stages, bool(swapped))
        tune = tune._replace(dequantized=scheme.group > 0)
        if share := multiplying_share(of, tokens, tune, scheme):
            promises[tune] = share - SPLIT_COST * splits.bit_length()
    chosen = dict[tuple[object, ...], LinearTune]()
    for tune in sorted(promises, key=lambda tune: (promises[tune], tune), reverse=True):
        chosen.setdefault((*tune[:5], tune.swapped), tune)  # with the most stages
    return [*chosen.values()]


def multiplying_share(
    of: LayerProduct, tokens: int, tune: LinearTune, scheme: Scheme
) -> float:
    """An estimate of the share of time in which the tensor cores multiply; 0 if the
    tiling is impossible.
    """
    lines, is_int8 = tune.columns * (1 + of.gated), scheme is INT8
    threads = tune.warps * THREADS
    step_bytes = tune.rows * (1 if is_int8 else 2) + lines / scheme.numbers  # of an input
    shared = step_bytes * tune.depth * tune.stages
    if not tune.swapped and not is_int8:  # dequantized into shared memory
        shared += lines * tune.depth * 2
    sums = tune.rows * lines / threads
    # Tensor cores multiply 64 rows of the first operand for each four warps.
    tall = lines if tune.swapped else tune.rows
    if shared > SHARED_BYTES or not 16 <= sums <= MAX_SUMS or tall < 16 * tune.warps:
        return 0.0
    if of.inputs % (tune.depth * tune.splits) or of.inputs < 8 * tune.depth * tune.splits:
        return 0.0
    products = (
        tune.rows * lines / (2 * PRODUCTS_PER_CLOCK if is_int8 else PRODUCTS_PER_CLOCK)
    )
    decoding = 0.0 if is_int8 else DECODING_CLOCKS * lines
    clocks = max(products, step_bytes / L2_BYTES_PER_CLOCK) + decoding / 2
    per_thread = 255 if sums > 64 else 128  # registers, as compiled
    places = min(int(SHARED_BYTES // shared), REGISTERS // (threads * per_thread))
    programs = ceil(tokens / tune.rows) * ceil(of.outputs / lines) * tune.splits
    if tune.splits > 1 and programs >= 2 * tune.splits * PROCESSORS:
        return 0.0  # partial sums would cost more than they fill
    at_once = PROCESSORS * places
    padding = tokens / (ceil(tokens / tune.rows) * tune.rows)
    busy = programs / (ceil(programs / at_once) * at_once)
    return products / clocks * padding * busy


def measure_case(case: Case, matrices: Sequence[Linear], limit: int) -> dict[str, Any]:
    """Returns the times of a product by cuBLAS, as the tables choose, and of the best
    tilings.
    """
    tokens, scheme = len(case.x), case.leaves[0].scheme
    tunes = tilings(case.of, tokens, scheme)[:limit]
    expected = case.calls(None)[0]().clone()
    figures: dict[str, Any] = {
        "cuBLAS": microseconds(case.plain_calls(matrices)),
        "table": microseconds(case.calls(None)),
    }
    compile_launches(lambda: launch_each(case, tunes), lambda _: None)
    times = dict[LinearTune, float]()
    for tune in tunes:
        try:
            if (error := case.error(tune, expected)) > MAX_ERROR:
                figures[f"wrong by {error:.3f}"] = written(tune)
                continue
            times[tune] = microseconds(case.calls(tune))
        except OutOfResources:
            continue
    best = sorted(times, key=times.__getitem__)[:SHOWN]
    return figures | {written(tune): times[tune] for tune in best}


def launch_each(case: Case, tunes: Sequence[LinearTune]) -> None:
    """Launch each tiling once."""
    for tune in tunes:
        try:
            case.calls(tune)[0]()
        except OutOfResources:
            continue


def written(tune: LinearTune) -> str:
    """A tiling as it stands in kernels/quantized_tunes.py."""
    flags = "".join(
        f", {name}=True" for name in ("swapped", "dequantized") if getattr(tune, name)
    )
    return f"LinearTune({', '.join(map(str, tune[:6]))}{flags})"


def try_case(case: Case) -> dict[str, Any]:
    """Returns the error of one small tiling, without a GPU."""
    scheme = case.leaves[0].scheme
    tune = LinearTune(64, 16, 64, 2, 4, 2, dequantized=scheme.group > 0)
    case.residual.zero_()
    with patch.object(kernels, "interpreting", True):
        expected = case.calls(None)[0]().clone()
        return {written(tune): case.error(tune, expected)}


def random_weights(
    scheme: Scheme, of: LayerProduct, device: str
) -> tuple[tuple[Linear, ...], list[Linear]]:
    """Returns copies of a matrix in few bits, and in bfloat16."""
    numbers, copies = of.outputs * of.inputs, (1, 1)
    if device != "cpu":
        copies = (
            max(MIN_COPIES, ceil(8 * ROTATED_BYTES / (scheme.bits * numbers))),
            max(MIN_COPIES, ceil(ROTATED_BYTES / (2 * numbers))),
        )
    sizes, few_bits = (of.outputs, of.inputs), range(copies[0])
    leaves = tuple(random_leaf(scheme, *sizes, device) for _ in few_bits)
    drawn = (torch.randn(sizes, device=device) for _ in range(copies[1]))
    return leaves, [
        Linear(weight=(each / of.inputs**0.5).to(torch.bfloat16), parts=(of.outputs,))
        for each in drawn
    ]


def cells(args: argparse.Namespace) -> Iterator[tuple[Scheme, LayerProduct]]:
    """The schemes and products that are asked for."""
    for name, of in combinations(args.schemes, PRODUCTS):
        small = evolve(of, inputs=256, outputs=64) if args.device == "cpu" else of
        yield SCHEMES[name], small


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure what is not in the result file yet."""
    path = args.folder / f"{args.name}.json"
    results = json.loads(path.read_text("utf-8"))["results"] if path.exists() else {}
    on_gpu = args.device != "cpu"
    for scheme, of in cells(args):
        names = {f"{scheme.name}, {of.name}, {tokens}": tokens for tokens in args.tokens}
        missing = {name: tokens for name, tokens in names.items() if name not in results}
        if not missing:
            continue
        leaves, matrices = random_weights(scheme, of, args.device)
        for name, tokens in missing.items():
            case = Case.of_product(of, leaves, tokens)
            results[name] = (
                measure_case(case, matrices, args.limit) if on_gpu else try_case(case)
            )
            for row, us in results[name].items():
                print(f"{name:28} {us:>10.2f} {row}" if us else row, flush=True)
            write(args.name, results, folder=args.folder)
    return results


if __name__ == "__main__":
    integers = {"type": int, "nargs": "+"}
    options = {
        "--device": "cuda",
        "--schemes": {"nargs": "+", "choices": [*SCHEMES], "default": [*SCHEMES]},
        "--tokens": {**integers, "default": [64, 128, 256, 512]},
        "--limit": {"type": int, "default": 40, "help": "tilings of a product"},
    }
    run("quantized_tunes_gpu", measure, options)
