"""What bench/gpu.py measures: each part is a function of a `Lab` and a model's name.

Models are Qwen2.5's shapes with random weights and a made-up tokenizer of the whole
vocabulary, so that text is made as for users. First runs compile kernels and capture
graphs: they do not count.
"""

import gc
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace
from typing import Any, Final, cast
from unittest.mock import patch

import torch
from attrs import define, field
from torch import Tensor
from triton.testing import do_bench_cudagraph

from bench.results import ROOT, percentiles, spread
from bench.shapes import SHAPES, TINY, qwen
from minfer import LLM, SamplingParams
from minfer.effects.execution.ranks.micro_batches import MicroBatchExecutor
from minfer.effects.execution.torch_executor import TorchExecutor
from minfer.kernels import activation, attention, fused_linear, norm, rope, sample
from minfer.kernels.leaves import Linear, Norm
from minfer.kernels.sample_reference import SamplingValues

Figures = dict[str, dict[str, Any]]
Spans = defaultdict[str, list[Any]]  # calls by name
SEED, BLOCK, STEPS = 0, 64, 64  # tokens of a KV block; decode steps that are timed
BANDWIDTH: Final = 4.26e12  # bytes a second, read and written, measured on an H200
MIN_COLD_BYTES: Final = 256e6  # after these the second-level cache has nothing left


def figure(values: Sequence[float], unit: str, **extra: Any) -> dict[str, Any]:
    return {"unit": unit, **spread(values), **extra}


def against(title: str, names: tuple[str, str], runs: list[list[float]]) -> Figures:
    """Two ways in ms, and how much less the first takes."""
    less = [100 * (1 - a / b) for a, b in zip(*runs, strict=True)]
    figures = {
        f"{title}, {name}": figure(ms, "ms") for name, ms in zip(names, runs, strict=True)
    }
    return {**figures, f"{title}, {names[0]} against {names[1]}": figure(less, "% less")}


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


@define
class Lab:
    """A folder of models, and the one engine that is open."""

    folder: Path
    rng: random.Random = field(factory=lambda: random.Random(SEED))
    llm: LLM | None = None
    opened: object = None  # what the open engine was made of
    words: int = 100_000  # token ids of prompts are below it

    @classmethod
    def for_shape(cls, folder: str, shape: str) -> "Lab":
        """A lab whose prompts have token ids of this model."""
        return cls(Path(folder), words=2000 if shape in TINY else 100_000)

    def model(self, name: str) -> str:
        """A folder with a config, and a tokenizer whose words are numbers."""
        from tokenizers import Tokenizer, models

        if not (folder := self.folder / name).exists():
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(qwen(name)))
            words = {f"{i:x}": i for i in range({**SHAPES, **TINY}[name][5])}
            Tokenizer(models.WordLevel(words, "0")).save(str(folder / "tokenizer.json"))
        return str(folder)

    def engine(self, model: str, **overrides: Any) -> LLM:
        """The engine with these settings, else as vLLM's was; another one is closed
        first.
        """
        if self.llm is None or self.opened != (model, overrides):
            self.close()
            settings: dict[str, Any] = {
                "device": "cuda",
                "max_num_seqs": 256,
                "enable_prefix_caching": False,
            }
            self.llm = LLM(
                self.model(model), load_format="dummy", **(settings | overrides)
            )
            self.opened = model, overrides
        return self.llm

    def close(self) -> None:
        """Give the GPU's memory back."""
        if self.llm is not None:
            self.llm.close()
        self.llm = self.opened = None
        gc.collect()
        torch.cuda.empty_cache()

    def prompts(self, count: int, length: int) -> list[list[int]]:
        return [self.rng.choices(range(1, self.words), k=length) for _ in range(count)]

    def equal(self, batch: int) -> tuple[list[list[int]], list[SamplingParams]]:
        """Requests of 512 tokens in and 128 out."""
        return self.prompts(batch, 512), [greedy(128)] * batch


