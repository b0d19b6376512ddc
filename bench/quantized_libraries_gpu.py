"""Products with quantized matrices on a GPU, beside other libraries'.

    python -m bench.quantized_libraries_gpu

For each scheme that minfer serves, Qwen2.5-7B's products for 1 to 2,048 rows, in
microseconds, in CUDA graphs over rotated weights: minfer's, cuBLAS's in bfloat16, torch's
in FP8 with blocks, and humming's and quack's where they are installed. Activations are
rounded within the time, where a scheme rounds them; norms, gates and additions, which
minfer's kernels do too, are left out. humming is measured as it is, and with
`use_batch_invariant`, without which its sums are added in any order. And gpt-oss-20b's
experts in MXFP4: minfer's whole layer, and humming's two products alone, of tokens that
are sorted already. `error` is the first result's, relative to the product in float32.
What the result file has is not measured again. `--device cpu` tries minfer's part, with
TRITON_INTERPRET=1.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product as combinations
from math import ceil
from typing import Any, Final, TypeVar
from unittest.mock import patch

import torch
from attrs import evolve, frozen
from torch import Tensor

from bench.gpu_times import call_microseconds, microseconds
from bench.quantized_tunes_gpu import MIN_COPIES, PRODUCTS, ROTATED_BYTES, LayerProduct
from bench.results import run, write
from minfer import kernels
from minfer.kernels import quantized, quantized_linear
from minfer.kernels.compiling import compile_launches
from minfer.kernels.experts import add_experts
from minfer.kernels.leaves import (
    FP8,
    FP8_BLOCKS,
    INT8,
    MXFP4,
    PLAIN,
    ChosenExperts,
    Experts,
    Linear,
    Scheme,
    int4,
)
from minfer.kernels.quantized_kernels import round_groups

SCHEMES: Final = {
    "int4": int4(128),
    "int4_zeros": int4(128, zeros=True),
    "int8": INT8,
    "fp8": FP8,
    "fp8_blocks": FP8_BLOCKS,
    "mxfp4": MXFP4,
}
# humming's names of the weights and of the activations.
HUMMING: Final[dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "int4": ({"dtype": "uint4", "group_size": 128}, {}),
    "int4_zeros": ({"dtype": "uint4", "group_size": 128, "has_zero_point": True}, {}),
    "int8": ({"dtype": "int8"}, {"dtype": "int8", "quant_mode": "dynamic_token"}),
    "fp8": (
        {"dtype": "float8e4m3"},
        {"dtype": "float8e4m3", "quant_mode": "dynamic_token"},
    ),
    "fp8_blocks": (
        {"dtype": "float8e4m3", "group_size": 128, "group_size_n": 128},
        {"dtype": "float8e4m3", "group_size": 128, "quant_mode": "dynamic_group"},
    ),
    "mxfp4": (
        {"dtype": "float4e2m1", "group_size": 32, "scale_dtype": "float8e8m0"},
        {},
    ),
}
QUACK: Final = {"int4": "int4", "int4_zeros": "int4awq"}
BLOCK: Final = 128  # of FP8's scales
MOST: Final = 1 << 30
EXPERTS, TOP_K, WIDTH = 32, 4, 2880  # gpt-oss-20b
MAX_ERROR: Final = 0.2  # rounding to 4 bits makes 0.1
Call = Callable[[], Tensor]
Prepared = Callable[[Tensor], list[Call]]
Figures = Iterator[tuple[int, str, dict[str, Any]]]  # by rows and library
T = TypeVar("T")


@frozen
class Matrix:
    """A matrix that each library stores in its own form, several times."""

    scheme: str
    weight: Tensor  # [outputs, inputs] float32, or of experts
    rows: tuple[int, ...]  # that it is multiplied with

    @property
    def copies(self) -> range:
        """As many as a graph rotates."""
        if not self.weight.is_cuda:
            return range(1)
        stored = self.weight.numel() * (SCHEMES[self.scheme].bits or 16) / 8
        return range(max(MIN_COPIES, ceil(ROTATED_BYTES / stored)))


def of_minfer(matrix: Matrix) -> Prepared:
    """minfer's product, as a layer without a norm calls it."""
    scheme = SCHEMES[matrix.scheme]
    leaf = quantized_linear.prepare(quantized_leaf(scheme, matrix.weight))
    leaves = [copied(leaf) for _ in matrix.copies]
    return lambda x: [partial(quantized_linear.linear, x, each) for each in leaves]


