"""What draft heads are worth, at acceptance that is set: with and without, in pairs.

    python -m bench.draft_heads_gpu [--parts PART ...] [--rows N ...] [--seconds N]

    eagle3   a 7B (Qwen2.5's shape) with an EAGLE-3 head that knows 32,000 tokens
    mtp      Qwen3-Next's shape with its MTP head; `--experts` of its 512. Embeddings and
             routers are drawn from N(0, 1), so that experts are hit independently

Weights are random, and drafts are accepted by coins (bench/coins.py) that are tossed on
the device: by place with the probabilities `--rates`, of drafts whose predecessors were
accepted. An engine without drafts and one with as many as may be are in one process, and
are asked in turn; then one without and one with as many as pay. Results are written after
every round, and another call goes on where this one stopped. `--tiny --device cpu` tries
it.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from attrs import frozen

from bench.layers_gpu import COMMON, draw, tiny
from bench.layers_gpu import SHAPES as LAYERED
from bench.results import run
from bench.shapes import qwen
from bench.speculation_cases import LOW_WORDS, PLAIN, Case, Part, Prompts, Way
from bench.speculation_speed import Results, measured, table
from minfer.effects.models.architecture.moe_weights import MoEWeights
from minfer.effects.models.architecture.weights import Weights
from minfer.effects.models.checkpoint import checkpoint
from minfer.effects.models.draft_heads import head_files
from minfer.effects.models.draft_heads.head_weights import DraftHeadWeights

INPUTS, OUTPUTS = 512, 256  # tokens of a request
TINY_INPUTS, TINY_OUTPUTS = 24, 16
HEAD_VOCAB: Final = 32_000  # tokens that the EAGLE-3 head knows
# Bytes of the cache of each engine: 256 rows, with the states of recurrent layers.
CACHE: Final = {"eagle3": 16 << 30, "mtp": 30 << 30}
ALWAYS, ADAPTIVE = WAYS = ("always", "adaptive")


@frozen
class Model:
    """A model in a folder, and its drafts' configuration."""

    path: str
    speculative: Mapping[str, Any]
    spreads_routing: bool = False


def eagle3_model(folder: Path, args: argparse.Namespace) -> Model:
    """A 7B with an EAGLE-3 head."""
    config = qwen("tiny" if args.tiny else "7B")
    head = {
        **config,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": 512 if args.tiny else HEAD_VOCAB,
        "tie_word_embeddings": False,
    }
    if args.tiny:  # there have to be layers before which the head reads
        config["num_hidden_layers"] = 4
    path = written(folder / "7B", config)
    return Model(path, {"method": "eagle3", "model": written(folder / "head", head)})


def mtp_model(folder: Path, args: argparse.Namespace) -> Model:
    """Qwen3-Next's shape with its MTP head."""
    config = {**LAYERED["next"], **COMMON}
    config = tiny(config) if args.tiny else config | {"num_experts": args.experts}
    path = written(folder / "next", config)
    return Model(path, {"method": "mtp"}, spreads_routing=True)


def written(folder: Path, config: Mapping[str, Any]) -> str:
    """A folder with a config."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def part(model: Model, args: argparse.Namespace, way: str) -> Part:
    """Cases by rows: without drafts, and in one of `WAYS`."""
    length, tokens = (TINY_INPUTS, TINY_OUTPUTS) if args.tiny else (INPUTS, OUTPUTS)
    config = {"num_speculative_tokens": args.drafts, "adaptive": way == ADAPTIVE}
    with_drafts = Way({**model.speculative, **config}, tuple(args.rates))
    ways = {PLAIN: Way(), way: with_drafts}

    def prompts(rows: int, rng: Any) -> Prompts:
        return [rng.choices(range(1, LOW_WORDS), k=length) for _ in range(rows)]

    cases = {
        f"{rows} rows": Case(prompts=partial(prompts, rows), tokens=tokens, ways=ways)
        for rows in args.rows
    }
    settings = {
        "model": model.path,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "device": args.device,
        "max_num_seqs": max(args.rows),
        "max_model_len": 2 * (length + tokens),
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": CACHE[model.speculative["method"]] >> (8 * args.tiny),
    }
    return Part(settings, cases, spreading if model.spreads_routing else nullcontext)


@contextmanager
def spreading() -> Iterator[None]:
    """Random weights that are drawn meanwhile route tokens to all experts."""
    random_weights, random_head = checkpoint.random_weights, head_files.random_head

    def drawn(*args: Any) -> Weights:
        weights = random_weights(*args)
        draw(weights)
        return weights

    def drawn_head(*args: Any) -> DraftHeadWeights:
        weights = random_head(*args)
        feed = weights.layer.feed_forward
        if isinstance(feed, MoEWeights):
            feed.router.weight.normal_()
        return weights

    with (
        patch.object(checkpoint, "random_weights", drawn),
        patch.object(head_files, "random_head", drawn_head),
    ):
        yield


def measure(args: argparse.Namespace) -> None:
    """Measure the parts that are named."""
    end = time.monotonic() + args.seconds
    results = Results.of(args)
    is_cuda = args.device == "cuda"
    device_name = torch.cuda.get_device_name() if is_cuda else "CPU"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for name, way in product(args.parts, args.ways):
            rates = ", ".join(f"{rate:g}" for rate in args.rates)
            shape = "tiny, " if args.tiny else ""
            label = (
                f"{name}, {shape}{args.drafts} drafts at {rates}, {way}, {device_name}"
            )
            print(label, flush=True)
            ended = measured(
                part(MODELS[name](Path(folder), args), args, way), label, results, end
            )
            table(results.rates[label], {})
            if not ended:
                print("there is more to measure: call again", flush=True)
                return


MODELS: Final = {"eagle3": eagle3_model, "mtp": mtp_model}
OPTIONS: Final[dict[str, Any]] = {
    "--parts": {"nargs": "+", "choices": [*MODELS], "default": [*MODELS]},
    "--rows": {"nargs": "+", "type": int, "default": [1, 8, 64, 256]},
    "--drafts": {"type": int, "default": 3, "help": "of a row in a step, at most"},
    "--rates": {"nargs": "+", "type": float, "default": [0.8, 0.65, 0.5]},
    "--experts": {"type": int, "default": 64, "help": "of mtp's layers"},
    "--ways": {"nargs": "+", "choices": WAYS, "default": WAYS},
    "--pairs": {"type": int, "default": 3, "help": "rounds that count"},
    "--seconds": {"type": float, "default": 540.0, "help": "to stop within"},
    "--device": {"default": "cuda", "choices": ["cuda", "cpu"]},
    "--tiny": {"action": "store_true", "help": "a shape that a CPU runs"},
}

if __name__ == "__main__":
    run("draft_heads_gpu", measure, OPTIONS)
