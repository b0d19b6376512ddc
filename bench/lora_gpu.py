"""Adapters on one GPU: many in one batch, beside none.

    python -m bench.lora_gpu --parts decode end_to_end
    python -m bench.lora_gpu --shape moe --parts decode --batches 1 8 32
    python -m bench.lora_gpu --parts cold
    python -m bench.lora_gpu --parts kernels --sweep

Weights and adapters are random, and drawn on the device: of every matrix of every layer
that an adapter can change, which are the seven of a dense layer. "one": all rows have the
same adapter; "different": each row has its own, as far as there are slots.

decode      ms of a decode step: its graph, replayed on rows at 512 tokens of context
end_to_end  output tokens/s of 512 tokens in and 128 out, prefill included, by `LLM`
cold        the first token of a prompt whose adapter lies in host memory, beside one
            whose adapter lies on the device; and the copy to a slot alone
kernels     us of a shrink and an expand, in a graph over layers, by rows and adapters,
            beside their bytes; --sweep tries other constants

The floor is the bytes of weights and of the adapters of a step at the bandwidth of this
GPU (`--bandwidth`). A run that was stopped goes on where it was: parts that are in the
result file are not measured again. `--device cpu --shape tiny --prompt 12 --output 4
--batches 1 3 --slots 2` tries all but times.
"""

import argparse
import gc
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from typing import Any, Final, cast

import torch
from attrs import frozen

from bench.gpu_times import events, microseconds
from bench.gpu_workloads import BANDWIDTH, BLOCK, Lab, greedy
from bench.layers_gpu import SHAPES as LAYER_SHAPES
from bench.layers_gpu import draw
from bench.results import run, show, spread, write
from bench.shapes import SHAPES, TINY
from minfer import LLM
from minfer.effects.execution.device.step_shape import StepShape
from minfer.effects.execution.running.own_model import OwnModel
from minfer.effects.execution.torch_executor import TorchExecutor
from minfer.effects.models.adapters.slot_layout import SlotMemory
from minfer.effects.models.layout.shapes import weight_bytes
from minfer.kernels.leaves import AdapterSlots
from minfer.kernels.lora import add_lora
from minfer.kernels.lora_tunes import LoraTune, tune_of
from minfer.kernels.plain_lora import AdapterTokens
from minfer.records.messages import AdapterLoaded, LoadAdapter

WAYS: Final = ("none", "one", "different")
STEPS: Final = 64  # decode steps that are timed
NO_SLOT: Final = -1
SCALE: Final = 0.01  # of random numbers in adapters
# Tiles of rows, splits, inputs of a pass, columns, warps, stages.
SWEEP: Final = [
    LoraTune(*values)
    for values in itertools.product(
        (1, 16, 64), (1, 4, 8, 16), (64, 128, 256), (64, 128, 256), (2, 4, 8), (2, 3)
    )
]
# The matrices of a 7B's layer: inputs, and outputs of each matrix with an A of its own.
MATRICES: Final[dict[str, tuple[int, tuple[int, ...]]]] = {
    "qkv": (3584, (3584, 512, 512)),
    "out": (3584, (3584,)),
    "gate_up": (3584, (18_944, 18_944)),
    "down": (18_944, (3584,)),
}


@frozen
class Cell:
    """A measurement."""

    rows: int
    rank: int
    way: str

    @property
    def name(self) -> str:
        return f"{self.rows} rows, rank {self.rank}, {self.way}"


class RandomAdapters:
    """Random adapters of an engine, which take no time to load."""

    def __init__(self, llm: LLM, rank: int) -> None:
        self.executor = cast(TorchExecutor, llm.worker.driver.executor)
        loader = self.executor.adapters
        assert loader is not None
        self.loader, self.llm = loader, llm
        self.digests = [f"{slot + 1:064x}" for slot in range(self.slots)]
        with self.executor.between_steps():
            loader.memory.numbers.normal_(0, SCALE)
            loader.memory.ranks.fill_(rank)
        llm.worker.driver.load_adapter = _report_loaded

    @property
    def slots(self) -> int:
        return len(self.loader.memory.numbers)

    def of_rows(self, rows: int, way: str) -> list[str]:
        """The digests of rows' adapters; empty: none."""
        if way == "none":
            return [""] * rows
        count = 1 if way == "one" else self.slots
        return [self.digests[row % count] for row in range(rows)]

    def bytes(self, rows: int, way: str) -> int:
        """Bytes of the adapters of a step."""
        used = len({*self.of_rows(rows, way)} - {""})
        numbers = self.loader.memory.numbers
        return used * int(numbers[0].nbytes)


