"""The mechanisms: for each, the settings of an engine that has it and of one that lacks
it, the load of both, and why it gains or loses.
"""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from attrs import evolve, frozen

from bench.ablation.loads import Load, Sizes, alone, mixed, texts

Options = Mapping[str, Any]
GPU: Final = "cuda"
NONE: Final[Options] = MappingProxyType({})


@frozen(kw_only=True)
class Place:
    """Where the rows are measured."""

    device: str
    common: Options  # of all engines
    sizes: Sizes  # of the mixed load
    context: int  # the longest, in tokens
    pool: int  # tokens that the KV cache holds
    long: int  # tokens of the long prompt
    # Seconds in which a new engine captures graphs while it is idle, beside the other.
    settles: float
    prompts: tuple[tuple[int, ...], ...]  # of real text, for drafts; none on a GPU

    def pages(self, size: int) -> Options:
        """A pool of blocks of so many tokens."""
        return {"block_size": size, "num_gpu_blocks_override": self.pool // size}


@frozen(kw_only=True)
class Row:
    """A mechanism."""

    name: str
    why: str
    load: Load
    having: Options = (
        NONE  # settings with the mechanism, that differ from the common ones
    )
    lacking: Options = NONE  # and without it
    recomputed: bool = False  # without it, each token is a request over the whole text
    unsplit: bool = False  # without it, each context is read by one program


def rows_of(place: Place) -> list[Row]:
    """The rows that make sense in a place."""
    load = partial(mixed, place.sizes)
    sizes = evolve(place.sizes, requests=place.sizes.requests // 4)
    few, (fewest, most) = partial(mixed, sizes), sizes.output
    brief = fewest // 4, most // 4
    rows = [
        Row(
            name="nothing",
            why="both engines have the same settings",
            load=load,
            lacking={"max_num_seqs": place.common["max_num_seqs"]},
        ),
        Row(
            name="KV cache",
            why="without it, each token costs a prefill of the whole text before it",
            load=partial(mixed, evolve(sizes, output=brief)),
            lacking={"enable_prefix_caching": False},
            recomputed=True,
        ),
        Row(
            name="paging",
            why=f"whole contexts of {place.context} tokens: the pool holds "
            f"{place.pool // place.context} sequences, and no prefix is shared",
            load=load,
            lacking=place.pages(place.context),
        ),
        Row(
            name="batching",
            why="one sequence at a time: each step reads all weights for one token",
            load=few,
            lacking={"max_num_seqs": 1},
        ),
        Row(
            name="continuous batching",
            why="batches of 8 run until their last sequence ends, and arrivals wait",
            load=load,
            lacking={"scheduling_policy": "static"},
        ),
        Row(
            name="chunked prefill",
            why="a long prompt in one step: fewer steps, but all running sequences wait",
            load=load,
            lacking={"max_num_batched_tokens": place.context},
        ),
        Row(
            name="prefix cache",
            why=f"the first {place.sizes.prefix} tokens are shared, and computed again",
            load=load,
            lacking={"enable_prefix_caching": False},
        ),
        Row(
            name="a second step in flight",
            why="the device waits while the host plans each step and reads its tokens",
            load=load,
            lacking={"steps_in_flight": 1},
        ),
        Row(
            name="a third step in flight",
            why="two hide the host already; a third only delays admission",
            load=load,
            having={"steps_in_flight": 3},
        ),
    ]
    if place.device == GPU:
        rows += _only_gpu(place, load)
    if place.prompts:
        ngram = {"method": "ngram", "num_speculative_tokens": 4}
        rows.append(
            Row(
                name="drafts by lookups",
                why="text that repeats itself; verifying costs more where a step is "
                "limited by multiplications, as on a CPU",
                load=partial(texts, place.prompts, 64),
                having={"speculative_config": ngram},
            )
        )
    return rows + _levels(place, load)


def _only_gpu(place: Place, load: Load) -> list[Row]:
    return [
        Row(
            name="CUDA graphs",
            why="each step launches hundreds of kernels, one after the other",
            load=load,
            lacking={"enforce_eager": True},
        ),
        Row(
            name="Flash-Decoding",
            why=f"one context of {place.long} tokens, read by as many programs as there "
            "are key heads: most of the GPU is idle",
            load=partial(alone, place.long, 64),
            unsplit=True,
        ),
    ]


def _levels(place: Place, load: Load) -> list[Row]:
    """Levels of quantization: the same load with fewer bytes."""
    weights = "weights of fewer bytes, which decoding reads in each step"
    cache = "a KV cache of fewer bytes; contexts here are short beside the weights"
    if place.device != GPU:
        cache = "half of the memory; each step restores whole contexts to float32"
    levels = ["int8", "int4"] if place.device != GPU else ["fp8", "int8", "int4"]
    matrices = [
        Row(name=f"{one} weights", why=weights, load=load, having={"quantization": one})
        for one in levels
    ]
    return matrices + [
        Row(name=f"{one} KV", why=cache, load=load, having={"kv_cache_dtype": one})
        for one in ("fp8", "int8_per_token_head")
    ]
