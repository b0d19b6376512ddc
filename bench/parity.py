"""Does minfer say what transformers says? Greedy tokens in float32, logits in bfloat16.

float32: prompts of Python text are continued greedily by transformers, one by one, and by the
engine under every combination of chunk size, batch size, depth, repeat and pool size; each engine
serves the prompts twice, so that the second pass hits the prefix cache. Any token that differs
counts its prompt as a mismatch; expected are none.

bfloat16: over prompts and their continuations, the KL divergence in nats of minfer's next-token
distribution from that of transformers in float32, and how often the likeliest token is the same;
beside them, transformers' own figures in bfloat16.

    python -m bench.parity
"""

import argparse
import itertools
import random
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.results import write
from bench.serving import BUNDLED, Arrival, Server, their_tokens, theirs
from minfer.effects.attention import make_cache
from minfer.effects.batch import Row, make_batch
from minfer.effects.checkpoint import load_weights, read_spec
from minfer.effects.model import forward
from minfer.effects.spec import ModelSpec
from minfer.effects.weights import Weights

OWN = (
    "def fibonacci(n):\n",
    "import os\nimport sys\n\n\ndef main():\n    ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "# Read a file and count its words.\n",
    "for i in range(10):\n    print(i",
    'def greet(name: str) -> str:\n    """Return a greeting."""\n    return ',
    "try:\n    value = int(text)\nexcept ValueError",
    "with open(path) as file:\n",
    "x",
    "\n",
)
HEADER = '"""Tools for reading and writing tables.\n\nEvery function takes a path first."""\n\n'
BLOCK = 16
MOST = 192  # prompt tokens
COMBINATIONS = {
    "max_num_batched_tokens": (1024, 24),  # whole prompts, or chunks of what is left of 24
    "max_num_seqs": (1, 16),
    "depth": (1, 2),
    "max_repeat": (1, 4),
    "pool": ("ample", "tight"),
}


def snippets(count: int, rng: random.Random) -> list[str]:
    """Python text: a list of our own, then pieces of the standard library, some with one header."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    out = list(OWN[:count])
    while len(out) < count:
        lines = rng.choice(files).read_text("utf-8").splitlines(keepends=True)
        at = rng.randrange(max(1, len(lines) - 8))
        text = "".join(lines[at : at + rng.randrange(1, 25)])
        if text.strip():
            out.append(HEADER + text if rng.random() < 0.3 else text)
    return out


def encoded(folder: Path, texts: list[str]) -> list[tuple[int, ...]]:
    """Prompts as token ids, shortened to MOST."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [tuple(tokenizer.encode(text).ids[:MOST]) for text in texts]


def settings_of(values: dict[str, Any], tokens: int) -> dict[str, Any] | None:
    """An engine's settings; a tight pool holds two of the longest sequences."""
    one = -(-(MOST + tokens) // BLOCK)
    out = {k: v for k, v in values.items() if k != "pool"}
    if values["pool"] == "tight" and values["max_num_seqs"] == 1:
        return None  # a sequence alone is never preempted
    blocks = 2 * one if values["pool"] == "tight" else 2048
    return {**out, "num_blocks": blocks, "block_size": BLOCK, "max_model_len": MOST + tokens}


def compare(
    spec: ModelSpec, weights: Weights, arrivals: list[Arrival], wanted: list[list[int]], tokens: int
) -> list[dict[str, Any]]:
    """Serve the prompts twice under every combination; one row of figures each."""
    rows = []
    for values in itertools.product(*COMBINATIONS.values()):
        named = dict(zip(COMBINATIONS, values, strict=True))
        settings = settings_of(named, tokens)
        if settings is None:
            continue
        begin = time.perf_counter()
        server = Server.of(spec, weights, **settings)
        wrong = []
        for turn in range(2):
            hits = server.hit
            served = server.serve(arrivals)
            pairs = zip(served, wanted, strict=True)
            wrong += [(turn, i) for i, (s, w) in enumerate(pairs) if list(s.tokens) != w]
        row = {
            **named,
            "prompts": 2 * len(arrivals),
            "mismatches": len(wrong),
            "mismatched": wrong,
            "preemptions": server.preempted,
            "hit_tokens_first_pass": hits,
            "hit_tokens_second_pass": server.hit - hits,
            "failed_steps": server.voided,
            "seconds": time.perf_counter() - begin,
        }
        rows.append(row)
        print(
            f"tokens a step {named['max_num_batched_tokens']:5} batch {named['max_num_seqs']:3} "
            f"depth {named['depth']} repeat {named['max_repeat']} pool {named['pool']:6}"
            f" preemptions {server.preempted:5} hits {row['hit_tokens_second_pass']:6}"
            f" mismatches {len(wrong)} of {row['prompts']}",
            flush=True,
        )
    return rows


def close_calls(model: Any, prompts: Sequence[Sequence[int]], wanted: list[list[int]]) -> float:
    """The smallest gap between the two largest logits at any token that was chosen."""
    smallest = float("inf")
    for prompt, out in zip(prompts, wanted, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *out[:-1]]])).logits[0, len(prompt) - 1 :]
        top = logits.topk(2, -1).values
        smallest = min(smallest, float((top[:, 0] - top[:, 1]).min()))
    return smallest


