"""The options of `minfer simulate`, and the settings that follow from them."""

import argparse
import contextlib
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, Final

from attrs import evolve, frozen

from minfer.analysis.paired import MIN_DRAWS
from minfer.effects.runs.arrivals import ArrivalTrace
from minfer.effects.runs.costs import H200
from minfer.effects.runs.trace_files import TRACE_FORMATS
from minfer.policies.builtin import SUMMARIES, policy_named
from minfer.records.config import SIZES, EngineConfig
from minfer.records.tiers import HostTier
from minfer.routing.policies import ROUTING_POLICIES
from minfer.simulation.cost import CostModel
from minfer.values.checks import ConfigError

POOL: Final = 30_000 * 64  # tokens of KV cache that a 7B model leaves room for on an H200
# Seconds to move a token's KV of a 7B model between device and host: 18 ms for 16k.
HOST_TOKEN_SECONDS: Final = 1.1e-6
DEFAULT_ROUTING: Final = "prefix"
LIST_HELP: Final = "of several, all combinations are run"
_UPPER_LIMIT: Final = 2**31  # no option takes a number as large


@frozen
class Case:
    """Settings under which a trace is simulated."""

    config: EngineConfig
    speed: float  # times the trace's own pace


@frozen
class _NumberOption:
    """An option that is a number."""

    name: str
    kind: type
    default: float | None
    help: str


