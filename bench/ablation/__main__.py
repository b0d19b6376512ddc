"""What each mechanism is worth: it is taken away, and all else stays as it is.

    python -m bench.ablation                             # the bundled model, on the CPU
    python -m bench.ablation --device cuda --shape 7B    # random weights, on a GPU

For each row two engines are open at once, one with the mechanism and one without it, and
serve the same load in turns, so that a machine's noise hits both. One of them has the
common settings and is the same for all rows. They differ by their settings alone, or by
what is asked of them: without a KV cache, each token is a request over the whole text.
Only Flash-Decoding has no setting: there the number of ranges that a context is cut into
is replaced by 1. The first row compares two equal engines: what it shows is noise.

The mixed load: prompts of many lengths that begin alike, every eighth of them long, which
arrive within half of the time that the engine takes for all at once. A figure's worth is
how many times better it is with the mechanism: output tokens a second, prefill included;
the median time from arrival to the first token; the median and the 99th percentile of the
times between tokens.

Another call goes on where the last one was; `--rows` chooses.
"""

import argparse
import gc
import json
import random
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import attrs
import torch

from bench.ablation.loads import Run, Sizes, Work, mixed, run
from bench.ablation.plot import draw
from bench.ablation.rows import GPU, Options, Place, Row, rows_of
from bench.held_out import held_out_texts
from bench.results import run as main
from bench.results import show, spread, write
from bench.shapes import SHAPES, TINY, qwen
from minfer import AsyncLLM
from minfer.effects.execution.device import routes

BLOCK: Final = 64  # tokens
PROMPT: Final = 256  # tokens of a prompt of real text
CHARACTERS: Final = 4000  # of a text, which hold more tokens than that
SMALL: Final = Sizes(requests=32, prefix=256, own=(16, 192), long=1024, output=(16, 96))
LARGE: Final = Sizes(requests=64, prefix=512, own=(64, 1024), long=6144, output=(32, 192))


def cpu_place() -> Place:
    """The bundled model."""
    common = {"max_model_len": 2048, "max_num_batched_tokens": 256, "max_num_seqs": 32}
    with closing(AsyncLLM(device="cpu")) as llm:  # for its tokenizer
        tokenizer = llm.get_tokenizer()
        texts = [tokenizer.encode(text[:CHARACTERS]) for text in held_out_texts()]
    prompts = [tuple(ids[:PROMPT]) for ids in texts if len(ids) > PROMPT]
    return Place(
        device="cpu",
        common={"device": "cpu", **common},
        sizes=SMALL,
        context=2048,
        pool=16_384,
        settles=0,
        long=1900,
        prompts=tuple(prompts[: SMALL.requests]),
    )


def gpu_place(folder: Path, shape: str) -> Place:
    """Random weights of a shape; real text would be none to such a model."""
    (folder / "config.json").write_text(json.dumps(qwen(shape)))
    return Place(
        device=GPU,
        common={
            "model": str(folder),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": 8192,
            "max_num_batched_tokens": 2048,
            "max_num_seqs": 64,
        },
        sizes=LARGE,
        context=8192,
        pool=131_072,
        settles=12,
        long=8000,
        prompts=(),
    )


@contextmanager
def opened(place: Place, options: Options) -> Iterator[AsyncLLM]:
    """An engine with these settings beside the common ones."""
    settings = {**place.common, **place.pages(BLOCK), **options}
    with closing(AsyncLLM(**settings)) as llm:
        yield llm
    gc.collect()
    if place.device == GPU:
        torch.cuda.empty_cache()


def run_without(row: Row, llm: AsyncLLM, work: list[Work]) -> Run:
    """A run without the mechanism."""
    one_range = patch.object(routes, "num_splits", lambda *_: 1)
    with one_range if row.unsplit else nullcontext():
        return run(llm, work, recomputed=row.recomputed)


def measure_row(
    row: Row, place: Place, plain: AsyncLLM, pairs: int, seconds: float
) -> dict[str, Any]:
    """The engine of the common settings and another one, in turns: their figures, and
    what the mechanism is worth.
    """
    rng = random.Random(0)
    having: list[Run] = []
    lacking: list[Run] = []
    other: AbstractContextManager[AsyncLLM] = nullcontext(plain)
    if row.having or row.lacking:
        other = opened(place, row.having or row.lacking)
    with other as changed:
        if changed is not plain:
            run(changed, row.load(rng, 0))
            time.sleep(place.settles)
        with_it, without = (changed, plain) if row.having else (plain, changed)
        for number in range(pairs + 1):
            first = number % 2
            for takes in (first, not first):
                work = row.load(rng, seconds)
                if takes:
                    lacking.append(run_without(row, without, work))
                else:
                    having.append(run(with_it, work))
    del having[0], lacking[0]  # the first runs compile kernels and capture graphs
    figures = [field.name for field in attrs.fields(Run)]
    worth = {}
    for key in figures:
        ratios = [
            getattr(a, key) / getattr(b, key)
            for a, b in zip(having, lacking, strict=True)
        ]
        better = ratios if key == "throughput" else [1 / ratio for ratio in ratios]
        worth[key] = spread(better)
    return {
        "worth": worth,
        "with": {
            key: spread([getattr(result, key) for result in having]) for key in figures
        },
        "without": {
            key: spread([getattr(result, key) for result in lacking]) for key in figures
        },
        "settings": {"with": str(dict(row.having)), "without": str(dict(row.lacking))},
        "why": row.why,
    }


def arrival_seconds(llm: AsyncLLM, sizes: Sizes) -> float:
    """Half of the time that the mixed load takes if all requests arrive at once."""
    rng, seconds = random.Random(1), 0.0
    for _ in range(3):
        work = mixed(sizes, rng, 0)
        begin = time.perf_counter()
        run(llm, work)
        seconds = time.perf_counter() - begin
    return seconds / 2


def card() -> str | None:
    """The GPU's name."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def measure(args: argparse.Namespace) -> None:
    """All rows; the file is written after each of them."""
    path: Path = args.folder / f"{args.name}.json"
    before: Mapping[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    results: dict[str, Any] = dict(before.get("results", {}).get("rows", {}))
    with tempfile.TemporaryDirectory() as folder:
        place = cpu_place()
        if args.device == GPU:
            place = gpu_place(Path(folder), args.shape)
        with opened(place, {}) as plain:
            seconds = arrival_seconds(plain, place.sizes)
            for row in rows_of(place):
                wanted = row.name in args.rows if args.rows else row.name not in results
                if not wanted:
                    continue
                results[row.name] = measure_row(row, place, plain, args.pairs, seconds)
                show({row.name: results[row.name]["worth"]})
                data = {"card": card(), "arrival_seconds": seconds, "rows": results}
                write(args.name, data, 0, args.folder)
    draw(results, path.with_suffix(".svg"))


if __name__ == "__main__":
    main(
        "ablation",
        measure,
        {
            "--device": {"choices": ["cpu", GPU], "default": "cpu"},
            "--shape": {"choices": [*SHAPES, *TINY], "default": "7B"},
            "--pairs": 3,
            "--rows": {"nargs": "+", "default": [], "help": "by name; all else"},
        },
    )
