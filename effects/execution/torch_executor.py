"""The torch executor: launches plans; on a GPU results arrive a step later.

A plan's changes of rows and blocks go to the model runner (`runner.py`), its forwards are
packed (`pack_plan.py`) and run one after the other, each with a slot of host memory for
its tokens (`read_back.py`). On a GPU all that is launched at once, and collecting a plan
waits for its own tokens only, so the next step runs while the host reads this one. The
CPU does the same when results are collected.

If a plan has rows with deferred sampling, its forward keeps their logits; they are
sampled when `sample` is called (`deferred_sampling.py`), and other rows do not wait for
that.
"""

import threading
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Final

import torch
from attrs import define, field, frozen

from minfer.effects.execution.contract import ExecutorError, UnsupportedPlanError
from minfer.effects.execution.cpu.cpu_backend import CpuBackend
from minfer.effects.execution.device.backend import Backend, Cache
from minfer.effects.execution.device.device_rows import Wants
from minfer.effects.execution.device.streams import give_back, is_gpu, on
from minfer.effects.execution.device.threads import is_for_one_thread, work_alone
from minfer.effects.execution.packing.catching_up import CatchUp
from minfer.effects.execution.packing.pack_plan import Draw, Packer
from minfer.effects.execution.packing.read_back import Ring, Slot, results
from minfer.effects.execution.packing.verified import check_speculation, flaw_of_drafts
from minfer.effects.execution.running.background import Background
from minfer.effects.execution.running.deferred_sampling import Bits, LatePacker
from minfer.effects.execution.running.draft_model import DraftOf
from minfer.effects.execution.running.runner import ModelRunner
from minfer.effects.execution.warming.progress import Report, ignore_progress
from minfer.effects.execution.warming.step_costs import step_costs
from minfer.effects.execution.warming.warm_up import SECONDS, WarmUp
from minfer.effects.models.model import Model
from minfer.effects.models.spec import ModelSpec
from minfer.effects.models.weights import Weights
from minfer.records.acceptance import Costs
from minfer.records.config import EngineConfig
from minfer.records.messages import Executed, Failed
from minfer.records.plan import MEAN, POOLINGS, Plan, SampleDeferred
from minfer.records.speculation import Speculation


@define(eq=False)
class Flight:
    """A launched plan: where its results will be, or why it could not be launched."""

    plan: Plan
    # one for each forward, and for deferred draws
    slots: list[Slot] = field(factory=list)
    error: str = ""
    kept: Draw | None = None  # rows with deferred sampling, once their logits are kept
    told: SampleDeferred | None = None  # of these; None: the host has not sent it yet
    gone: list[int] = field(factory=list)  # of these, whose rows had new owners by then


PLAIN: Final = Wants(filtered=False, scored=False)


@frozen
class Readiness:
    """What an executor does before it is ready, and where it reports progress."""

    report: Report = ignore_progress
    likely: Wants = PLAIN  # of requests with default sampling
    capturing: float = SECONDS  # seconds of captures, at most
    grammars: bool = False  # whether requests may have grammars
    fewer_drafts: bool = False  # whether the number of drafts will vary


def open_backend(
    spec: ModelSpec, config: EngineConfig, device: torch.device, *, kernels: bool
) -> Backend:
    """Returns the backend for a device; `kernels`: a GPU's backend, also on the CPU."""
    if not kernels and not is_gpu(device):
        return CpuBackend(device)
    # Imports Triton, which the CPU does not need.
    from minfer.effects.execution.cuda.cuda_backend import CudaBackend

    return CudaBackend.make(spec, config, device)


def unsupported(plan: Plan) -> str:
    """Returns what a plan asks for that cannot be executed yet, or nothing."""
    if plan.moves:
        return "blocks cannot be moved between tiers yet"
    if any(len(one.tables) != 1 for one in plan.opens) or any(
        grow.group for grow in plan.grows
    ):
        return "all layers have one block table"
    if any(one.adapter for one in plan.opens):
        return "adapters cannot be loaded yet"
    for one in plan.opens:
        if one.pooling and one.pooling not in POOLINGS:
            return f"prompts are pooled by {' or '.join(POOLINGS)}, not {one.pooling!r}"
        if one.pooling == MEAN and plan.starts[one.index]:
            return "a mean is over a whole prompt, and this row begins in the middle"
    return ""