_NUMBERS: Final = (
    _NumberOption("--max-model-len", int, None, "default: the longest request's"),
    _NumberOption("--steps-in-flight", int, None, "steps planned ahead (default: 2)"),
    _NumberOption("--requests", int, None, "only so many, the first of the trace"),
    _NumberOption("--divide", int, 1, "divide all lengths by it"),
    _NumberOption(
        "--seeds",
        int,
        None,
        "compare the policies under this number of loads like TRACE: medians, "
        f"intervals, and which differences are noise; at least {MIN_DRAWS} (others with "
        "--first-seed)",
    ),
    _NumberOption("--replicas", int, 1, "engines behind a router (default: 1)"),
    _NumberOption(
        "--host-blocks",
        int,
        None,
        "blocks of a host tier (default: as in TRACE, or none)",
    ),
    _NumberOption(
        "--host-page-seconds",
        float,
        None,
        "what moving a block to or from host memory takes (default: a 7B model's block "
        "over PCIe)",
    ),
    _NumberOption(
        "--slo-ttft",
        float,
        math.inf,
        "an answer is good if its first token comes within so many seconds",
    ),
    _NumberOption(
        "--slo-tpot",
        float,
        math.inf,
        "... and the others take at most so many seconds each, on average",
    ),
    _NumberOption(
        "--slo-share",
        float,
        0.99,
        "the share of answers that must be good, for --find (default: 0.99)",
    ),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    add, list_help = parser.add_argument, LIST_HELP
    add("trace", metavar="TRACE", help=TRACE_FORMATS)
    add(
        "--scheduling-policy",
        action="append",
        metavar="NAME",
        help="who goes first; several, to compare them: "
        + "; ".join(f"{name} ({summary})" for name, summary in SUMMARIES.items())
        + "; or a class of --policies",
    )
    for name in SIZES:
        option = f"--{name.replace('_', '-')}"
        add(option, type=_reader(int, True), metavar="N,..", help=list_help)
    add(
        "--speed",
        type=_reader(float, True),
        default=[1.0],
        metavar="X,..",
        help=f"times the trace's own pace; {list_help}",
    )
    for number in _NUMBERS:
        add(
            number.name,
            type=_reader(number.kind),
            default=number.default,
            metavar="N",
            help=number.help,
        )
    add(
        "--find",
        choices=("max-num-seqs", "num-blocks", "block-size", "speed"),
        help="the smallest (of speed: the greatest) with which they are",
    )
    add(
        "--first-seed",
        type=_seed,
        metavar="SEED",
        help="of --seeds: the first of them (default: the seed of a distribution, or 0); "
        "others show whether a difference is there again",
    )
    add(
        "--mix", type=_seed, metavar="SEED", help="draw clients, priorities and deadlines"
    )
    _add_files(parser)
    add("--json", action="store_true", help="print all figures as JSON")


def _add_files(parser: argparse.ArgumentParser) -> None:
    """Options that name files, and the router's policy."""
    add = parser.add_argument
    add(
        "--routing",
        choices=tuple(ROUTING_POLICIES),
        help=f"which of several --replicas gets a request (default: {DEFAULT_ROUTING})",
    )
    add(
        "--cost",
        type=Path,
        metavar="FILE",
        help=f"what steps cost, as --save-cost wrote it; h200: {H200.name} "
        "(default: as in TRACE, if it is a run that tells; else h200)",
    )
    add(
        "--fit",
        type=Path,
        metavar="JOURNAL",
        help="fit what steps cost to this run instead of TRACE",
    )
    add("--save-cost", type=Path, metavar="FILE", help="keep it for --cost")
    add("--csv", type=Path, metavar="FILE", help="write the figures of all runs there")
    add(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw the figures of all policies there: .png, .svg or .pdf (needs "
        "matplotlib)",
    )
    add("--journal", type=Path, metavar="DIR", help="keep each run as a journal there")


def _reader(kind: type, takes_list: bool = False) -> Callable[[str], Any]:
    """A parser of a number above 0 of that kind, or of several with commas."""

    def read(text: str) -> Any:
        with contextlib.suppress(ValueError):
            values = [kind(number) for number in text.split(",")]
            fit = all(0 < value < _UPPER_LIMIT for value in values)
            if fit and (takes_list or len(values) == 1):
                return values if takes_list else values[0]
        expected = "a whole number from 1" if kind is int else "a number above 0"
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")

    return read


def _seed(text: str) -> int:
    """A seed; not below 0, as Python draws the same for -1 as for 1."""
    with contextlib.suppress(ValueError):
        if 0 <= int(text) < _UPPER_LIMIT:
            return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")


def check_options(options: argparse.Namespace, cases: list[Case]) -> None:
    """Raise ConfigError for options that conflict."""
    level = min(options.slo_ttft, options.slo_tpot) < math.inf
    if options.find and (len(cases) > 1 or not level):
        raise ConfigError(
            "--find needs one value of each setting, and a service level: --slo-ttft, "
            "--slo-tpot or both"
        )
    if options.seeds is not None and (options.find or options.journal):
        raise ConfigError("--seeds goes neither with --find nor with --journal")
    if options.first_seed is not None and options.seeds is None:
        raise ConfigError("--first-seed needs --seeds: how many there are")
    if options.host_page_seconds is not None and options.host_blocks is None:
        raise ConfigError("--host-page-seconds needs --host-blocks: how many there are")
    if options.replicas > 1:
        _check_replicas(options, cases)
    elif options.routing is not None:
        raise ConfigError("--routing chooses among several engines: add --replicas")


def _check_replicas(options: argparse.Namespace, cases: list[Case]) -> None:
    """Raise ConfigError for what replicas cannot be simulated with."""
    if options.journal:
        raise ConfigError("--journal is of one engine: leave --replicas out")
    if any(case.config.speculation is not None for case in cases):
        raise ConfigError("drafts are simulated of one engine: leave --replicas out")


def host_tier(
    config: EngineConfig, options: argparse.Namespace, cost: CostModel
) -> HostTier:
    """The host tier of the options, with the costs that decide whether to load from
    it.
    """
    page_seconds = options.host_page_seconds or HOST_TOKEN_SECONDS * config.block_size
    return HostTier(
        pages=options.host_blocks,
        page_seconds=page_seconds,
        token_seconds=cost.token or cost.eager_token,
    )


def cases_of(
    trace: ArrivalTrace, options: argparse.Namespace, cost: CostModel, longest: int
) -> list[Case]:
    """All combinations of the settings; the default is the journal's, or one that suits
    an H200, and requests of up to `longest` tokens.
    """
    first = trace.config or EngineConfig(
        num_blocks=POOL // 64,
        watermark=POOL // 6400,
        max_num_batched_tokens=8192,
        max_model_len=longest,
    )
    if options.host_blocks is not None:
        first = evolve(first, host=host_tier(first, options, cost))
    limits = {"max_model_len": options.max_model_len, "depth": options.steps_in_flight}
    first = evolve(first, **{name: value for name, value in limits.items() if value})
    names = options.scheduling_policy or ()
    policies = [policy_named(name) for name in names] or [first.policy]
    other_sizes = SIZES[1:]  # all but the pool, which follows from the block size
    sizes = (getattr(options, name) or [getattr(first, name)] for name in other_sizes)
    cases: list[Case] = []
    for policy, *values in product(policies, *sizes):
        changes = dict(zip(other_sizes, values, strict=True))
        config = with_block_size(first, changes.pop("block_size"))
        config = evolve(config, policy=policy, **changes)
        pool = first.num_blocks * first.block_size // config.block_size
        configs = [with_blocks(config, blocks) for blocks in options.num_blocks or [pool]]
        cases += (Case(*case) for case in product(configs, options.speed))
    return cases


def with_blocks(config: EngineConfig, blocks: int) -> EngineConfig:
    """The configuration with `blocks` blocks, of which a hundredth is kept free."""
    if blocks == config.num_blocks:
        return config
    blocks = max(1, blocks)
    store = config.external_store
    if store is not None:  # it remembers at least twice the pool
        store = evolve(store, max_known_keys=max(store.max_known_keys, 2 * blocks))
    return evolve(
        config, num_blocks=blocks, watermark=blocks // 100, external_store=store
    )


def with_block_size(config: EngineConfig, size: int) -> EngineConfig:
    """The configuration with blocks of `size` tokens. Tiers hold as many tokens as
    before, and take as long for each.
    """
    ratio = size / config.block_size
    host, store = config.host, config.external_store
    if host is not None:
        pages, seconds = round(host.pages / ratio), host.page_seconds * ratio
        host = evolve(host, pages=max(1, pages), page_seconds=seconds)
    if store is not None:
        store = evolve(store, page_seconds=store.page_seconds * ratio)
    return evolve(config, block_size=size, host=host, external_store=store)
