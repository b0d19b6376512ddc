"""What text costs beside the model: stop strings, and detokenizing a long answer.

Claims: 16 stop strings of 1 kB, whose beginnings are all over the text, cost 32 requests
on the bundled model at most 5 % of their throughput; and a token far into an answer costs
its text what a token at its start does.

Requests with stop strings and without are served in turns, in one process, greedily, so
that both write the same text. The stop strings are cut from that text and end in a
character that it has not: they are begun again and again, held back for hundreds of
characters, and never found.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any, Final

import torch
from attrs import frozen

from bench.results import run, show, spread
from minfer import LLM, SamplingParams
from minfer.effects.live.engine.interpreter import paused_collector
from minfer.effects.setup.folders import bundled_folder
from minfer.effects.text.detokenizer import Detokenizer
from minfer.effects.text.stops import StopMatcher
from minfer.effects.text.tokenizer import Tokenizer

REQUESTS: Final = 32
STOPS: Final = 16
LENGTH: Final = 1000  # characters of a stop string
TOKENS: Final = 256  # of an answer
NEVER: Final = "§"  # no answer has it
PROMPT: Final = "def find_file(name, path):\n"
ENDS_SHARE: Final = 10  # of a long answer, its first tokens and its last are this part
LONG: Final = 100_000  # tokens of a long answer
TEXT: Final = "café “日本語” नमस्ते مرحبا 👩\u200d👩\u200d👧 🇩🇪 def f(x):\n    return x\n"


def stop_strings(text: str) -> list[str]:
    """Strings that begin with what the text has at many places, and are never whole."""
    step = max(1, len(text) // STOPS)
    beginnings = (
        text[start : start + LENGTH - 1] for start in range(0, STOPS * step, step)
    )
    return [beginning + NEVER * (LENGTH - len(beginning)) for beginning in beginnings]


@frozen
class Served:
    """All requests, served once."""

    texts: list[str]
    seconds: float
    processor: float  # seconds of all threads

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return REQUESTS * TOKENS / self.seconds


def serve(llm: LLM, stop: list[str]) -> Served:
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, stop=stop)
    begin, processor = time.perf_counter(), time.process_time()
    outputs = llm.generate([PROMPT] * REQUESTS, params, use_tqdm=False)
    seconds, processor = time.perf_counter() - begin, time.process_time() - processor
    completions = [output.outputs[0] for output in outputs]
    assert {len(completion.token_ids) for completion in completions} == {TOKENS}, (
        "a stop string was found"
    )
    return Served([completion.text for completion in completions], seconds, processor)


def stopping(pairs: int) -> dict[str, Any]:
    """Throughput with stop strings and without, in turns, and the processor's time."""
    llm = LLM(max_num_seqs=REQUESTS)
    stops = stop_strings(serve(llm, []).texts[0])
    without, beside = list[Served](), list[Served]()
    for number in range(pairs):
        for stop in ([], stops) if number % 2 else (stops, []):
            (beside if stop else without).append(serve(llm, stop))
        assert beside[-1].texts == without[-1].texts, "stop strings have changed the text"
    llm.close()
    matched = [*zip(without, beside, strict=True)]
    return {
        "tokens per second without": spread([served.rate for served in without]),
        "tokens per second with": spread([served.rate for served in beside]),
        "ratio of medians": median(b.rate for b in beside)
        / median(a.rate for a in without),
        "ratio": spread([b.rate / a.rate for a, b in matched]),
        "processor time": spread([b.processor / a.processor for a, b in matched]),
    }


def flatness(repetitions: int) -> dict[str, Any]:
    """A token's cost at the end of a long answer, in costs of one at its start."""
    tokenizer = Tokenizer(bundled_folder())
    once = tokenizer.encode(TEXT)
    ids = (once * (LONG // len(once) + 1))[:LONG]
    stops = stop_strings(TEXT * (STOPS * LENGTH // len(TEXT) + 1))

    def plain() -> Callable[[int], object]:
        decoder = Detokenizer(tokenizer)
        return decoder.push_token

    def stopped() -> Callable[[int], object]:
        decoder, matcher = Detokenizer(tokenizer), StopMatcher(stops)
        return lambda token: matcher.push(decoder.push_token(token))

    ways = {"detokenizing": plain, "with stop strings": stopped}
    return {name: _flat(way, ids, repetitions) for name, way in ways.items()}


def _flat(
    way: Callable[[], Callable[[int], object]], ids: list[int], repetitions: int
) -> dict[str, Any]:
    size = len(ids) // ENDS_SHARE
    ratios, costs = [], []
    for _ in range(repetitions + 1):
        push = way()
        first = _seconds(push, ids[:size])
        middle = _seconds(push, ids[size:-size])
        last = _seconds(push, ids[-size:])
        ratios.append(last / first)
        costs.append(1e6 * (first + middle + last) / len(ids))
    # The first time looks the tokens' bytes up.
    return {"last to first": spread(ratios[1:]), "us a token": spread(costs[1:])}


def _seconds(push: Callable[[int], object], ids: list[int]) -> float:
    begin = time.perf_counter()
    for token in ids:
        push(token)
    return time.perf_counter() - begin


def measure(args: argparse.Namespace) -> dict[str, Any]:
    # Threads of a product that wait for each other would be most of what is measured.
    torch.set_num_threads(1)
    with paused_collector():
        results = {
            "stop strings": stopping(args.pairs),
            "flat": flatness(args.repetitions),
        }
    for name, figures in results.items():
        show({name: figures})
    return results


if __name__ == "__main__":
    run("text", measure, {"--pairs": 21, "--repetitions": 7})