def quantized_leaf(scheme: Scheme, weight: Tensor) -> Linear:
    """Returns a leaf of a matrix, or of the matrices of experts."""
    parts = (weight.shape[-2],)
    if scheme is PLAIN:
        return Linear(weight=weight.to(torch.bfloat16), parts=parts)
    stored = quantized.quantize(weight, scheme, torch.bfloat16)
    return Linear(**stored._asdict(), scheme=scheme, parts=parts)


def copied(leaf: Linear) -> Linear:
    """Returns the leaf with a weight of its own; scales are small beside it."""
    return evolve(leaf, weight=leaf.weight.clone())


def of_cublas(matrix: Matrix) -> Prepared:
    """The product in bfloat16."""
    count = max(1, round(len(matrix.copies) * SCHEMES[matrix.scheme].bits / 16))
    count = max(count, min(MIN_COPIES, len(matrix.copies)))
    weights = [matrix.weight.to(torch.bfloat16) for _ in range(count)]
    return lambda x: [
        partial(torch.nn.functional.linear, x, each.to(x.dtype)) for each in weights
    ]


def of_torch(matrix: Matrix) -> Prepared:
    """torch's product in FP8 with blocks."""
    leaf = quantized_leaf(FP8_BLOCKS, matrix.weight)
    blocks = leaf.scaled[::BLOCK].contiguous()  # one row for each block of outputs
    blocks = torch.nn.functional.pad(blocks, (0, -blocks.shape[1] % 4))
    weights = [leaf.weight.clone() for _ in matrix.copies]
    recipes: Any = torch.nn.functional.ScalingType  # untyped

    def product(x: Tensor, weight: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % 4))
        numbers, scales = round_groups(padded, torch.float8_e4m3fn, BLOCK)
        out = torch.nn.functional.scaled_mm(
            numbers,
            weight.t(),
            scales.t().contiguous().t(),
            recipes.BlockWise1x128,
            blocks.t(),
            recipes.BlockWise128x128,
            output_dtype=x.dtype,
        )
        return out[: len(x)]

    return lambda x: [partial(product, x, weight) for weight in weights]


def of_humming(matrix: Matrix, same_bits: bool) -> Prepared:
    """humming's product: tiles of its own table for each number of rows."""
    humming = humming_product(matrix, same_bits, "dense", 1)
    layer, names = humming.layer, ("weight_scale", "zero_point", "weight_scale_2")
    shared = {name: getattr(layer, name, None) for name in names}
    weights = [layer.weight.detach().clone() for _ in matrix.copies]
    locks = [torch.zeros_like(layer.locks) for _ in matrix.copies]

    def product(x: Tensor, weight: Tensor, own_locks: Tensor) -> Tensor:
        out: Tensor = humming.forward(
            layer.humming_config,
            inputs=x,
            weight=weight,
            locks=own_locks,
            compute_config=humming.compute,
            tuning_config=humming.tuning,
            **shared,
        )
        return out

    return lambda x: [
        partial(product, x, *each) for each in zip(weights, locks, strict=True)
    ]


@frozen
class HummingProduct:
    """humming's product with a matrix, and what it is called with."""

    forward: Callable[..., Tensor]
    layer: Any  # with the matrix
    compute: dict[str, Any]  # how it computes
    tuning: list[Any]  # the tiles of each number of rows


