"""Whether transformers' `ResponseParser` could read answers in place of minfer's parsers.

`cost`: answers with calls of Hermes' format, fed a token at a time to 256 parsers of each
kind in turn; processor time a token. `length`: the same of one answer, by its length.
`broken`: what each makes of calls that are nearly right, and whether text is lost.
`first`: the tokens of a call with a long argument that go by before any of the argument
is known. `imports`: seconds and memory of the import, in a process of its own.

    python -m bench.response_parser              # a minute
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, Final

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

from bench.results import run, show, spread
from minfer.effects.text.tools.deltas import Arguments, CallStart, ContentDelta
from minfer.effects.text.tools.formats import Parsing

CHARACTERS_PER_TOKEN: Final = 4  # characters
STREAMS: Final = 256
LENGTHS: Final = (1_000, 4_000, 16_000)  # tokens of an answer
NAMES: Final = ("get_weather", "write_file")
TEMPLATE: Final = load_response_template(
    {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {
                "open_pattern": r"\s*<tool_call>",
                "close": "</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close": "<|im_end|>", "content": "text"},
        },
    }
)
IMPORT: Final = """
import time
def size():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20
before, start = size(), time.perf_counter()
import {module}
print(time.perf_counter() - start, size() - before)
"""
MODULES: Final = {
    "transformers": "transformers.utils.chat_parsing",
    "minfer": "minfer.effects.text.tools.formats",
}
Feed = Callable[[str], object]


def call(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as Hermes and Qwen write it."""
    text = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{text}\n</tool_call>"


WEATHER: Final = call("get_weather", {"city": "Paris", "days": 3})
BROKEN: Final = {
    "a marker in a string": call("write_file", {"text": "a </tool_call> b"}),
    "arguments that are cut": WEATHER[:-30],
    "no JSON": "<tool_call>\n{name: get_weather}\n</tool_call>",
    "a call, then no JSON": f"{WEATHER}\n<tool_call>oops</tool_call> The end.",
    "a line break in a string": WEATHER.replace("Paris", "Pa\nris"),
    "the marker twice": f"<tool_call>{WEATHER}",
    "two calls between markers": WEATHER.replace(
        "\n</tool", '\n{"name": "get_weather", "arguments": {}}\n</tool'
    ),
    "prose about the marker": "Write <tool_call> before a call.",
}


def pieces(text: str) -> list[str]:
    """A text cut into tokens."""
    return [
        text[start : start + CHARACTERS_PER_TOKEN]
        for start in range(0, len(text), CHARACTERS_PER_TOKEN)
    ]


def minfer_feed() -> Feed:
    """A parser of minfer's."""
    return Parsing(tools="hermes", names=NAMES).parser().push


def transformers_feed() -> Feed:
    """A parser of transformers'."""
    return ResponseParser(TEMPLATE, prefix="").feed


KINDS: Final = {"minfer": minfer_feed, "transformers": transformers_feed}


def microseconds(make: Callable[[], Feed], streams: int, tokens: Sequence[str]) -> float:
    """Processor time a token, of answers that come at the same time."""
    feeds = [make() for _ in range(streams)]
    start = time.process_time()
    for token in tokens:
        for feed in feeds:
            feed(token)
    return (time.process_time() - start) / (streams * len(tokens)) * 1e6


def compare(streams: int, text: str, rounds: int) -> dict[str, Any]:
    """Both kinds in alternation, and the median of their ratios."""
    tokens = pieces(text)
    costs: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind, make in KINDS.items():
            costs[kind].append(microseconds(make, streams, tokens))
    ratios = [b / a for a, b in zip(*costs.values(), strict=True)]
    return {
        **{kind: spread(values) for kind, values in costs.items()},
        "ratio": round(median(ratios), 2),
    }


def outcome(text: str) -> dict[str, Any]:
    """What both make of an answer."""
    deltas = Parsing(tools="hermes", names=NAMES).parser().push(text, final=True)
    minfer_outcome = {
        "content": "".join(d.text for d in deltas if isinstance(d, ContentDelta)),
        "calls": sum(isinstance(d, CallStart) for d in deltas),
    }
    parser = ResponseParser(TEMPLATE, prefix="")
    try:
        parser.feed(text)
        message, _ = parser.finalize()
        calls = message.get("tool_calls", [])
        transformers_outcome = {
            "content": message.get("content", ""),
            "calls": len(calls),
        }
    except Exception as error:  # whatever it raises, the answer is lost
        transformers_outcome = {"raises": type(error).__name__}
    return {"minfer": minfer_outcome, "transformers": transformers_outcome}


def first_argument(text: str) -> dict[str, int]:
    """The tokens that come before a piece of an argument does."""
    feed, parser = minfer_feed(), ResponseParser(TEMPLATE, prefix="")
    counts: dict[str, int] = {}
    for count, token in enumerate(pieces(text), 1):
        deltas: Any = feed(token)
        if any(isinstance(delta, Arguments) for delta in deltas):
            counts.setdefault("minfer", count)
        if any(event["type"] == "region_close" for event in parser.feed(token)):
            counts.setdefault("transformers", count)
    return counts


def imports(rounds: int) -> dict[str, Any]:
    """Seconds and MiB of the modules that hold the parsers."""
    figures = {}
    for kind, module in MODULES.items():
        runs = []
        for _ in range(rounds):
            code = IMPORT.format(module=module)
            process = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, check=True, text=True
            )
            runs.append([float(number) for number in process.stdout.split()[-2:]])
        seconds, size = zip(*runs, strict=True)
        figures[kind] = {"seconds": spread(seconds), "MiB": spread(size)}
    return figures


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    answer = "Let me look.\n" + "\n".join([WEATHER] * 8)
    results: dict[str, Any] = {
        "streams": args.streams,
        "cost": compare(args.streams, answer, args.rounds),
        "length": {
            str(length): compare(1, call("write_file", {"text": "x" * length * 4}), 3)
            for length in LENGTHS
        },
        "broken": {name: outcome(text) for name, text in BROKEN.items()},
        "first": first_argument(call("write_file", {"text": "x" * 4000})),
        "imports": imports(args.rounds),
    }
    show(results)
    return results


if __name__ == "__main__":
    run("response_parser", measure, {"--streams": STREAMS, "--rounds": 7})
