"""Tilings for kernels/linear_tunes.py, from measurements on a GPU.

    python -m bench.linear_tunes_gpu --models phi4 gemma2

For each product of a layer: the fastest of up to 100 tilings beside the table's, and
beside cuBLAS with separate norm and activation, in microseconds, in CUDA graphs over
rotated weights of 220 MB and more. Tilings for tensor cores are compared at 8 tokens, the
fastest of them again at each number of tokens, with as many rows. `--tiny` tries the
script on a CPU.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product as combinations
from math import ceil
from statistics import median
from typing import Any, Final, NamedTuple

import torch
from attrs import evolve, frozen
from torch import Tensor
from triton.runtime.errors import OutOfResources

from bench.gpu_times import call_microseconds
from bench.results import run
from minfer.kernels import fused_linear, plain
from minfer.kernels.activation import gated_mul
from minfer.kernels.compiling import compile_launches
from minfer.kernels.leaves import Linear, Norm
from minfer.kernels.linear_tunes import LinearTune, Product, tune_of
from minfer.kernels.norm import normalise

ROTATED_BYTES: Final = 220e6  # of weights in a graph: more than the L2 cache has
MIN_COPIES: Final = 3  # of a product's weights in a graph, so that launches overlap
TOKENS: Final = (1, 2, 4, 8, 16, 32)
LANE_TOKENS: Final = (1, 2, 4)  # that tilings without tensor cores are tried for
COMPARED_TOKENS: Final = 8
FINALISTS: Final = 5
ROUNDS: Final = 3  # of the finalists
PROCESSORS: Final = 132
SHARED_BYTES: Final = 227 << 10  # of a processor
MAX_WARPS: Final = 64  # of a processor
THREADS: Final = 32  # of a warp
CUBLAS: Final = "cuBLAS"
MAX_ERROR: Final = 0.02  # of products, relative
# Bytes in flight on a processor, at least: a latency of 0.8 us at 4.2 TB/s.
MIN_FLIGHT_BYTES: Final = 25e3
SPLIT_COST: Final = 0.03  # share of time, for each doubling


Call = Callable[[], Tensor]


class Timed(NamedTuple):
    """A tiling, or cuBLAS, and its time."""

    us: float
    tune: LinearTune | None


@frozen
class LayerProduct:
    """A product of a layer."""

    name: str
    kind: Product
    inputs: int
    outputs: int  # rows of the weight

    @property
    def gated(self) -> bool:
        """Whether half of the outputs are gates."""
        return self.kind == "norm_gated"


MODELS: Final = {
    "phi4": (
        LayerProduct("qkv", "norm_linear", 5120, 7680),
        LayerProduct("out", "linear_add", 5120, 5120),
        LayerProduct("gate, up", "norm_gated", 5120, 2 * 17920),
        LayerProduct("down", "linear_add", 17920, 5120),
    ),
    "qwen2.5-7B": (
        LayerProduct("qkv", "norm_linear", 3584, 4608),
        LayerProduct("out", "linear_add", 3584, 3584),
        LayerProduct("gate, up", "norm_gated", 3584, 2 * 18944),
        LayerProduct("down", "linear_add", 18944, 3584),
    ),
    # Gemma 2 9B: norms after the sums, and gelu in a kernel of its own.
    "gemma2": (
        LayerProduct("qkv", "norm_linear", 3584, 8192),
        LayerProduct("out", "linear", 4096, 3584),
        LayerProduct("gate, up", "norm_linear", 3584, 2 * 14336),
        LayerProduct("down", "linear", 14336, 3584),
    ),
    # Qwen3.5 9B: a layer with a gated delta net. Qwen3 8B has all but the first.
    "qwen3.5": (
        LayerProduct("inputs", "norm_linear", 4096, 12288),
        LayerProduct("out", "linear_add", 4096, 4096),
        LayerProduct("gate, up", "norm_gated", 4096, 2 * 12288),
        LayerProduct("down", "linear_add", 12288, 4096),
    ),
}


@frozen
class Tensors:
    """What a product is tried with."""

    of: LayerProduct
    leaves: tuple[Linear, ...]
    norm: Norm
    device: str

    @classmethod
    def of_product(cls, of: LayerProduct) -> "Tensors":
        """Returns random tensors, on the GPU if there is one."""
        device = "cuda" if torch.cuda.is_available() else "cpu"

        def drawn(*sizes: int) -> Tensor:
            return torch.randn(sizes, device=device, dtype=torch.bfloat16) / 64

        copies = max(MIN_COPIES, ceil(ROTATED_BYTES / (2 * of.inputs * of.outputs)))
        if device == "cpu":
            copies = MIN_COPIES
        leaves = (
            Linear(weight=drawn(of.outputs, of.inputs), parts=(of.outputs,))
            for _ in range(copies)
        )
        return cls(of, (*leaves,), Norm(drawn(of.inputs) + 1, 1e-6), device)

    def rows(self, tokens: int) -> tuple[Tensor, Tensor]:
        """x, and a residual stream."""
        columns = self.of.outputs // (1 + self.of.gated)
        x = torch.randn(tokens, self.of.inputs, device=self.device, dtype=torch.bfloat16)
        return x, x.new_zeros(tokens, columns)

    def calls(self, tokens: int, tune: LinearTune | None) -> list[Call]:
        """The product with each copy of the weights; without a tiling, by cuBLAS."""
        x, residual = self.rows(tokens)
        once = partial(self._by_library, x, residual)
        if tune is not None:
            once = partial(self._by_kernel, x, residual, tune)
        return [partial(once, leaf) for leaf in self.leaves]

    def _by_kernel(
        self, x: Tensor, residual: Tensor, tune: LinearTune, leaf: Linear
    ) -> Tensor:
        match self.of.kind:
            case "norm_linear":
                return fused_linear.norm_linear(x, self.norm, leaf, tune)
            case "norm_gated":
                return fused_linear.norm_gated(x, self.norm, leaf, tune=tune)
            case "linear":
                return fused_linear.linear(x, leaf, tune)
            case "linear_add":
                fused_linear.linear_add(residual, x, leaf, tune)
                return residual

    def _by_library(self, x: Tensor, residual: Tensor, leaf: Linear) -> Tensor:
        match self.of.kind:
            case "norm_linear":
                return plain.linear(normalise(x, self.norm), leaf)
            case "norm_gated":
                return gated_mul(plain.linear(normalise(x, self.norm), leaf))
            case "linear":
                return plain.linear(x, leaf)
            case "linear_add":
                plain.linear_add(residual, x, leaf)
                return residual

    def check(self, tokens: int, tune: LinearTune | None) -> None:
        """Raise AssertionError if a tiling's product is not cuBLAS's."""
        x, residual = self.rows(tokens)
        leaf = self.leaves[0]
        expected = self._by_library(x, residual.clone(), leaf)
        out = expected
        if tune is not None:
            out = self._by_kernel(x, residual, tune, leaf)
        error = (out.float() - expected.float()).norm() / expected.float().norm()
        assert error < MAX_ERROR, f"{self.of}, {tokens} tokens, {tune}: {error}"

    def table_tune(self, tokens: int) -> LinearTune | None:
        """What the table has now."""
        x, _ = self.rows(tokens)
        return tune_of(self.of.kind, x, self.leaves[0].weight)


def tensor_core_tunes(of: LayerProduct) -> list[LinearTune]:
    """Tilings for 2 tokens and more, the most promising first: of each shape of a tile at
    most two.
    """
    shapes = dict[tuple[object, ...], list[tuple[float, LinearTune]]]()
    for columns, depth, splits, warps, stages, swapped in combinations(
        (16, 32, 64, 128),
        (64, 128, 256),
        (1, 2, 4, 8),
        (2, 4, 8),
        (3, 4, 5, 6, 8),
        (0, 1),
    ):
        tune = LinearTune(16, columns, depth, splits, warps, stages, bool(swapped))
        if busy := _busy_share(of, tune):
            shape = columns, depth, splits, swapped
            promise = busy - SPLIT_COST * splits.bit_length()
            shapes.setdefault(shape, []).append((promise, tune))
    chosen = list[tuple[float, LinearTune]]()
    for tunes in shapes.values():
        first = max(tunes)
        others = [each for each in tunes if each[1].warps != first[1].warps]
        chosen += [first, *([max(others)] if others else [])]
    return [tune for _, tune in sorted(chosen, reverse=True)]


def _busy_share(of: LayerProduct, tune: LinearTune) -> float:
    """The share of the places for programs that is used, if they run in waves; 0 if the
    tiling is impossible, or cannot be fast.
    """
    lines = tune.columns * (1 + of.gated)
    shared = (lines + tune.rows) * tune.depth * 2 * tune.stages
    programs = ceil(of.outputs / lines) * tune.splits
    loaded = lines * tune.depth / (tune.warps * THREADS)  # by a thread, in a pass
    passes = of.inputs / (tune.depth * tune.splits)
    possible = 32 <= lines <= 128 and shared <= SHARED_BYTES - 2048 and passes >= 4
    if tune.swapped:  # by 64 lines, with groups of four warps
        possible = possible and lines >= 64 and tune.warps >= 4
    if not possible or programs < PROCESSORS - 20 or not 16 <= loaded <= 256:
        return 0.0
    places = PROCESSORS * min(SHARED_BYTES // (shared + 1024), MAX_WARPS // tune.warps)
    flight = min(programs, places) * lines * tune.depth * 2 * (tune.stages - 1)
    if flight < MIN_FLIGHT_BYTES * PROCESSORS:
        return 0.0
    waves = programs / places
    return 1.0 if waves <= 1 else waves / ceil(waves)


def lane_tunes(of: LayerProduct) -> Iterator[LinearTune]:
    """Tilings for single tokens."""
    for columns, depth, warps, stages in combinations(
        (1, 2, 4), (512, 1024, 2048, 4096), (1, 2, 4, 8), (4,)
    ):
        loaded = columns * (1 + of.gated) * depth / (warps * THREADS)
        if depth / warps >= 256 and 16 <= loaded <= 64:
            yield LinearTune(1, columns, depth, 1, warps, stages)


def measured(tensors: Tensors, limit: int) -> dict[int, list[Timed]]:
    """Returns for each number of tokens the times of the best tilings, of the table's,
    and of cuBLAS, the fastest first.
    """
    of = tensors.of
    wide, narrow = tensor_core_tunes(of)[:limit], [*lane_tunes(of)][:limit]
    if tensors.device != "cpu":
        began = time.perf_counter()
        compiled = compile_launches(
            lambda: launch_all(tensors, [*wide, *narrow]), lambda _: None
        )
        print(of, compiled, f"{time.perf_counter() - began:.1f} s", flush=True)
    finalists, results = best(tensors, COMPARED_TOKENS, wide), {}
    for tokens in TOKENS:
        candidates = [None, tensors.table_tune(tokens)]
        if tokens > 1:  # a program has all tokens, so that weights are read once
            fitting = [tune._replace(rows=max(tune.rows, tokens)) for tune in finalists]
            candidates += best(tensors, tokens, fitting)
        if tokens in LANE_TOKENS:
            candidates += best(tensors, tokens, narrow)
        candidates = [*dict.fromkeys(candidates)]
        for tune in candidates:
            tensors.check(tokens, tune)
        times = [
            median(call_microseconds(tensors.calls(tokens, tune)) for _ in range(ROUNDS))
            for tune in candidates
        ]
        results[tokens] = sorted(
            map(Timed, times, candidates), key=lambda timed: timed.us
        )
        print(of.name, tokens, results[tokens][:3], flush=True)
    return results


def chained(
    products: Sequence[Tensors], timed: Sequence[dict[int, list[Timed]]], tokens: int
) -> dict[str, Any]:
    """Returns the tilings with which the products of some layers, one after the other,
    take the least time, and microseconds of a layer: a kernel that is the fastest by
    itself may leave no room for the next to start early. Also those of the table.
    """
    table = [tensors.table_tune(tokens) for tensors in products]

    def layer_us(tunes: Sequence[LinearTune | None]) -> float:
        calls = [
            tensors.calls(tokens, tune)[:MIN_COPIES]
            for tensors, tune in zip(products, tunes, strict=True)
        ]
        layers = [*zip(*calls, strict=True)]
        return call_microseconds([call for layer in layers for call in layer]) * len(
            products
        )

    tunes = [by_tokens[tokens][0].tune for by_tokens in timed]
    for place, by_tokens in enumerate(timed):
        options = [each.tune for each in by_tokens[tokens][:FINALISTS]]
        times = {
            tune: layer_us([*tunes[:place], tune, *tunes[place + 1 :]])
            for tune in dict.fromkeys([*options, table[place]])
        }
        tunes[place] = min(times, key=times.__getitem__)
    names = [tensors.of.name for tensors in products]
    return {
        "best": dict(zip(names, map(written, tunes), strict=True)),
        "us": layer_us(tunes),
        "table": dict(zip(names, map(written, table), strict=True)),
        "table_us": layer_us(table),
        "cublas_us": layer_us([None] * len(products)),
    }


def written(tune: LinearTune | None) -> str:
    """A tiling as text: its numbers in their order."""
    return CUBLAS if tune is None else " ".join(map(str, map(int, tune)))


def launch_all(tensors: Tensors, tunes: Iterable[LinearTune]) -> None:
    """Launch the kernel with each tiling."""
    for tune in tunes:
        tensors.calls(COMPARED_TOKENS if tune.rows > 1 else 1, tune)[0]()


def best(tensors: Tensors, tokens: int, tunes: Iterable[LinearTune]) -> list[LinearTune]:
    """Returns the fastest tilings. Those that the compiler refuses are left out."""
    times = dict[LinearTune, float]()
    for tune in tunes:
        try:
            times[tune] = call_microseconds(tensors.calls(tokens, tune))
        except OutOfResources as error:
            print(tensors.of.name, tune, error, flush=True)
    return sorted(times, key=times.__getitem__)[:FINALISTS]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all products of the models."""
    on_gpu = torch.cuda.is_available()
    results = dict[str, Any]()
    for model in args.models:
        products = [
            Tensors.of_product(tiny(of) if args.tiny else of) for of in MODELS[model]
        ]
        timed = [measured(tensors, args.limit) for tensors in products]
        layers = {n: chained(products, timed, n) for n in TOKENS}
        for tokens, layer in layers.items():
            print(model, tokens, layer, flush=True)
        results[model] = {
            "layers": layers,
            "products": {
                of.name: {
                    tokens: {written(each.tune): each.us for each in best_first}
                    for tokens, best_first in by_tokens.items()
                }
                for of, by_tokens in zip(MODELS[model], timed, strict=True)
            },
        }
    return results | {"card": torch.cuda.get_device_name() if on_gpu else "none"}


def tiny(of: LayerProduct) -> LayerProduct:
    """The product, so small that a CPU runs it: to try this script."""
    return evolve(of, inputs=512, outputs=1024)


if __name__ == "__main__":
    run(
        "linear_tunes_gpu",
        measure,
        {
            "--models": {"nargs": "+", "default": [*MODELS]},
            "--limit": {"type": int, "default": 60, "help": "tilings of each kind"},
            "--tiny": {"action": "store_true"},
        },
    )
