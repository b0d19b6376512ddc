"""Real traces run live, journalled, and replayed elsewhere; and processes killed while
they record.

A run takes the first requests of a trace as fast as the engine does, cancels some at
random, and has too small a pool and urgent ones displace others, so that requests are
preempted. The journal is then replayed by `minfer replay` in a process with another hash
seed, which must not load torch: digests must be equal and no turn may differ. `live` runs
the bundled model with lengths divided,
`oracle` full lengths on the oracle executor. `python -m tests.effects.recorded_traces`.
"""

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from statistics import mean
from typing import Any

import attrs
import torch

from bench.replay import replayed
from bench.results import run, show
from minfer.effects.execution.contract import Executor
from minfer.effects.live.engine.driver import Driver
from minfer.effects.live.engine.interpreter import paused_collector
from minfer.effects.live.engine.open_engine import open_executor
from minfer.effects.live.journal.journal_files import read_journal
from minfer.effects.live.journal.journal_writer import JournalWriter
from minfer.effects.runs.trace_files import read_trace
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.prepare import prepare
from minfer.policies.builtin import Priority
from minfer.records.config import EngineConfig
from minfer.records.messages import Cancel, Preempted, Submit
from minfer.records.request import Request
from minfer.simulation.oracle import Oracle


def live(
    config: EngineConfig, executor: Executor, requests: Iterator[Request], seed: int
) -> Any:
    """Serve all requests with cancels; returns the journal's findings beside the run's
    own.
    """
    rng, preempted, turns = random.Random(seed), 0, 0
    doomed: dict[int, list[str]] = {}  # turn -> who is cancelled in it
    with tempfile.TemporaryDirectory() as folder:
        writer = JournalWriter(Path(folder), config, {}, size=1 << 34)
        driver, begin, left = (
            Driver(config, executor, record=writer),
            time.perf_counter(),
            True,
        )
        with paused_collector():
            while left or driver.busy:
                while left and len(driver.state.requests) + len(driver.inbox) < 100:
                    request = next(requests, None)
                    left = request is not None
                    if request is not None:
                        urgent = attrs.evolve(request, priority=rng.randint(-9, 9))
                        driver.post(Submit(urgent))
                        if rng.random() < 0.1:
                            turn = turns + rng.randrange(100)
                            doomed.setdefault(turn, []).append(request.id)
                for name in doomed.pop(turns, ()):
                    driver.post(Cancel(name))
                transition = driver.turn()
                turns += 1
                preempted += sum(
                    isinstance(reason, Preempted) for reason in transition.reasons
                )
        took = time.perf_counter() - begin
        driver.close()
        replay = replayed(Path(folder))
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
    assert replay["digest"] == writer.digest.hex()
    assert replay["turns"] == turns
    assert replay["divergence"] is None
    return {
        "turns": turns,
        "row_results": replay["row_results"],
        "seconds_live": took,
        "ended": Counter(replay["ended"]),
        "preemptions": preempted,
        "digest": replay["digest"],
        "divergent_turns": 0,
        "state_digests": replay["state_digests"],
        "journal_bytes": size,
        "seconds_replay": replay["replay_seconds"],
        "row_results_per_second": replay["row_results_per_second"],
    }


def traces(args: argparse.Namespace) -> dict[str, Any]:
    """Every trace, live and on the oracle."""
    torch.set_num_threads(1)
    out: dict[str, Any] = {}
    for path in args.traces:
        small = requested(str(path), args.requests, args.divide)
        # So few rows that they are fought for even if most outputs are a single token.
        rows = max(2, round(mean(request.max_tokens for request in small)))
        setup = prepare(
            EngineArgs(
                num_gpu_blocks_override=128,
                block_size=16,
                max_num_seqs=rows,
                max_model_len=2048,
                max_num_batched_tokens=1024,
                dtype="float32",
                scheduling_policy="priority",
            )
        )
        vocab = setup.spec.vocab_size
        real = [
            attrs.evolve(request, prompt=tuple(token % vocab for token in request.prompt))
            for request in small
            if len(request.prompt) + request.max_tokens <= setup.config.max_model_len
        ]
        figures = live(setup.config, open_executor(setup, None), iter(real), args.seed)
        out[f"{path.stem} live"] = {
            "rows": rows,
            "too_long": len(small) - len(real),
            **figures,
        }
        show({path.stem: "live", **out[f"{path.stem} live"]})
        requests = requested(str(path), args.requests)
        lengths = [len(request.prompt) + request.max_tokens for request in requests]
        config = EngineConfig(
            num_blocks=round(max(*lengths, 13 * mean(lengths)) / 64) + 1,
            block_size=64,
            max_model_len=131_072,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            policy=Priority(),
        )
        out[f"{path.stem} oracle"] = live(
            config, Oracle(64, 2**31), iter(requests), args.seed
        )
        show({path.stem: "oracle", **out[f"{path.stem} oracle"]})
    return out


def requested(*trace: Any) -> list[Request]:
    """The requests of a trace."""
    arrivals = (item for _, item in read_trace(*trace).arrivals(64))
    return [
        attrs.evolve(request, keys=())
        for request in arrivals
        if isinstance(request, Request)
    ]


KILLED = """
import sys
from pathlib import Path
from tests.effects.recorded_traces import endless
endless(Path(sys.argv[1]))
"""


def endless(folder: Path) -> None:
    """Serve for ever, and say after each turn how many there were."""
    config = EngineConfig(num_blocks=500, max_num_seqs=64)
    driver = Driver(config, Oracle(64, 1000), record=JournalWriter(folder, config, {}))
    for turn in count(1):
        while len(driver.state.requests) + len(driver.inbox) < 80:
            name = f"{turn}.{len(driver.inbox)}"
            driver.post(Submit(Request(id=name, prompt=(1, 2, 3), max_tokens=50)))
        driver.turn()
        sys.stdout.write(f"{turn}\n")
        sys.stdout.flush()


def kills(times: int, seed: int) -> dict[str, Any]:
    """Kill a process that many times at a random moment: what was told must be in its
    journal.
    """
    rng, lost, torn, turns = random.Random(seed), 0, 0, 0
    for _ in range(times):
        with tempfile.TemporaryDirectory() as name:
            command = [sys.executable, "-c", KILLED, name]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                process.stdout.readline()
                time.sleep(rng.uniform(0.01, 0.2))
                process.send_signal(signal.SIGKILL)
                reported = [
                    line for line in process.stdout.read().split("\n")[:-1] if line
                ]
            journal = read_journal(Path(name))
            for _ in journal.turns():
                pass
            lost += journal.count < int(reported[-1] if reported else 1)
            torn += bool(journal.torn)
            turns += journal.count
    return {
        "kills": times,
        "turns_told_and_lost": lost,
        "torn_tails": torn,
        "turns": turns,
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    figures = kills(args.kills, args.seed)
    show(figures)
    return {"kills": figures, **traces(args)}


if __name__ == "__main__":
    run(
        "replay_traces",
        measure,
        {
            "--traces": {
                "type": Path,
                "nargs": "*",
                "default": [],
                "help": "mooncake_conversation.jsonl, azure_code_2023.csv",
            },
            "--requests": 3000,
            "--divide": 32,
            "--kills": 20,
            "--seed": 0,
        },
    )