def watched(spans: Spans, owner: Any, name: str, stream: Any = None) -> Any:
    """A patch: note when a method is called on the host, and between which events on a
    stream.
    """
    inner = getattr(owner, name)

    def mark() -> Any:
        # Torch's.
        return stream and stream.record_event(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]

    def call(*args: Any) -> Any:
        before, begin = mark(), time.perf_counter()
        result, end = inner(*args), time.perf_counter()
        span = {"begin": begin, "end": end, "before": before, "after": mark(), "of": args}
        spans[name].append(SimpleNamespace(**span))
        return result

    return patch.object(owner, name, call)


def steady(lab: Lab, llm: LLM, rows: int, context: int) -> tuple[float, Spans]:
    """`STEPS` steps of rows that feed themselves: ms of one on the GPU, and calls
    meanwhile.
    """
    stagger = 2 * (rows * context // llm.setup.config.max_num_batched_tokens) + 16
    spans = Spans(list)
    driver = llm.worker.driver
    executor = executor_of(llm)
    runner = executor.runner
    launcher: Any = driver.executor
    if launcher is not executor:
        launcher = type(launcher)  # micro-batches', which has slots
    with (
        watched(spans, driver, "turn"),
        watched(spans, llm.worker.reporter, "outputs_of"),
        watched(spans, launcher, "launch", runner.stream),
        watched(spans, executor, "collect"),
        watched(spans, runner, "_replay", runner.stream),
    ):
        rate(llm, lab.prompts(rows, context), [greedy(STEPS + stagger)] * rows)
    torch.cuda.synchronize()
    launched = [(s, s.of[-1]) for s in spans["launch"]]
    decoding = [s for s, plan in launched if len(plan.rows) == rows and not plan.fills]
    first, last = decoding[-STEPS], decoding[-1]
    for name, calls in spans.items():
        spans[name] = [span for span in calls if first.begin <= span.begin < last.end]
    return first.after.elapsed_time(last.after) / (STEPS - 1), spans


def executor_of(llm: LLM) -> TorchExecutor:
    """The model's own executor; of rank 0, if there are several."""
    executor = llm.worker.driver.executor
    if isinstance(executor, MicroBatchExecutor):
        executor = executor.inner
    return cast(TorchExecutor, executor)


def rate(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> float:
    """Output tokens a second, prefill and text included."""
    began = time.perf_counter()
    outputs = [
        output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)
    ]
    seconds = time.perf_counter() - began
    if broken := [
        output.error or output.finish_reason
        for output in outputs
        if output.finish_reason != "length"
    ]:
        raise RuntimeError(
            f"{len(broken)} of {len(outputs)} requests failed: {broken[0]}"
        )
    return sum(len(output.token_ids) for output in outputs) / seconds


def streamed(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams]
) -> list[list[float]]:
    """When each request's tokens came, one after the other."""
    times = defaultdict[str, list[float]](list)
    for output in llm.stream(prompts, params):
        times[output.request_id].append(time.perf_counter())
    return list(times.values())


def throughput(lab: Lab, model: str) -> Figures:
    """Of equal requests, and of nano-vllm's; and the memory that this took."""
    llm, out = lab.engine(model), Figures()
    for batch in (1, 8, 32, 128, 256) if model == "7B" else (1, 256):
        runs = [rate(llm, *lab.equal(batch)) for _ in range(5)]
        out[f"batch {batch}"] = figure(runs[2:], "tok/s")
    dice = random.Random(0)
    sizes = partial(dice.randint, 100, 1024)
    prompts = [[dice.randint(0, 10_000) for _ in range(sizes())] for _ in range(256)]
    lengths = [sizes() for _ in prompts]
    params = [
        SamplingParams(temperature=0.6, max_tokens=n, ignore_eos=True) for n in lengths
    ]
    runs = [rate(llm, prompts, params) for _ in range(4)]
    free, total = torch.cuda.mem_get_info()
    memory = figure(
        [(total - free) / 2**30], "GiB", planned=llm.setup.memory.total / 2**30
    )
    return {
        **out,
        "nano": figure(runs[2:], "tok/s", tokens=sum(lengths)),
        "memory": memory,
    }


