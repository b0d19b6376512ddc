"""Tilings for products with FP8 in blocks, from measurements on a GPU.

    python -m bench.fp8_blocks_tunes_gpu

Of Qwen3-Next-80B-A3B's sizes: both paths of few tokens' experts, with the shared one,
which all choose; the experts of a layer by the number of tokens, which choose
independently; and the dense products of a layer. Of the first alone, in less than a
minute: `--tokens --dense`. The fastest tilings beside those
of the tables (kernels/experts_tunes.py, kernels/quantized_tunes.py), in microseconds, in
CUDA graphs over copies of the weights; and the floor, the bytes of weights at 4.26 TB/s.
`--device cpu` tries the parts of experts; the dense products need a GPU.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product as combinations
from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor
from triton.runtime.errors import OutOfResources

from bench.gpu_times import microseconds
from bench.results import run
from minfer.kernels import quantized_linear
from minfer.kernels.compiling import compile_launches
from minfer.kernels.experts import add_experts, experts_hit
from minfer.kernels.experts_tunes import (
    FP8_BLOCKS_FEW_TOKENS,
    QUANTIZED_GROUPED_TABLE,
    ROUNDED_GROUPED_TABLE,
    DownTune,
    ExpertsTune,
    FewTokensTune,
    GateUpTune,
    GroupedTune,
    ManyTokensTune,
    tune_of,
)
from minfer.kernels.leaves import FP8_BLOCKS, ChosenExperts, Experts, Linear
from minfer.kernels.linear_tunes import LinearTune
from minfer.kernels.quantized_tunes import tune_of as linear_tune_of

BYTES_PER_US: Final = 4.26e6
EXPERTS, TOP_K, HIDDEN, INTER = 512, 10, 2048, 512
BLOCK: Final = 128
COPIES: Final = 3  # of the weights
DENSE: Final = {  # inputs, outputs
    "in": (2048, 12_288),
    "out": (4096, 2048),
    "gate, up": (2048, 1024),
    "down": (512, 2048),
}
DENSE_COPIES: Final = 24
SHOWN: Final = 6
SHOWN_OF_PATHS: Final = 2  # of each
Call = Callable[[], object]


def leaf(device: str, *shape: int) -> Linear:
    """Returns random weights, of experts or one matrix: [..., outputs, inputs]."""
    numbers = torch.randint(0, 112, shape, device=device, dtype=torch.uint8)
    scales = torch.rand(*shape[:-1], -(-shape[-1] // BLOCK), device=device) / 64
    return Linear(
        weight=numbers.view(torch.float8_e4m3fn),
        scales=scales,
        scheme=FP8_BLOCKS,
        parts=(shape[-2],),
    )


@frozen(eq=False)
class ExpertsCase:
    """Experts of a few layers, with tokens that choose of them."""

    layers: tuple[Experts, ...]
    x: Tensor
    choices: tuple[ChosenExperts, ...]

    @classmethod
    def of(
        cls,
        layers: tuple[Experts, ...],
        tokens: int,
        top_k: int,
        *,
        shared: bool = False,
    ) -> "ExpertsCase":
        """Returns tokens that choose independently. shared: all choose the last expert,
        as the last of theirs.
        """
        device, count = layers[0].down.weight.device, len(layers[0].down.weight)
        hidden = layers[0].down.weight.shape[1]
        choices = list[ChosenExperts]()
        for _ in layers:
            scores = torch.rand(tokens, count, device=device)
            if shared:
                scores[:, -1] = 0
            picked = scores.topk(top_k)
            ids = picked.indices.int()
            if shared:
                ids[:, -1] = count - 1
            choices.append(ChosenExperts(ids, picked.values))
        x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)
        return cls(layers, x, (*choices,))

    def calls(self, tune: ExpertsTune | None) -> list[Call]:
        """The sums of each layer."""
        out = torch.zeros_like(self.x)
        return [
            partial(add_experts, out, self.x, experts, choice, tune)
            for experts, choice in zip(self.layers, self.choices, strict=True)
        ]

    def floor(self) -> float:
        """us by the bytes of the experts that are hit."""
        hit = float(sum(experts_hit(choice) for choice in self.choices))
        down = self.layers[0].down.weight
        return hit / len(self.choices) * 3 * down[0].numel() / BYTES_PER_US


def few_tunes() -> Iterator[FewTokensTune]:
    """Tilings for few tokens: each half beside the table's of the other. A warp has at
    least 512 inputs of a line, 16 a thread.
    """
    gates, downs = FP8_BLOCKS_FEW_TOKENS
    for columns, depth, warps, stages in combinations(
        (1, 2, 4, 8), (512, 1024, 2048), (1, 2), (1, 2)
    ):
        fits = 1024 <= columns * depth // warps <= 4096
        if fits and depth >= 512 * warps and (stages == 1 or depth < HIDDEN):
            yield FewTokensTune(GateUpTune(columns, depth, warps, stages), downs)
    for columns, ahead in combinations((1, 2, 4), (4, 6, 8, 11)):
        if columns * INTER * ahead <= 12_288:
            yield FewTokensTune(gates, DownTune(columns, INTER, 1, ahead))


def grouped_tunes(mean: float) -> Iterator[ManyTokensTune]:
    """Tilings for this number of pairs an expert."""
    few = mean <= 24
    rows = (16, 32) if few else (32, 64, 128)
    group = 1 if few else 8
    for height, cols, depth, warps, stages, swapped in combinations(
        rows, (32, 64, 128), (64, 128), (4, 8), (3, 5), (False, True)
    ):
        lines = 2 * cols
        stage = (lines + 2 * height) * depth
        if stage * stages > 200_000 or (few and cols == 128) or (not few and cols == 32):
            continue
        if swapped and lines < 64 * (warps // 4):
            continue
        gates = GroupedTune(cols, depth, warps, stages, group, swapped)
        downs = GroupedTune(min(2 * cols, 128), depth, warps, stages, group, swapped)
        yield ManyTokensTune(height, gates, downs)
    for height, cols, warps, stages, swapped in combinations(
        (16, 32, 64, 128), (64, 128), (4, 8), (3, 4), (False, True)
    ):
        if few == (height > 32) or (height + 2 * BLOCK) * BLOCK * stages > 220_000:
            continue
        gates = GroupedTune(BLOCK, BLOCK, 8, min(stages, 4), group, swapped)
        downs = GroupedTune(cols, BLOCK, warps, stages, group, swapped)
        yield ManyTokensTune(height, gates, downs, rounded=True)


def linear_tunes(tokens: int) -> Iterator[LinearTune]:
    """Tilings of a dense product."""
    if tokens == 1:
        for columns, depth, warps, stages in combinations(
            (1, 2, 4), (512, 1024, 2048), (1, 2), (1, 2, 4)
        ):
            yield LinearTune(1, columns, depth, 1, warps, stages)
    rows = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
    for columns, depth, splits, warps, stages, swapped in combinations(
        (16, 32, 64, 128), (128, 256), (1, 2, 4), (4,), (3, 5), (False, True)
    ):
        if (columns + 2 * rows) * depth * stages < 200_000 and columns >= 64 * swapped:
            yield LinearTune(rows, columns, depth, splits, warps, stages, swapped)


def time_tilings(
    cases: dict[Any, list[Call]], before: Any, device: str, shown: int = SHOWN
) -> dict[str, float | str]:
    """Returns the fastest tilings with their us, and `before`. Those that a GPU has no
    room for are left out.
    """
    if device == "cpu":
        for calls in [*cases.values()][:1]:
            calls[0]()
        return {}
    compile_launches(lambda: launch_each(cases.values()), lambda _: None)
    times = dict[Any, float]()
    for tune, calls in cases.items():
        try:
            times[tune] = microseconds(calls)
        except OutOfResources:
            continue
    best = sorted(times, key=times.__getitem__)[:shown]
    return {f"{tune}": times[tune] for tune in [*best, before] if tune in times}


def launch_each(cases: Iterable[list[Call]]) -> None:
    """Launch each tiling once."""
    for calls in cases:
        try:
            calls[0]()
        except OutOfResources:
            continue


def experts_sizes(device: str) -> tuple[int, int, int, int]:
    """How many experts there are and are chosen, and the hidden and inner size."""
    return (4, 2, 256, 128) if device == "cpu" else (EXPERTS, TOP_K, HIDDEN, INTER)


def experts_layers(
    device: str, count: int, hidden: int, inter: int
) -> tuple[Experts, ...]:
    """Returns a few layers' experts."""
    return tuple(
        Experts(
            gate_up=leaf(device, count, 2 * inter, hidden),
            down=leaf(device, count, hidden, inter),
        )
        for _ in range(COPIES)
    )