class TorchExecutor:
    """Runs plans on the device that the weights are on; steps overlap with the host's
    work.
    """

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        weights: Weights | Model,
        device: torch.device | str,
        *,
        graphs: bool = True,
        checked: bool = False,
        kernels: bool = False,
        readiness: Readiness = Readiness(),
        draft: DraftOf | None = None,
    ) -> None:
        """Runs on `device`, which has the weights, also those of the draft model.

        `checked`: a decode step that waits for the device, or allocates memory, fails.
        `kernels`: on the CPU, do as a GPU does, with the kernels' references. Raises
        MemoryError or RuntimeError (torch.OutOfMemoryError) if the cache does not fit,
        and ConfigError for an impossible speculation.
        """
        check_speculation(config, modelled=draft is not None)
        self.device = torch.device(device)
        backend = open_backend(spec, config, self.device, kernels=kernels)
        self.routes = backend.described  # which kernel serves what, in words
        self.runner = ModelRunner(
            backend,
            spec,
            weights,
            config,
            graphs=graphs,
            checked=checked,
            draft=draft,
            keeps=readiness.grammars,
        )
        modelled = draft is not None
        self.packer = Packer(
            self.runner.rows,
            self.runner.padded,
            self.runner.drafts,
            remembers=modelled,
            parts_drafts=self.runner.parts_drafts,
        )
        self.late_packer = LatePacker(self.runner.rows, self.runner.padded)
        # A plan takes a slot for each of at most two forwards; or two for one forward
        # with deferred sampling.
        slots = (config.depth + 1) * 2 + 1
        # What a draft model's cache lacks of rows, if there is a draft model; it takes a
        # slot.
        self.catch_up: CatchUp | None = None
        if modelled:
            budget, size = config.max_num_batched_tokens, config.block_size
            self.catch_up = CatchUp(budget, size)
            slots += config.depth + 1
        self.ring = Ring(slots, self.runner.room, self.runner.lines, self.device)
        self.flights: deque[Flight] = deque()
        # Whether launched work runs at once; else, when its results are collected.
        self.at_once = is_gpu(self.device)
        self.in_one_thread = is_for_one_thread(spec, self.device)
        # Held while launching, and by background work.
        self.lock = threading.Lock()
        self.collecting = False
        self.background: Background | None = None
        if is_gpu(self.device):
            self._warm_up(spec, readiness)
        self.runner.wait()

    # --- the executor's contract --------------------------------------------------------

    def launch(self, plan: Plan) -> None:
        """Enqueue a plan. Errors are reported when it is collected."""
        flight = Flight(plan)
        self._note_work()
        with self.lock:
            self.flights.append(flight)
            if self.at_once and self._stands(flight):
                self._attempt(flight, self._launch)

    def mask_lines(self, step: int) -> Bits | None:
        """Returns pinned memory, from which masks are copied to the device; None if there
        is no memory: then the step fails.
        """
        try:
            return self.runner.sampler.masks.lend(step)
        except Exception as error:
            for flight in self.flights:
                if flight.plan.step == step:
                    flight.error = flight.error or _said(error)
            return None

    def sample(self, apart: SampleDeferred) -> None:
        """Sample the deferred rows of a launched plan."""
        flight = next((one for one in self.flights if one.plan.step == apart.step), None)
        if flight is None:
            return  # it failed, and was reported
        flight.told = apart
        if self.at_once and self._stands(flight):
            with self.lock:
                self._attempt(flight, self._sample)

    def collect(self) -> Executed | Failed:
        """Wait for the earliest plan's tokens; returns its results."""
        self.collecting = True
        try:
            return self._collect(self.flights.popleft())
        finally:
            self._note_work()
            self.collecting = False

    def _collect(self, flight: Flight) -> Executed | Failed:
        if not self.at_once:
            self._attempt(flight, self._launch)
            if flight.plan.deferred and flight.told is not None and not flight.error:
                self._attempt(flight, self._sample)
        if not flight.error:
            try:
                return self._results(flight)
            except Exception as error:
                flight.error = _said(error)
        self._give_up()
        return Failed(flight.plan.step, flight.error)

    def close(self) -> None:
        """Release the weights and the cache; no call may follow."""
        if self.background is not None:
            self.background.close()
        self.runner.wait()
        self.flights.clear()
        self.runner.close()
        del self.packer, self.late_packer

    def step_costs(self, how: Speculation) -> Costs:
        """Measure steps for an engine with this speculation. Before any plan."""
        if self.in_one_thread:
            work_alone()
        with (
            self.lock,
            torch.inference_mode(),
            on(self.runner.stream),
        ):
            return step_costs(self.runner, how)

    # --- what `minfer verify` runs the model by itself with -----------------------------

    @property
    def model(self) -> Model:
        """The function of a batch and a cache that runs the model."""
        return self.runner.model

    def make_cache(self, blocks: int, block_size: int, length: int) -> Cache:
        """Returns a cache that the model can run with, for positions below `length`."""
        runner = self.runner
        return runner.backend.make_cache(runner.spec, blocks, block_size, length)

    # --- before it is ready, and in quiet moments ---------------------------------------

    def _warm_up(self, spec: ModelSpec, readiness: Readiness) -> None:
        """Compile kernels and capture graphs before they are needed; the rest is done
        later.
        """
        warm_up = WarmUp(
            self.runner,
            spec,
            readiness.report,
            readiness.likely,
            seconds=readiness.capturing,
            fewer_drafts=readiness.fewer_drafts,
        )
        warm_up.before_ready()
        self.background = Background(
            warm_up.piece,
            quiet=lambda: not (self.flights or self.collecting),
            lock=self.lock,
        )
        self.background.start()

    def _note_work(self) -> None:
        if self.background is not None:
            self.background.asked()
            if self.runner.captures.launched:  # shapes not captured in advance
                self.background.start()

    # --- one plan -----------------------------------------------------------------------

    def _stands(self, flight: Flight) -> bool:
        """Returns whether neither a plan nor one before it has failed."""
        upto = self.flights.index(flight) + 1
        return not any(one.error for one in islice(self.flights, upto))

    def _attempt(self, flight: Flight, work: Callable[[Flight], None]) -> None:
        """Do a part of a plan's work; notes the error if it fails."""
        if self.in_one_thread:
            work_alone()
        shortcuts = self.runner.shortcuts
        shortcuts.begin()
        try:
            with torch.inference_mode(), on(self.runner.stream):
                work(flight)
        except Exception as error:
            shortcuts.blame(error)
            flight.error = _said(error)

    def _launch(self, flight: Flight) -> None:
        """Launch all of a plan but its deferred draws."""
        plan = flight.plan
        how, rows = self.runner.config.speculation, self.runner.rows
        modelled = self.runner.draft is not None
        room, why = self.packer.drafts, unsupported(plan)
        why = why or flaw_of_drafts(plan, how, rows, room, modelled=modelled)
        if why:
            raise UnsupportedPlanError(f"step {plan.step}: {why}")
        self.runner.take(plan)
        if self.catch_up is not None and (due := self.catch_up.begun(plan)):
            self.runner.catch_up(due, self.ring.next())
        for forward in self.packer.forwards(plan):
            slot = self.ring.next()
            flight.slots.append(slot)
            flight.kept = forward.kept
            self.runner.run(forward, slot)

    def _sample(self, flight: Flight) -> None:
        """Launch a plan's deferred draws."""
        if flight.kept is None or flight.told is None:
            return
        late = self.late_packer.pack(flight.plan, flight.kept, flight.told)
        flight.gone = late.gone
        if not late.draw.places:
            self.runner.sampler.masks.forget(late.step)
            return
        slot = self.ring.next()
        flight.slots.append(slot)
        self.runner.run_late(late, slot)

    def _results(self, flight: Flight) -> Executed:
        if flight.plan.deferred and flight.told is None:
            raise ExecutorError(
                f"the host has not allowed that the deferred rows of step "
                f"{flight.plan.step} are sampled"
            )
        vocab = self.runner.spec.vocab_size
        found = results(flight.plan, flight.slots, vocab, flight.gone)
        if self.catch_up is not None:
            self.catch_up.collected(flight.plan, found.yields)
        return found

    def _give_up(self) -> None:
        """Clear all after a failed plan; waits until no launched work uses the cache."""
        self.flights.clear()
        self.packer.forget()
        if self.catch_up is not None:
            self.catch_up.forget()
        self.runner.forget()
        self.runner.sampler.masks.forget()
        self.runner.wait()
        give_back(self.device)  # while a graph is captured, torch does not do so itself


def _said(error: Exception) -> str:
    """Returns an error's message; with its type if it is not an executor's own error."""
    return str(error) if isinstance(error, ExecutorError) else repr(error)