def latency(lab: Lab, model: str) -> Figures:
    llm, out = lab.engine(model), Figures()
    for batch in (1, 8, 64):
        rows = list[list[float]]()
        for _ in range(5):
            began = 1e3 * time.perf_counter()
            rows += [
                [began, *(1e3 * moment for moment in row)]
                for row in streamed(llm, *lab.equal(batch))
            ]
        del rows[: 2 * batch]
        for name, ms in (
            ("TTFT", [row[1] - row[0] for row in rows]),
            ("TPOT", [(row[-1] - row[1]) / (len(row) - 2) for row in rows]),
            ("ITL", [b - a for row in rows for a, b in itertools.pairwise(row[1:])]),
        ):
            out[f"batch {batch}, {name}"] = figure(ms, "ms", **percentiles(ms))
    return out


def decode(lab: Lab, model: str) -> Figures:
    llm, out = lab.engine(model), Figures()
    for batch, context in ((1, 600), (1, 32_000), (256, 600)):
        runs = [steady(lab, llm, batch, context)[0] for _ in range(3)]
        out[f"batch {batch}, context {context}"] = figure(runs[1:], "ms")
    return out


def prefill(lab: Lab, model: str) -> Figures:
    llm = lab.engine(model)
    runs = [1 / rate(llm, lab.prompts(1, 8192), [greedy(1)]) for _ in range(7)]
    return {"8192 tokens": figure(runs[2:], "s")}


def host(lab: Lab, model: str) -> Figures:
    """Host time of a step at 256 rows, and how long the GPU is between graphs."""
    llm, samples = lab.engine(model), defaultdict[str, list[float]](list)
    for _ in range(3):
        _, spans = steady(lab, llm, 256, 600)
        ms = {
            name: 1e3 * mean(s.end - s.begin for s in calls)
            for name, calls in spans.items()
        }
        samples["staging"].append(ms["launch"])
        samples["planning, committing, staging"].append(ms["turn"] - ms["collect"])
        samples["delivering"].append(ms["outputs_of"])
        busy = sum(span.before.elapsed_time(span.after) for span in spans["_replay"])
        total = spans["_replay"][0].before.elapsed_time(spans["_replay"][-1].after)
        samples["GPU idle"].append(100 * (1 - busy / total))
    units = {"GPU idle": "%"}
    return {
        name: figure(values[1:], units.get(name, "ms"))
        for name, values in samples.items()
    }


def graphs(lab: Lab, model: str) -> Figures:
    ways: tuple[dict[str, bool], ...] = ({}, {"enforce_eager": True})
    runs = [
        [steady(lab, lab.engine(model, **settings), 1, 600)[0] for _ in range(4)]
        for settings in ways
    ]
    return against("step", ("graphs", "eager"), [run[1:] for run in runs])


def journal(lab: Lab, model: str) -> Figures:
    """256 requests, with every turn recorded and without."""
    ways: tuple[dict[str, Any], ...] = ({"journal": lab.folder / "journal"}, {})
    runs = [
        [1e3 / rate(lab.engine(model, **settings), *lab.equal(256)) for _ in range(5)]
        for settings in ways
    ]
    return against("1 token", ("recorded", "not"), [run[2:] for run in runs])