def _report_loaded(command: LoadAdapter, report: Callable[[Any], None]) -> None:
    report(AdapterLoaded(command.adapter, command.slot))


def open_engine(lab: Lab, args: argparse.Namespace, rank: int) -> LLM:
    """An engine with slots for adapters of a rank."""
    if args.shape in LAYER_SHAPES:
        path = lab.folder / args.shape
        if not path.exists():
            path.mkdir()
            lab_model = Path(lab.model("tiny"))
            (path / "config.json").write_text(
                json.dumps({"dtype": "bfloat16", **LAYER_SHAPES[args.shape]})
            )
            tokenizer = (lab_model / "tokenizer.json").read_bytes()
            (path / "tokenizer.json").write_bytes(tokenizer)
    most = max(args.batches)
    llm = lab.engine(
        args.shape,
        device=args.device,
        enable_lora=True,
        max_loras=min(args.slots, most),
        max_lora_rank=rank,
        max_num_seqs=most,
        max_model_len=args.prompt + args.output + BLOCK,
    )
    model = cast(TorchExecutor, llm.worker.driver.executor).model
    if args.shape in LAYER_SHAPES and isinstance(model, OwnModel):
        draw(model.weights)
    return llm


# --- parts ------------------------------------------------------------------------------


def decode(
    adapters: RandomAdapters, cell: Cell, args: argparse.Namespace
) -> dict[str, Any]:
    """ms of a decode step."""
    executor, runner = adapters.executor, adapters.executor.runner
    shape = StepShape(decode_rows=cell.rows, draws=cell.rows, adapters=cell.way != "none")
    times: list[float] = []
    with executor.between_steps():
        shape = runner.with_context_splits(runner.padded(shape), args.prompt)
        if args.device == "cpu":
            executor.dummy_runner.dummy_step(shape)
            return {"steps": 1}
        if shape not in runner.captures.graphs:
            executor.dummy_runner.capture(shape)
        for _ in range(args.repeats):
            _set_rows(adapters, cell, args.prompt)
            begin, end = events()
            runner.captures.graphs[shape].replay()
            begin.record()
            for _ in range(STEPS):
                runner.captures.graphs[shape].replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / STEPS)
        _set_rows(adapters, Cell(0, cell.rank, "none"), 0)
    return {"ms": spread(times)}


def _set_rows(adapters: RandomAdapters, cell: Cell, context: int) -> None:
    """Set decode rows at a context, each with pages of its own and its adapter's slot."""
    rows, config = adapters.executor.runner.rows, adapters.executor.runner.config
    count = cell.rows
    rows.batch.fill_(rows.scratch)
    rows.batch[:count] = torch.arange(count, device=rows.batch.device)
    rows.sampling_split.fill_(rows.scratch)  # where logits are kept: all are sampled now
    rows.sampling_split[0, :count] = rows.batch[:count]
    rows.next[:count] = context
    pages = torch.arange(count * rows.blocks, device=rows.batch.device)
    rows.table[:, :count] = (pages % config.num_blocks).view(count, rows.blocks)
    assert rows.adapter_slots is not None
    rows.adapter_slots.fill_(NO_SLOT)
    if cell.way != "none":
        slots = torch.arange(count, device=rows.batch.device)
        used = 1 if cell.way == "one" else adapters.slots
        rows.adapter_slots[:count] = slots % used


