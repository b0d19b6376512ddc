"""A model on several GPUs beside one: decode steps and prefill apart, on random weights.

    python -m bench.ranks_gpu --shape 7B --ranks 1,2 --stages 1,2

For each number of tensor parallel ranks and of pipeline stages an engine is opened: a
step of some rows of 600 tokens that decode, on the GPU's clock, and the first token of
a prompt of 8,192 tokens. Beside it a floor: the bytes that a rank reads in a step, at the
bandwidth that a copy has here, and the sums over ranks alone, as many and as large, in a
CUDA graph. With stages, each rank reads its weights for each micro-batch.

The bubble is the share of the time in which rank 0's GPU does not compute: 1 - computing
/ all, by events on its stream. It computes a forward from when that begins on its stream,
or, behind the first stage, from when the residual stream is there, until tokens are
sampled. Rank 0 is in the last stage; other stages are not timed. Gaps between kernels
that are launched one by one count as computing, so the bubble of prefill, and of steps
without a graph, is a lower bound; `by graph` is the share of forwards that had one.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from attrs import define

from bench import layers_gpu
from bench.gpu_times import events
from bench.gpu_workloads import STEPS, Lab, executor_of, figure, greedy, rate, steady
from bench.results import run, show
from bench.shapes import SHAPES, TINY, qwen
from minfer import LLM
from minfer.effects.execution.device.step_shape import StepShape
from minfer.effects.execution.ranks.torch_ranks import TorchRanks
from minfer.effects.execution.running.stage_buffers import StageBuffers
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.layout.shapes import kv_bytes_per_token, weight_bytes
from minfer.effects.models.ranks import Parallel, RankInfo

CONTEXT: Final = 600  # tokens of a row that decodes
PROMPT: Final = 8192
REPEATS: Final = 3
COPY_BYTES: Final = 1 << 30  # bytes
CAPTURE_SECONDS: Final = 60.0  # seconds in which graphs are captured, at most


def config_of(shape: str) -> dict[str, Any]:
    """What config.json says of a shape."""
    if shape in layers_gpu.SHAPES:
        return {**layers_gpu.SHAPES[shape], **layers_gpu.COMMON}
    return qwen(shape)


def bandwidth() -> float:
    """Bytes a second that a GPU reads, by the copy of a large tensor."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = list[float]()
    for _ in range(5):
        begin, end = events()
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return 2 * COPY_BYTES / min(times)


def sums(ranks: int, hidden: int, rows: list[int]) -> dict[str, float]:
    """us of a sum over `ranks` ranks of [rows, hidden], in a graph."""
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
    measured = [
        (words[0], words[1], float(words[2])) for words in lines if len(words) == 3
    ]
    return {f"{name} {rows}": us for name, rows, us in measured}


