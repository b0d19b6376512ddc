"""The torch executor: launches plans; on a GPU results arrive a step later.

On a GPU a plan is launched at once (`plan_launcher.py`), and collecting it waits for its
own tokens only, so the next step runs while the host reads this one. The CPU does the
same when results are collected. Plans after one that failed are not launched, until the
engine has collected them.
"""

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

import torch

from minfer.blocks.keys import Keys
from minfer.effects.execution.contract import ExecutorError, ReportLoad
from minfer.effects.execution.device.backend import Cache
from minfer.effects.execution.device.step_shape import StepShape
from minfer.effects.execution.device.streams import is_gpu, on, release_cached_memory
from minfer.effects.execution.device.threads import is_for_one_thread, use_one_thread
from minfer.effects.execution.open_backend import open_backend
from minfer.effects.execution.packing.verified import check_speculation
from minfer.effects.execution.ranks.items import (
    AddAdapter,
    Close,
    Collect,
    Discard,
    Item,
    Launch,
    LoadOnRank,
    RemoveAdapter,
    Sample,
    transfer_item,
)
from minfer.effects.execution.ranks.worker_group import RankError, WorkerGroup
from minfer.effects.execution.running.adapter_loader import (
    AdapterLoader,
    AdapterRoom,
)
from minfer.effects.execution.running.background import Background
from minfer.effects.execution.running.deferred_sampling import Bits, with_masks
from minfer.effects.execution.running.draft_model import LoadedDraft
from minfer.effects.execution.running.head_model import LoadedHead
from minfer.effects.execution.running.plan_launcher import LaunchedPlan, PlanLauncher
from minfer.effects.execution.running.runner import ModelRunner
from minfer.effects.execution.tiers.keyed_store import KeyedStore
from minfer.effects.execution.tiers.paged_tensors import paged_tensors_of
from minfer.effects.execution.tiers.tier_copiers import TierCopiers
from minfer.effects.execution.tiers.transfer_thread import ReportEnd
from minfer.effects.execution.warming.dummy_runner import DummyRunner
from minfer.effects.execution.warming.step_costs import step_costs, token_seconds
from minfer.effects.execution.warming.warm_up import Readiness, WarmUp
from minfer.effects.models.adapters.peft_config import AdapterError
from minfer.effects.models.architecture.model import Model
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.weights import Weights
from minfer.effects.models.layout.cache_layout import plain_layout
from minfer.effects.models.ranks import SINGLE_RANK, Communicator
from minfer.records.acceptance import Costs
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    AdapterFailed,
    Executed,
    Failed,
    LoadAdapter,
    Lost,
    TransferCommand,
)
from minfer.records.plan import Plan, SampleDeferred
from minfer.records.speculation import Speculation
from minfer.values.checks import ConfigError

_log = logging.getLogger("minfer.executor")