def measure_paths(args: argparse.Namespace) -> dict[str, Any]:
    """The experts of a layer and the shared one by the number of tokens: the fastest of
    each path.
    """
    if not args.paths:
        return {}
    count, top_k, hidden, inter = experts_sizes(args.device)
    layers = experts_layers(args.device, count + 1, hidden, inter)
    rounded = [tune for tune in grouped_tunes(1) if tune.rows == 16 and tune.rounded]
    paths: dict[str, list[ExpertsTune]] = {
        "few": [FP8_BLOCKS_FEW_TOKENS, *few_tunes()],
        "grouped": [QUANTIZED_GROUPED_TABLE[0].tune],
        "rounded": [ROUNDED_GROUPED_TABLE[0].tune, *rounded],
    }
    results = dict[str, Any]()
    for tokens in args.paths:
        case = ExpertsCase.of(layers, tokens, top_k + 1, shared=True)
        figures: dict[str, Any] = {"floor, us": case.floor()}
        for path, tunes in paths.items():
            cases = {tune: case.calls(tune) for tune in tunes}
            times = time_tilings(cases, tunes[0], args.device, SHOWN_OF_PATHS)
            figures |= {f"{path}: {tune}": us for tune, us in times.items()}
        results[f"{tokens} tokens"] = figures
        report(f"paths, {tokens} tokens", figures)
    return results


