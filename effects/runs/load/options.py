"""What `minfer bench serve` takes. The names are those of vLLM's command."""

import argparse
import contextlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from minfer.effects.runs.load.record import LoadError

HOST: Final = "127.0.0.1"  # as `minfer serve` has it, and its port
PORT: Final = 8000
_LAST_PORT: Final = 65535
_LARGEST: Final = 2**31  # no option takes a number as large
PROMPTS: Final = 1000  # requests, unless something says how many


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    _add_server(parser.add_argument_group("the server").add_argument)
    _add_pace(parser.add_argument_group("how many requests, how fast").add_argument)
    asked = parser.add_argument_group("what they ask").add_argument
    _add_random(asked)
    _add_sources(asked)
    _add_bodies(asked)
    _add_clients(parser.add_argument_group("clients").add_argument)
    _add_results(parser.add_argument_group("results").add_argument)


def _add_server(add: Callable[..., Any]) -> None:
    add(
        "--base-url",
        metavar="URL",
        help=f"where it is, with or without /v1 (default: http://{HOST}:{PORT})",
    )
    add("--host", help="the same in short, as `minfer serve` has it: of http://HOST:PORT")
    add("--port", type=whole(1, _LAST_PORT), metavar="PORT", help="likewise")
    add("--model", metavar="NAME", help="what to ask for (default: its first model)")
    add(
        "--api-key",
        default=os.environ.get("MINFER_API_KEY", ""),
        metavar="KEY",
        help="what it wants to be sent (default: the environment's MINFER_API_KEY)",
    )
    add(
        "--endpoint",
        choices=("completions", "chat"),
        default="completions",
        help="completions takes prompts as token ids, so that they are as long as they "
        "are said to be; chat takes words, and its template adds some (default: "
        "%(default)s)",
    )


def _add_pace(add: Callable[..., Any]) -> None:
    add(
        "--num-prompts",
        type=whole(1),
        metavar="N",
        help=f"requests in all (default: {PROMPTS}; those of --trace or --prompts; with "
        "--duration as many as there is time for)",
    )
    add(
        "--duration",
        type=number(above=0),
        metavar="SECONDS",
        help="send nothing after so many seconds; what was sent is waited for",
    )
    add(
        "--max-concurrency",
        type=whole(1),
        metavar="N",
        help="clients, each of which sends its next request when it has its answer; with "
        "a rate: requests on their way, at most",
    )
    add(
        "--request-rate",
        type=number(above=0, infinite=True),
        default=math.inf,
        metavar="R",
        help="requests a second, sent whether or not others were answered (default: inf, "
        "all at once, or as --max-concurrency lets them)",
    )
    add(
        "--burstiness",
        type=number(above=0, infinite=True),
        default=1.0,
        metavar="B",
        help="how evenly they come: 1 as Poisson's do, below it in bursts, inf as a "
        "clock ticks (default: 1)",
    )


def _add_random(add: Callable[..., Any]) -> None:
    for name, default, least, text in (
        ("input", 512, 1, "tokens of a prompt"),
        ("output", 128, 1, "tokens of an answer, at most"),
        ("prefix", 0, 0, "tokens before them that all prompts share"),
    ):
        add(
            f"--random-{name}-len",
            type=whole(least),
            default=default,
            metavar="N",
            help=f"{text} (default: %(default)s)",
        )
    add(
        "--random-range-ratio",
        type=number(above=-1, below=1),
        default=0.0,
        metavar="X",
        help="lengths vary by this share of themselves, up and down (default: 0)",
    )
    add(
        "--vocab-size",
        type=whole(17),
        default=2000,
        metavar="N",
        help="random token ids are below it; the model must know them (default: "
        "%(default)s)",
    )


def _add_sources(add: Callable[..., Any]) -> None:
    add(
        "--trace",
        metavar="FILE",
        help="arrivals and lengths of recorded requests, as `minfer simulate` takes them",
    )
    add(
        "--speed",
        type=number(above=0),
        default=1.0,
        metavar="X",
        help="times the trace's own pace (default: 1)",
    )
    add(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='a prompt a line, or JSON lines with "prompt" (text or token ids) or '
        '"messages", and "max_tokens" if it is not --random-output-len',
    )


def _add_bodies(add: Callable[..., Any]) -> None:
    add("--seed", type=whole(0), default=0, metavar="N", help="of all that is random")
    add("--ignore-eos", action="store_true", help="write all tokens that are asked for")
    add(
        "--temperature",
        type=number(above=-1),
        default=0.0,
        metavar="T",
        help="default: 0, the likeliest token",
    )
    add(
        "--extra-body",
        type=_object,
        default={},
        metavar="JSON",
        help="fields that every request has besides, such as '{\"top_p\": 0.9}'",
    )


def _add_clients(add: Callable[..., Any]) -> None:
    add(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="take answers token by token; without, there is no TTFT, TPOT or ITL",
    )
    add(
        "--usage-per-event",
        action="store_true",
        help="have the server say how many tokens each event brings (vLLM's and SGLang's "
        "continuous_usage_stats)",
    )
    add(
        "--processes",
        type=whole(1),
        metavar="N",
        help="client processes (default: a core's each, up to 8)",
    )
    add(
        "--timeout",
        type=number(above=0),
        default=600.0,
        metavar="SECONDS",
        help="a request fails that has not ended then (default: 600)",
    )
    add(
        "--warmup",
        type=whole(0),
        default=1,
        metavar="N",
        help="requests before, which are not measured (default: %(default)s)",
    )
    add(
        "--repeat",
        type=whole(1),
        default=1,
        metavar="N",
        help="runs in succession, each with other random prompts (default: %(default)s)",
    )


def _add_results(add: Callable[..., Any]) -> None:
    add(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="count the requests a second that keep to all of these: ttft:200 tpot:50 "
        "e2el:5000",
    )
    add("--json", type=Path, metavar="FILE", help="write all figures and settings there")
    add(
        "--save-detailed",
        action="store_true",
        help="with --json: each request by itself, too",
    )
    add(
        "--plot",
        type=Path,
        metavar="FILE.svg",
        help="draw throughput over time and latencies (needs matplotlib)",
    )


def base_url(options: argparse.Namespace) -> str:
    """Where the server is. Raises LoadError if that is said twice."""
    host, port = options.host, options.port
    short = [name for name, value in (("host", host), ("port", port)) if value]
    if not short:
        return options.base_url or f"http://{HOST}:{PORT}"
    if options.base_url:
        named = " and ".join(f"--{name}" for name in short)
        raise LoadError(f"--base-url says where the server is: leave {named} out")
    host = host or HOST
    return f"http://{f'[{host}]' if ':' in host else host}:{port or PORT}"


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """What reads a whole number from `least` on, to `most`."""
    said = f"from {least}" + (f" to {most}" if most else "")

    def read(text: str) -> int:
        with contextlib.suppress(ValueError):
            if least <= int(text) <= (most or _LARGEST - 1):
                return int(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {said}")

    return read


def number(
    above: float, below: float = math.inf, *, infinite: bool = False
) -> Callable[[str], float]:
    """What reads a number: above -1 means from 0 on."""
    said = "from 0" if above < 0 else f"above {above:g}"
    said += f" and below {below:g}" if below < math.inf else ""

    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            value = float(text)
            least = value >= 0 if above < 0 else value > above
            if least and (
                value < min(below, _LARGEST) or (infinite and value == math.inf)
            ):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not a number {said}")

    return read


def _object(text: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        told = json.loads(text)
        if isinstance(told, dict):
            return told
    raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
