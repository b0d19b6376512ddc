"""Every family of the table, and some outside it, against transformers: greedy float32
tokens.

Tiny random checkpoints as transformers saves them, with weights large enough that tokens
vary. minfer serves the prompts in small blocks and chunks, eight at a time, far past the
windows, and again from its prefix cache; transformers one by one. Counts tokens that
differ (expected: none), and different ones.
"""

import argparse
import random
import tempfile
from typing import Any

import torch

from bench.results import run, show
from tests.effects.parity import serve_twice, their_tokens
from tests.effects.tiny_families import OTHERS, VARIANTS, WINDOW, save

SMALL = {"block_size": 8, "max_num_seqs": 8, "max_num_batched_tokens": 24}


def compare(
    family: str, config: dict[str, Any], prompts: list[list[int]]
) -> dict[str, int]:
    """Continue the prompts with both; what differs."""
    tokens = 2 * WINDOW
    with tempfile.TemporaryDirectory() as folder:
        model = save(folder, family, config)
        expected = [their_tokens(model, [prompt], tokens)[0] for prompt in prompts]
        passes, _ = serve_twice(folder, prompts, tokens, **SMALL)
    rows = [
        row
        for tokens_of_pass in passes
        for row in zip(tokens_of_pass, expected, strict=True)
    ]
    pairs = [pair for row in rows for pair in zip(*row, strict=True)]
    return {
        "output_tokens": len(pairs),
        "mismatched_tokens": sum(
            token != expected_token for token, expected_token in pairs
        ),
        "different_tokens": len({expected_token for _, expected_token in pairs}),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    rng, rows = random.Random(args.seed), list[dict[str, Any]]()
    for (family, name), config in (VARIANTS | OTHERS).items():
        lengths = rng.choices(range(1, 3 * WINDOW + 1), k=args.prompts)
        prompts = [rng.choices(range(160), k=length) for length in lengths]
        rows.append(
            {"family": family, "variant": name, **compare(family, config, prompts)}
        )
        show(rows[-1])
    wrong = sum(row["mismatched_tokens"] for row in rows)
    print(f"{wrong} mismatches in {len(rows)} variants")
    return {"mismatched_tokens": wrong, "prompts": args.prompts, "variants": rows}


if __name__ == "__main__":
    run("families", measure, {"--prompts": 50, "--seed": 0})
