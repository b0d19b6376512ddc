"""What masks cost the host: one turn of the driver, part by part, on the CPU.

Everything on the host is real: the core, grammars, masks, packing and reading back. Only
the device is not: a forward and late draws take a time that is given (by default those of
a 1.5B on an H200), and what is drawn is any token that is allowed. Drawing it is not
timed. Two figures have to fit into a device's step: from the arrival of a step's tokens
until the next masks are handed over (a forward's time), and all that the host does in a
turn (a step's).

Times are in microseconds of the wall clock: medians and quartiles of turns. On a busy
machine look at ratios of kinds within one run. `--front` adds a thread that computes in
Python, as a client in the same process does for the text of each token.

`--waves N` measures outputs that end instead: N times, as many strict calls as a
batch has rows come at once, of 128 tokens each. That is done in alternation with the idle
matchers that are kept now, and with those of before (`BEFORE`).
"""

import argparse
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from statistics import quantiles
from typing import Any

import numpy as np
import torch
from attrs import define, field
from typing_extensions import override

from bench.results import run, show, spread
from bench.shapes import qwen
from bench.structured import ENDLESS, vocabulary
from bench.tool_calls import edits
from minfer.effects.execution.device.step_shape import StepShape
from minfer.effects.execution.open_backend import open_backend
from minfer.effects.execution.packing.pack_plan import Forward
from minfer.effects.execution.packing.read_back import HostSlot
from minfer.effects.execution.running.deferred_sampling import DeferredDraws
from minfer.effects.execution.running.plan_launcher import PlanLauncher
from minfer.effects.execution.running.runner import ModelRunner
from minfer.effects.execution.torch_executor import TorchExecutor
from minfer.effects.live.constraints.grammar_masks import GrammarMasks
from minfer.effects.live.engine import driver as driving
from minfer.effects.live.engine.driver import Driver
from minfer.effects.live.engine.interpreter import paused_collector, short_switch_interval
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.checkpoint.random_weights import random_weights
from minfer.effects.text.grammars import idle_matchers
from minfer.effects.text.grammars import slow_masks as watching
from minfer.effects.text.grammars.llguidance_compiler import LlguidanceCompiler
from minfer.effects.text.grammars.store import Grammars
from minfer.effects.text.tools.argument_forms import Callee
from minfer.effects.text.tools.forms import Calling, arguments_schema, grammar
from minfer.records.config import EngineConfig
from minfer.records.messages import Emit, Submit
from minfer.records.plan import Copy
from minfer.records.request import Request, SamplingParams
from minfer.records.state import Transition
from minfer.sampling.structured import StructuredOutputs

VOCAB = 151_936
EOS = 0
CPU = torch.device("cpu")
KINDS: dict[str, StructuredOutputs | None] = {
    "free": None,
    "any text": StructuredOutputs(regex="(.|\n)*"),  # the library's part is next to none
    "json": ENDLESS["json"],
    "bounded json": ENDLESS["bounded json"],
}
MIXES = (("free",), ("any text",), ("json",), ("bounded json",), ("free", "json"))
WARM = 30  # turns
CAPTURED = 512  # inputs from history, of a step with a graph
MODEL = {  # of what the device does not compute; the vocabulary alone matters
    **qwen("tiny"),
    "vocab_size": VOCAB,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}


@define
class Parts:
    """Microseconds of the parts of a turn, each without those within it."""

    thread: int = field(factory=threading.get_ident)
    spent: dict[str, float] = field(factory=lambda: defaultdict(float))
    inner: list[float] = field(factory=lambda: [0.0])  # of the parts that are open

    def wrap(self, owner: Any, name: str, part_name: str) -> None:
        """Have calls of a method timed, in this thread; in others as a part beside."""
        call: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            if threading.get_ident() != self.thread:
                result = call(*args, **kwargs)
                self.spent[f"{part_name}, beside"] += 1e6 * (time.perf_counter() - began)
                return result
            self.inner.append(0.0)
            try:
                return call(*args, **kwargs)
            finally:
                took = 1e6 * (time.perf_counter() - began)
                self.spent[part_name] += took - self.inner.pop()
                self.inner[-1] += took

        setattr(owner, name, timed)

    def take(self) -> dict[str, float]:
        """Those of the turn that is over."""
        spent, self.spent = dict(self.spent), defaultdict(float)
        return spent


class Sink(torch.Tensor):
    """Stands for lines on the device: it remembers what was sent last."""

    sent: torch.Tensor | None = None

    def __setitem__(self, _: Any, value: Any) -> None:
        self.sent = value


