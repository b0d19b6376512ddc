"""Adapters of a rank: in host memory, and in the slots of the device.

Theory. Host memory has an adapter as a slot has it (models/adapters/slot_layout.py),
pinned for a GPU, so that a load is one copy. It runs on a stream of its own, in a thread
that waits for its end: no step reads the slot meanwhile (`minfer.records.adapters`), and
steps go on beside it. The smaller copy, of the ranks of matrices, follows it: a kernel
reads no numbers of a matrix whose rank is 0.
"""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from attrs import evolve, frozen

from minfer.effects.execution.contract import ReportLoad
from minfer.effects.execution.device.streams import CAPTURE_LOCK, is_gpu, new_stream, on
from minfer.effects.models.adapters.peft_config import AdapterError
from minfer.effects.models.adapters.peft_files import read_adapter
from minfer.effects.models.adapters.place_adapter import place_adapter
from minfer.effects.models.adapters.slot_layout import SlotLayout, SlotMemory, with_slots
from minfer.effects.models.architecture.model import Model
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.weights import Weights
from minfer.records.messages import AdapterFailed, AdapterLoaded, LoadAdapter
from minfer.values.checks import ConfigError

_log = logging.getLogger("minfer.executor")


@frozen
class AdapterRoom:
    """Which adapters an executor takes."""

    model: ModelSpec  # the sizes of the whole model
    max_rank: int


class AdapterLoader:
    """The adapters of one rank."""

    def __init__(
        self, room: AdapterRoom, spec: ModelSpec, slots: int, device: torch.device
    ) -> None:
        """Has `slots` on the device, for a rank, whose sizes `spec` has. Raises
        RuntimeError (torch.OutOfMemoryError) if they do not fit.
        """
        self.room, self.spec, self.device = room, spec, device
        self.layout = SlotLayout.of(spec, room.max_rank)
        self.memory = SlotMemory.empty(spec, self.layout, slots, device)
        self.host: dict[str, SlotMemory] = {}  # by digest
        self.stream = new_stream(device)
        self.thread = ThreadPoolExecutor(1, "minfer-adapter-loads")

    def with_slots(self, weights: Weights | Model) -> Weights:
        """Returns the model's weights with the slots. Raises ConfigError for a model that
        transformers runs.
        """
        if not isinstance(weights, Weights):
            raise ConfigError(
                "a model that runs as transformers' own cannot have adapters "
                "(enable_lora)"
            )
        return with_slots(self.spec, weights, self.memory)

    def add(self, digest: str, folder: str) -> None:
        """Read an adapter into host memory, unless it is there. Raises AdapterError, and
        CorruptFileError.
        """
        if digest in self.host:
            return
        with torch.inference_mode():
            adapter = read_adapter(Path(folder), self.room.model, self.room.max_rank)
            if adapter.digest.hex() != digest:
                raise AdapterError(
                    f"{folder}: holds another adapter than when it was registered; "
                    f"register it again"
                )
            placed = place_adapter(adapter, self.room.model, self.spec, self.layout)
            self.host[digest] = self._pinned(placed)

    def begin_adding(
        self, digest: str, folder: str, report: Callable[[str], None]
    ) -> None:
        """Begin to add an adapter; `report` gets the error at its end, or nothing, in
        another thread. Loads that begin later wait for it.
        """
        self.thread.submit(self._add, digest, folder, report)

    def _add(self, digest: str, folder: str, report: Callable[[str], None]) -> None:
        try:
            self.add(digest, folder)
        except Exception as error:
            report(str(error) or repr(error))
        else:
            report("")

    def _pinned(self, placed: SlotMemory) -> SlotMemory:
        """Returns an adapter in memory from which the device copies."""
        if not is_gpu(self.device):
            return placed
        with CAPTURE_LOCK:  # no graph can be captured while memory is pinned
            return evolve(
                placed,
                numbers=placed.numbers.pin_memory(),
                ranks=placed.ranks.pin_memory(),
            )

    def remove(self, digest: str) -> None:
        """Free the host memory of an adapter; what is in slots stays."""
        self.host.pop(digest, None)

    def load(self, command: LoadAdapter, report: ReportLoad) -> None:
        """Begin to copy an adapter to a slot; `report` is called at its end, in another
        thread.
        """
        self.thread.submit(self._load, command, report)

    def _load(self, command: LoadAdapter, report: ReportLoad) -> None:
        adapter, slot = command.adapter, command.slot
        if (placed := self.host.get(adapter)) is None:
            error = f"adapter {adapter[:12]} is not in host memory"
            report(AdapterFailed(adapter, slot, error))
            return
        try:
            self._copy(placed, slot)
        except Exception as error:
            _log.warning("an adapter could not be loaded: %s", error)
            report(AdapterFailed(adapter, slot, str(error)))
        else:
            report(AdapterLoaded(adapter, slot))

    def _copy(self, placed: SlotMemory, slot: int) -> None:
        """Copy an adapter to a slot; it is there when this returns."""
        with torch.inference_mode(), on(self.stream):
            self.memory.numbers[slot].copy_(placed.numbers[0], non_blocking=True)
            self.memory.ranks[slot].copy_(placed.ranks[0], non_blocking=True)
        if self.stream is not None:
            self.stream.synchronize()

    def close(self) -> None:
        """End the loads that have begun, and release all memory."""
        self.thread.shutdown()
        self.host.clear()
        del self.memory