def end_to_end(
    adapters: RandomAdapters, cell: Cell, lab: Lab, args: argparse.Namespace
) -> dict[str, Any]:
    """Output tokens a second."""
    llm: Any = adapters.llm
    digests = adapters.of_rows(cell.rows, cell.way)
    llm._digests = lambda *_: digests
    rates = []
    for turn in range(args.repeats + 1):
        prompts = lab.prompts(cell.rows, args.prompt)
        begin = time.perf_counter()
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            greedy(args.output),
            use_tqdm=False,
        )
        seconds = time.perf_counter() - begin
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        assert tokens == cell.rows * args.output
        if turn:  # the first one compiles and captures
            rates.append(tokens / seconds)
    return {"tok/s": spread(rates)}


def cold(adapters: RandomAdapters, lab: Lab, args: argparse.Namespace) -> dict[str, Any]:
    """ms to a first token with an adapter on the device, and in host memory alone; and of
    a copy.
    """
    llm: Any = adapters.llm
    loader = adapters.loader
    count = adapters.slots + 2
    digests = [f"{number + 1:064x}" for number in range(count)]
    memory = SlotMemory.empty(loader.spec, loader.layout, 1, "cpu")
    memory.numbers.normal_(0, SCALE)
    memory.ranks.fill_(loader.room.max_rank)
    placed = loader._pinned(memory)
    loader.host.update(dict.fromkeys(digests, placed))
    llm.worker.driver.load_adapter = adapters.executor.load_adapter
    turns = itertools.cycle(digests)

    def first_token(digest: str) -> float:
        llm._digests = lambda *_: [digest]
        [prompt] = lab.prompts(1, args.prompt)
        begin = time.perf_counter()
        request = [{"prompt_token_ids": prompt}]
        llm.generate(request, greedy(1), use_tqdm=False)
        return 1e3 * (time.perf_counter() - begin)

    for _ in range(count):
        first_token(next(turns))
    not_there = [first_token(next(turns)) for _ in range(args.repeats * count)]
    resident = next(turns)
    first_token(resident)
    there = [first_token(resident) for _ in range(args.repeats * count)]
    copies = []
    for number in range(args.repeats):
        ended: SimpleQueue[object] = SimpleQueue()
        begin = time.perf_counter()
        loader.load(LoadAdapter(digests[number % count], 0), ended.put)
        ended.get()
        copies.append(1e3 * (time.perf_counter() - begin))
    return {
        "bytes": int(placed.numbers.nbytes),
        "ms, on the device": spread(there),
        "ms, in host memory": spread(not_there),
        "ms more, median": median(not_there) - median(there),
        "ms of a copy": spread(copies),
    }


# --- kernels ----------------------------------------------------------------------------


def kernels(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """us of products of adapters, by matrix, rows and number of adapters."""
    for rank, rows, (name, sizes) in itertools.product(
        args.ranks, args.batches, MATRICES.items()
    ):
        for used in sorted({1, min(rows, args.slots)}):
            figures = _kernel(rank, rows, used, *sizes, args)
            yield f"{name}, rank {rank}, {rows} rows, {used} adapters", figures


def _kernel(
    rank: int,
    rows: int,
    used: int,
    inputs: int,
    parts: tuple[int, ...],
    args: argparse.Namespace,
) -> dict[str, Any]:
    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=args.device).to(torch.bfloat16)

    layers = [
        AdapterSlots(
            lora_a=drawn(args.slots, len(parts) * rank, inputs),
            lora_b=drawn(args.slots, rank, sum(parts)),
            ranks=torch.full((args.slots, len(parts)), rank, device=args.device).int(),
            parts=parts,
        )
        for _ in range(args.layers)
    ]
    x, out = drawn(rows, inputs), drawn(rows, sum(parts))
    tokens = AdapterTokens((torch.arange(rows, device=args.device) % used).int())
    if args.device == "cpu":
        add_lora(out, x, layers[0], tokens)
        return {"rows": rows}

    def us(tune: LoraTune) -> float:
        return microseconds(
            [partial(add_lora, out, x, slots, tokens, None, tune) for slots in layers]
        )

    numbers = used * rank * (len(parts) * inputs + sum(parts))
    chosen = tune_of(rows, inputs, max(16, rank))
    figures: dict[str, Any] = {
        "floor, us": 2 * numbers / args.bandwidth * 1e6,
        "us": us(chosen),
        "tune": [*chosen],
    }
    if args.sweep:
        tried = sorted((us(tune), tune) for tune in SWEEP if _suits(tune, rows, rank))
        figures["best"] = [{"us": took, "tune": [*tune]} for took, tune in tried[:5]]
    return figures


