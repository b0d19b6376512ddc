"""vLLM with the draft heads of `draft_heads_gpu`: what that measures of minfer.

    python -m bench.draft_heads_vllm --part eagle3

For an environment with vLLM beside minfer. Two engines, without drafts and with them, are
asked in turn, each with its share of the memory. Drafts are accepted at the same rates:
by vLLM's own "synthetic" rejection, whose rates are of all drafts up to a place, where
`--rates` are of drafts whose predecessors were accepted.
"""

import argparse
import itertools
import operator
import tempfile
from pathlib import Path
from typing import Any, Final

from bench.draft_heads_gpu import CACHE, INPUTS, MODELS, OUTPUTS, Model
from bench.layers_vllm import Model as Vllm
from bench.layers_vllm import memory_settings, set_environment, spread_routing
from bench.results import run, show, spread
from bench.speculation_cases import LOW_WORDS, PLAIN

DRAFTS: Final = "drafts"


def engine(model: Model, args: argparse.Namespace, *, drafts: bool) -> Vllm:
    """vLLM with the model, and its head if there are `drafts`."""
    from vllm import LLM

    rates = [*itertools.accumulate(args.rates, operator.mul)]
    config = {
        **model.speculative,
        "num_speculative_tokens": len(rates),
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": rates,
    }
    llm = LLM(
        model.path,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=2 * (INPUTS + OUTPUTS),
        max_num_seqs=max(args.rows),
        enable_prefix_caching=False,
        speculative_config=config if drafts else None,
        **memory_settings(CACHE[args.part] / 1e9),
    )
    if model.spreads_routing:
        llm.apply_model(spread_routing)
    return Vllm(llm, range(1, LOW_WORDS))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure both engines in turn."""
    set_environment()
    import torch
    import vllm

    args.tiny = False  # the shape, as of `draft_heads_gpu`
    with tempfile.TemporaryDirectory() as folder:
        model = MODELS[args.part](Path(folder), args)
        ways = {PLAIN: False, DRAFTS: True}
        engines = {
            way: engine(model, args, drafts=drafts) for way, drafts in ways.items()
        }
    results: dict[str, Any] = {}
    for rows in args.rows:
        for vllm_engine in engines.values():
            vllm_engine.ask(rows, INPUTS, OUTPUTS)
        pairs = [
            {way: each.ask(rows, INPUTS, OUTPUTS) for way, each in engines.items()}
            for _ in range(args.pairs)
        ]
        results[f"{rows} rows"] = {
            way: spread([pair[way] for pair in pairs]) for way in engines
        } | {"ratio": spread([pair[DRAFTS] / pair[PLAIN] for pair in pairs])}
        show({f"{args.part}, {rows} rows": results[f"{rows} rows"]["ratio"]})
    card = torch.cuda.get_device_name()
    return {"card": card, "vllm": vllm.__version__, args.part: results}


if __name__ == "__main__":
    run(
        "draft_heads_vllm",
        measure,
        {
            "--part": {"choices": [*MODELS], "default": "eagle3"},
            "--rows": {"nargs": "+", "type": int, "default": [1, 8, 64, 256]},
            "--rates": {"nargs": "+", "type": float, "default": [0.8, 0.65, 0.5]},
            "--experts": {"type": int, "default": 64, "help": "of mtp's layers"},
            "--pairs": {"type": int, "default": 3, "help": "rounds that count"},
        },
    )
