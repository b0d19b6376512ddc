"""The options of `minfer bench serve`: those of `vllm bench serve`, by the same names."""

import argparse
import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from minfer.effects.setup.removed import refuse

URL: Final = "http://127.0.0.1:8000"  # the default address of `minfer serve`
ENDPOINTS: Final = {
    "openai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}
GOALS: Final = ("ttft", "tpot", "e2el")
PROMPTS: Final = 1000  # requests, by default

_LARGEST: Final = 2**31  # no option takes a number as large
_DATASET: Final = "a file of prompts: --dataset-name custom --dataset-path FILE"
# Removed options, and what replaces each.
REMOVED: Final = {
    "--host": "give the whole address with --base-url",
    "--port": "give the whole address with --base-url",
    "--api-key": "set OPENAI_API_KEY in the environment",
    "--duration": "give --num-prompts: the rate times the seconds",
    "--random-prefix-len": f"write the shared prefix into {_DATASET}",
    "--vocab-size": "random token ids are below 2,000",
    "--trace": f"use `minfer simulate`, or {_DATASET}",
    "--speed": "give --request-rate",
    "--prompts": "use --dataset-name custom --dataset-path FILE",
    "--extra-body": "use --temperature and --ignore-eos",
    "--stream": "answers are always streamed",
    "--no-stream": "answers are always streamed; E2EL is the latency of all of them",
    "--usage-per-event": "TPOT is exact without it",
    "--processes": "run several of this command at once",
    "--timeout": "interrupt the run: what was completed is shown and saved",
    "--warmup": "one request is always sent before the load",
    "--repeat": "run the command again, with another --seed",
    "--json": "use --result-filename FILE",
    "--save-detailed": "use --save-result: percentiles by --metric-percentiles",
    "--plot": "use --save-result, and draw its numbers",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    _add_server(parser.add_argument_group("the server").add_argument)
    _add_pace(parser.add_argument_group("how many requests, how fast").add_argument)
    _add_requests(parser.add_argument_group("what they ask").add_argument)
    _add_results(parser.add_argument_group("results").add_argument)
    refuse(parser, REMOVED)


def _add_server(add: Callable[..., Any]) -> None:
    add(
        "--backend",
        "--endpoint-type",
        choices=tuple(ENDPOINTS),
        default="openai",
        help="openai sends prompts as token ids, so that they have exactly as many as "
        "were asked for; openai-chat sends words, and the chat template adds tokens "
        "(default: %(default)s)",
    )
    add(
        "--base-url",
        default=URL,
        metavar="URL",
        help="the server, with or without /v1 (default: %(default)s)",
    )
    add(
        "--endpoint",
        type=_path,
        metavar="PATH",
        help="where requests are posted (default: /v1/completions, or "
        "/v1/chat/completions, by --backend)",
    )
    add("--model", metavar="NAME", help="what to ask for (default: its first model)")


def _add_pace(add: Callable[..., Any]) -> None:
    add(
        "--num-prompts",
        type=whole(1),
        metavar="N",
        help=f"requests (default: {PROMPTS}, or the prompts of --dataset-path)",
    )
    add(
        "--request-rate",
        type=number(above=0, infinite=True),
        default=math.inf,
        metavar="R",
        help="requests a second, sent whether or not others were answered (default: inf, "
        "all at once, or as --max-concurrency allows)",
    )
    add(
        "--burstiness",
        type=number(above=0, infinite=True),
        default=1.0,
        metavar="B",
        help="how evenly they are sent: 1 as a Poisson process, below it in bursts, inf "
        "at equal intervals (default: 1)",
    )
    add(
        "--max-concurrency",
        type=whole(1),
        metavar="N",
        help="requests in flight, at most; without a rate: N clients, each of which "
        "sends its next request when it has its answer",
    )


def _add_requests(add: Callable[..., Any]) -> None:
    add(
        "--dataset-name",
        choices=("random", "custom"),
        default="random",
        help="random tokens, or the prompts of --dataset-path (default: %(default)s)",
    )
    add(
        "--dataset-path",
        type=Path,
        metavar="FILE",
        help='JSON lines with "prompt" (text or token ids) or, in a chat, "messages", '
        'and "output_tokens" if that is not --random-output-len',
    )
    for name, default, what in (
        ("input", 1024, "tokens of a prompt"),
        ("output", 128, "tokens of an answer, at most"),
    ):
        add(
            f"--random-{name}-len",
            type=whole(1),
            default=default,
            metavar="N",
            help=f"{what} (default: %(default)s)",
        )
    add(
        "--random-range-ratio",
        type=number(above=-1, below=1),
        default=0.0,
        metavar="X",
        help="lengths vary by this share of themselves, up and down (default: 0)",
    )
    add("--seed", type=whole(0), default=0, metavar="N", help="of prompts and gaps")
    add(
        "--ignore-eos",
        action="store_true",
        help="generate all tokens that are asked for",
    )
    add(
        "--temperature",
        type=number(above=-1),
        default=0.0,
        metavar="T",
        help="default: 0, the likeliest token",
    )


def _add_results(add: Callable[..., Any]) -> None:
    add(
        "--metric-percentiles",
        type=_percentiles,
        default=(99.0,),
        metavar="P,P",
        help="percentiles of latencies (default: 99)",
    )
    add(
        "--goodput",
        nargs="+",
        type=_goal,
        default=[],
        metavar="NAME:MS",
        help="also count requests that were as fast as ttft:200 tpot:50 e2el:5000",
    )
    add("--save-result", action="store_true", help="save all numbers as JSON")
    add(
        "--result-filename",
        type=Path,
        metavar="FILE",
        help="where (default: a name from backend, rate, model and time)",
    )


def _path(text: str) -> str:
    if text.startswith("/"):
        return text
    raise argparse.ArgumentTypeError(
        f"{text!r} is no path, as /v1/completions is; a chat is --backend openai-chat"
    )


def _goal(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    with contextlib.suppress(ValueError):
        if name in GOALS and float(value) > 0:
            return name, float(value)
    raise argparse.ArgumentTypeError(
        f"{text!r} is no goal; it is as in ttft:200 tpot:50 e2el:5000, in milliseconds"
    )


def _percentiles(text: str) -> tuple[float, ...]:
    with contextlib.suppress(ValueError):
        found = tuple([float(part) for part in text.split(",")])
        if all(0 <= share <= 100 for share in found):
            return found
    raise argparse.ArgumentTypeError(f"{text!r} is not like 50,90,99")


def whole(least: int) -> Callable[[str], int]:
    """A parser of whole numbers from `least` on."""

    def read(text: str) -> int:
        with contextlib.suppress(ValueError):
            if least <= int(text) < _LARGEST:
                return int(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least}")

    return read


def number(
    above: float, below: float = math.inf, *, infinite: bool = False
) -> Callable[[str], float]:
    """A parser of numbers; above -1 means from 0 on."""
    wanted = "from 0" if above < 0 else f"above {above:g}"
    wanted += f" and below {below:g}" if below < math.inf else ""

    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            value = float(text)
            enough = value >= 0 if above < 0 else value > above
            if enough and (
                value < min(below, _LARGEST) or (infinite and value == math.inf)
            ):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not a number {wanted}")

    return read
