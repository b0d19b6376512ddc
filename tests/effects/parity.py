"""Does minfer say what transformers says? Greedy tokens in float32, logits in bfloat16.

float32: pieces of Python are continued greedily by transformers, one by one, and by
engines with every combination of chunk size, batch size, depth, drafts and pool size,
twice, so that the second pass hits the prefix cache. A mismatch is a continuation in
which any token differs: expected none.

bfloat16: over prompts and continuations, the KL divergence in nats of minfer's next-token
distribution from that of transformers in float32, and how often the likeliest token is
the same; beside them, transformers' own figures in bfloat16.
"""

import argparse
import random
import sysconfig
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from bench.results import run, show
from minfer import LLM, SamplingParams
from minfer.effects.cli.verify.logit_differences import packed_logits
from minfer.effects.setup.folders import bundled_folder
from minfer.effects.text.tokenizer import Tokenizer
from minfer.records.messages import Discarded, Preempted
from tests.effects.watched import Watched

HEADER = (
    '"""Tools for reading and writing tables.\n\nEvery function takes a path '
    'first."""\n\n'
)
BLOCK = 16
MAX_PROMPT_TOKENS = 192  # prompt tokens
COMBINATIONS = {
    "max_num_batched_tokens": (
        1024,
        24,
    ),  # whole prompts, or chunks of what is left of 24
    "max_num_seqs": (1, 16),
    "steps_in_flight": (1, 2),
    "speculative_config": (None, {"method": "ngram", "num_speculative_tokens": 4}),
    "pool": ("ample", "tight"),  # which holds two of the longest sequences
}


def their_tokens(
    model: Any,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    ends: list[int] | None = None,
) -> list[list[int]]:
    """transformers' greedy tokens, up to one of `ends`; prompts are padded on
    the left.
    """
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    options = {
        "max_new_tokens": tokens,
        "do_sample": False,
        "eos_token_id": ends,
        "pad_token_id": 0,
    }
    tokens_made: list[list[int]] = model.generate(ids, attention_mask=mask, **options)[
        :, longest:
    ].tolist()
    return tokens_made


def serve_twice(
    model: str, prompts: list[list[int]], tokens: int, **settings: Any
) -> tuple[list[list[list[int]]], dict[str, Any]]:
    """minfer's greedy tokens in float32, of both passes, and what the engine
    had to do.
    """
    params = SamplingParams(temperature=0, max_tokens=tokens)
    passes, hits = list[list[list[int]]](), list[int]()
    with LLM(model, dtype="float32", skip_tokenizer_init=True, **settings) as llm:
        turns = Watched(llm)
        for _ in range(2):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            passes.append([list(output.outputs[0].token_ids) for output in outputs])
            hits.append(sum(output.num_cached_tokens for output in outputs))
    reasons = [reason for turn in turns for reason in turn.reasons]
    return passes, {
        "preemptions": sum(isinstance(reason, Preempted) for reason in reasons),
        "hit_tokens_first_pass": hits[0],
        "hit_tokens_second_pass": hits[1],
        "failed_steps": [
            reason.error for reason in reasons if isinstance(reason, Discarded)
        ],
    }


def pieces(model: Path, count: int, rng: random.Random) -> list[list[int]]:
    """Token ids from the standard library, of one to MAX_PROMPT_TOKENS tokens, some
    behind one header.
    """
    encode = Tokenizer(model).encode
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:40]
    ids, header = (
        encode("".join(path.read_text("utf-8") for path in files)),
        encode(HEADER),
    )
    out = []
    for _ in range(count):
        offset, start = (
            rng.randrange(len(ids) - MAX_PROMPT_TOKENS),
            header if rng.random() < 0.3 else [],
        )
        out.append(
            (start + ids[offset : offset + MAX_PROMPT_TOKENS])[
                : rng.randint(1, MAX_PROMPT_TOKENS)
            ]
        )
    return out


