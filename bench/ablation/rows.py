"""The mechanisms: for each, the settings of an engine that has it and of one that lacks
it, the load of both, and why it gains or loses.
"""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from attrs import evolve, field, frozen

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
        """A pool of blocks of `size` tokens."""
        return {"block_size": size, "num_gpu_blocks_override": self.pool // size}


@frozen
class Row:
    """A mechanism, and the settings of both engines that differ from the common ones."""

    name: str
    why: str
    lacking: Options = NONE  # without the mechanism
    load: Load = field(kw_only=True)
    having: Options = field(default=NONE, kw_only=True)  # with it
    # Without it, each token is a request over the whole text.
    recomputed: bool = field(default=False, kw_only=True)
    # Without it, each context is read by one program.
    unsplit: bool = field(default=False, kw_only=True)


def rows_of(place: Place) -> list[Row]:
    """The rows that make sense in a place."""
    row = partial(Row, load=partial(mixed, place.sizes))
    sizes = evolve(place.sizes, requests=place.sizes.requests // 4)
    few_requests, (min_output, max_output) = partial(mixed, sizes), sizes.output
    brief = min_output // 4, max_output // 4
    rows = [
        row(
            "nothing",
            "both engines have the same settings",
            {"max_num_seqs": place.common["max_num_seqs"]},
        ),
        row(
            "KV cache",
            "without it, each token costs a prefill of the whole text before it",
            {"enable_prefix_caching": False},
            load=partial(mixed, evolve(sizes, output=brief)),
            recomputed=True,
        ),
        row(
            "paging",
            f"whole contexts of {place.context} tokens: the pool holds "
            f"{place.pool // place.context} sequences, and no prefix is shared",
            place.pages(place.context),
        ),
        row(
            "batching",
            "one sequence at a time: each step reads all weights for one token",
            {"max_num_seqs": 1},
            load=few_requests,
        ),
        row(
            "continuous batching",
            "batches of 8 run until their last sequence ends, and arrivals wait",
            {"scheduling_policy": "static"},
        ),
        row(
            "chunked prefill",
            "a long prompt in one step: fewer steps, but all running sequences wait",
            {"max_num_batched_tokens": place.context},
        ),
        row(
            "prefix cache",
            f"the first {place.sizes.prefix} tokens are shared, and computed again",
            {"enable_prefix_caching": False},
        ),
        row(
            "a second step in flight",
            "the device waits while the host plans each step and reads its tokens",
            {"steps_in_flight": 1},
        ),
        row(
            "a third step in flight",
            "two hide the host already; a third only delays admission",
            having={"steps_in_flight": 3},
        ),
    ]
    levels = ["int8", "int4"]
    cache = "half of the memory; each step dequantizes whole contexts to float32"
    if place.device == GPU:
        levels = ["fp8", *levels]
        cache = "a KV cache of fewer bytes; contexts here are short beside the weights"
        rows += [
            row(
                "CUDA graphs",
                "each step launches hundreds of kernels, one after the other",
                {"enforce_eager": True},
            ),
            row(
                "Flash-Decoding",
                f"one context of {place.long} tokens, read by as many programs as there "
                "are key heads: most of the GPU is idle",
                load=partial(alone, place.long, 64),
                unsplit=True,
            ),
        ]
    if place.prompts:
        rows.append(
            row(
                "drafts by lookups",
                "text that repeats itself; verifying costs more where a step is limited "
                "by multiplications, as on a CPU",
                load=partial(texts, place.prompts, 64),
                having={
                    "speculative_config": {
                        "method": "ngram",
                        "num_speculative_tokens": 4,
                    }
                },
            )
        )
    weights = "weights of fewer bytes, which decoding reads in each step"
    rows += [
        row(f"{level} weights", weights, having={"quantization": level})
        for level in levels
    ]
    return rows + [
        row(f"{dtype} KV", cache, having={"kv_cache_dtype": dtype})
        for dtype in ("fp8", "int8_per_token_head")
    ]
