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


def pieces(max_pieces: int) -> list[list[int]]:
    """Up to `max_pieces` pieces of `LENGTH` token ids, none of two files."""
    encode, token_pieces = Tokenizer(bundled_folder()).encode, []
    for text in held_out_texts():
        ids = encode(text)
        ends = range(LENGTH, len(ids) + 1, LENGTH)
        token_pieces += [ids[end - LENGTH : end] for end in ends]
    return token_pieces[:max_pieces]


def scored(texts: Sequence[list[int]], **settings: Any) -> dict[str, float]:
    """The perplexity of an engine with these settings."""
    began = time.perf_counter()
    costs = list[list[float]]()
    with LLM(dtype="float32", skip_tokenizer_init=True, **settings) as llm:
        for output in llm.generate([*texts], SCORED, use_tqdm=False):
            ids, logprobs = output.prompt_token_ids, output.prompt_logprobs or []
            pairs = zip(ids, logprobs, strict=True)
            costs.append([-by_id[token].logprob for token, by_id in pairs if by_id])
    late = [cost for text_costs in costs for cost in text_costs[max(WINDOWS) - 1 :]]
    all_costs = [cost for text_costs in costs for cost in text_costs]
    return {
        "perplexity": perplexity(late),
        "perplexity_of_all_positions": perplexity(all_costs),
        "positions": len(late),
        "seconds": time.perf_counter() - began,
    }


def perplexity(costs: Sequence[float]) -> float:
    """The exponential of the mean of costs in nats."""
    return math.exp(math.fsum(costs) / len(costs))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    texts = pieces(args.pieces)
    results: dict[str, Any] = {"pieces": len(texts), "length": LENGTH}
    results["full attention"] = scored(texts)
    show({"window": "none", **results["full attention"]})
    for window in WINDOWS:
        for sinks in SINKS:
            settings = {"attention_window": window, "attention_sink_tokens": sinks}
            case = scored(texts, **settings)
            results[f"window {window}, {sinks} sink tokens"] = case
            show({"window": window, "sinks": sinks, **case})
    return results


if __name__ == "__main__":
    run("attention_sinks", measure, {"--pieces": 64})