def compare(
    model: str, prompts: list[list[int]], expected: list[list[int]], tokens: int
) -> Iterator[dict[str, Any]]:
    """What engines make of the prompts, against `expected`: figures of every
    combination.
    """
    longest = MAX_PROMPT_TOKENS + tokens
    for values in product(*COMBINATIONS.values()):
        combination, begin = (
            dict(zip(COMBINATIONS, values, strict=True)),
            time.perf_counter(),
        )
        settings: dict[str, Any] = {
            **combination,
            "block_size": BLOCK,
            "max_model_len": longest,
        }
        tight = settings.pop("pool") == "tight"
        if tight and combination["max_num_seqs"] == 1:
            continue  # one alone is never preempted
        settings["num_gpu_blocks_override"] = 2 * -(-longest // BLOCK) if tight else 2048
        passes, engine_figures = serve_twice(model, prompts, tokens, **settings)
        wrong = [
            (n, i) for n in (0, 1) for i, w in enumerate(expected) if passes[n][i] != w
        ]
        row = {"prompts": 2 * len(prompts), "mismatches": len(wrong), "mismatched": wrong}
        yield {
            **combination,
            **row,
            **engine_figures,
            "seconds": time.perf_counter() - begin,
        }


def divergence(exact: list[Tensor], other: list[Tensor]) -> dict[str, float]:
    """KL divergence (nats) and top-1 agreement of the logits `other` with `exact`."""
    logp, logq = (torch.cat(logits).double().log_softmax(-1) for logits in (exact, other))
    kl, same = (logp.exp() * (logp - logq)).sum(-1), logp.argmax(-1) == logq.argmax(-1)
    return {
        "kl_mean_nats": float(kl.mean()),
        "kl_max_nats": float(kl.max()),
        "top1_agreement": float(same.double().mean()),
        "positions": len(kl),
    }


@torch.inference_mode()
def measure(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(args.threads)
    read: Any = transformers.AutoModelForCausalLM.from_pretrained
    models = [read(args.model, dtype=dtype) for dtype in ("float32", "bfloat16")]
    prompts = pieces(args.model, args.prompts, random.Random(args.seed))
    with LLM(str(args.model), dtype="bfloat16") as llm:
        ends = sorted(llm.setup.stop_ids)
        continuations = [
            their_tokens(models[0], [p], args.tokens, ends)[0] for p in prompts
        ]
        texts = [prompt + out for prompt, out in zip(prompts, continuations, strict=True)]
        our_logits = [packed_logits(llm, [ids])[0] for ids in texts]
    exact, half = (
        [model(torch.tensor([ids])).logits[0].float() for ids in texts]
        for model in models
    )
    chosen = [
        logits[-len(out) - 1 : -1]
        for logits, out in zip(exact, continuations, strict=True)
    ]
    top = torch.cat(chosen).topk(2).values
    figures = {
        "minfer": divergence(exact, our_logits),
        "transformers": divergence(exact, half),
    }
    rows = []
    for row in compare(str(args.model), prompts, continuations, args.tokens):
        rows.append(row)
        show(row)
    figures_of_model = {
        "model": args.model.name,
        "prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "output_tokens": sum(map(len, continuations)),
        "mismatches": sum(row["mismatches"] for row in rows),
        "smallest_gap": float(
            (top[:, 0] - top[:, 1]).min()
        ),  # of logits, where tokens were chosen
    }
    show({**figures_of_model, **figures})
    return {**figures_of_model, "combinations": rows, "bfloat16": figures}


if __name__ == "__main__":
    run(
        "parity",
        measure,
        {
            "--model": {"type": Path, "default": bundled_folder()},
            "--prompts": 200,
            "--tokens": {
                "type": int,
                "default": 24,
                "help": "output tokens a prompt, at most",
            },
            "--seed": 0,
            "--threads": {
                "type": int,
                "default": 1,
                "help": "of torch; the model is tiny",
            },
        },
    )
