"""What recording a journal costs at 256 rows, and how fast it replays in another process.

Steady: 256 sequences that only decode. Churn: outputs of 200 to 300 tokens, so that one
ends and one with a prompt of 500 tokens comes each turn. The executor costs nothing.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench.results import percentiles, run, show
from minfer.effects.execution.dry_executor import DryExecutor
from minfer.effects.live.engine.driver import Driver
from minfer.effects.live.engine.interpreter import paused_collector
from minfer.effects.live.journal.journal_writer import JournalWriter
from minfer.records.config import EngineConfig
from minfer.records.messages import Executed, Submit
from minfer.records.request import Request
from minfer.records.state import Turn

REPLAY = """
import sys
from minfer.effects.cli.main import main
code = main(["replay", sys.argv[1], "--json"])
assert "torch" not in sys.modules
sys.exit(code)
"""


def replayed(folder: Path) -> dict[str, Any]:
    """What `minfer replay` finds in a process of another hash seed."""
    process = subprocess.run(
        [sys.executable, "-c", REPLAY, str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "4711"},
    )
    assert process.stdout, process.stderr
    result: dict[str, Any] = json.loads(process.stdout)
    return result


class Fixed(DryExecutor):
    """An executor that costs nothing: ids up to 150,000, drawn before."""

    def __init__(self) -> None:
        super().__init__([[0]])
        rng = random.Random(1)
        self.drawn = [
            tuple((rng.randrange(150_000),) for _ in range(256)) for _ in range(64)
        ]

    def collect(self) -> Executed:
        plan = self.plans.popleft()
        drawn = self.drawn[plan.step % 64]
        pairs = zip(plan.max_sampled_tokens, drawn, strict=False)
        return Executed(
            plan.step,
            tuple([tokens if max_sampled else () for max_sampled, tokens in pairs]),
        )


def recording(turns: int, *, churn: bool) -> dict[str, Any]:
    """What a turn over 256 rows costs to record; with `churn`, outputs are 200 to 300
    tokens.
    """
    config = EngineConfig(
        num_blocks=20_000,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        max_model_len=16_384,
        vocab_size=151_936,
    )
    rng, names, record, turn_seconds = (
        random.Random(0),
        count(),
        list[float](),
        list[float](),
    )
    with tempfile.TemporaryDirectory() as folder:
        writer = JournalWriter(Path(folder), config, {})

        class Timed:
            def __call__(self, turn: Turn) -> None:
                begin = time.perf_counter()
                writer(turn)
                record.append(time.perf_counter() - begin)

            close = staticmethod(writer.close)

        driver, sizes = Driver(config, Fixed(), record=Timed()), list[int]()
        with paused_collector():
            for _ in range(turns):
                while len(driver.state.requests) + len(driver.inbox) < 256:
                    prompt = tuple([rng.randrange(150_000) for _ in range(500)])
                    max_tokens = rng.randint(200, 300) if churn else 15_000
                    request = Request(
                        id=str(next(names)), prompt=prompt, max_tokens=max_tokens
                    )
                    driver.post(Submit(request))
                before, begin = writer.size, time.perf_counter()
                driver.turn()
                turn_seconds.append(time.perf_counter() - begin)
                sizes.append(writer.size - before)
        driver.close()
        verified = replayed(Path(folder))
    assert verified["digest"] == writer.digest.hex()
    skip = turns // 6
    micro = [1e6 * seconds for seconds in record[skip:]]
    return {
        "microseconds": {"mean": mean(micro), **percentiles(micro)},
        "share_of_the_turn": sum(record[skip:]) / sum(turn_seconds[skip:]),
        "bytes": {"mean": mean(sizes[skip:]), "median": median(sizes[skip:])},
        "row_results_per_second_of_replay": verified["row_results_per_second"],
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, churn in (("steady", False), ("churn", True)):
        out[name] = recording(args.turns, churn=churn)
        show({name: out[name]})
    return out


if __name__ == "__main__":
    run("replay", measure, {"--turns": 3000})
