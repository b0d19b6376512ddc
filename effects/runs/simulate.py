"""`minfer simulate TRACE`: what would come of a trace under other settings, policies and
loads.

Decisions are the engine's own; what steps take is a model. Imports no torch.
"""

import argparse
import contextlib
import json
import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from itertools import chain, product
from pathlib import Path
from typing import Any, Final

from attrs import evolve
from tqdm import tqdm

from minfer.blocks import blocks_for
from minfer.config import SIZES, ConfigError, EngineConfig
from minfer.effects.live.driver import quiet_collector
from minfer.effects.live.journal_files import read_journal, write_journal
from minfer.effects.runs.costs import H200, fit, read_cost, steps, write_cost
from minfer.effects.runs.report import Report
from minfer.effects.runs.traces import KNOWN, Trace, read_trace
from minfer.policies import POLICIES, policy_named
from minfer.runs.codec import dump
from minfer.runs.cost import CostModel
from minfer.runs.simulate import Simulated, Simulation

Figures = dict[str, Any]
POOL: Final = 30_000 * 64  # tokens of KV cache that a 7B model leaves room for on an H200
COLUMNS: Final = (  # title, where it is in the figures, format
    ("policy", "policy", ""),
    ("blocks", "num_blocks", ""),
    ("of", "block_size", ""),
    ("seqs", "max_num_seqs", ""),
    ("batched", "max_num_batched_tokens", ""),
    ("speed", "speed", ".3g"),
    ("tok/s", "tokens_per_second", ",.0f"),
    ("TTFT p50", "ttft.p50", ".3f"),
    ("p99", "ttft.p99", ".3f"),
    ("TPOT p50", "tpot.p50", ".4f"),
    ("p99", "tpot.p99", ".4f"),
    ("ITL p99", "itl.p99", ".4f"),
    ("good", "good", ".1%"),
    ("good/s", "goodput", ".2f"),
    ("hits", "hit_share", ".1%"),
    ("preempted", "preemptions", ","),
    ("refused", "ended.rejected", ","),
    ("unserved", "unfinished", ","),
    ("running", "running", ".1f"),
    ("busy", "busy", ".0%"),
    ("took", "simulated_in", ".1f"),
)


def simulate_options(parser: argparse.ArgumentParser) -> None:
    """What `minfer simulate` takes."""
    add, several = parser.add_argument, "of several, all combinations are run"
    add("trace", metavar="TRACE", help=KNOWN)
    add(
        "--policy",
        action="append",
        metavar="NAME",
        help="as --scheduling-policy; may be repeated",
    )
    for name in SIZES:
        add(
            f"--{name.replace('_', '-')}",
            type=_reader(int, True),
            metavar="N,..",
            help=several,
        )
    add(
        "--speed",
        type=_reader(float, True),
        default=[1.0],
        metavar="X,..",
        help=f"times the trace's own pace; {several}",
    )
    for name, kind, default, text in (
        ("--max-model-len", int, None, "default: the longest request's"),
        ("--steps-in-flight", int, None, "steps planned ahead (default: 2)"),
        ("--requests", int, None, "only so many, the first of the trace"),
        ("--divide", int, 1, "divide all lengths by it"),
        ("--slo-ttft", float, math.inf, "a first token is good within so many seconds"),
        ("--slo-tpot", float, math.inf, "others are, on average"),
        ("--slo-share", float, 0.99, "of requests that have to be good (default: 0.99)"),
    ):
        add(name, type=_reader(kind), default=default, metavar="N", help=text)
    add(
        "--find",
        choices=("max-num-seqs", "num-blocks", "block-size", "speed"),
        help="the smallest (of speed: the greatest) with which they are",
    )
    add("--mix", type=int, metavar="SEED", help="draw clients, priorities and deadlines")
    add(
        "--cost",
        type=Path,
        metavar="FILE",
        help=f"what steps cost (default: {H200.name})",
    )
    add(
        "--fit",
        type=Path,
        metavar="JOURNAL",
        help="fit what steps cost to a measured run",
    )
    add("--save-cost", type=Path, metavar="FILE", help="keep it for --cost")
    add("--journal", type=Path, metavar="DIR", help="keep each run as a journal there")
    add("--json", action="store_true", help="print all figures as JSON")