def humming_product(
    matrix: Matrix, same_bits: bool, kind: str, factor: int
) -> HummingProduct:
    """Returns humming's product, whose kernels are compiled. `factor`: rows of a product
    for each row that is asked for.
    """
    # A library that is not installed with minfer.
    from humming.forward import humming_forward  # type: ignore[import-not-found]
    from humming.layer import HummingLayer  # type: ignore[import-not-found]

    weights, activations = HUMMING[matrix.scheme]
    layer = HummingLayer(
        shape_n=matrix.weight.shape[-2],
        shape_k=matrix.weight.shape[-1],
        weight_config=dict(weights),
        input_config=dict(activations),
        num_experts=len(matrix.weight) if matrix.weight.dim() == 3 else None,
        torch_dtype=torch.bfloat16,
    ).cuda()
    layer.load_from_unquantized(matrix.weight.to(torch.bfloat16))
    layer.transform()
    rows = [factor * count for count in matrix.rows]
    chosen = humming_kernels(layer.humming_config, rows, same_bits, kind)
    return HummingProduct(humming_forward, layer, *chosen)


def humming_kernels(
    config: Any, rows: Sequence[int], same_bits: bool, kind: str
) -> tuple[dict[str, Any], list[Any]]:
    """Compiles humming's kernels of a layer for these numbers of rows; returns how it
    computes, and the tiles of each number of rows.
    """
    # As above.
    from humming.kernel.humming import HummingKernel  # type: ignore[import-not-found]
    from humming.tune import get_heuristics_config  # type: ignore[import-not-found]

    tiles = partial(
        get_heuristics_config, config, use_batch_invariant=same_bits, gemm_type=kind
    )
    edges = [0, *rows[:-1], MOST]
    tuning = [
        [first, last, tiles(shape_m=count)]
        for first, last, count in zip(edges[:-1], edges[1:], rows, strict=True)
    ]
    compute = {"gemm_type": kind, "use_batch_invariant": same_bits}
    texts = (json.dumps(each) for each in (compute, tuning))
    HummingKernel.prepare_kernels(config.to_str(), *texts)
    return compute, tuning


def compile_humming(schemes: Sequence[str], rows: Sequence[int]) -> None:
    """Compile humming's kernels of all products at once, into its cache on disk."""
    # As above.
    from humming.schema import (  # type: ignore[import-not-found]
        BaseInputSchema,
        BaseWeightSchema,
    )
    from humming.transform import (  # type: ignore[import-not-found]
        prepare_layer_config,
    )

    def compile_one(case: tuple[str, LayerProduct, bool]) -> object:
        scheme, of, same_bits = case
        weights, activations = HUMMING[scheme]
        config = prepare_layer_config(
            shape_n=of.outputs,
            shape_k=of.inputs,
            weight_schema=BaseWeightSchema.from_config(
                {"quant_method": "humming", **weights}
            ),
            input_schema=BaseInputSchema.from_config(
                {"quant_method": "humming", "dtype": "bfloat16", **activations}
            ),
            torch_dtype=torch.bfloat16,
        )
        return attempt(partial(humming_kernels, config, rows, same_bits, "dense"))

    began, cases = time.perf_counter(), [*combinations(schemes, PRODUCTS, (False, True))]
    with ThreadPoolExecutor() as pool:
        failed = {
            found for found in pool.map(compile_one, cases) if isinstance(found, str)
        }
    seconds = time.perf_counter() - began
    print(f"humming: {len(rows) * len(cases)} kernels in {seconds:.1f} s", *failed)


def compile_minfer(schemes: Sequence[str], rows: Sequence[int]) -> None:
    """Compile minfer's kernels of all products at once."""

    def launch_all() -> None:
        for scheme, of, count in combinations(schemes, PRODUCTS, rows):
            x = torch.empty(count, of.inputs, device="cuda", dtype=torch.bfloat16)
            quantized_linear.linear(x, empty_leaf(SCHEMES[scheme], of))

    print("minfer:", compile_launches(launch_all, lambda _: None), flush=True)