@define(eq=False)
class Work:
    """Something that a device does until a moment; as an event that can be waited for."""

    device: "Device"
    slot: HostSlot
    end: float  # by its own clock, which stands still while tokens are drawn for it
    lines: torch.Tensor | None = None  # masks of what is drawn; None: any token

    def synchronize(self) -> None:
        """Draw, and wait."""
        began, processor = time.perf_counter(), time.thread_time()
        draw = self.slot.draw
        if draw is None:
            raise AssertionError("this device draws no tokens")
        count = (
            len(draw.entries) if draw.lines is None else max(draw.lines, default=-1) + 1
        )
        drawn = self.slot.drawn.numpy()
        if self.lines is None:
            drawn[:count] = self.device.rng.integers(EOS + 1, VOCAB, count)
        else:
            lines = self.lines.numpy().view(np.uint32)
            drawn[:count] = [self.device.any_of(line) for line in lines]
        self.device.lost += time.perf_counter() - began  # the device stands still
        self.device.drawing += time.thread_time() - processor
        time.sleep(max(0.0, self.end + self.device.lost - time.perf_counter()))
        self.device.arrived = time.perf_counter()


class Device(ModelRunner):
    """A runner of a tiny model, whose device takes the time that it is given instead, and
    to which nothing less is sent.
    """

    def __init__(self, config: EngineConfig, forward: float, draws: float) -> None:
        spec = parse_spec(MODEL)
        # As on a GPU, nothing clears a new block.
        backend = open_backend(spec, config, CPU, kernels=True)
        super().__init__(backend, spec, random_weights(spec, spec.dtype), config)
        self.forward, self.late = forward, draws
        self.rng = np.random.default_rng(0)
        self.free = 0.0  # when it has done all that it was given
        self.lost = 0.0  # seconds in which it stood still, as tokens were drawn for it
        self.drawing = 0.0  # of a processor's seconds
        self.arrived = 0.0  # when tokens were there last
        self.sent = 0.0  # when masks were handed over last
        self.sink = self.sampler.masks._lines = Sink()

    @override
    def may_be_captured(self, shape: StepShape) -> bool:
        return shape.fits(CAPTURED)

    @override
    def run(self, forward: Forward, slot: HostSlot, saves: Sequence[Copy] = ()) -> None:
        slot.begin(forward.draw, scored=False)
        slot.write([forward.words, *self.rows.take()])
        self._begin(slot, self.forward)

    @override
    def run_deferred(self, deferred: DeferredDraws, slot: HostSlot) -> None:
        slot.begin(deferred.draw, scored=False)
        slot.write([deferred.words, *self.rows.take()])
        self.sampler.masks.send(deferred)
        self.sent = time.perf_counter()
        self._begin(slot, self.late, self.sink.sent)

    def _begin(
        self, slot: HostSlot, spent: float, lines: torch.Tensor | None = None
    ) -> None:
        self.free = max(self.free, time.perf_counter() - self.lost) + spent
        slot.done = Work(self, slot, self.free, lines)  # type: ignore[assignment]  # an event

    def any_of(self, line: Any) -> int:
        """Some token that a mask allows."""
        words = np.flatnonzero(line)
        index = int(words[self.rng.integers(len(words))])
        bits = int(line[index])
        allowed = [i for i in range(32) if bits >> i & 1]
        return 32 * index + allowed[self.rng.integers(len(allowed))]


class Paced(TorchExecutor):
    """The torch executor over such a device."""

    def __init__(self, config: EngineConfig, device: Device) -> None:
        backend, spec = device.backend, device.spec
        weights = random_weights(spec, spec.dtype)
        super().__init__(config, spec, weights, backend.device, kernels=True)
        self.runner = device
        self.launcher = PlanLauncher(device)
        self.runs_at_once, self.in_one_thread = True, False


class Front:
    """A thread of this process that makes text of tokens, in Python."""

    def __init__(self, per_token: float) -> None:
        self.per_token = per_token  # seconds
        self.queue = SimpleQueue[int]()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while tokens := self.queue.get():
            end = time.thread_time() + tokens * self.per_token
            while time.thread_time() < end:
                pass

    def close(self) -> None:
        self.queue.put(0)
        self.thread.join()