def measure_experts(args: argparse.Namespace) -> dict[str, Any]:
    """The experts of a layer, by the number of tokens."""
    if not args.tokens:
        return {}
    count, top_k, hidden, inter = experts_sizes(args.device)
    layers = experts_layers(args.device, count, hidden, inter)
    results = dict[str, Any]()
    for tokens in args.tokens:
        case = ExpertsCase.of(layers, tokens, top_k)
        before = tune_of(tokens, top_k, layers[0])
        few = isinstance(before, FewTokensTune)
        tunes = few_tunes() if few else grouped_tunes(tokens * top_k / count)
        cases = {tune: case.calls(tune) for tune in (before, *tunes)}
        figures = time_tilings(cases, before, args.device)
        results[f"{tokens} tokens"] = {"floor, us": case.floor(), **figures}
        report(f"experts, {tokens} tokens", results[f"{tokens} tokens"])
    return results


def measure_dense(args: argparse.Namespace) -> dict[str, Any]:
    """The dense products of a layer."""
    results = dict[str, Any]()
    for (name, (inputs, outputs)), tokens in combinations(DENSE.items(), args.dense):
        leaves = [leaf(args.device, outputs, inputs) for _ in range(DENSE_COPIES)]
        x = torch.randn(tokens, inputs, device=args.device, dtype=torch.bfloat16)
        before = linear_tune_of(x, leaves[0])
        cases: dict[Any, list[Call]] = {
            tune: [partial(quantized_linear.linear, x, each, tune) for each in leaves]
            for tune in (before, *linear_tunes(tokens))
        }
        figures = time_tilings(cases, before, args.device)
        floor = inputs * outputs / BYTES_PER_US
        results[f"{name}, {tokens} tokens"] = {"floor, us": floor, **figures}
        report(f"{name}, {tokens} tokens", results[f"{name}, {tokens} tokens"])
    return results


def report(name: str, figures: dict[str, Any]) -> None:
    """Print a line for each tiling."""
    for tune, us in figures.items():
        print(f"{name:22} {us:9.2f}  {tune}", flush=True)


def measure(args: argparse.Namespace) -> dict[str, Any] | None:
    """Measure paths, experts, then dense products."""
    paths, experts = measure_paths(args), measure_experts(args)
    if args.device == "cpu":
        return None
    return {"paths": paths, "experts": experts, "dense": measure_dense(args)}


if __name__ == "__main__":
    integers = {"type": int, "nargs": "*"}
    options = {
        "--device": "cuda",
        "--paths": {**integers, "default": [1, 4, 8, 12, 16]},
        "--tokens": {**integers, "default": [1, 8, 64, 256, 8192]},
        "--dense": {**integers, "default": [1, 8, 64]},
    }
    run("fp8_blocks_tunes_gpu", measure, options)
