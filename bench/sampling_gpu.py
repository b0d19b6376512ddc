"""What drawing tokens takes on a GPU, of each kind of request: `python -m
bench.sampling_gpu`.

A batch of 1 and of 256 rows with the vocabulary of Qwen2.5 and its logits' type: all that
a step launches between the model's last product and the rows' next tokens, in CUDA
graphs, in the executor's own sampler. Rows are all of a kind; logits differ between the
rounds, and are as peaked as a model's (a perplexity of some 6) or flat. Each
figure is also a share of a decode step of a 7B, as bench/results/gpu.json has it.
"""

import argparse
import itertools
import json
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from triton.testing import do_bench_cudagraph

from bench.results import RESULTS, run, show, spread
from minfer.effects.execution.cuda.cuda_backend import CudaBackend
from minfer.effects.execution.device.device_rows import DeviceRows
from minfer.effects.execution.device.routes import Routes
from minfer.effects.execution.running.sampler import Sampler
from minfer.kernels.rows import scatter
from minfer.records.plan import NewRow
from minfer.sampling.params import SamplingParams
from minfer.sampling.reference_sampler import RowSampling

VOCAB: Final = 151_936
PROMPT, OUTPUT = 512, 128  # tokens that a row knows
LINES: Final = 4  # batches of logits, in turn
PENALTIES: Final[dict[str, Any]] = {
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.3,
    "presence_penalty": 0.2,
}
ALL: Final[dict[str, Any]] = {
    **PENALTIES,
    "logit_bias": {7 * i: 1.0 for i in range(300)},
    "allowed_token_ids": range(65_536),
    "min_tokens": 1000,
    "max_tokens": None,
}
ROWS: Final = (1, 256)
OPTIONS: Final[dict[str, Any]] = {
    "--seed": 0,
    "--rows": {"type": int, "nargs": "+", "default": ROWS, "help": "of a batch"},
}
WAYS: Final[dict[str, dict[str, Any]]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.8},
    "top-p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "top-k 50": {"temperature": 0.8, "top_k": 50},
    "min-p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "typical 0.9": {"temperature": 0.8, "typical_p": 0.9},
    "typical 0.9 of top-p 0.95": {"temperature": 0.8, "typical_p": 0.9, "top_p": 0.95},
    "greedy, all penalties": {"temperature": 0, **PENALTIES},
    "temperature, all penalties": {"temperature": 0.8, **PENALTIES},
    "top-p 0.9, all penalties": {"temperature": 0.8, "top_p": 0.9, **PENALTIES},
    "temperature, all there is": {"temperature": 0.8, **ALL},
}
SPREADS: Final = {"peaked": 4.5, "flat": 0.02}  # of logits
DECODE: Final = "batch {rows}, context 600"  # as bench.gpu names it


def opened(sampling: RowSampling, row: int) -> NewRow:
    """A row in the middle of its output."""
    tokens = torch.Generator().manual_seed(row)
    known_tokens = torch.randint(VOCAB, (PROMPT + OUTPUT,), generator=tokens).tolist()
    return NewRow(
        0, (str(row), 0), tuple(known_tokens), PROMPT, 10_000, sampling, ((0,),)
    )


def sampler_of(rows: int, settings: Mapping[str, Any], seed: int) -> Sampler:
    """A sampler all of whose rows ask for the same."""
    device = torch.device("cuda")
    device_rows = DeviceRows(rows, 1, VOCAB, device)
    sampler = Sampler(CudaBackend(device, Routes()), device_rows, rows)
    params = SamplingParams(**settings)
    for row in range(rows):
        sampling = RowSampling.of(params, seed, row, frozenset({5, 6}))
        opened_row = opened(sampling, row)
        sampler.open(row, opened_row)
    words = torch.cat([torch.from_numpy(column) for column in device_rows.take()])
    scatter(device_rows.arena, words.to(device))
    return sampler


def microseconds(sampler: Sampler, rows: int, lines: list[Tensor]) -> dict[str, float]:
    """Of a draw for all rows, by CUDA graphs of many."""
    device_rows = torch.arange(rows, dtype=torch.int32, device="cuda")
    positions = torch.full_like(device_rows, PROMPT + OUTPUT)
    needs = sampler.rows.sampling_needs(range(rows))
    turns = itertools.cycle(lines)

    def draw() -> None:
        sampler.sample(next(turns), device_rows, positions, needs)

    for _ in lines:
        draw()
    torch.cuda.synchronize()  # what follows is on another stream
    times: list[float] = do_bench_cudagraph(draw, return_mode="all")
    return spread([1e3 * ms for ms in times])


def step_of_7b(rows: int) -> float | None:
    """Microseconds of a decode step, as it was measured last; None if it was not."""
    path = RESULTS / "gpu.json"
    if not path.exists():
        return None
    tasks = json.loads(path.read_text("utf-8"))["results"]["tasks"]
    figures = tasks.get("decode 7B", {}).get("figures", {})
    figure = figures.get(DECODE.format(rows=rows))
    return None if figure is None else 1e3 * float(figure["median"])


def measure(args: argparse.Namespace) -> Mapping[str, Any]:
    """All kinds of requests, at each size and each form of logits."""
    setup: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "vocabulary": VOCAB}
    figures: dict[str, Any] = {}
    for rows, (form, width) in itertools.product(args.rows, SPREADS.items()):
        torch.manual_seed(args.seed)
        shape = (rows, VOCAB)
        lines = [
            (width * torch.randn(shape, device="cuda")).bfloat16() for _ in range(LINES)
        ]
        step = step_of_7b(rows)
        for name, settings in WAYS.items():
            us = microseconds(sampler_of(rows, settings, args.seed), rows, lines)
            share = (
                {} if step is None else {"percent of a step": 100 * us["median"] / step}
            )
            label = f"{rows} rows, {form}: {name}"
            figures[label] = {"unit": "us", **us, **share}
            show({label: us, **share})
    return {**setup, "figures": figures}


if __name__ == "__main__":
    run("sampling_gpu", measure, OPTIONS)