def micro_batches(parallel: Parallel, rows: int) -> tuple[int, int]:
    """How many micro-batches have some of `rows` rows, and the most rows of one."""
    count = min(parallel.pipeline, rows)
    return count, -(-rows // count)


def floor_ms(
    args: argparse.Namespace,
    parallel: Parallel,
    rows: int,
    rate: float,
    us: dict[str, float],
) -> float:
    """ms of the bytes of a step, and its sums: the slowest stage of all micro-batches,
    or of all stages for one.
    """
    spec, (count, max_rows) = (
        parse_spec(config_of(args.shape)),
        micro_batches(parallel, rows),
    )
    stage_ms = list[float]()  # stage's ms of a micro-batch
    for rank in range(0, parallel.ranks, parallel.tensor):
        rank_info = RankInfo(rank, parallel)
        stage_spec = spec if parallel.ranks == 1 else spec.for_rank(rank_info)
        read = weight_bytes(stage_spec, cuda=True)
        if rank_info.is_first_stage:
            read -= stage_spec.embed_rows * stage_spec.hidden_size * 2
        read += max_rows * CONTEXT * kv_bytes_per_token(stage_spec)
        sums = 2 * len(stage_spec.layers) + rank_info.is_first_stage
        total = sums * us[f"sum {max_rows}"] if parallel.tensor > 1 else 0.0
        stage_ms.append(1e3 * read / rate + total / 1e3)
    return max(count * max(stage_ms), sum(stage_ms))


@define
class Forward:
    """A forward on rank 0."""

    begun: float  # on the host's clock
    before: Any  # event from which it computes
    after: Any  # event at its end
    by_graph: bool = False

    @property
    def ms(self) -> float:
        """How long it computed."""
        ms: float = self.before.elapsed_time(self.after)
        return ms


@contextmanager
def forwards(llm: LLM) -> Iterator[list[Forward]]:
    """What rank 0 computes meanwhile."""
    runner, computed = executor_of(llm).runner, list[Forward]()
    run, receive, replay = runner._replay, TorchRanks.receive, StageBuffers.replay

    def timed(shape: StepShape) -> None:
        computed.append(Forward(time.perf_counter(), *events()))
        computed[-1].before.record(runner.stream)
        run(shape)
        computed[-1].after.record(runner.stream)

    def received(ranks: TorchRanks, tokens: int, into: Any = None) -> torch.Tensor:
        hidden = receive(ranks, tokens, into)
        computed[-1].before.record(runner.stream)
        return hidden

    def replayed(ends: StageBuffers, graph: Any, tokens: int) -> None:
        computed[-1].by_graph = True
        replay(ends, graph, tokens)

    with (
        patch.object(runner, "_replay", timed),
        patch.object(TorchRanks, "receive", received),
        patch.object(StageBuffers, "replay", replayed),
    ):
        yield computed
    torch.cuda.synchronize()


def bubble(computed: list[Forward], ms: float) -> dict[str, float]:
    """What share of `ms` ms rank 0 does not compute."""
    graphs = sum(forward.by_graph for forward in computed) / max(1, len(computed))
    return {
        "bubble": 1 - sum(forward.ms for forward in computed) / ms,
        "by graph": graphs,
    }


def steps(lab: Lab, llm: LLM, rows: int) -> tuple[list[float], dict[str, float]]:
    """ms of decode steps of `rows` rows, and the bubble."""
    for_all, idle = list[float](), dict[str, float]()
    for _ in range(1 + REPEATS):
        with forwards(llm) as computed:
            ms, spans = steady(lab, llm, rows, CONTEXT)
        for_all.append(ms)
        first, last = spans["launch"][0].begin, spans["launch"][-1].end
        timed = [forward for forward in computed if first <= forward.begun < last]
        idle = bubble(timed, ms * (STEPS - 1))
    return for_all[1:], idle


def await_graphs(llm: LLM) -> None:
    """Wait until graphs are captured, as they are while a server is idle."""
    background = executor_of(llm).background
    if background is not None and background.thread is not None:
        background.thread.join(CAPTURE_SECONDS)


def prefill(lab: Lab, llm: LLM) -> tuple[list[float], dict[str, float]]:
    """ms to the first token of a prompt, and the bubble."""
    runs, idle = list[float](), dict[str, float]()
    for _ in range(2 + REPEATS):
        with forwards(llm) as computed:
            runs.append(1e3 / rate(llm, lab.prompts(1, PROMPT), [greedy(1)]))
        idle = bubble(computed, runs[-1])
    return runs[2:], idle


def parallels(args: argparse.Namespace) -> list[Parallel]:
    """The ways that there are GPUs for."""
    combinations = [
        Parallel(ranks, stages, args.by_expert)
        for stages in map(int, args.stages.split(","))
        for ranks in map(int, args.ranks.split(","))
    ]
    return [
        parallel
        for parallel in combinations
        if parallel.ranks <= torch.cuda.device_count()
    ]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Each number of ranks, with an engine of its own."""
    rows = [int(number) for number in args.rows.split(",")]
    results: dict[str, Any] = {"card": torch.cuda.get_device_name(), "shape": args.shape}
    speed = results["bandwidth, bytes/s"] = bandwidth()
    torch.cuda.empty_cache()
    base = dict[int, float]()
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab.for_shape(folder, args.shape)
        if args.shape in layers_gpu.SHAPES:
            model = Path(folder) / args.shape
            model.mkdir()
            (model / "config.json").write_text(json.dumps(config_of(args.shape)))
        for parallel in parallels(args):
            name = f"{parallel.tensor} ranks"
            if parallel.pipeline > 1:
                name += f", {parallel.pipeline} stages"
            hidden = config_of(args.shape)["hidden_size"]
            sizes = sorted({micro_batches(parallel, count)[1] for count in rows})
            us = sums(parallel.tensor, hidden, sizes) if parallel.tensor > 1 else {}
            llm = lab.engine(
                args.shape,
                tensor_parallel_size=parallel.tensor,
                pipeline_parallel_size=parallel.pipeline,
                enable_expert_parallel=args.by_expert,
                skip_tokenizer_init=args.shape in layers_gpu.SHAPES,
                max_model_len=16_384,
            )
            await_graphs(llm)
            result: dict[str, Any] = {"sums, us": us}
            for count in rows:
                ms, idle = steps(lab, llm, count)
                middle = statistics.median(ms)
                low = floor_ms(args, parallel, count, speed, us)
                base.setdefault(count, middle)
                result[f"decode, {count} rows"] = figure(
                    ms,
                    "ms",
                    floor=low,
                    of_floor=middle / low,
                    times=base[count] / middle,
                    **idle,
                )
                show({f"{name}, {count} rows": result[f"decode, {count} rows"]})
            runs, idle = prefill(lab, llm)
            first = statistics.median(runs)
            base.setdefault(-1, first)
            result["prefill"] = figure(runs, "ms", times=base[-1] / first, **idle)
            show({f"{name}, prefill": result["prefill"]})
            results[name] = result
            lab.close()
    return results


if __name__ == "__main__":
    run(
        "ranks_gpu",
        measure,
        {
            "--shape": {"choices": [*SHAPES, *TINY, *layers_gpu.SHAPES], "default": "7B"},
            "--ranks": "1,2",
            "--stages": "1",
            "--rows": "1,8,64,256",
            "--by-expert": {"action": "store_true"},
        },
    )