def minfer_logits(spec: ModelSpec, weights: Weights, tokens: list[int]) -> Tensor:
    """Logits [tokens, vocab] float32, the second half computed as a chunk over the cached first."""
    blocks = -(-len(tokens) // BLOCK)
    dtype = str(weights.embed.dtype).removeprefix("torch.")
    cache = make_cache(spec, blocks, BLOCK, dtype)
    half, table = len(tokens) // 2, list(range(blocks))
    parts = []
    for start, part in ((0, tokens[:half]), (half, tokens[half:])):
        if part:
            batch = make_batch([Row(part, start, table, len(part))], BLOCK)
            parts.append(forward(spec, weights, batch, cache).float())
    return torch.cat(parts)


def divergence(
    reference: Any, half: Any, spec: ModelSpec, weights: Weights, texts: list[list[int]]
) -> dict[str, dict[str, float]]:
    """KL divergence (nats) and top-1 agreement with `reference`, of minfer and of `half`."""
    kl: dict[str, list[Tensor]] = {"minfer": [], "transformers": []}
    same: dict[str, list[Tensor]] = {"minfer": [], "transformers": []}
    for tokens in texts:
        with torch.inference_mode():
            exact = reference(torch.tensor([tokens])).logits[0]
            found = {
                "minfer": minfer_logits(spec, weights, tokens),
                "transformers": half(torch.tensor([tokens])).logits[0].float(),
            }
            logp = exact.double().log_softmax(-1)
            for name, logits in found.items():
                logq = logits.double().log_softmax(-1)
                kl[name].append((logp.exp() * (logp - logq)).sum(-1))
                same[name].append((exact.argmax(-1) == logits.argmax(-1)).double())
    return {
        name: {
            "kl_mean_nats": float(torch.cat(kl[name]).mean()),
            "kl_max_nats": float(torch.cat(kl[name]).max()),
            "top1_agreement": float(torch.cat(same[name]).mean()),
            "positions": sum(map(len, kl[name])),
        }
        for name in kl
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=BUNDLED)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=24, help="output tokens a prompt, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="of torch; the model is tiny")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    spec = read_spec(args.model)
    prompts = encoded(args.model, snippets(args.prompts, random.Random(args.seed)))
    weights = load_weights(args.model, spec, "float32")
    halved = load_weights(args.model, spec, "bfloat16")
    reference = theirs(spec, weights, torch.float32)
    stops = frozenset(spec.eos_ids)
    wanted = []
    for prompt in prompts:
        made = their_tokens(reference, [prompt], args.tokens)[0]
        ends = [i for i, token in enumerate(made) if token in stops]
        wanted.append(made[: ends[0] + 1] if ends else made)
    arrivals = [Arrival(prompt, args.tokens, 0.0, stops) for prompt in prompts]
    rows = compare(spec, weights, arrivals, wanted, args.tokens)
    gap = close_calls(reference, prompts, wanted)
    texts = [[*prompt, *out] for prompt, out in zip(prompts, wanted, strict=True)]
    figures = divergence(reference, theirs(spec, halved, torch.bfloat16), spec, halved, texts)
    total = sum(row["mismatches"] for row in rows)
    print(f"float32: {total} mismatches in {sum(row['prompts'] for row in rows)} continuations")
    print(f"smallest gap between the two largest logits at a chosen token: {gap:.2g}")
    for name, f in figures.items():
        print(
            f"bfloat16 {name:12} KL mean {f['kl_mean_nats']:.2e} max {f['kl_max_nats']:.2e} nats, "
            f"top-1 agreement {100 * f['top1_agreement']:.2f} % of {f['positions']}"
        )
    write(
        "parity",
        {
            "model": args.model.name,
            "prompts": len(prompts),
            "prompt_tokens": sum(map(len, prompts)),
            "output_tokens": sum(map(len, wanted)),
            "mismatches": total,
            "smallest_gap": gap,
            "combinations": rows,
            "bfloat16": figures,
        },
        args.seed,
    )


if __name__ == "__main__":
    main()
