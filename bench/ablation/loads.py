"""The loads of the ablation, and what one run of a load measures."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

import numpy
from attrs import frozen

from minfer import AsyncLLM, SamplingParams

IDS: Final = range(10, 2000)  # tokens that every model has


@frozen(kw_only=True)
class Sizes:
    """How large a load is: numbers of tokens, unless said."""

    requests: int  # a number of requests
    prefix: int  # that all prompts share
    own: tuple[int, int]  # of a prompt alone: the fewest and the most
    long: int  # of every eighth prompt alone
    output: tuple[int, int]


@frozen(kw_only=True)
class Work:
    """A request, and when it arrives in seconds after the start."""

    prompt: tuple[int, ...]
    output: int
    at: float


@frozen(kw_only=True)
class Run:
    """What a run of a load took."""

    throughput: float  # output tokens a second, prefill included
    ttft: float  # seconds from arrival to the first token, median
    itl: float  # seconds between tokens of one request, median
    itl_p99: float


Load = Callable[[random.Random, float], list[Work]]  # of a seed, and seconds of arrivals


def mixed(sizes: Sizes, rng: random.Random, seconds: float) -> list[Work]:
    """Prompts of many lengths that begin alike, and arrive at random times within
    `seconds`.
    """
    shapes = random.Random(0)  # the same lengths in each run
    prefix = _tokens(rng, sizes.prefix)
    times = sorted(shapes.uniform(0, seconds) for _ in range(sizes.requests))
    work = []
    for number, arrival in enumerate(times):
        length = sizes.long if number % 8 == 7 else shapes.randint(*sizes.own)
        prompt = prefix + _tokens(rng, length)
        work.append(Work(prompt=prompt, output=shapes.randint(*sizes.output), at=arrival))
    return work


def alone(inputs: int, output: int, rng: random.Random, _seconds: float) -> list[Work]:
    """One request."""
    return [Work(prompt=_tokens(rng, inputs), output=output, at=0)]


def texts(
    prompts: Sequence[Sequence[int]], output: int, rng: random.Random, seconds: float
) -> list[Work]:
    """Real text, a sample of these prompts in another order each time."""
    times = sorted(rng.uniform(0, seconds) for _ in prompts)
    chosen = rng.sample(list(prompts), len(prompts))
    return [
        Work(prompt=tuple(prompt), output=output, at=arrival)
        for prompt, arrival in zip(chosen, times, strict=True)
    ]


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.choices(IDS, k=count))


def run(llm: AsyncLLM, work: Sequence[Work], *, recomputed: bool = False) -> Run:
    """Put a load on an engine. `recomputed`: without a KV cache between tokens, so that
    each token is a request of its own over the whole text.
    """
    return asyncio.run(_run(llm, work, recomputed=recomputed))


async def _run(llm: AsyncLLM, work: Sequence[Work], *, recomputed: bool) -> Run:
    answer = _token_by_token if recomputed else _streamed
    begin = time.perf_counter()

    async def token_times(item: Work) -> list[float]:
        await asyncio.sleep(item.at)
        return await answer(llm, item)

    times = await asyncio.gather(*map(token_times, work))
    seconds = time.perf_counter() - begin
    gaps = [b - a for row in times for a, b in pairwise(row[1:])]
    middle, high = numpy.percentile(gaps, [50, 99])
    return Run(
        throughput=sum(item.output for item in work) / seconds,
        ttft=float(numpy.median([row[1] - row[0] for row in times])),
        itl=float(middle),
        itl_p99=float(high),
    )


async def _streamed(llm: AsyncLLM, item: Work) -> list[float]:
    """When a request arrived, and when each of its tokens came."""
    times = [time.perf_counter()]
    async for output in llm.generate_deltas(item.prompt, _greedy(item.output)):
        fresh = len(output.outputs[0].token_ids)
        if output.outputs[0].error:
            raise RuntimeError(output.outputs[0].error)
        # Several tokens in one piece came at once: all but the first without a gap.
        times += [time.perf_counter()] * fresh
    return times


async def _token_by_token(llm: AsyncLLM, item: Work) -> list[float]:
    """As above, of a chain of requests for one token each."""
    times, text = [time.perf_counter()], list(item.prompt)
    for _ in range(item.output):
        async for output in llm.generate_deltas(text, _greedy(1), streaming=False):
            text += output.outputs[0].token_ids
        times.append(time.perf_counter())
    return times


def _greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
