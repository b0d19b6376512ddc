"""Tokens per second on the CPU against transformers: same weights, same prompts, one run.

Batch 1: one request at a time, transformers' `generate` (greedy, its dynamic cache, sdpa) and the
engine in turns; a pair's ratio is of neighbouring measurements, so that the machine's noise hits
both. The prompt's forward is part of both times.

Arrivals: 16 requests with mixed prompt and output lengths come at seeded random times, faster than
one by one could be served. transformers serves static batches, as well as they can be: whenever it
is free it takes what has arrived, up to N requests, pads on the left and generates up to the
longest output asked for in that batch; or it waits until all have arrived and makes one batch.
Every such policy is measured once and the fastest is what minfer is compared with, in pairs.
Throughput counts the tokens asked for, from the first arrival to the last result.

    python -m bench.cpu_throughput
"""

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from attrs import define, evolve

from bench.results import spread, write
from bench.serving import BUNDLED, Arrival, Server, their_tokens, theirs
from minfer.effects.checkpoint import load_weights, random_weights, read_spec
from minfer.effects.driver import QuietCollector
from minfer.effects.spec import ModelSpec, parse_spec
from minfer.effects.weights import Weights

HALF_BILLION = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
REQUESTS = 16


@define
class Case:
    """One model at one precision, and how much work to give it."""

    name: str
    spec: ModelSpec
    weights: Weights
    tokens: int  # output of the batch 1 measurement
    prompts: tuple[int, int]  # shortest and longest prompt
    outputs: tuple[int, int]  # shortest and longest output
    pairs: int


def bundled(dtype: str, pairs: int) -> Case:
    spec = read_spec(BUNDLED)
    weights = load_weights(BUNDLED, spec, dtype)
    return Case(f"bundled, {dtype}", spec, weights, 256, (8, 128), (16, 256), pairs)


def half_billion(dtype: str, pairs: int) -> Case:
    spec = parse_spec(HALF_BILLION)
    weights = random_weights(spec, dtype)
    return Case(f"Qwen2.5 0.5B, {dtype}", spec, weights, 24, (16, 128), (8, 80), pairs)


def server_of(case: Case) -> Server:
    """The engine with its defaults, and room for all."""
    return Server.of(
        case.spec,
        case.weights,
        num_blocks=256,
        block_size=64,
        max_model_len=1024,
        max_num_seqs=REQUESTS,
        max_num_batched_tokens=1024,
    )


def random_prompt(case: Case, length: int, rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.randrange(10, case.spec.vocab_size) for _ in range(length))


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    out = call()
    return time.perf_counter() - begin, out


def batch_one(case: Case, model: Any, server: Server, rng: random.Random) -> dict[str, Any]:
    """Pairs of single requests; every pair has a new prompt, so nothing is cached."""
    mine: list[float] = []
    other: list[float] = []
    same = 0
    for pair in range(case.pairs + 1):  # the first warms up
        prompt = random_prompt(case, 32, rng)
        calls = [
            lambda p=prompt: server.serve([Arrival(p, case.tokens)]),
            lambda p=prompt: their_tokens(model, [p], case.tokens),
        ]
        order = (0, 1) if pair % 2 else (1, 0)
        done = {which: timed(calls[which]) for which in order}
        if pair:
            mine.append(case.tokens / done[0][0])
            other.append(case.tokens / done[1][0])
            same += list(done[0][1][0].tokens) == done[1][1][0]
    return figures(mine, other) | {"equal_outputs": same, "output_tokens": case.tokens}


def figures(mine: list[float], other: list[float]) -> dict[str, Any]:
    """Tokens per second of both, and the ratio within pairs."""
    return {
        "minfer": spread(mine),
        "transformers": spread(other),
        "ratio": spread([a / b for a, b in zip(mine, other, strict=True)]),
    }


def arrivals_of(case: Case, pace: float, rng: random.Random) -> list[Arrival]:
    """Requests whose lengths are spread evenly over their logarithms; `pace` seconds apart."""

    def length(low: int, high: int) -> int:
        return round(low * math.exp(rng.random() * math.log(high / low)))

    at, out = 0.0, []
    for _ in range(REQUESTS):
        prompt = random_prompt(case, length(*case.prompts), rng)
        out.append(Arrival(prompt, length(*case.outputs), at))
        at += rng.expovariate(1 / pace)
    return out


