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

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final

import torch
from attrs import define, field, frozen

from minfer.blocks.keys import Keys
from minfer.effects.execution.contract import ExecutorError, UnsupportedPlanError
from minfer.effects.execution.cpu.cpu_backend import CpuBackend, describe_products
from minfer.effects.execution.device.backend import Backend, Cache
from minfer.effects.execution.device.device_rows import Wants
from minfer.effects.execution.device.step_shape import StepShape
from minfer.effects.execution.device.streams import is_gpu, on, release_cached_memory
from minfer.effects.execution.device.threads import is_for_one_thread, use_one_thread
from minfer.effects.execution.packing.catching_up import CatchUp
from minfer.effects.execution.packing.pack_plan import Draw, Packer
from minfer.effects.execution.packing.read_back import HostSlot, SlotRing, results
from minfer.effects.execution.packing.verified import check_speculation, flaw_of_drafts
from minfer.effects.execution.ranks.crew import Crew, RankError
from minfer.effects.execution.ranks.items import (
    Close,
    Collect,
    Discard,
    Item,
    Launch,
    Sample,
    Transfer,
)
from minfer.effects.execution.running.background import Background
from minfer.effects.execution.running.deferred_sampling import Bits, DeferredPacker
from minfer.effects.execution.running.draft_model import LoadedDraft
from minfer.effects.execution.running.runner import ModelRunner
from minfer.effects.execution.tiers.keyed_store import KeyedStore
from minfer.effects.execution.tiers.page_parts import HEADS, Part
from minfer.effects.execution.tiers.tier_copiers import TierCopiers
from minfer.effects.execution.tiers.transfer_thread import ReportEnd
from minfer.effects.execution.warming.start_progress import Report, ignore_progress
from minfer.effects.execution.warming.step_costs import step_costs, token_seconds
from minfer.effects.execution.warming.warm_up import SECONDS, WarmUp
from minfer.effects.models.model import Model
from minfer.effects.models.ranks import ALONE, Ranks
from minfer.effects.models.spec import ModelSpec
from minfer.effects.models.weights import Weights
from minfer.records.acceptance import Costs
from minfer.records.config import EngineConfig
from minfer.records.messages import Executed, Failed, Lost, TransferCommand
from minfer.records.plan import MEAN, POOLINGS, Mask, Plan, SampleDeferred
from minfer.records.speculation import Speculation


@define(eq=False)
class LaunchedPlan:
    """A launched plan: where its results will be, or why it could not be launched."""

    plan: Plan
    # one for each forward, and for deferred draws
    slots: list[HostSlot] = field(factory=list)
    error: str = ""
    # rows with deferred sampling, once their logits are kept
    deferred: Draw | None = None
    command: SampleDeferred | None = None  # of these; None: the host has not sent it yet
    # of these, whose rows had new owners by then
    reassigned: list[int] = field(factory=list)


_log = logging.getLogger("minfer.executor")
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
        return CpuBackend(device, described=describe_products(spec))
    # Imports Triton, which the CPU does not need.
    from minfer.effects.execution.cuda.cuda_backend import CudaBackend

    return CudaBackend.make(spec, config, device)