class Bench:
    """Turns of a driver, timed."""

    def __init__(self, compiler: LlguidanceCompiler, batch: int, settings: Any) -> None:
        config = EngineConfig(
            num_blocks=batch * 40,
            block_size=64,
            max_model_len=2048,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            vocab_size=VOCAB,
            late_masks=True,
        )
        self.device = Device(config, settings["forward"] / 1e3, settings["draws"] / 1e3)
        self.compiler = compiler
        masks = GrammarMasks(Grammars(lambda: compiler), 64, frozenset({EOS}))
        self.driver = Driver(config, Paced(config, self.device), masks=masks)
        self.parts = Parts()
        self.front = Front(settings["front"] / 1e6)

    def submit(self, kinds: list[str]) -> None:
        for i, kind in enumerate(kinds):
            constraint = KINDS[kind]
            params = SamplingParams(
                temperature=1, ignore_eos=True, structured_outputs=constraint
            )
            bound = constraint is not None
            request = Request(
                id=f"r{i}",
                prompt=(5, i, *range(60)),
                max_tokens=1024,
                sampling=params,
                needs_host_mask=bound,
                seed=i,
            )
            self.driver.post(Submit(request))
        state = self.driver.state
        while len(state.running) < len(kinds) or state.paused or state.filling:
            self.driver.turn()
            state = self.driver.state
        for _ in range(WARM):
            self.driver.turn()

    def wrap(self) -> None:
        """Have a turn's parts timed."""
        wrap, executor, masks = (
            self.parts.wrap,
            self.driver.executor,
            self.driver.deferred.masks,
        )
        wrap(Work, "synchronize", "waiting for the device")
        wrap(executor, "collect", "reading results")
        wrap(driving, "step", "core step")
        wrap(executor, "sample", "handing masks over")
        wrap(executor, "launch", "launching")
        for name in ("add_requests", "observe", "begin"):
            wrap(masks, name, "what is due")
        parallel: Any = self.compiler._parallel
        parallel._executor = library = Library(parallel._executor)
        wrap(library, "consume_token_par", "library: tokens")
        wrap(library, "unsafe_compute_mask_ptr", "library: masks")

    def turns(self, count: int) -> dict[str, Any]:
        """`count` turns, without those in which a sample was paused."""
        times = defaultdict[str, list[float]](list)
        last = 0.0
        device = self.device
        for _ in range(count):
            began = time.perf_counter()
            self.driver.turn(self.count_outputs)
            total = 1e6 * (time.perf_counter() - began)
            part_times = self.parts.take()
            waited = part_times.pop("waiting for the device", 0.0)
            for name, spent in part_times.items():
                times[name].append(spent)
            timed = sum(
                spent for name, spent in part_times.items() if "beside" not in name
            )
            times["the rest"].append(total - waited - timed)
            times["all of a turn"].append(total - waited)
            if device.sent > device.arrived:
                times["tokens to masks"].append(1e6 * (device.sent - device.arrived))
            now = device.arrived - device.lost
            if last:
                times["a step, with the device"].append(1e6 * (now - last))
            last = now
        return {name: quartiles(values) for name, values in times.items()}

    def count_outputs(self, transition: Transition) -> None:
        emits = [command for command in transition.commands if isinstance(command, Emit)]
        if emits and self.front.per_token:
            self.front.queue.put(sum(map(len, emits[0].tokens)))

    def close(self) -> None:
        self.driver.close()
        self.front.close()


def quartiles(values: list[float]) -> dict[str, float]:
    """The median, and the quartiles beside it, of turns."""
    low, middle, high = quantiles(values, n=4)
    return {"median": middle, "low": low, "high": high, "repetitions": len(values)}


class Library:
    """The library's executor, with methods that can be wrapped."""

    def __init__(self, library: Any) -> None:
        self.consume_token_par = library.consume_token_par
        self.unsafe_compute_mask_ptr = library.unsafe_compute_mask_ptr


def made_up() -> str:
    """A tokenizer.json of a vocabulary of that size."""
    with tempfile.TemporaryDirectory() as folder:
        vocabulary(Path(folder), VOCAB)
        return (Path(folder) / "tokenizer.json").read_text("utf-8")


def measured(
    text: str, mix: tuple[str, ...], batch: int, settings: Any
) -> dict[str, Any]:
    """The parts of a turn of one batch."""
    before = Work.synchronize, driving.step  # type: ignore[attr-defined]  # it is timed there
    watching.MASK_THREADS = 0  # type: ignore[misc]  # no mask is late, on few processors
    bench = Bench(LlguidanceCompiler(text, VOCAB, [EOS]), batch, settings)
    try:
        with paused_collector(), short_switch_interval():
            bench.submit([mix[i % len(mix)] for i in range(batch)])
            bench.wrap()
            return bench.turns(settings["turns"])
    finally:
        Work.synchronize, driving.step = before  # type: ignore[method-assign,attr-defined]
        bench.close()


# --- waves ------------------------------------------------------------------------------

# Idle matchers by room, characters that take a room more, and tokens that one serves.
Kept = tuple[int, int, int]
BEFORE: Kept = (128, 4096, 1024)
NOW: Kept = (
    idle_matchers.MAX_TOTAL_WEIGHT,
    idle_matchers.CHARACTERS_PER_WEIGHT,
    idle_matchers.MAX_SERVED_TOKENS,
)
OUTPUT = 128  # tokens of a call


