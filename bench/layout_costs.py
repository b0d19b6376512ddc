"""What steps and copies cost in `bench.layouts`: from results of H100s, of which each
part names its file; `SOURCES` says what was not measured.
"""

import json
from functools import cache
from typing import Any, Final

import numpy
from attrs import frozen

from bench.results import RESULTS
from minfer.records.config import EngineConfig
from minfer.records.tiers import HostTier
from minfer.simulation.cost import CostModel

BLOCK: Final = 64  # tokens
GPUS: Final = 8  # of a machine
HOST: Final = 128 * 2**30  # bytes of host memory for each GPU
OTHER: Final = 2e9  # bytes of these on each card for activations and graphs
CARD: Final = 0.9 * 79.6 * 2**30  # bytes of an H100 that an engine takes
CONTEXT: Final = 600  # tokens of the rows whose steps were measured
PROMPT: Final = 8192  # tokens of the prompts whose prefill was measured
ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256)


@frozen
class Shape:
    """A model."""

    weights: float  # bytes
    token: int  # bytes of KV


DENSE: Final = Shape(15.2e9, 57_344)
MOE: Final = Shape(61.1e9, 98_304)


@frozen
class Layout:
    """What the GPUs of a machine do; each engine has `ranks` of them."""

    name: str
    ranks: int = 1
    prefill: int = 0  # engines that prefill, if apart
    host: bool = False  # whether a tier in host memory is under each pool
    budget: int = 2048  # prefill tokens of a step; of an engine that prefills, 8,192
    routing: str = "prefix"
    experts: str = ""  # of the mixture of experts: divided, or whole

    @property
    def shape(self) -> Shape:
        return MOE if self.experts else DENSE


# --- what was measured ------------------------------------------------------------------


@cache
def measured(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))["results"]


def seconds(figure: Any) -> float:
    return float(figure["median"]) / 1e3


@frozen
class Steps:
    """Seconds of decode steps by rows, without their contexts, of the prefill of `PROMPT`
    tokens, and of a position that a prefill token attends to.
    """

    decode: dict[int, float]
    prefill: float
    pair: float
    position: float  # that a row reads

    def model(self, name: str) -> CostModel:
        sizes = [*self.decode]
        rows = [count for count in ROWS if count <= max(sizes)]
        step_seconds = numpy.interp(rows, sizes, [*self.decode.values()])
        mixed, pairs = float(step_seconds[0]), PROMPT * (PROMPT + 1) / 2
        return CostModel(
            name=name,
            decode=tuple(zip(rows, map(float, step_seconds), strict=True)),
            mixed=mixed,
            token=(self.prefill - mixed - self.pair * pairs) / PROMPT,
            context=self.position,
            attention=self.pair,
        )


def position(shape: Shape, ranks: int) -> float:
    """Seconds to read the KV of a token, at the rate of a copy."""
    return shape.token / float(measured("ranks_7B_2")["bandwidth, bytes/s"]) / ranks


def without_context(
    shape: Shape, ranks: int, steps: dict[int, float]
) -> dict[int, float]:
    read = position(shape, ranks) * CONTEXT
    return {rows: took - rows * read for rows, took in steps.items()}


def one_rank() -> Steps:
    figures, tier_figures = measured("ranks_7B"), measured("kv_tiers_gpu")["moving"]
    steps = {rows: seconds(figures[f"1 ranks, {rows} rows"]) for rows in (1, 8, 256)}
    decode = without_context(DENSE, 1, steps)
    # these rows had 1,024 tokens, and output 512
    full = seconds(tier_figures["still, p50"]) - 64 * 1280 * position(DENSE, 1)
    decode = {1: decode[1], 8: decode[8], 64: max(full, decode[8]), 256: decode[256]}
    prefill = seconds(figures["1 ranks, prefill"])
    twice = seconds(measured("kv_host_gpu")["first_token"]["computed"])
    # a prompt twice as long has four times as many pairs
    return Steps(decode, prefill, (twice - 2 * prefill) / PROMPT**2, position(DENSE, 1))


def two_ranks() -> Steps:
    figures = measured("ranks_7B_2")["2 ranks"]
    steps = {rows: seconds(figures[f"decode, {rows} rows"]) for rows in (1, 8, 64, 256)}
    decode, pair = without_context(DENSE, 2, steps), one_rank().pair / 2
    return Steps(decode, seconds(figures["prefill"]), pair, position(DENSE, 2))