def unsupported(plan: Plan, groups: int = 1) -> str:
    """Returns what a plan asks for that cannot be executed, or nothing, for a model with
    so many cache groups.
    """
    tables = [len(one.tables) == groups for one in plan.opens]
    if not all(tables) or any(grow.group >= groups for grow in plan.grows):
        return f"rows of this model have {groups} block table(s), a group of layers each"
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
        draft: LoadedDraft | None = None,
        store: KeyedStore | None = None,
        ranks: Ranks = ALONE,
        crew: Crew | None = None,
    ) -> None:
        """Runs on `device`, which has the weights, also those of the draft model;
        `store` has the blocks of the keyed tier. `ranks` run the model together, of which
        `spec` and the weights are this one's part; rank 0 has the `crew` of the others,
        which do what it does.

        `checked`: a decode step that waits for the device, or allocates memory, fails.
        `kernels`: on the CPU, do as a GPU does, with the kernels' references. Raises
        MemoryError or RuntimeError (torch.OutOfMemoryError) if the cache does not fit,
        and ConfigError for an impossible speculation or other groups than the model's.
        """
        check_speculation(config, modelled=draft is not None)
        self.device = torch.device(device)
        self.groups = len(config.groups)
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
            keeps_logits=readiness.grammars,
            ranks=ranks,
            tell=None if crew is None else crew.tell,
        )
        self.ranks = ranks
        self.crew = crew
        modelled = draft is not None
        self.packer = Packer(
            self.runner.rows,
            self.runner.padded,
            self.runner.drafts,
            remembers=modelled,
            parts_drafts=self.runner.parts_drafts,
        )
        self.deferred_packer = DeferredPacker(self.runner.rows, self.runner.padded)
        # A plan takes a slot for each of at most two forwards; or two for one forward
        # with deferred sampling. With stages there is a plan for each micro-batch.
        plans = (config.depth + 1) * ranks.place.parallel.pipeline
        slots = plans * 2 + 1
        # What a draft model's cache lacks of rows, if there is a draft model; it takes a
        # slot.
        self.catch_up: CatchUp | None = None
        if modelled:
            budget, size = config.max_num_batched_tokens, config.block_size
            self.catch_up = CatchUp(budget, size)
            slots += config.depth + 1
        self.ring = SlotRing(slots, self.runner.room, self.runner.lines, self.device)
        self.launched_plans: deque[LaunchedPlan] = deque()
        # Whether launched work runs at once; else, when its results are collected.
        self.at_once = is_gpu(self.device)
        self.in_one_thread = is_for_one_thread(spec, self.device)
        # Held while launching, and by background work.
        self.lock = threading.Lock()
        self.collecting = False
        self.background: Background | None = None
        self.copiers: TierCopiers | None = None
        if is_gpu(self.device):
            self._warm_up(spec, readiness)
        elif crew is not None:
            crew.await_ready()
        self.runner.wait()
        if config.host is not None or store is not None:
            self.copiers = TierCopiers(config, self._parts, store)

    # --- the executor's contract --------------------------------------------------------

    def launch(self, plan: Plan) -> None:
        """Enqueue a plan. Errors are reported when it is collected."""
        launched = LaunchedPlan(plan)
        self._note_work()
        with self.lock:
            self._tell(Launch(plan))
            self.launched_plans.append(launched)
            if self.at_once and self._can_run(launched):
                self._attempt(launched, self._launch)

    def mask_lines(self, step: int) -> Bits | None:
        """Returns pinned memory, from which masks are copied to the device; None if there
        is no memory: then the step fails.
        """
        try:
            return self.runner.sampler.masks.lend(step)
        except Exception as error:
            for launched in self.launched_plans:
                if launched.plan.step == step:
                    launched.error = launched.error or _describe(error)
            return None

    def sample(self, command: SampleDeferred) -> None:
        """Sample the deferred rows of a launched plan."""
        launched = next(
            (one for one in self.launched_plans if one.plan.step == command.step), None
        )
        if launched is None:
            return  # it failed, and was reported
        launched.command = command
        with self.lock:
            self._tell_masks(launched, command)
            if self.at_once and self._can_run(launched):
                self._attempt(launched, self._sample)

    def move(self, command: TransferCommand, report: ReportEnd) -> None:
        """Begin to copy pages between the device and a tier."""
        if self.copiers is None:
            report(Lost(command.number, "there is no tier for KV pages"))
            return
        if self.crew is not None:
            report = self.crew.transfers.begin(command.number, report)
            with self.lock:
                self._tell(Transfer(command))
        self.copiers.move(command, report)

    def collect(self) -> Executed | Failed:
        """Wait for the earliest plan's tokens; returns its results."""
        self.collecting = True
        try:
            self._tell(Collect())
            found = self._collect(self.launched_plans.popleft())
            if isinstance(found, Failed):
                self._tell(Discard())
            return found
        finally:
            self._note_work()
            self.collecting = False

    def _collect(self, launched: LaunchedPlan) -> Executed | Failed:
        if not self.at_once:
            self._attempt(launched, self._launch)
            if launched.plan.deferred and launched.command and not launched.error:
                self._attempt(launched, self._sample)
        if not launched.error:
            try:
                return self._results(launched)
            except Exception as error:
                self._must_be_alike(error)
                launched.error = _describe(error)
        self.discard()
        return Failed(launched.plan.step, launched.error)

    def close(self) -> None:
        """Release the weights and the cache; no call may follow."""
        if self.background is not None:
            self.background.close()
        with contextlib.suppress(RankError):
            self._tell(Close())
        if self.copiers is not None:
            self.copiers.close()
            self.copiers = None  # it has tensors of the cache
        self.runner.wait()
        self.launched_plans.clear()
        self.runner.close()
        del self.packer, self.deferred_packer
        if self.crew is not None:
            self.crew.close()
            self.ranks.leave()

    def step_costs(self, how: Speculation) -> Costs:
        """Measure steps for an engine with this speculation. Before any plan."""
        if self.in_one_thread:
            use_one_thread()
        with self.between_steps():
            return step_costs(self.runner, how)

    def _parts(self, pages: int, slices: int) -> list[Part]:
        """Returns the tensors of the cache, with so many pages in host memory; in equal
        slices of key heads, one after the other.
        """
        cache = self.runner.cache
        tensors = [cache.data, *([] if cache.scales is None else [cache.scales])]
        if slices > 1:  # never of latents
            split = [tensor.chunk(slices, HEADS) for tensor in tensors]
            tensors = [one for each in zip(*split, strict=True) for one in each]
        return [Part.of(tensor, cache.page_dim, pages) for tensor in tensors]

    def tier_costs(self, config: EngineConfig) -> EngineConfig:
        """Returns the configuration with the measured costs of loads from its tiers, and
        of computing instead. Before any plan. Raises as `TierCopiers.with_costs`.
        """
        if self.copiers is None:
            return config
        with self.between_steps():
            token = token_seconds(self.runner)
        return self.copiers.with_costs(config, token)

    # --- several ranks ------------------------------------------------------------------

    def want(self, keys: Keys, engine: str) -> None:
        """Have this rank's part of a prompt's blocks sent to another engine."""
        if self.copiers is not None and self.copiers.keyed is not None:
            self.copiers.keyed.store.want(keys, engine)

    def capture(self, shape: StepShape) -> None:
        """Capture a shape's graph because rank 0 does; steps run without it if that
        fails.
        """
        try:
            with self.between_steps():
                self.runner.capture(shape)
        except Exception as error:
            _log.warning("a graph could not be captured on this rank: %r", error)

    def _tell(self, item: Item) -> None:
        """Have the other ranks do the same, if this is rank 0 of several."""
        if self.crew is not None:
            self.crew.tell(item)

    def _tell_masks(self, launched: LaunchedPlan, command: SampleDeferred) -> None:
        """Have the other ranks sample with the same masks."""
        if self.crew is None:
            return
        if command.written:
            lines = self.runner.sampler.masks.lent(command.step)
            command = SampleDeferred(
                command.step,
                tuple(
                    Mask(index, line.tobytes())
                    for index, line in zip(launched.plan.deferred, lines, strict=False)
                ),
            )
        self._tell(Sample(command))

    def _must_be_alike(self, error: Exception) -> None:
        """Raise an error that other ranks need not have: they would go on alone."""
        several = self.ranks.place.parallel.ranks > 1
        if several and not isinstance(error, ExecutorError):
            raise RankError(f"rank {self.ranks.place.rank}: {error!r}") from error

    # --- what `minfer verify` and `compare` run the model by itself with ----------------

    @contextlib.contextmanager
    def between_steps(self) -> Iterator[None]:
        """Run work of the caller on the executor's stream, while no plan is in flight and
        nothing is captured.
        """
        with self.lock, torch.inference_mode(), on(self.runner.stream):
            yield

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
        warm_up.prepare()
        if self.ranks.place.rank > 0:
            return  # rank 0 decides what is captured
        if self.crew is not None:
            self.crew.await_ready()
        warm_up.before_ready()
        self.background = Background(
            warm_up.piece,
            quiet=lambda: not (self.launched_plans or self.collecting),
            lock=self.lock,
        )
        self.background.start()

    def _note_work(self) -> None:
        if self.background is not None:
            self.background.note_work()
            if self.runner.captures.launched:  # shapes not captured in advance
                self.background.start()

    # --- one plan -----------------------------------------------------------------------

    def _can_run(self, launched: LaunchedPlan) -> bool:
        """Returns whether neither a plan nor one before it has failed."""
        upto = self.launched_plans.index(launched) + 1
        return not any(one.error for one in islice(self.launched_plans, upto))

    def _attempt(
        self, launched: LaunchedPlan, work: Callable[[LaunchedPlan], None]
    ) -> None:
        """Do a part of a plan's work; notes the error if it fails."""
        if self.in_one_thread:
            use_one_thread()
        shortcuts = self.runner.shortcuts
        shortcuts.begin()
        try:
            with torch.inference_mode(), on(self.runner.stream):
                work(launched)
        except Exception as error:
            self._must_be_alike(error)
            shortcuts.blame(error)
            launched.error = _describe(error)

    def _launch(self, launched: LaunchedPlan) -> None:
        """Launch all of a plan but its deferred draws."""
        plan = launched.plan
        how, rows = self.runner.config.speculation, self.runner.rows
        modelled = self.runner.draft is not None
        room, why = self.packer.drafts, unsupported(plan, self.groups)
        why = why or flaw_of_drafts(plan, how, rows, room, modelled=modelled)
        if why:
            raise UnsupportedPlanError(f"step {plan.step}: {why}")
        sampler, stages = self.runner.sampler, self.ranks.place.parallel.pipeline
        sampler.receive(plan.step - stages)  # of the same micro-batch
        self.runner.take(plan)
        if self.catch_up is not None and (due := self.catch_up.start(plan)):
            self.runner.catch_up(due, self.ring.next())
        for forward in self.packer.forwards(plan):
            slot = self.ring.next()
            launched.slots.append(slot)
            launched.deferred = forward.deferred
            self.runner.run(forward, slot)
            sampler.finish(plan.step, forward.shape.lines)

    def _sample(self, launched: LaunchedPlan) -> None:
        """Launch a plan's deferred draws."""
        if launched.deferred is None or launched.command is None:
            return
        draws = self.deferred_packer.pack(
            launched.plan, launched.deferred, launched.command
        )
        launched.reassigned = draws.reassigned
        if not draws.draw.places:
            self.runner.sampler.masks.forget(draws.step)
            return
        slot = self.ring.next()
        launched.slots.append(slot)
        self.runner.run_deferred(draws, slot)
        self.runner.sampler.finish(launched.plan.step, draws.shape.lines)

    def _results(self, launched: LaunchedPlan) -> Executed:
        if launched.plan.deferred and launched.command is None:
            raise ExecutorError(
                f"the host has not allowed that the deferred rows of step "
                f"{launched.plan.step} are sampled"
            )
        if self.at_once:  # all that is sent has to be received
            self._receive(launched.plan.step)
        vocab = self.runner.spec.vocab_size
        found = results(launched.plan, launched.slots, vocab, launched.reassigned)
        if self.catch_up is not None:
            self.catch_up.note_results(launched.plan, found.yields)
        return found

    def _receive(self, step: int) -> None:
        """Take the tokens of a step, in order with the steps before and after it."""
        with torch.inference_mode(), on(self.runner.stream):
            self.runner.sampler.receive(step)

    def discard(self) -> None:
        """Clear all after a failed plan; waits until no launched work uses the cache."""
        if self.launched_plans:
            self._receive(self.launched_plans[-1].plan.step)
        self.launched_plans.clear()
        self.packer.forget()
        if self.catch_up is not None:
            self.catch_up.forget()
        self.runner.forget()
        self.runner.sampler.masks.forget()
        self.runner.wait()
        # While a graph is captured, torch does not do so itself.
        release_cached_memory(self.device)


def _describe(error: Exception) -> str:
    """Returns an error's message; with its type if it is not an executor's own error."""
    return str(error) if isinstance(error, ExecutorError) else repr(error)
