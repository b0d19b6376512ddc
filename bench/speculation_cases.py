"""What `bench/speculation_speed` asks, of which engines."""

import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from attrs import field, frozen

from bench.held_out import held_out_texts
from bench.shapes import SHAPES, TINY, qwen
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.weights import Weights, named_parts
from minfer.effects.models.checkpoint import checkpoint
from minfer.effects.setup.folders import bundled_folder
from minfer.effects.text.tokenizer import Tokenizer

PLAIN: Final = "without"
DRAFTS: Final = 4  # always
MAX_DRAFTS: Final = 8  # where there are as many as pay
ACCEPTANCES: Final = (0.5, 0.7, 0.9)
BATCHES: Final = (1, 8, 32, 64)
PERIOD: Final = 64  # tokens after which a text that goes round is where it was
CACHE: Final = 5 << 30  # bytes of KV cache of each engine on a GPU
DRAFT_OF: Final = {"7B": "0.5B", "tiny": "tiny draft"}  # shapes, and of their drafts
WINDOW: Final = 256  # tokens of a held-out file that are a prompt
REPEATED: Final = 4  # times that a prompt says the same
LOW_WORDS: Final = 1000  # ids that both models have
Config = Mapping[str, Any] | None
Prompts = list[list[int]]


@frozen
class Way:
    """An engine, and the acceptance that is set, if any is."""

    config: Config = None
    acceptance: float | tuple[float, ...] | None = None  # in all places, or by place


@frozen(kw_only=True)
class Case:
    """Requests of one kind, and the ways in which they are served."""

    prompts: Callable[[random.Random], Prompts]  # other ones in every round
    tokens: int  # of output
    temperature: float = 0.0
    ways: Mapping[str, Way]  # by name; one is `PLAIN`


@frozen
class Part:
    """Cases of one set of engines."""

    settings: Mapping[str, Any]
    cases: Mapping[str, Case]
    while_opening: Callable[[], AbstractContextManager[None]] = field(default=nullcontext)


def parts(folder: Path, shape: str, device: str) -> dict[str, Callable[[], Part]]:
    """Every part, to be made when it is wanted; models are written to `folder`."""
    return {
        "bundled": partial(_bundled, device),
        "ngram": partial(_repeating, device),
        "set": partial(_set, folder, shape, device),
        "circle": partial(_circle, folder, shape, device),
    }


def speculative_config(method: str, *, adaptive: bool, **extra: Any) -> dict[str, Any]:
    """A speculative configuration."""
    return {
        "method": method,
        "num_speculative_tokens": MAX_DRAFTS if adaptive else DRAFTS,
        "adaptive": adaptive,
        **extra,
    }


# --- the bundled pair -------------------------------------------------------------------


def _bundled(device: str) -> Part:
    config = partial(speculative_config, "draft_model")
    ways = {
        PLAIN: Way(),
        f"{DRAFTS} drafts": Way(config(adaptive=False)),
        "adaptive": Way(config(adaptive=True)),
    }
    texts = _held_out()

    def prompts(rng: random.Random) -> Prompts:
        return [_window(rng, texts, WINDOW)]

    cases = {
        f"temperature {t:g}": Case(
            prompts=prompts, tokens=WINDOW, temperature=t, ways=ways
        )
        for t in (0.0, 1.0)
    }
    return Part({"device": device, "num_gpu_blocks_override": 64}, cases)