def static_batches(model: Any, arrivals: Sequence[Arrival], most: int, *, patient: bool) -> float:
    """Seconds from the first arrival to the last result; `patient`: wait until all are there."""
    left = list(arrivals)
    begin = time.perf_counter()
    while left:
        now = time.perf_counter() - begin
        here = [a for a in left if a.at <= now]
        if not here or (patient and len(here) < len(left)):
            time.sleep(max(0.0, (left[-1] if patient else left[0]).at - now))
            continue
        batch, left = here[:most], [a for a in left if a not in here[:most]]
        their_tokens(model, [a.prompt for a in batch], max(a.tokens for a in batch))
    return time.perf_counter() - begin


def over_time(
    case: Case, model: Any, server: Server, pace: float, rng: random.Random
) -> dict[str, Any]:
    """Pairs of runs over arriving requests; new prompts each time."""
    wanted = arrivals_of(case, pace, rng)
    work = sum(a.tokens for a in wanted)
    policies = {f"up to {n}": (n, False) for n in (4, 8, 16)} | {"all at once": (REQUESTS, True)}
    tried = {
        name: work / static_batches(model, wanted, most, patient=patient)
        for name, (most, patient) in policies.items()
    }
    best = max(tried, key=lambda name: tried[name])
    most, patient = policies[best]
    mine, other = [], []
    for pair in range(case.pairs):
        fresh = [evolve(a, prompt=random_prompt(case, len(a.prompt), rng)) for a in wanted]
        calls = [
            lambda f=fresh: max(s.done for s in server.serve(f)),
            lambda f=fresh: static_batches(model, f, most, patient=patient),
        ]
        order = (0, 1) if pair % 2 else (1, 0)
        seconds = {which: calls[which]() for which in order}
        mine.append(work / seconds[0])
        other.append(work / seconds[1])
    return figures(mine, other) | {
        "static_batching": best,
        "policies_tried": tried,
        "seconds_between_arrivals": pace,
        "last_arrival": wanted[-1].at,
        "prompt_tokens": [len(a.prompt) for a in wanted],
        "output_tokens": [a.tokens for a in wanted],
    }


def measure(case: Case, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    model, server = theirs(case.spec, case.weights, case.weights.embed.dtype), server_of(case)
    alone = batch_one(case, model, server, rng)
    mean = statistics.mean(case.outputs)
    pace = mean / alone["transformers"]["median"] / 8  # eight come while one could be served alone
    mixed = over_time(case, model, server, pace, rng)
    if server.voided:
        raise RuntimeError(f"steps failed: {server.voided}")
    for what, found in (("batch 1", alone), (f"{REQUESTS} arriving", mixed)):
        mine, other, ratio = (found[key] for key in ("minfer", "transformers", "ratio"))
        print(
            f"{case.name:24} {what:12} minfer {mine['median']:8.1f} transformers "
            f"{other['median']:8.1f} tokens/s  ratio {ratio['median']:.2f} "
            f"({ratio['low']:.2f} to {ratio['high']:.2f})"
            + (f"  static: {found['static_batching']}" if "static_batching" in found else ""),
            flush=True,
        )
    return {"batch_1": alone, "arriving": mixed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["bundled", "0.5b"])
    parser.add_argument("--pairs", type=int, default=5, help="of the bundled model; others fewer")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--float32", action="store_true", help="the 0.5B model in float32 as well")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    makers: list[Callable[[], Case]] = []
    if "bundled" in args.models:
        makers += [partial(bundled, d, args.pairs) for d in ("float32", "bfloat16")]
    if "0.5b" in args.models:
        dtypes = ("bfloat16", "float32") if args.float32 else ("bfloat16",)
        makers += [partial(half_billion, d, max(3, args.pairs // 2)) for d in dtypes]
    out = {}
    for make in makers:
        case = make()
        with QuietCollector():  # for both
            out[case.name] = measure(case, args.seed)
    write("cpu_throughput", out, args.seed)


if __name__ == "__main__":
    main()
