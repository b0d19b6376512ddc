"""A real trace through the engine: every request must end, and hits must be near what is possible.

The trace (Mooncake, FAST'25, conversation: one JSON object per line with `timestamp` in ms,
`input_length`, `output_length`, `hash_ids`, one id per 512 tokens of the prompt) gives arrivals,
lengths and which prefixes repeat; token ids are made from the ids. The oracle executes, so every
output is also what it would have been had the request run alone. Time is virtual: a step costs
10 ms plus 18 us per token, about a 7B model on one large GPU.

The hit share is of prompt tokens, at each request's first admission, next to the share that a
cache which never forgets anything would reach.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

from bench.results import write
from minfer.config import EngineConfig
from minfer.effects.driver import Driver, QuietCollector
from minfer.effects.oracle import Oracle
from minfer.invariants import check
from minfer.keys import block_keys
from minfer.messages import Emit, Execute, Finished, Preempted, Submit
from minfer.request import Request

VOCAB = 32_000
SPAN = 512  # tokens that one id of the trace stands for


def requests(path: Path, count: int) -> Iterator[tuple[float, Request]]:
    """Arrival in seconds, and the request, with token ids that repeat where the ids do."""
    with path.open() as lines:
        for number, line in zip(range(count), lines, strict=False):
            row = json.loads(line)
            prompt: list[int] = []
            for span in row["hash_ids"]:
                prompt += [(span * 7919 + i * i * 31 + i) % VOCAB for i in range(SPAN)]
            del prompt[row["input_length"] :]
            request = Request(
                id=str(number), prompt=tuple(prompt), max_tokens=max(1, row["output_length"])
            )
            yield row["timestamp"] / 1000, request


def possible_share(arrivals: list[tuple[float, Request]], block_size: int) -> float:
    """The share of prompt tokens that an infinite cache would have seen before."""
    seen: set[bytes] = set()
    hit = total = 0
    for _, request in arrivals:
        keys = block_keys(b"", request.prompt, block_size)
        usable = keys[: (len(request.prompt) - 1) // block_size]
        hit += block_size * next((i for i, k in enumerate(usable) if k not in seen), len(usable))
        total += len(request.prompt)
        seen.update(keys)
    return hit / total


class Run:
    """The trace on a virtual clock."""

    def __init__(self, config: EngineConfig, arrivals: list[tuple[float, Request]]) -> None:
        self.now = 0.0
        self.arrivals = list(reversed(arrivals))
        self.oracle = Oracle(config.block_size, VOCAB)
        self.driver = Driver(config, self.oracle, clock=lambda: self.now)
        self.ended: list[Finished] = []
        self.turns = self.preempted = self.peak = 0

    def drain(self) -> None:
        while self.arrivals or self.driver.busy:
            if not self.driver.busy:
                self.now = max(self.now, self.arrivals[-1][0])
            while self.arrivals and self.arrivals[-1][0] <= self.now:
                self.driver.post(Submit(self.arrivals.pop()[1]))
            turn = self.driver.turn()
            self.turns += 1
            self.peak = max(self.peak, len(turn.state.running))
            self.preempted += sum(isinstance(r, Preempted) for r in turn.reasons)
            for command in turn.commands:
                if isinstance(command, Execute):
                    plan = command.plan
                    self.now += plan.repeat * 0.010 + sum(plan.counts) * 18e-6
                elif isinstance(command, Emit):
                    self.ended += command.finished


def measure(
    arrivals: list[tuple[float, Request]], possible: float, blocks: int
) -> dict[str, object]:
    """One run of the whole trace with a pool of `blocks` blocks."""
    config = EngineConfig(
        num_blocks=blocks, block_size=64, max_model_len=131_072, max_num_seqs=256,
        max_num_batched_tokens=8192, vocab_size=VOCAB, depth=2, watermark=blocks // 100,
    )  # fmt: skip
    run = Run(config, arrivals)
    begin = time.perf_counter()
    with QuietCollector():
        run.drain()
    took = time.perf_counter() - begin
    state = run.driver.state
    check(config, state)
    assert len(run.ended) == len(arrivals)
    assert state.blocks.available == config.num_blocks
    prompt = sum(len(r.prompt) for _, r in arrivals)
    return {
        "blocks": blocks,
        "requests": len(arrivals),
        "ended": {r: sum(f.reason == r for f in run.ended) for r in {f.reason for f in run.ended}},
        "prompt_tokens": prompt,
        "output_tokens": sum(f.length for f in run.ended),
        "hit_share": sum(f.cached for f in run.ended) / prompt,
        "hit_share_of_an_infinite_cache": possible,
        "turns": run.turns,
        "preemptions": run.preempted,
        "most_running": run.peak,
        "blocks_free_or_cached_at_the_end": state.blocks.available,
        "virtual_seconds": run.now,
        "seconds": took,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, required=True, help="mooncake_conversation.jsonl")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument(
        "--blocks", type=int, nargs="+", default=[27_000, 100_000, 450_000],
        help="pools of 64-token blocks: 1.7 million tokens, 6.4 million, and the whole trace",
    )  # fmt: skip
    args = parser.parse_args()
    arrivals = list(requests(args.trace, args.requests))
    possible = possible_share(arrivals, 64)
    runs = []
    for blocks in args.blocks:
        runs.append(measure(arrivals, possible, blocks))
        print(json.dumps(runs[-1]), flush=True)
    write("mooncake", {"runs": runs})


if __name__ == "__main__":
    main()