def strict_calls(tools: int) -> StructuredOutputs:
    """Calls of `tools` strict tools, in a form with markers as text."""
    schema = arguments_schema(edits(bounded=False), "tools")
    callees = tuple(Callee(f"edit_{number:02}", schema) for number in range(tools))
    calling = Calling(format="hermes", callees=callees, must=True, token=lambda _: None)
    return StructuredOutputs(grammar=grammar(calling))


def keep(capacities: Kept) -> None:
    """Have this many idle matchers kept."""
    weight, characters, tokens = capacities
    idle_matchers.MAX_TOTAL_WEIGHT = weight  # type: ignore[misc]  # to compare
    idle_matchers.CHARACTERS_PER_WEIGHT = characters  # type: ignore[misc]
    idle_matchers.MAX_SERVED_TOKENS = tokens  # type: ignore[misc]


def one_wave(bench: Bench, batch: int, wave: int, constraint: Any) -> dict[str, float]:
    """As many calls as a batch has rows, from their arrival to their end."""
    params = SamplingParams(temperature=1, ignore_eos=True, structured_outputs=constraint)
    began, processor = time.perf_counter(), time.process_time()
    for i in range(batch):
        prompt = (5, wave % 250, i, *range(60))
        request = Request(
            id=f"w{wave}-{i}",
            prompt=prompt,
            max_tokens=OUTPUT,
            sampling=params,
            needs_host_mask=True,
            seed=i,
        )
        bench.driver.post(Submit(request))
    lost, drawing, ready, turns = bench.device.lost, bench.device.drawing, 0.0, 0
    bench.driver.turn()
    while bench.driver.busy:
        bench.driver.turn()
        turns += 1
        state = bench.driver.state
        if not ready and len(state.running) == batch and not state.paused:
            ready = time.perf_counter() - began
    seconds = time.perf_counter() - began - (bench.device.lost - lost)
    spent = time.process_time() - processor - (bench.device.drawing - drawing)
    ready = ready or seconds  # some had ended before the last one began
    return {"seconds": seconds, "processor": spent, "ready": ready, "turns": turns}


def waves(args: argparse.Namespace) -> dict[str, Any]:
    """Waves of strict calls, with few idle matchers kept and with as many as now."""
    results: dict[str, Any] = {}
    compiler = LlguidanceCompiler(made_up(), VOCAB, [EOS])
    settings = {"forward": args.forward, "draws": args.draws, "front": 0.0}
    watching.MASK_THREADS = 0  # type: ignore[misc]  # no mask is late, on few processors
    for tools in (1, 20):
        constraint = strict_calls(tools)
        for batch in args.batches:
            timings: dict[str, list[dict[str, float]]] = {"before": [], "now": []}
            benches = {name: Bench(compiler, batch, settings) for name in timings}
            for wave in range(args.waves + 1):
                for name in sorted(timings, reverse=bool(wave % 2)):
                    keep(BEFORE if name == "before" else NOW)
                    with paused_collector(), short_switch_interval():
                        timed = one_wave(benches[name], batch, wave, constraint)
                    timings[name] += [timed] if wave else []
            for bench in benches.values():
                bench.close()
            pairs = list(zip(timings["now"], timings["before"], strict=True))
            ratios = {
                f"{metric}, now to before": spread(
                    [a[metric] / b[metric] for a, b in pairs]
                )
                for metric in ("seconds", "processor", "ready")
            }
            entry = f"{tools} strict tools, {batch} rows"
            results[entry] = {**timings, **ratios}
            show({entry: ratios})
    keep(NOW)
    return results


def measure(args: argparse.Namespace) -> dict[str, Any] | None:
    if args.waves:
        return {"forward": args.forward, "waves": args.waves, **waves(args)}
    settings = {
        "forward": args.forward,
        "draws": args.draws,
        "turns": args.turns,
        "front": args.front,
    }
    results: dict[str, Any] = {**settings}
    text = made_up()
    for batch in args.batches:
        for mix in MIXES:
            if len(mix) > batch or (args.only and " and ".join(mix) != args.only):
                continue
            name = f"batch {batch}: {' and '.join(mix)}"
            results[name] = measured(text, mix, batch, settings)
            show({name: results[name]})
    return results


if __name__ == "__main__":
    options: dict[str, Any] = {
        "--forward": 1.8,  # milliseconds
        "--draws": 0.15,
        "--front": 0.0,  # microseconds of another thread of this process, for a token
        "--turns": 200,
        "--batches": {"type": int, "nargs": "*", "default": [1, 32, 128]},
        "--only": "",
        "--waves": 0,
    }
    run("mask_cost", measure, options)