def chunked(lab: Lab, model: str) -> Figures:
    """The longest gap between tokens of 32 rows, in the second after a prompt of 8,192
    arrives.
    """
    peaks = []
    for budget in (1024, 8192 + 64):
        llm, arrivals = lab.engine(model, max_num_batched_tokens=budget), list[float]()
        with ThreadPoolExecutor(1) as pool:
            decoding = pool.submit(
                streamed, llm, lab.prompts(32, 2100), [greedy(1900)] * 32
            )
            time.sleep(2)
            for prompt in lab.prompts(6, 8192):
                time.sleep(1)
                arrivals.append(time.perf_counter())
                rate(llm, [prompt], [greedy(1)])
        gaps = [
            (b, b - a) for row in decoding.result() for a, b in itertools.pairwise(row)
        ]
        peaks.append(
            [1e3 * max(gap for end, gap in gaps if a < end < a + 1) for a in arrivals[2:]]
        )
    return against("ITL peak", ("chunks of 1024", "whole"), peaks)


def prefix(lab: Lab, model: str) -> Figures:
    llm, pairs = lab.engine(model, enable_prefix_caching=True), []
    for shared in lab.prompts(10, 2048):
        cold, hit = (
            1e3 / rate(llm, [shared + suffix], [greedy(1)])
            for suffix in lab.prompts(2, 64)
        )
        pairs.append((hit, cold))
    return against(
        "TTFT", ("hit", "cold"), [list(runs) for runs in zip(*pairs[2:], strict=True)]
    )


def start(lab: Lab, model: str) -> Figures:
    """A process that writes one token, with an empty cache of compiled kernels, then a
    full one.
    """
    out, env = Figures(), {**os.environ, "TRITON_CACHE_DIR": str(lab.folder / "compiled")}
    command = [sys.executable, "-m", "minfer", "generate", "def", "--device=cuda"]
    command += ["--model", lab.model(model), "--load-format=dummy", "--max-tokens=1"]
    for name in ("first token", "first token, compiled before"):
        began = time.perf_counter()
        subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, check=True)
        out[name] = figure([time.perf_counter() - began], "s")
    return out


def transformers(lab: Lab, model: str) -> Figures:
    from transformers import AutoConfig, AutoModelForCausalLM

    minfer_rates, peer_rates = (
        [rate(lab.engine(model), *lab.equal(8)) for _ in range(5)][2:],
        list[float](),
    )
    lab.close()
    config: Any = AutoConfig.from_pretrained(lab.model(model))
    with torch.device("cuda"), torch.inference_mode():
        # Transformers'.
        peer: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
        for _ in range(3):
            ids, began = torch.tensor(lab.equal(8)[0]), time.perf_counter()
            outputs = peer.generate(
                ids, max_new_tokens=128, do_sample=False, pad_token_id=0
            )
            peer_rates.append(
                outputs[:, ids.shape[1] :].cpu().numel() / (time.perf_counter() - began)
            )
    figures = {
        "minfer": figure(minfer_rates, "tok/s"),
        "transformers": figure(peer_rates[1:], "tok/s"),
    }
    return {
        **figures,
        "ratio": figure([median(minfer_rates) / median(peer_rates[1:])], "times"),
    }


def tensor(*shape: int) -> Tensor:
    return torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(0, 0.05)