def _reader(kind: type, several: bool = False) -> Callable[[str], Any]:
    """What reads a number above 0 of that kind, or several with commas between them."""

    def read(text: str) -> Any:
        with contextlib.suppress(ValueError):
            values = [kind(part) for part in text.split(",")]
            if all(0 < value < 2**31 for value in values) and (
                several or len(values) == 1
            ):
                return values if several else values[0]
        whole = "a whole number from 1" if kind is int else "a number above 0"
        raise argparse.ArgumentTypeError(f"{text!r} is not {whole}")

    return read


def simulate(options: argparse.Namespace) -> int:
    """Simulate a trace and print what comes of it; returns the exit code.

    Raises TraceError, JournalError and ConfigError.
    """
    try:
        return _simulate(options)
    except OSError as error:
        if error.filename is None:  # of standard output
            raise
        raise ConfigError(f"{error.filename}: {error.strerror}") from None


def _simulate(options: argparse.Namespace) -> int:
    if options.slo_share > 1:
        raise ConfigError(
            f"--slo-share is a share, from 0 to 1, not {options.slo_share:g}"
        )
    trace = read_trace(options.trace, options.requests, options.divide)
    cost, about = _cost(options)
    cases, runs, found = _cases(trace, options), list[Figures](), None
    if options.find and (
        len(cases) > 1 or min(options.slo_ttft, options.slo_tpot) == math.inf
    ):
        needs = (
            "one value of each setting, and a service level: --slo-ttft, "
            "--slo-tpot "
            "or both"
        )
        raise ConfigError(f"--find needs {needs}")
    varied = {name for name in (*SIZES, "speed") if len(getattr(options, name) or ()) > 1}
    fixed = {*SIZES, "speed"} - varied - {str(options.find).replace("-", "_")}
    table = [column for column in COLUMNS if column[1] not in fixed]

    def good(config: EngineConfig, speed: float) -> bool:
        runs.append(run(trace, config, speed, cost, options))
        if not options.json:
            print(
                "  ".join(f"{_cell(runs[-1], *where):>8}" for _, *where in table),
                flush=True,
            )
        return bool((runs[-1]["good"] or 0.0) >= options.slo_share)

    if not options.json:
        limits = f"{options.slo_ttft:g} s, then {options.slo_tpot:g} s per token"
        limits = limits.replace("inf s", "any time")
        print(
            f"{len(trace.sizes):,} requests of {options.trace}; what steps cost: "
            f"{cost.name}"
        )
        print(f"times in seconds; good: first token within {limits}")
        if trace.rows and options.policy and options.mix is None:
            print("nobody has a client, a priority or a deadline; --mix SEED draws some")
        print("  ".join(f"{title:>8}" for title, *_ in table))
    if options.find:
        found = find(options.find, max(trace.sizes), *cases[0], good)
    else:
        for case in cases:
            good(*case)
    if options.json:
        told = {
            "trace": options.trace,
            "requests": len(trace.sizes),
            "cost": dump(cost),
            **about,
            "runs": runs,
            "find": options.find,
            "found": found,
        }
        print(json.dumps(told, indent=1))
    elif options.find:
        value = "nothing that was tried" if found is None else f"{found:g}"
        print(f"{options.find} with which {options.slo_share:.1%} are good: {value}")
    return int(bool(options.find) and found is None)


def _cost(options: argparse.Namespace) -> tuple[CostModel, Figures]:
    if options.cost is not None and options.fit is not None:
        raise ConfigError(
            "--cost and --fit both say what steps cost: leave one of them out"
        )
    cost, about = H200 if options.cost is None else read_cost(options.cost), Figures()
    if options.fit is not None:
        journal = read_journal(options.fit)
        cost, about = fit(steps(journal.turns()), f"fitted to {options.fit}")
        about["ran"] = dict(journal.about)
    if options.save_cost is not None:
        write_cost(options.save_cost, cost, about)
    return cost, about


