"""How much faster drafts are: with and without them, interleaved, in one process.

    python -m bench.speculation_speed [--parts PART ...] [--ways BEGINNING] [--seconds N]

A round asks each engine for the same number of tokens, prefill and text included; what
counts is the ratio to the engine without drafts within that round. Before the first one
engines have the graphs that they foresee, which a server captures in its quiet moments:
else one of them would do so while the other is measured. First rounds do not count.
Results are written after every round, and another call goes on where this one stopped:
before a round that would not end in time.
Seconds are those of the clock on the wall; on the CPU, where one thread computes, of the
processor, so that who else is on the machine counts for little.

    bundled  the bundled target and draft model go on with held-out files
    ngram    the bundled target goes on with lines that are repeated
    set      a 7B with a 0.5B to draft for it, random weights, and acceptance that is set
             (bench/coins.py): each draft whose predecessors were accepted is, with a
             probability of 0.5, 0.7 and 0.9; 4 drafts always, and up to 8, as many as pay
    circle   the same 7B, whose weights are changed so that its text goes round: n-gram
"""

import argparse
import gc
import json
import random
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any, Final, cast

import torch
from attrs import define, evolve, field

from bench.coins import Coined, tossing
from bench.results import run, show, spread, write
from bench.speculation_cases import DRAFT_OF, PLAIN, Case, Part, Way, parts
from minfer import LLM, SamplingParams
from minfer.effects.execution.torch_executor import TorchExecutor
from minfer.effects.live.engine.interpreter import paused_collector

MAX_SETTLE_SECONDS: Final = 90.0  # seconds, at most, until an engine has its graphs
WARM: Final = 2  # rounds of each case that do not count
# vLLM 0.26.0 on an H200, the same shapes and lengths, by batch: tokens a second without
# drafts, with 4 at 0.7 and with 6 at 0.9 (by place, a, a^2 ... of all that are proposed).
VLLM: Final = {
    "batch 1": (208, 112, 216),
    "batch 8": (1526, 1226, 1609),
    "batch 32": (4894, 3666, 4673),
    "batch 64": (7783, 5107, 6956),
}
PEER_COLUMNS: Final = {1: "at 0.7, 4 drafts", 2: "at 0.9, 6 drafts"}  # columns of it
IN_PART: Final = {"cpu": ("bundled", "ngram"), "cuda": ("set", "circle")}


@define
class Session:
    """The engines of a part, opened when they are needed."""

    part: Part
    clock: Callable[[], float] = time.perf_counter
    engines: dict[str, LLM] = field(factory=dict)
    coins: dict[str, Coined] = field(factory=dict)

    def ask(self, case: Case, way: Way, number: int) -> float:
        """Output tokens a second of one round."""
        llm = self.engine(way)
        rng = random.Random(number)
        prompts = case.prompts(rng)
        params = [
            SamplingParams(
                temperature=case.temperature,
                max_tokens=case.tokens,
                ignore_eos=True,
                seed=rng.getrandbits(60),
            )
            for _ in prompts
        ]
        clock = self.clock
        begin = clock()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = clock() - begin
        completions = [output.outputs[0] for output in outputs]
        if any(completion.finish_reason != "length" for completion in completions):
            raise RuntimeError(f"a request failed: {completions[0].error}")
        return sum(len(completion.token_ids) for completion in completions) / seconds

    def engine(self, way: Way) -> LLM:
        """The engine of a way, with its acceptance set."""
        name = json.dumps(way.config)
        if name not in self.engines:
            coins = nullcontext(list[Coined]()) if way.acceptance is None else tossing()
            with self.part.while_opening(), coins as opened_coins:
                llm = LLM(speculative_config=way.config, **self.part.settings)
            settle(llm)
            self.engines[name] = llm
            self.coins.update((name, coin) for coin in opened_coins)
        if way.acceptance is not None:
            executor = executor_of(self.engines[name])
            with executor.lock:  # no graph is captured meanwhile
                self.coins[name].set(way.acceptance)
        return self.engines[name]

    def close(self) -> None:
        """Give the memory back."""
        for llm in self.engines.values():
            llm.close()
        self.engines.clear()
        self.coins.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def executor_of(llm: LLM) -> TorchExecutor:
    """The executor of an engine of one rank."""
    return cast(TorchExecutor, llm.worker.driver.executor)


def settle(llm: LLM) -> None:
    """Wait until an engine has captured all graphs that it foresees."""
    background = executor_of(llm).background
    if background is not None and background.thread is not None:
        background.thread.join(MAX_SETTLE_SECONDS)


