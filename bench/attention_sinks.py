"""Perplexity of the bundled model with attention windows, and sink tokens beside them.

    python -m bench.attention_sinks

The text is the held-out files of the standard library, cut into pieces of as many tokens
as the model takes; each is a prompt of an engine, which scores it (`prompt_logprobs`), in
float32. Positions count from the widest window on, where every window leaves tokens out;
beside them is the figure of all positions.
"""

import argparse
import math
import time
from collections.abc import Sequence
from typing import Any, Final

from bench.held_out import held_out_texts
from bench.results import run, show
from minfer import LLM, SamplingParams
from minfer.effects.setup.folders import bundled_folder
from minfer.effects.text.tokenizer import Tokenizer

LENGTH: Final = 2048  # the model's context
WINDOWS: Final = (128, 256, 512)
SINKS: Final = (0, 4, 16)
SCORED: Final = SamplingParams(max_tokens=0, prompt_logprobs=0)


def pieces(most: int) -> list[list[int]]:
    """Up to so many pieces of `LENGTH` token ids, none of two files."""
    encode, found = Tokenizer(bundled_folder()).encode, []
    for text in held_out_texts():
        ids = encode(text)
        ends = range(LENGTH, len(ids) + 1, LENGTH)
        found += [ids[end - LENGTH : end] for end in ends]
    return found[:most]


def scored(texts: Sequence[list[int]], **settings: Any) -> dict[str, float]:
    """The perplexity of an engine with these settings."""
    began = time.perf_counter()
    costs = list[list[float]]()
    with LLM(dtype="float32", skip_tokenizer_init=True, **settings) as llm:
        for output in llm.generate([*texts], SCORED, use_tqdm=False):
            ids, found = output.prompt_token_ids, output.prompt_logprobs or []
            each = zip(ids, found, strict=True)
            costs.append([-one[token].logprob for token, one in each if one])
    late = [cost for each in costs for cost in each[max(WINDOWS) - 1 :]]
    every = [cost for each in costs for cost in each]
    return {
        "perplexity": perplexity(late),
        "perplexity_of_all_positions": perplexity(every),
        "positions": len(late),
        "seconds": time.perf_counter() - began,
    }


def perplexity(costs: Sequence[float]) -> float:
    """The exponential of the mean of costs in nats."""
    return math.exp(math.fsum(costs) / len(costs))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    texts = pieces(args.pieces)
    found: dict[str, Any] = {"pieces": len(texts), "length": LENGTH}
    found["full attention"] = scored(texts)
    show({"window": "none", **found["full attention"]})
    for window in WINDOWS:
        for sinks in SINKS:
            how = {"attention_window": window, "attention_sink_tokens": sinks}
            case = scored(texts, **how)
            found[f"window {window}, {sinks} sink tokens"] = case
            show({"window": window, "sinks": sinks, **case})
    return found


if __name__ == "__main__":
    run("attention_sinks", measure, {"--pieces": 64})