def timed(
    function: Callable[..., Any], size: int, build: Callable[[], Any]
) -> dict[str, Any]:
    """Microseconds of a function that moves `size` bytes, of arguments that no cache
    holds.
    """
    calls = [
        partial(function, *build())
        for _ in range(min(32, 1 + int(MIN_COLD_BYTES // size)))
    ]
    turns = itertools.cycle(calls)
    torch.cuda.synchronize()  # what follows is on another stream
    times: list[float] = do_bench_cudagraph(lambda: next(turns)(), return_mode="all")
    return figure([1e3 * ms for ms in times], "us", floor=1e6 * size / BANDWIDTH)


def flash_decoding(_lab: Lab, model: str) -> Figures:
    out, (hidden, _, _, heads, kv_heads, *_) = Figures(), SHAPES[model]
    dim, function = hidden // heads, attention.decode_attention

    def build(tokens: int) -> tuple[Any, ...]:
        keys, values = (tensor(tokens // BLOCK, BLOCK, kv_heads, dim) for _ in range(2))
        table = torch.randperm(len(keys), device="cuda").int()[None]
        rest = table, table.new_zeros(1), table.new_full((1,), tokens), dim**-0.5
        return tensor(1, heads, dim), keys, values, *rest

    for tokens in (4096, 32_768):
        size = 4 * tokens * kv_heads * dim
        out[f"{tokens} tokens"] = split = timed(function, size, partial(build, tokens))
        out[f"{tokens} tokens, bandwidth"] = figure(
            [size / split["median"] / 1e6], "TB/s"
        )
        unsplit = timed(partial(function, splits=1), size, partial(build, tokens))
        ratio = unsplit["median"] / split["median"]
        out[f"{tokens} tokens, against unsplit"] = figure([ratio], "times")
    return out


def kernels(_lab: Lab, model: str) -> Figures:
    hidden, inner, _, heads, kv_heads, vocab, _ = SHAPES[model]
    num_tokens, rows, dim, eps, t = 4096, 256, hidden // heads, 1e-6, tensor
    qkv, paged = hidden + 2 * kv_heads * dim, (num_tokens // BLOCK, BLOCK, kv_heads, dim)
    positions, logits = torch.arange(num_tokens, device="cuda").int(), 2 * rows * vocab

    def draw(temperature: float, top_p: float) -> tuple[Any, ...]:
        device_rows, zeros = positions[:rows], torch.zeros_like(positions[:rows])
        heat, share, deep = (0 * zeros + x for x in (temperature, top_p, torch.inf))
        values = SamplingValues(heat, zeros, share, deep, torch.ones_like(heat))
        return 80 * t(rows, vocab), device_rows, values, device_rows.long(), device_rows

    def product(function: object, outs: int, ins: int, tokens: int) -> tuple[Any, ...]:
        x, weight = t(tokens, ins), t(outs, ins)
        leaf = Linear(weight=weight, parts=(outs,))
        return (t(tokens, outs), x, leaf) if function is add else (x, scale(ins), leaf)

    def scale(size: int) -> Norm:
        return Norm(t(size), eps)

    unfiltered, rotate = partial(sample.sample, filtered=False), rope.rope_and_cache
    plain, gated = fused_linear.norm_linear, fused_linear.norm_gated
    add = fused_linear.linear_add
    # The function, the bytes that it moves, and its arguments.
    work: dict[str, tuple[Callable[..., Any], int, Callable[[], Any]]] = {
        "RMSNorm of a sum, 4096 tokens": (
            norm.normalise,
            8 * num_tokens * hidden,
            lambda: (t(num_tokens, hidden), scale(hidden), t(num_tokens, hidden)),
        ),
        "RoPE and cache, 4096 tokens": (
            rotate,
            4 * num_tokens * qkv,
            lambda: (
                t(num_tokens, qkv),
                t(num_tokens, dim).float(),
                positions,
                positions.long(),
                t(*paged),
                t(*paged),
                heads,
                kv_heads,
            ),
        ),
        "SiLU times up, 4096 tokens": (
            activation.gated_mul,
            6 * num_tokens * inner,
            lambda: (t(num_tokens, 2 * inner),),
        ),
        "greedy, 256 rows": (unfiltered, logits, partial(draw, 0.0, 1.0)),
        "temperature, 256 rows": (unfiltered, logits, partial(draw, 0.8, 1.0)),
        "top-p, 256 rows": (sample.sample, logits, partial(draw, 0.8, 0.9)),
    }
    for name, function, outs, ins in (
        ("QKV", plain, qkv, hidden),
        ("out", add, hidden, hidden),
        ("down", add, hidden, inner),
        ("gate, up", gated, 2 * inner, hidden),
        ("head", plain, vocab, hidden),
    ):
        for tokens in (1, 16):
            build = partial(product, function, outs, ins, tokens)
            work[f"{name}, {tokens} tokens"] = function, 2 * outs * ins, build
    return {name: timed(*case) for name, case in work.items()}