@define
class Rounds:
    """Rounds of one case, and what is kept of them."""

    session: Session
    case: Case
    rates: dict[str, list[float]]  # by way: output tokens a second of each round
    end: float  # by time.monotonic()
    warm: int = 0

    def go_on(self, pairs: int, keep: Callable[[], None]) -> bool:
        """Rounds until there are `pairs`; false if there is no time left."""
        took = 0.0
        while len(self.rates[PLAIN]) < pairs:
            begin = time.monotonic()
            if begin + 1.1 * took > self.end:
                return False
            rates = self._round(len(self.rates[PLAIN]) + self.warm)
            if self.warm < WARM:
                self.warm += 1
            else:
                for name, rate in rates.items():
                    self.rates[name].append(rate)
                keep()
            took = time.monotonic() - begin
        return True

    def _round(self, number: int) -> dict[str, float]:
        """Each way once; none is always the first."""
        ways = [*self.case.ways.items()]
        turn = number % len(ways)
        with paused_collector():
            return {
                name: self.session.ask(self.case, way, number)
                for name, way in (*ways[turn:], *ways[:turn])
            }


def figures(rates: Mapping[str, list[float]]) -> dict[str, Any]:
    """Medians of tokens a second, and ratios within rounds."""
    plain = rates[PLAIN]
    return {
        name: {
            "tokens per second": spread(values),
            "ratio": spread([a / b for a, b in zip(values, plain, strict=True)]),
        }
        for name, values in rates.items()
    }


def table(cases: Mapping[str, Any], peer: Mapping[str, tuple[int, ...]]) -> None:
    """Ratios of all cases; beside them vLLM's, where there are some."""
    for name, rates in cases.items():
        if not rates[PLAIN]:
            continue
        ratios = {way: figure["ratio"] for way, figure in figures(rates).items()}
        del ratios[PLAIN]
        plain = f"{median(rates[PLAIN]):.0f} tok/s without"
        show({f"{name}, {plain}": ratios})
        if name in peer:
            baseline = peer[name][0]
            ratios = {
                PEER_COLUMNS[way_index]: peer[name][way_index] / baseline
                for way_index in PEER_COLUMNS
            }
            show({f"    vLLM 0.26.0, {baseline} tok/s without": ratios})


@define
class Results:
    """Tokens a second of all rounds so far: by part, case and way."""

    args: argparse.Namespace
    rates: dict[str, dict[str, dict[str, list[float]]]]

    @classmethod
    def of(cls, args: argparse.Namespace) -> "Results":
        """What the file has."""
        path = args.folder / f"{args.name}.json"
        exists = path.exists()
        stored = json.loads(path.read_text("utf-8"))["results"] if exists else {}
        return cls(args, stored.get("rates", {}))

    def write(self) -> None:
        """Keep all, with what follows from it."""
        by_part = {
            part_name: {
                name: figures(rates) for name, rates in cases.items() if rates[PLAIN]
            }
            for part_name, cases in self.rates.items()
        }
        data = {"rates": self.rates, "figures": by_part}
        write(self.args.name, data, None, self.args.folder)


def measure(args: argparse.Namespace) -> None:
    end = time.monotonic() + args.seconds
    device = "cuda" if torch.cuda.is_available() else "cpu"
    device_name = (
        torch.cuda.get_device_name() if device == "cuda" else "CPU, processor time"
    )
    torch.set_num_threads(1)
    results = Results.of(args)
    with tempfile.TemporaryDirectory() as folder:
        all_parts = parts(Path(folder), args.shape, device)
        for name in args.parts or IN_PART[device]:
            shaped = f"{args.shape}, " if name in IN_PART["cuda"] else ""
            label = f"{name}, {shaped}{device_name}"
            print(label, flush=True)
            ended = measured(all_parts[name](), label, results, end, args.ways)
            table(results.rates[label], VLLM if label.startswith("set, 7B") else {})
            if not ended:
                print("there is more to measure: call again", flush=True)
                return


def restricted(case: Case, begins: str) -> Case:
    """A case in those of its ways whose names begin so, and without drafts."""
    ways = {
        name: way
        for name, way in case.ways.items()
        if name == PLAIN or name.startswith(begins)
    }
    return evolve(case, ways=ways)


def measured(
    part: Part, label: str, results: Results, end: float, begins: str = ""
) -> bool:
    """All cases of a part that lack rounds, in the ways whose names begin so; false if
    there was no time for them.
    """
    on_cpu = part.settings.get("device") == "cpu"
    clock = time.process_time if on_cpu else time.perf_counter
    session, label_rates = Session(part, clock), results.rates.setdefault(label, {})
    pairs = results.args.pairs
    try:
        for name, full_case in part.cases.items():
            case = restricted(full_case, begins)
            rates = label_rates.setdefault(name, {way: [] for way in case.ways})
            rounds = Rounds(session, case, rates, end)
            if not rounds.go_on(pairs, results.write):
                return False
    finally:
        session.close()
    return True


if __name__ == "__main__":
    options = {
        "--parts": {"nargs": "+", "choices": ["bundled", "ngram", "set", "circle"]},
        "--shape": {"choices": [*DRAFT_OF], "default": "7B", "help": "of set and circle"},
        "--ways": {
            "default": "",
            "help": "only those that begin so: a file of their own",
        },
        "--pairs": {"type": int, "default": 5, "help": "rounds that count"},
        "--seconds": {"type": float, "default": 540.0, "help": "to stop within"},
    }
    run("speculation_speed", measure, options)