def _cases(trace: Trace, options: argparse.Namespace) -> list[tuple[EngineConfig, float]]:
    """All combinations of the settings; what is not set is the journal's, or suits an
    H200.
    """
    first = trace.config or EngineConfig(
        num_blocks=POOL // 64,
        watermark=POOL // 6400,
        max_num_batched_tokens=8192,
        max_model_len=max(trace.sizes),
    )
    told = {"max_model_len": options.max_model_len, "depth": options.steps_in_flight}
    first = evolve(first, **{name: value for name, value in told.items() if value})
    policies = [policy_named(name) for name in options.policy or ()] or [first.policy]
    sizes = (getattr(options, name) or [getattr(first, name)] for name in SIZES[1:])
    cases: list[tuple[EngineConfig, float]] = []
    for policy, *each in product(policies, *sizes):
        config = evolve(first, policy=policy, **dict(zip(SIZES[1:], each, strict=True)))
        pool = first.num_blocks * first.block_size // config.block_size
        configs = [_pooled(config, blocks) for blocks in options.num_blocks or [pool]]
        cases += product(configs, options.speed)
    return cases


def _pooled(config: EngineConfig, blocks: int) -> EngineConfig:
    """The configuration with so many blocks, and a hundredth of them left free, as it
    comes.
    """
    if blocks == config.num_blocks:
        return config
    return evolve(config, num_blocks=max(1, blocks), watermark=blocks // 100)


def run(
    trace: Trace,
    config: EngineConfig,
    speed: float,
    cost: CostModel,
    options: argparse.Namespace,
) -> Figures:
    """Simulate the trace once; returns the settings and what came of it."""
    asked = (name for name in options.policy or () if policy_named(name) == config.policy)
    usual = (name for name, kind in POLICIES.items() if kind is type(config.policy))
    sizes = {name: getattr(config, name) for name in SIZES}
    name = next(chain(asked, usual), type(config.policy).__name__)
    told = {"policy": name, **sizes, "speed": speed}
    report = Report(config, options.slo_ttft, options.slo_tpot)
    coming = trace.arrivals(config.block_size, speed, options.mix)
    coming = report.note(tqdm(coming, name, len(trace.sizes), leave=False, disable=None))
    turns = report.seen(
        Simulation(config, Simulated(trace.lengths), cost, coming).turns()
    )
    begin = time.perf_counter()
    with quiet_collector():
        if options.journal is None:
            deque(turns, maxlen=0)
        else:
            options.journal.mkdir(parents=True, exist_ok=True)
            path = options.journal / f"{'-'.join(map(str, told.values()))}.journal"
            write_journal(
                path, config, turns, {"simulated": options.trace, "cost": cost.name}
            )
    return {**told, **report.figures(), "simulated_in": time.perf_counter() - begin}


def find(
    what: str,
    longest: int,
    config: EngineConfig,
    speed: float,
    good: Callable[[EngineConfig, float], bool],
) -> float | None:
    """The smallest size, or the greatest speed, that is good; None if nothing is.

    Speeds and pools by bisection, in steps of 2%: more load, or fewer blocks, is taken to
    be never better; no more blocks are tried than the configuration has. Batch and block
    sizes help some and hurt others: all powers of two are tried, of blocks with a pool of
    as many tokens.
    """
    pool, budget = config.num_blocks * config.block_size, config.max_num_batched_tokens
    make: dict[str, Callable[[Any], tuple[EngineConfig, float]]] = {
        "speed": lambda pace: (config, pace),
        "num-blocks": lambda n: (_pooled(config, n), speed),
        "block-size": lambda n: (_pooled(evolve(config, block_size=n), pool // n), speed),
        "max-num-seqs": lambda n: (
            evolve(config, max_num_seqs=n, max_num_batched_tokens=max(n, budget)),
            speed,
        ),
    }
    values: list[float] = [
        1.02**k for k in range(350, -351, -1)
    ]  # 1,000 times to a thousandth
    if what == "num-blocks":
        least = blocks_for(min(longest, config.max_model_len), config.block_size)
        some = (round(least * 1.02**k) for k in range(1000))
        values = sorted({n for n in some if n < config.num_blocks} | {config.num_blocks})
    elif what != "speed":
        tried = (1 << k for k in range(0 if what == "max-num-seqs" else 3, 11))
        return min([n for n in tried if good(*make[what](n))], default=None)
    at = bisect_left(values, True, key=lambda value: good(*make[what](value)))
    return values[at] if at < len(values) else None


def _cell(figures: Figures, where: str, form: str) -> str:
    name, _, part = where.partition(".")
    value = figures[name][part] if part else figures[name]
    return "-" if value is None else format(value, form)
