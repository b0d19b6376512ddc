"""Where the bytes of a running engine are: planned, and measured.

    python -m bench.memory                             # the bundled model, on the CPU
    python -m bench.memory --device cuda --shape 7B    # random weights, on a GPU

Each level of quantization is an engine in a process of its own, which serves a load that
fills its largest steps. Then each live tensor is found and counted once, by its storage:
weights, KV cache, and the engine's rows and buffers. On a GPU what graphs keep in their
own pool is read from the allocator's snapshot. Their sum is compared with the allocator's
figure: PyTorch's for a GPU, the C library's (mallinfo2), less what it was before the
engine, for the CPU. Activations are the allocator's peak above it, for the CPU the
process's. Beside them stands what no allocator counts, as one line: on a GPU the CUDA
context and loaded kernels, on the CPU Python and its libraries before the engine.
"""

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

import torch
from attrs import asdict, frozen

from bench.results import ROOT, canvas, run, show
from bench.shapes import SHAPES, TINY, qwen
from minfer import LLM, SamplingParams
from minfer.effects.cli.compare.measure_level import held_bytes
from minfer.effects.execution.torch_executor import TorchExecutor

GPU: Final = "cuda"
MIB: Final = 2**20
LEVELS: Final[Mapping[str, Mapping[str, str]]] = {
    "as stored": {},
    "fp8": {"quantization": "fp8"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "KV fp8": {"kv_cache_dtype": "fp8"},
    "KV int8": {"kv_cache_dtype": "int8_per_token_head"},
}
PARTS: Final = ("weights", "KV cache", "rows and buffers", "graphs")
RESET_PEAK: Final = "5"  # to /proc/self/clear_refs: of VmHWM, the largest resident set
OTHER_POOL: Final = (0, 0)  # of all that is not in a graph's pool


@frozen(kw_only=True)
class Measured:
    """Bytes by part."""

    planned: Mapping[str, int]
    held: Mapping[str, int]  # by `PARTS`
    allocator: int  # what it says at the same time
    activations: int  # its peak above that
    beside: int  # context and libraries
    kv_blocks: int

    @property
    def explained(self) -> float:
        """The share of the allocator's figure that the parts explain."""
        return sum(self.held.values()) / self.allocator


def storages(kind: str) -> Iterator[tuple[int, int]]:
    """Address and bytes of each storage that a live tensor on the device has."""
    gc.unfreeze()  # what an engine has made at its start
    for item in gc.get_objects():
        is_tensor = type(item) in (torch.Tensor, torch.nn.Parameter)
        if is_tensor and item.device.type == kind and item.layout is torch.strided:
            storage = item.untyped_storage()
            yield storage.data_ptr(), storage.nbytes()


def graph_ranges() -> list[tuple[int, int, int]]:
    """Begin, end and allocated bytes of each segment in a pool of CUDA graphs."""
    # Torch's.
    segments: Any = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    return [
        (
            segment["address"],
            segment["address"] + segment["total_size"],
            segment["allocated_size"],
        )
        for segment in segments
        if tuple(segment["segment_pool_id"]) != OTHER_POOL
    ]


class CLibrary:
    """The C library's allocator: glibc's."""

    def __init__(self) -> None:
        class Info(ctypes.Structure):
            _fields_ = [
                (name, ctypes.c_size_t)
                for name in (
                    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
                    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
                )
            ]

        self._library = ctypes.CDLL("libc.so.6")
        self._read = self._library.mallinfo2
        self._read.restype = Info

    def trim(self) -> None:
        """Give the system back what is not in use."""
        self._library.malloc_trim(0)

    @property
    def bytes(self) -> int:
        """Bytes in use: in arenas, and mapped by themselves."""
        info = self._read()
        return int(info.uordblks + info.hblkhd)


def status_of(line: str) -> int:
    """Bytes that the system says of this process, such as VmRSS."""
    for text in Path("/proc/self/status").read_text().splitlines():
        if text.startswith(line + ":"):
            return int(text.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no line {line}")


def fill(llm: LLM) -> None:
    """Serve a load that fills the largest step, and rows of all batch sizes after it."""
    config = llm.setup.config
    length = min(config.max_model_len // 2, config.max_num_batched_tokens)
    rows = min(config.max_num_seqs, 2 * config.max_num_batched_tokens // length + 1)
    params = SamplingParams(temperature=0.7, max_tokens=24, ignore_eos=True)
    for prompts in ([[7] * length] * rows, [[9] * 8] * config.max_num_seqs):
        for output in llm.generate(prompts, params, use_tqdm=False):
            if output.outputs[0].error:
                raise RuntimeError(output.outputs[0].error)


def measure_engine(settings: Mapping[str, Any]) -> Measured:
    """Open an engine, put it under load, and count."""
    kind, library = settings["device"], CLibrary()
    gc.collect()
    before, resident = library.bytes, status_of("VmRSS")
    llm = LLM(**settings)
    fill(llm)
    gc.collect()
    executor = cast(TorchExecutor, llm.worker.driver.executor)
    runner, plan = executor.runner, llm.setup.memory
    if kind == GPU:
        torch.cuda.synchronize()
    model, cache = held_bytes([runner.step.model]), held_bytes([runner.cache])
    by_address = dict(storages(kind))
    ranges = graph_ranges() if kind == GPU else []
    inside = sum(
        size
        for address, size in by_address.items()
        if any(begin <= address < end for begin, end, _ in ranges)
    )
    sizes = {
        "weights": model,
        "KV cache": cache,
        "rows and buffers": sum(by_address.values()) - inside - model - cache,
        "graphs": sum(allocated for *_, allocated in ranges),
    }
    if kind == GPU:
        allocator = torch.cuda.memory_allocated()
        free, total = torch.cuda.mem_get_info()
        beside = total - free - torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        fill(llm)
        peak = torch.cuda.max_memory_allocated() - allocator
    else:
        allocator, beside = library.bytes - before, resident
        library.trim()
        rest = status_of("VmRSS")
        Path("/proc/self/clear_refs").write_text(RESET_PEAK)
        fill(llm)
        peak = status_of("VmHWM") - rest
    llm.close()
    return Measured(
        planned={
            "weights": plan.weights,
            "KV cache": plan.kv_cache,
            "activations": plan.activations + plan.workspace,
            "graphs": plan.graphs,
        },
        held=sizes,
        allocator=allocator,
        activations=peak,
        beside=beside,
        kv_blocks=plan.num_blocks,
    )


def settings_of(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The settings of all levels."""
    if args.device != GPU:
        return {"device": "cpu", "max_num_seqs": 64, "skip_tokenizer_init": True}
    (folder / "config.json").write_text(json.dumps(qwen(args.shape)))
    return {
        "device": GPU,
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 256 if args.shape in TINY else 8192,
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All levels, a process for each."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        common = settings_of(args, Path(folder))
        for name in args.levels:
            command = [sys.executable, "-m", "bench.memory", "--engine"]
            command.append(json.dumps({**common, **LEVELS[name]}))
            process = subprocess.run(
                command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True
            )
            results[name] = json.loads(process.stdout.splitlines()[-1])
            show({name: results[name]})
    draw(results, args.folder / f"{args.name}.svg")
    return results


def draw(levels: Mapping[str, Any], path: Path) -> None:
    """Write two bars for each level: as planned, and as measured."""
    figure = canvas(9, 1 + 0.7 * len(levels))
    axes = figure.subplots()
    categories = (*PARTS, "activations", "context and libraries")
    names = list(levels)[::-1]
    for place, name in enumerate(names):
        level = levels[name]
        measured = level["held"] | {"activations": level["activations"]}
        for shift, sizes in (
            (0.2, level["planned"]),
            (-0.2, measured | {"context and libraries": level["beside"]}),
        ):
            left = 0.0
            for colour, category in enumerate(categories):
                size = sizes.get(category, 0) / MIB
                axes.barh(place + shift, size, 0.36, left=left, color=f"C{colour}")
                left += size
    axes.set_yticks(range(len(names)), [f"{name}\nplanned, measured" for name in names])
    handles = [axes.barh(0, 0, color=f"C{colour}") for colour in range(len(categories))]
    axes.legend(handles, categories, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))
    axes.set_xlabel("MiB")
    figure.savefig(path, metadata={"Date": None})


def _measure(args: argparse.Namespace) -> dict[str, Any] | None:
    if args.engine is None:
        return measure(args)
    measured = measure_engine(json.loads(args.engine))
    print(json.dumps({**asdict(measured), "explained": measured.explained}))
    return None


if __name__ == "__main__":
    run(
        "memory",
        _measure,
        {
            "--device": {"choices": ["cpu", GPU], "default": "cpu"},
            "--shape": {"choices": [*SHAPES, *TINY], "default": "7B"},
            "--levels": {"nargs": "+", "choices": [*LEVELS], "default": [*LEVELS]},
            "--engine": {"help": "measure one engine of these settings, as JSON"},
        },
    )