class TorchExecutor:
    """Runs plans on the device that has the weights; the host works meanwhile."""

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
        draft: LoadedDraft | LoadedHead | None = None,
        store: KeyedStore | None = None,
        ranks: Communicator = SINGLE_RANK,
        workers: WorkerGroup | None = None,
        adapters: AdapterRoom | None = None,
    ) -> None:
        """Runs on `device`, which has the weights, also those of the drafter;
        `store` has the blocks of the external store. `ranks` run the model together, of
        which `spec` and the weights are this one's part; rank 0 has the `workers` of the
        others, which do what it does. `adapters` are those that the slots of `config`
        have room for.

        `checked`: a decode step that waits for the device, or allocates memory, fails.
        `kernels`: on the CPU, do as a GPU does, with the kernels' references. Raises
        MemoryError or RuntimeError (torch.OutOfMemoryError) if the cache does not fit,
        and ConfigError for an impossible speculation or other groups than the model's.
        """
        check_speculation(config, has_drafter=draft is not None)
        self.device = torch.device(device)
        backend = open_backend(
            spec.with_head_layer(), config, self.device, kernels=kernels
        )
        loader = None
        if config.adapter_slots:
            if adapters is None:
                raise ConfigError("the model has slots of adapters, but no room for any")
            slots = config.adapter_slots
            loader = AdapterLoader(adapters, spec, slots, self.device)
        self.adapters = loader
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
            adapters=loader,
        )
        self.launcher = PlanLauncher(self.runner)
        self.dummy_runner = DummyRunner(
            self.runner, None if workers is None else workers.broadcast
        )
        self.ranks, self.workers = ranks, workers
        self.launched_plans: deque[LaunchedPlan] = deque()
        # Whether launched work runs at once; else, when its results are collected.
        self.runs_at_once = is_gpu(self.device)
        self.in_one_thread = is_for_one_thread(spec, self.device)
        # Held while launching, and by background work.
        self.lock = threading.Lock()
        self.collecting = False
        self.background: Background | None = None
        self.copiers: TierCopiers | None = None
        if is_gpu(self.device):
            self._warm_up(readiness)
        elif workers is not None:
            workers.await_ready()
        self.runner.wait()
        if config.host is not None or store is not None:
            make_tensors = partial(paged_tensors_of, self.runner.cache)
            self.copiers = TierCopiers(config, make_tensors, store)

    # --- the executor's contract --------------------------------------------------------

    def launch(self, plan: Plan) -> None:
        """Enqueue a plan. Errors are reported when it is collected."""
        launched = LaunchedPlan(plan)
        self._note_work()
        with self.lock:
            self._broadcast(Launch(plan))
            self.launched_plans.append(launched)
            if self.runs_at_once and self._can_run(launched):
                self._attempt(launched, self.launcher.launch)

    def mask_lines(self, step: int) -> Bits | None:
        """Returns pinned memory, from which masks are copied to the device; None if there
        is no memory: then the step fails.
        """
        try:
            return self.runner.sampler.masks.lend(step)
        except Exception as error:
            for launched in self.launched_plans:
                if launched.plan.step == step and not launched.error:
                    launched.fail(error)
            return None

    def sample(self, command: SampleDeferred) -> None:
        """Sample the deferred rows of a launched plan."""
        launched = next(
            (
                candidate
                for candidate in self.launched_plans
                if candidate.plan.step == command.step
            ),
            None,
        )
        if launched is None:
            return  # it failed, and was reported
        launched.command = command
        with self.lock:
            self._broadcast_masks(launched, command)
            if self.runs_at_once and self._can_run(launched):
                self._attempt(launched, self.launcher.sample)

    def move(self, command: TransferCommand, report: ReportEnd) -> None:
        """Begin to copy pages between the device and a tier."""
        if self.copiers is None:
            report(Lost(command.number, "there is no tier for KV pages"))
            return
        if self.workers is not None:
            report = self.workers.transfers.begin(command.number, report)
            with self.lock:
                self._broadcast(transfer_item(command))
        self.copiers.move(command, report)

    def load_adapter(self, command: LoadAdapter, report: ReportLoad) -> None:
        """Begin to copy an adapter to a slot of each rank; `report` is called at its end,
        from any thread.
        """
        if self.adapters is None:
            error = "this engine has no adapters"
            report(AdapterFailed(command.adapter, command.slot, error))
            return
        if self.workers is not None:
            number, report = self.workers.transfers.begin_load(report)
            self._broadcast(LoadOnRank(number, command.adapter, command.slot))
        self.adapters.load(command, report)

    def add_adapter(self, digest: bytes, folder: str) -> None:
        """Read an adapter into the host memory of each rank, unless it is there; waits
        for all. Raises AdapterError, CorruptFileError and RankError.
        """
        if self.adapters is None:
            raise AdapterError("this engine has no adapters")
        if self.workers is None:
            self.adapters.add(digest.hex(), folder)
            return
        number, ended = self.workers.transfers.begin_reading()
        self._broadcast(AddAdapter(number, digest.hex(), folder))
        self.adapters.add(digest.hex(), folder)
        self.workers.await_end(ended)

    def remove_adapter(self, digest: bytes) -> None:
        """Free the host memory of an adapter on each rank; what is in slots stays."""
        if self.adapters is not None:
            self._broadcast(RemoveAdapter(digest.hex()))
            self.adapters.remove(digest.hex())

    def collect(self) -> Executed | Failed:
        """Wait for the earliest plan's tokens; returns its results."""
        self.collecting = True
        try:
            self._broadcast(Collect())
            result = self._collect(self.launched_plans.popleft())
            if isinstance(result, Failed):
                self._broadcast(Discard())
            return result
        finally:
            self._note_work()
            self.collecting = False

    def _collect(self, launched: LaunchedPlan) -> Executed | Failed:
        if not self.runs_at_once:
            self._attempt(launched, self.launcher.launch)
            if launched.plan.deferred and launched.command and not launched.error:
                self._attempt(launched, self.launcher.sample)
        if not launched.error:
            try:
                # All that is sent at once has to be received.
                return self.launcher.results(launched, receives=self.runs_at_once)
            except Exception as error:
                self._must_be_alike(error)
                launched.fail(error)
        self.discard()
        return Failed(launched.plan.step, launched.error)

    def counts(self) -> dict[str, float]:
        """Returns counts of the unprepared work of steps; on the CPU, none."""
        return self.runner.unprepared.totals() if is_gpu(self.device) else {}

    def close(self) -> None:
        """Release the weights and the cache; no call may follow."""
        if self.background is not None:
            self.background.close()
        with contextlib.suppress(RankError):
            self._broadcast(Close())
        if self.copiers is not None:
            self.copiers.close()
            self.copiers = None  # it has tensors of the cache
        self.runner.wait()
        self.launched_plans.clear()
        self.runner.close()
        del self.launcher  # it has the runner's rows
        if self.workers is not None:
            self.workers.close()
            self.ranks.leave()
            self.workers.remove_folder()

    def step_costs(self, spec_config: Speculation) -> Costs:
        """Measure steps for an engine with this speculation. Before any plan."""
        if self.in_one_thread:
            use_one_thread()
        with self.between_steps():
            return step_costs(self.dummy_runner, spec_config)

    def tier_costs(self, config: EngineConfig) -> EngineConfig:
        """Returns the configuration with the measured costs of loads from its tiers, and
        of computing instead. Before any plan. Raises as `TierCopiers.with_costs`.
        """
        if self.copiers is None:
            return config
        with self.between_steps():
            token = token_seconds(self.dummy_runner)
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
                self.dummy_runner.capture(shape)
        except Exception as error:
            _log.warning("a graph could not be captured on this rank: %r", error)

    def _broadcast(self, item: Item) -> None:
        """Send an item to the other ranks, if this is rank 0 of several."""
        if self.workers is not None:
            self.workers.broadcast(item)

    def _broadcast_masks(self, launched: LaunchedPlan, command: SampleDeferred) -> None:
        """Have the other ranks sample with the same masks."""
        if self.workers is None:
            return
        if command.written:
            lines = self.runner.sampler.masks.lent(command.step)
            command = with_masks(command, launched.plan.deferred, lines)
        self._broadcast(Sample(command))

    def _must_be_alike(self, error: Exception) -> None:
        """Raise an error that other ranks need not have: they would go on alone."""
        if self.runner.has_other_ranks and not isinstance(error, ExecutorError):
            raise RankError(f"rank {self.ranks.rank_info.rank}: {error!r}") from error

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
        return self.runner.step.model

    def make_cache(self, blocks: int, block_size: int, length: int) -> Cache:
        """Returns a cache that the model can run with, for positions below `length`; a
        sequence's state takes `state_pages` of its blocks.
        """
        runner = self.runner
        return runner.backend.make_cache(runner.spec, blocks, block_size, length)

    def state_pages(self, block_size: int) -> int:
        """Returns the pages of a sequence's state; 0: it has none. Raises ConfigError if
        pages are too small for it.
        """
        return plain_layout(self.runner.spec, block_size).state_pages

    # --- before it is ready, and in quiet moments ---------------------------------------

    def _warm_up(self, readiness: Readiness) -> None:
        """Compile kernels and capture graphs before they are needed; the rest is done
        later.
        """
        warm_up = WarmUp(self.dummy_runner, readiness)
        warm_up.prepare()
        self.runner.unprepared.restart()
        if self.ranks.rank_info.rank > 0:
            return  # rank 0 decides what is captured
        if self.workers is not None:
            self.workers.await_ready()
        warm_up.before_ready()
        self.runner.unprepared.restart()
        self.background = Background(
            warm_up.capture_one,
            quiet=lambda: not (self.launched_plans or self.collecting),
            lock=self.lock,
        )
        self.background.start()

    def _note_work(self) -> None:
        if self.background is not None:
            self.background.note_work()
            if self.runner.captures.launched:  # shapes not captured in advance
                self.background.start()

    # --- failures -----------------------------------------------------------------------

    def _can_run(self, launched: LaunchedPlan) -> bool:
        """Returns whether neither a plan nor one before it has failed."""
        upto = self.launched_plans.index(launched) + 1
        return not any(earlier.error for earlier in islice(self.launched_plans, upto))

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
            launched.fail(error)

    def discard(self) -> None:
        """Clear all after a failed plan; waits until no launched work uses the cache."""
        if self.launched_plans:
            self.launcher.receive(self.launched_plans[-1].plan.step)
        self.launched_plans.clear()
        self.launcher.forget()
        self.runner.wait()
        # While a graph is captured, torch does not do so itself.
        release_cached_memory(self.device)