def empty_leaf(scheme: Scheme, of: LayerProduct) -> Linear:
    """Returns a matrix whose memory is not written."""
    groups = scheme.groups(of.inputs)
    make = partial(torch.empty, device="cuda")
    scales = getattr(torch, scheme.scales) if scheme.scales else torch.bfloat16
    return Linear(
        weight=make(
            of.outputs, of.inputs // scheme.numbers, dtype=getattr(torch, scheme.storage)
        ),
        scheme=scheme,
        scales=make(of.outputs, groups, dtype=scales),
        zeros=make(of.outputs, groups, dtype=torch.uint8) if scheme.zeros else None,
        parts=(of.outputs,),
    )


def of_quack(matrix: Matrix) -> Prepared:
    """quack's product of 4 bits, in its own form."""
    # As above.
    from quack.gemm_w4 import gemm_w4a16  # type: ignore[import-not-found]
    from quack.operand_transform.formats import (  # type: ignore[import-not-found]
        decode_format,
    )

    form = decode_format(QUACK[matrix.scheme])
    numbers, scales = form.prepare(*form.quantize_reference(matrix.weight))
    blobs = [numbers.clone() for _ in matrix.copies]
    once = partial(gemm_w4a16, sf=scales, wformat=QUACK[matrix.scheme])
    return lambda x: [partial(once, x, blob) for blob in blobs]


LIBRARIES: Final[dict[str, Callable[[Matrix], Prepared]]] = {
    "minfer": of_minfer,
    "bfloat16": of_cublas,
    "torch": of_torch,
    "humming": partial(of_humming, same_bits=False),
    "humming, same bits": partial(of_humming, same_bits=True),
    "quack": of_quack,
}
# The only schemes that these libraries are measured with.
ONLY: Final = {"torch": ("fp8_blocks",), "quack": tuple(QUACK)}


def measure_matrix(matrix: Matrix, libraries: Sequence[str]) -> Figures:
    """Yields figures of each number of rows and library."""
    prepared = dict[str, Prepared]()
    for name in libraries:
        if matrix.scheme not in ONLY.get(name, SCHEMES):
            continue
        product = attempt(partial(LIBRARIES[name], matrix))
        if isinstance(product, str):
            yield matrix.rows[0], name, {"failed": product}
        else:
            prepared[name] = product
    for rows in matrix.rows:
        x = torch.randn(rows, matrix.weight.shape[1], device=matrix.weight.device)
        expected = x @ matrix.weight.t()
        if x.is_cuda:
            x = x.to(torch.bfloat16)
        for name, product in prepared.items():
            found = attempt(partial(times_of, product, x, expected))
            yield rows, name, {"failed": found} if isinstance(found, str) else found


def attempt(call: Callable[[], T]) -> T | str:
    """Returns what a call returns, or why it fails."""
    try:
        return call()
    except Exception as failure:  # libraries have their own
        return f"{type(failure).__name__}: {failure}".partition("\n")[0][:120]


def times_of(product: Prepared, x: Tensor, expected: Tensor) -> dict[str, Any]:
    """Returns the time and the error of a product."""
    calls = product(x)
    error = float((calls[0]().float() - expected).norm() / expected.norm())
    figures: dict[str, Any] = {"us": call_microseconds(calls), "error": error}
    return figures if error < MAX_ERROR else figures | {"failed": "wrong"}


def measure_experts(rows: tuple[int, ...]) -> Figures:
    """Yields figures of gpt-oss-20b's experts: whole layers of minfer in MXFP4 and in
    bfloat16, and humming's two products.
    """
    sizes = (2 * WIDTH, WIDTH), (WIDTH, WIDTH)
    weights = [
        torch.randn(EXPERTS, *size, device="cuda") / size[1] ** 0.5 for size in sizes
    ]
    for name, scheme in (("minfer", MXFP4), ("minfer, bfloat16", PLAIN)):
        leaves = [quantized_leaf(scheme, weight) for weight in weights]
        layers = [
            Experts(
                gate_up=copied(leaves[0]), down=copied(leaves[1]), activation="clamped"
            )
            for _ in range(MIN_COPIES)
        ]
        for tokens in rows:
            picked = torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K)
            choice = ChosenExperts(picked.indices.int(), picked.values)
            x = torch.randn(tokens, WIDTH, device="cuda", dtype=torch.bfloat16)
            out = torch.zeros_like(x)
            calls = [partial(add_experts, out, x, layer, choice) for layer in layers]
            yield tokens, name, {"us": microseconds(calls)}
    for same_bits in (False, True):
        name = "humming, same bits" if same_bits else "humming"
        found = attempt(partial(humming_experts, weights, rows, same_bits))
        if isinstance(found, str):
            yield rows[0], name, {"failed": found}
        else:
            for tokens, us in found.items():
                yield tokens, name, {"us": us}