def four_ranks() -> Steps:
    """Extrapolated: a quarter of one rank's time, and one and a half times what two ranks
    take beyond half of it, as a ring's share of bytes grows from 1/2 to 3/4.
    """
    single, double = one_rank(), two_ranks()

    def extrapolate(seconds_of_one: float, seconds_of_two: float) -> float:
        return seconds_of_one / 4 + 1.5 * (seconds_of_two - seconds_of_one / 2)

    decode = {
        rows: extrapolate(single.decode[rows], took)
        for rows, took in double.decode.items()
    }
    prefill = extrapolate(single.prefill, double.prefill)
    return Steps(decode, prefill, single.pair / 4, position(DENSE, 4))


def experts(name: str) -> Steps:
    """Of two ranks; pairs by the operations for each, as those of the 7B."""
    figures = measured({"divided": "ranks_moe", "whole": "ranks_moe_by_expert"}[name])
    figures = figures["2 ranks"]
    steps = {rows: seconds(figures[f"decode, {rows} rows"]) for rows in (8, 64)}
    pair = one_rank().pair * (48 * 32) / (28 * 28) / 2
    decode = without_context(MOE, 2, steps)
    return Steps(decode, seconds(figures["prefill"]), pair, position(MOE, 2))


def steps_of(layout: Layout) -> Steps:
    if layout.experts:
        return experts(layout.experts)
    return {1: one_rank, 2: two_ranks, 4: four_ranks}[layout.ranks]()


def block_bytes(layout: Layout) -> float:
    """Of a block, on each rank."""
    return layout.shape.token * BLOCK / layout.ranks


def sent_seconds(layout: Layout) -> float:
    """Of a block that goes from one engine to another, after the first token: measured
    with one rank, and with more, each sends its part.
    """
    figures = measured("disaggregation_gpu")
    idle = figures["parts"]["disaggregated_idle"]["transfer"]
    block_seconds = seconds(idle) / (figures["prompt"] // BLOCK)
    return float(block_seconds * block_bytes(layout) / block_bytes(Layout("")))


def host_tier(layout: Layout) -> HostTier:
    """Costs as pages were measured; a load of any size costs 0.29 ms."""
    rate = float(measured("kv_host_gpu")["copies"]["in"]["pages"]["median"]) * 1e9
    return HostTier(
        pages=int(HOST / block_bytes(layout)),
        load_seconds=0.29e-3,
        page_seconds=block_bytes(layout) / rate,
        token_seconds=steps_of(layout).prefill / PROMPT,
    )


def config_of(layout: Layout, budget: int) -> EngineConfig:
    shape, ranks = layout.shape, layout.ranks
    free = CARD - OTHER - shape.weights / ranks
    return EngineConfig(
        num_blocks=int(free / block_bytes(layout)),
        block_size=BLOCK,
        max_model_len=131_072,
        max_num_seqs=64 if layout.experts else 256,
        max_num_batched_tokens=budget,
        host=host_tier(layout) if layout.host else None,
    )


SOURCES: Final = {
    "TP 1": "ranks_7B (1, 8, 256 rows, prefill), kv_tiers_gpu (64 rows)",
    "TP 2": "ranks_7B_2",
    "TP 4": "not measured: a quarter of TP 1, and 1.5 times what TP 2 adds to its half",
    "TP 8": "left out: 28 heads do not divide by it",
    "attention of a prefill token": "kv_host_gpu (16,384 tokens) less ranks_7B; over two "
    "and four ranks divided by them",
    "context of a row": "its bytes at the bandwidth in ranks_7B_2",
    "KV from engine to engine": "disaggregation_gpu, on one machine; over TP 2 and TP 4 "
    "each rank sends its part as fast",
    "host memory": "kv_host_gpu, 128 GiB for each GPU, all GPUs of a machine as fast as "
    "one, which is not measured",
    "disk": "left out: a block takes 2.2 ms to read (kv_disk_gpu) and 1.5 ms to compute",
    "mixture of experts": "ranks_moe, ranks_moe_by_expert: 8 and 64 rows, prefill; "
    "attention by its operations beside the 7B's; not more than 64 rows",
    "pool": "0.9 of 79.6 GiB, less weights and 2 GB on each card",
}


def assumed() -> dict[str, Any]:
    """Costs and sizes in use, and what of them is not measured."""
    by_ranks = {1: one_rank(), 2: two_ranks(), 4: four_ranks()}
    return {
        "steps": {
            f"TP {ranks}": {
                "decode_ms": {
                    rows: 1e3 * took for rows, took in by_ranks[ranks].decode.items()
                },
                "prefill_8192_ms": 1e3 * by_ranks[ranks].prefill,
                "blocks": config_of(Layout("", ranks), 2048).num_blocks,
            }
            for ranks in by_ranks
        },
        "sent_block_ms": 1e3 * sent_seconds(Layout("")),
        "host_block_ms": 1e3 * host_tier(Layout("")).page_seconds,
        "sources": SOURCES,
    }
