"""A real trace through the engine: every request must end, and hits must be near what is possible.

The trace (Mooncake, FAST'25, conversation: one JSON object per line with `timestamp` in ms,
`input_length`, `output_length`, `hash_ids`, one id per 512 tokens of the prompt) gives arrivals,
lengths and which prefixes repeat; token ids are made from the ids. The oracle executes. Time is
virtual: a step costs 10 ms plus 18 us per token, about a 7B model on one large GPU. The hit share
is of prompt tokens, at first admissions, next to what a cache that never forgets would reach.
"""

import argparse
import json
import time
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.results import run, show
from bench.virtual import Arrivals, Virtual
from minfer.config import EngineConfig
from minfer.effects.driver import quiet_collector
from minfer.invariants import check
from minfer.keys import block_keys
from minfer.messages import Preempted
from minfer.oracle import Oracle
from minfer.plan import Plan
from minfer.request import Request

VOCAB, BLOCK = 32_000, 64
SPAN = 512  # tokens that one id of the trace stands for


def requests(path: Path, count: int) -> Iterator[tuple[float, Request]]:
    """Arrival in seconds, and the request, with token ids that repeat where the ids do."""
    with path.open() as lines:
        for number, line in zip(range(count), lines, strict=False):
            row = json.loads(line)
            prompt: list[int] = []
            for span in row["hash_ids"]:
                prompt += [(span * 7919 + i * i * 31 + i) % VOCAB for i in range(SPAN)]
            ids = tuple(prompt[: row["input_length"]])
            request = Request(id=str(number), prompt=ids, max_tokens=max(1, row["output_length"]))
            yield row["timestamp"] / 1000, request


def possible_share(arrivals: Arrivals) -> float:
    """The share of prompt tokens that an infinite cache would have seen before."""
    seen: set[bytes] = set()
    hit = total = 0
    for _, request in arrivals:
        keys = block_keys(b"", request.prompt, BLOCK)
        usable = keys[: (len(request.prompt) - 1) // BLOCK]
        hit += BLOCK * next((i for i, k in enumerate(usable) if k not in seen), len(usable))
        total += len(request.prompt)
        seen.update(keys)
    return hit / total


def cost(plan: Plan) -> float:
    return plan.repeat * 0.010 + sum(plan.counts) * 18e-6


def replay(arrivals: Arrivals, blocks: int) -> dict[str, Any]:
    """One run of the whole trace with a pool of `blocks` blocks."""
    config = EngineConfig(
        num_blocks=blocks, block_size=BLOCK, max_model_len=131_072, max_num_seqs=256,
        max_num_batched_tokens=8192, vocab_size=VOCAB, watermark=blocks // 100,
    )  # fmt: skip
    engine, begin = (
        Virtual(config, Oracle(BLOCK, VOCAB), cost, deque(arrivals)),
        time.perf_counter(),
    )
    with quiet_collector():
        engine.run()
    took, free = time.perf_counter() - begin, engine.state.blocks.available
    check(config, engine.state)
    assert len(engine.ended) == len(arrivals)
    assert free == blocks
    prompt = sum(len(request.prompt) for _, request in arrivals)
    return {
        "blocks": blocks, "requests": len(arrivals),
        "ended": Counter(end.reason for end in engine.ended), "prompt_tokens": prompt,
        "output_tokens": sum(end.length for end in engine.ended),
        "hit_share": sum(end.cached for end in engine.ended) / prompt,
        "turns": engine.turns, "preemptions": engine.reasons[Preempted],
        "most_running": engine.most_running, "blocks_free_or_cached_at_the_end": free,
        "virtual_seconds": engine.now, "seconds": took,
    }  # fmt: skip


def measure(args: argparse.Namespace) -> dict[str, Any]:
    arrivals, runs = list(requests(args.trace, args.requests)), []
    possible = {"hit_share_of_an_infinite_cache": possible_share(arrivals)}
    for blocks in args.blocks:
        runs.append(replay(arrivals, blocks) | possible)
        show(runs[-1])
    return {"runs": runs}


if __name__ == "__main__":
    run("mooncake", measure, {
        "--trace": {"type": Path, "required": True, "help": "mooncake_conversation.jsonl"},
        "--requests": 2000,
        "--blocks": {"type": int, "nargs": "+", "default": [27_000, 100_000, 450_000],
                     "help": "of 64 tokens: 1.7 million tokens, 6.4 million, the whole trace"},
    })  # fmt: skip