def _suits(tune: LoraTune, rows: int, rank: int) -> bool:
    """Whether constants are worth a try."""
    lanes = max(16, rank)
    fits = lanes * max(tune.depth, tune.columns) <= 1 << 14
    return fits and (tune.tile == 1 if rows == 1 else tune.tile <= max(16, rows))


# --- all --------------------------------------------------------------------------------


def with_floor(
    figures: dict[str, Any],
    adapters: RandomAdapters,
    cell: Cell,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Add the ms of a decode step's bytes: weights and adapters, without KV."""
    spec = adapters.executor.runner.spec
    weights = weight_bytes(spec, cuda=args.device == "cuda")
    read = weights + adapters.bytes(cell.rows, cell.way)
    return {**figures, "floor of a step, ms": 1e3 * read / args.bandwidth}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All parts that are not in the result file yet."""
    path = args.folder / f"{args.name}.json"
    results: dict[str, Any] = {}
    if path.exists():
        results = json.loads(path.read_text("utf-8"))["results"]

    def note(part: str, name: str, figures: dict[str, Any]) -> None:
        results.setdefault(f"{args.shape}, {part}", {})[name] = figures
        show({f"{part}, {name}": figures})
        write(args.name, results, args.seed, args.folder)

    def is_there(part: str, name: str) -> bool:
        return name in results.get(f"{args.shape}, {part}", {})

    if "kernels" in args.parts:
        for name, figures in kernels(args):
            note("kernels", name, figures)
    parts = [part for part in ("decode", "end_to_end", "cold") if part in args.parts]
    cells = [
        Cell(rows, rank, way)
        for rank in args.ranks
        for rows in args.batches
        for way in WAYS
        if way != "different" or rows > 1
    ]
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab.for_shape(folder, "tiny" if args.shape in LAYER_SHAPES else args.shape)
        for rank in args.ranks if parts else ():
            adapters = RandomAdapters(open_engine(lab, args, rank), rank)
            for cell, part in itertools.product(cells, ("decode", "end_to_end")):
                if cell.rank != rank or part not in parts or is_there(part, cell.name):
                    continue
                figures = (
                    decode(adapters, cell, args)
                    if part == "decode"
                    else end_to_end(adapters, cell, lab, args)
                )
                note(part, cell.name, with_floor(figures, adapters, cell, args))
            if "cold" in parts and not is_there("cold", f"rank {rank}"):
                note("cold", f"rank {rank}", cold(adapters, lab, args))
            del adapters
            lab.close()
            gc.collect()
    return with_ratios(results)


def with_ratios(results: dict[str, Any]) -> dict[str, Any]:
    """Add to each cell its speed divided by that without adapters."""
    for part in results.values():
        for name, figures in part.items():
            none = part.get(f"{name.rpartition(', ')[0]}, none")
            for unit, faster in (("ms", -1), ("tok/s", 1)):
                if none and unit in figures and unit in none:
                    ratio = figures[unit]["median"] / none[unit]["median"]
                    figures["speed of none"] = ratio**faster
    return results


if __name__ == "__main__":
    integers = {"type": int, "nargs": "+"}
    run(
        "lora_gpu",
        measure,
        {
            "--shape": {"choices": [*SHAPES, *TINY, *LAYER_SHAPES], "default": "7B"},
            "--device": {"choices": ["cuda", "cpu"], "default": "cuda"},
            "--parts": {"nargs": "+", "default": ["decode", "end_to_end", "cold"]},
            "--batches": {**integers, "default": [1, 8, 32]},
            "--ranks": {**integers, "default": [16, 64]},
            "--slots": {"type": int, "default": 32, "help": "adapters on the device"},
            "--prompt": 512,
            "--output": 128,
            "--repeats": 3,
            "--layers": {"type": int, "default": 28, "help": "of a graph of kernels"},
            "--bandwidth": {"type": float, "default": BANDWIDTH, "help": "bytes/s"},
            "--sweep": {"action": "store_true"},
            "--seed": 0,
        },
    )
