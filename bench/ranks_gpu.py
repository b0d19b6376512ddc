"""A model on several GPUs beside one: decode steps and prefill apart, on random weights.

    python -m bench.ranks_gpu --shape 7B --ranks 1,2

For each number of tensor parallel ranks an engine is opened: a step of so many rows of
600 tokens that decode, on the GPU's clock, and the first token of a prompt of 8,192
tokens. Beside it a floor: the bytes that a rank reads in a step, at the bandwidth that a
copy has here, and the sums over ranks alone, as many and as large, in a CUDA graph.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import torch

from bench import layers_gpu
from bench.gpu_workloads import Lab, figure, greedy, rate, steady
from bench.ranks_gpu_sums import events
from bench.results import run, show
from bench.shapes import SHAPES, TINY, qwen
from minfer import LLM
from minfer.effects.models.ranks import Parallel, Place
from minfer.effects.models.shapes import kv_bytes_per_token, weight_bytes
from minfer.effects.models.spec_reader import parse_spec

CONTEXT: Final = 600  # tokens of a row that decodes
PROMPT: Final = 8192
REPEATS: Final = 3
COPIED: Final = 1 << 30  # bytes


def config_of(shape: str) -> dict[str, Any]:
    """What config.json says of a shape."""
    if shape in layers_gpu.SHAPES:
        return {**layers_gpu.SHAPES[shape], **layers_gpu.COMMON}
    return qwen(shape)


def bandwidth() -> float:
    """Bytes a second that a GPU reads, by the copy of a large tensor."""
    here = torch.empty(COPIED, dtype=torch.uint8, device="cuda")
    there = torch.empty_like(here)
    times = list[float]()
    for _ in range(5):
        begin, end = events()
        begin.record()
        there.copy_(here)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return 2 * COPIED / min(times)


def sums(ranks: int, hidden: int, rows: list[int]) -> dict[str, float]:
    """us of a sum over so many ranks of [rows, hidden], in a graph."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", "-m", "bench.ranks_gpu_sums"]
    sizes = ",".join(map(str, rows))
    text = subprocess.run(
        [*command, str(hidden), sizes],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ).stdout
    lines = (line.split() for line in text.splitlines())
    found = [(words[0], words[1], float(words[2])) for words in lines if len(words) == 3]
    return {f"{name} {rows}": us for name, rows, us in found}


def floor_ms(
    args: argparse.Namespace, ranks: int, rows: int, rate: float, us: dict[str, float]
) -> float:
    """ms of the bytes of a step, and its sums."""
    spec = parse_spec(config_of(args.shape))
    place = Place(0, Parallel(ranks, by_expert=args.by_expert))
    own = spec if ranks == 1 else spec.for_rank(place)
    read = weight_bytes(own, cuda=True) - own.embed_rows * own.hidden_size * 2
    read += rows * CONTEXT * kv_bytes_per_token(own)
    total = (2 * len(own.layers) + 1) * us[f"sum {rows}"] if ranks > 1 else 0.0
    return 1e3 * read / rate + total / 1e3


def steps(lab: Lab, llm: LLM, rows: int) -> list[float]:
    """ms of decode steps of so many rows."""
    return [steady(lab, llm, rows, CONTEXT)[0] for _ in range(1 + REPEATS)][1:]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Each number of ranks, with an engine of its own."""
    rows = [int(one) for one in args.rows.split(",")]
    found: dict[str, Any] = {"card": torch.cuda.get_device_name(), "shape": args.shape}
    speed = found["bandwidth, bytes/s"] = bandwidth()
    torch.cuda.empty_cache()
    base = dict[int, float]()
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab.for_shape(folder, args.shape)
        if args.shape in layers_gpu.SHAPES:
            model = Path(folder) / args.shape
            model.mkdir()
            (model / "config.json").write_text(json.dumps(config_of(args.shape)))
        for ranks in map(int, args.ranks.split(",")):
            hidden = config_of(args.shape)["hidden_size"]
            us = sums(ranks, hidden, rows) if ranks > 1 else {}
            llm = lab.engine(
                args.shape,
                tensor_parallel_size=ranks,
                enable_expert_parallel=args.by_expert,
                skip_tokenizer_init=args.shape in layers_gpu.SHAPES,
                max_model_len=16_384,
            )
            part: dict[str, Any] = {"sums, us": us}
            for count in rows:
                ms = steps(lab, llm, count)
                middle, low = (
                    statistics.median(ms),
                    floor_ms(args, ranks, count, speed, us),
                )
                base.setdefault(count, middle)
                part[f"decode, {count} rows"] = figure(
                    ms, "ms", floor=low, of_floor=middle / low, times=base[count] / middle
                )
                show({f"{ranks} ranks, {count} rows": part[f"decode, {count} rows"]})
            runs = [
                1e3 / rate(llm, lab.prompts(1, PROMPT), [greedy(1)]) for _ in range(5)
            ]
            first = statistics.median(runs[2:])
            base.setdefault(-1, first)
            part["prefill"] = figure(runs[2:], "ms", times=base[-1] / first)
            show({f"{ranks} ranks, prefill": part["prefill"]})
            found[f"{ranks} ranks"] = part
            lab.close()
    return found


if __name__ == "__main__":
    run(
        "ranks_gpu",
        measure,
        {
            "--shape": {"choices": [*SHAPES, *TINY, *layers_gpu.SHAPES], "default": "7B"},
            "--ranks": "1,2",
            "--rows": "1,8,64,256",
            "--by-expert": {"action": "store_true"},
        },
    )