def _repeating(device: str) -> Part:
    """Lines of held-out files, said several times: the model goes on saying them."""
    ways = {
        PLAIN: Way(),
        f"{DRAFTS} drafts": Way(speculative_config("ngram", adaptive=False)),
        "adaptive": Way(speculative_config("ngram", adaptive=True)),
    }
    texts = _held_out()

    def prompts(rng: random.Random) -> Prompts:
        return [_window(rng, texts, WINDOW // REPEATED) * REPEATED]

    case = Case(prompts=prompts, tokens=WINDOW, ways=ways)
    settings = {"device": device, "num_gpu_blocks_override": 64}
    return Part(settings, {"repeated lines": case})


def _held_out() -> Prompts:
    tokenizer = Tokenizer(bundled_folder())
    return [tokenizer.encode(text) for text in held_out_texts()]


def _window(rng: random.Random, texts: Prompts, size: int) -> list[int]:
    text = rng.choice([text for text in texts if len(text) > size])
    begin = rng.randrange(len(text) - size)
    return text[begin : begin + size]


# --- random weights ---------------------------------------------------------------------


def _set(folder: Path, shape: str, device: str) -> Part:
    """Acceptance is set, for 4 drafts always and for as many as pay."""
    draft = model_folder(folder, DRAFT_OF[shape])
    config = partial(speculative_config, "draft_model", model=draft)
    ways = {PLAIN: Way()}
    for name, adaptive in ((f"{DRAFTS} drafts", False), ("adaptive", True)):
        for acceptance in ACCEPTANCES:
            way = Way(config(adaptive=adaptive), acceptance)
            ways[f"{name}, {acceptance}"] = way
    sizes = (24, 16) if shape in TINY else (512, 256)
    return _random(folder, shape, device, ways, sizes)


def _circle(folder: Path, shape: str, device: str) -> Part:
    """Text goes round, and n-gram finds out."""
    ways = {
        PLAIN: Way(),
        f"{DRAFTS} drafts": Way(speculative_config("ngram", adaptive=False)),
        "adaptive": Way(speculative_config("ngram", adaptive=True)),
    }
    sizes = (24, 2 * PERIOD) if shape in TINY else (512, 256)
    random_part = _random(folder, shape, device, ways, sizes)
    return Part(random_part.settings, random_part.cases, going_round)


def _random(
    folder: Path,
    shape: str,
    device: str,
    ways: Mapping[str, Way],
    sizes: tuple[int, int],
) -> Part:
    """Batches of requests with `sizes` tokens in and out."""
    length, tokens = sizes

    def prompts(batch: int, rng: random.Random) -> Prompts:
        return [rng.choices(range(1, LOW_WORDS), k=length) for _ in range(batch)]

    batches = BATCHES[:2] if shape in TINY else BATCHES
    cases = {
        f"batch {batch}": Case(prompts=partial(prompts, batch), tokens=tokens, ways=ways)
        for batch in batches
    }
    settings = {
        "model": model_folder(folder, shape),
        "load_format": "dummy",
        "device": device,
        "max_num_seqs": batches[-1],
        "max_model_len": 2 * (length + tokens),
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": CACHE >> (8 if shape in TINY else 0),
    }
    return Part(settings, cases)


def model_folder(folder: Path, name: str) -> str:
    """A folder with a config, and a tokenizer whose words are numbers."""
    from tokenizers import Tokenizer as Words
    from tokenizers import models

    model = folder / name
    if not model.exists():
        model.mkdir()
        (model / "config.json").write_text(json.dumps(qwen(name)))
        size = {**SHAPES, **TINY}[name][5]
        words = {f"{number:x}": number for number in range(size)}
        Words(models.WordLevel(words, "0")).save(str(model / "tokenizer.json"))
    return str(model)


@contextmanager
def going_round() -> Iterator[None]:
    """Random weights that are drawn meanwhile make text go round: nothing is added to a
    token's own embedding, and the head has that of the token before. The work is the
    same.
    """
    inner = checkpoint.random_weights

    def drawn(spec: ModelSpec, *args: Any) -> Weights:
        weights = inner(spec, *args)
        for name, weight in named_parts(spec, weights):
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
        ids = range(spec.vocab_size - spec.vocab_size % PERIOD)
        before = [
            token_id // PERIOD * PERIOD + (token_id - 1) % PERIOD for token_id in ids
        ]
        weights.lm_head.weight.zero_()[: len(before)] = weights.embed[before]
        return weights

    with patch.object(checkpoint, "random_weights", drawn):
        yield