def humming_experts(
    weights: Sequence[Tensor], rows: tuple[int, ...], same_bits: bool
) -> dict[int, float]:
    """Returns us of humming's products with gates and with outputs together, of rows
    that are sorted by expert.
    """
    kind = "grouped_contiguous"
    products = [
        humming_product(Matrix("mxfp4", weight, rows), same_bits, kind, TOP_K)
        for weight in weights
    ]
    times = dict[int, float]()
    for tokens in rows:
        picked = torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K).indices
        counts = picked.flatten().bincount(minlength=EXPERTS)
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        x = torch.randn(tokens * TOP_K, WIDTH, device="cuda", dtype=torch.bfloat16)
        calls = [
            partial(
                humming.layer,
                x,
                expert_layout=offsets,
                compute_config=humming.compute,
                tuning_config=humming.tuning,
            )
            for humming in products
        ]
        # Each layer's weights are larger than the L2 cache.
        times[tokens] = len(calls) * microseconds(calls)
    return times


def measure_random(
    scheme: str, of: LayerProduct, args: argparse.Namespace, rows: tuple[int, ...]
) -> Figures:
    """Yields figures of a matrix whose products are about as large as the rows."""
    outputs, inputs = (128, 256) if args.device == "cpu" else (of.outputs, of.inputs)
    drawn = torch.randn(outputs, inputs, device=args.device)
    return measure_matrix(Matrix(scheme, drawn / inputs**0.5, rows), args.libraries)


def report(cell: str, name: str, figures: dict[str, Any]) -> None:
    """Print a line."""
    us, error = figures.get("us", float("nan")), figures.get("error", float("nan"))
    why = figures.get("failed", "")
    print(f"{cell:30} {name:20} {us:10.2f} us  error {error:.3f}  {why}", flush=True)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure what is not in the result file yet."""
    path = args.folder / f"{args.name}.json"
    results = json.loads(path.read_text("utf-8"))["results"] if path.exists() else {}
    rows, on_cpu = tuple(sorted(args.rows)), args.device == "cpu"
    if not on_cpu:
        compile_minfer(args.schemes, rows)
        if "humming" in args.libraries:
            print(attempt(partial(compile_humming, args.schemes, rows)) or "", flush=True)
    parts: dict[str, Callable[[], Figures]] = {
        f"{scheme}, {of.name}": partial(measure_random, scheme, of, args, rows)
        for scheme in args.schemes
        for of in PRODUCTS
    }
    if args.experts and not on_cpu:
        parts["experts in mxfp4"] = partial(measure_experts, rows)
    for part, measured in parts.items():
        if part in results:
            continue
        figures = dict[str, Any]()
        with patch.object(kernels, "interpreting", on_cpu):
            for count, name, found in measured():
                figures.setdefault(f"{count} rows", {})[name] = found
                report(f"{part}, {count} rows", name, found)
        results[part] = figures
        write(args.name, results, folder=args.folder)
    return results


if __name__ == "__main__":
    options = {
        "--device": "cuda",
        "--schemes": {"nargs": "*", "choices": [*SCHEMES], "default": [*SCHEMES]},
        "--libraries": {"nargs": "+", "choices": [*LIBRARIES], "default": [*LIBRARIES]},
        "--rows": {"nargs": "+", "type": int, "default": [1, 8, 64, 256, 2048]},
        "--experts": {
            "action": argparse.BooleanOptionalAction,
            "default": True,
            "help": "products of experts too",
        },
    }
    run("quantized_libraries_gpu", measure, options)
