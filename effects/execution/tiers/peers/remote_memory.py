"""An inbox that engines of other machines write to themselves, through NIXL: over RDMA,
where there is such a network, and whatever else UCX finds.

It is the optional package `nixl-cu13` (extra `nixl`), which needs no GPU. A sender has a
few buffers that NIXL knows, copies a block to one of them and has it written to a slot.
"""

import importlib
import logging
import queue
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from attrs import define, field

from minfer.effects.execution.tiers.peers.peer_messages import RemoteMemory, copy_bytes
from minfer.effects.net.addresses import DEAD_PEER_SECONDS
from minfer.effects.net.framing import PeerError

PACKAGE: Final = "nixl-cu13"
MODULE: Final = "nixl_cu13._api"
_MEMORY_TYPE: Final = "DRAM"
_NUM_BUFFERS: Final = 4  # blocks that are on their way at once
_POLL_SECONDS: Final = 2e-5  # between two checks of a transfer's state


class WriteError(PeerError):
    """NIXL is not there, or has failed."""


def is_installed() -> bool:
    """Returns whether the package can be imported."""
    try:
        importlib.import_module(MODULE)
    except ImportError:
        return False
    return True


def _agent() -> Any:
    """Returns a new NIXL agent. Raises WriteError."""
    try:
        api = importlib.import_module(MODULE)
        log = logging.getLogger("nixl")  # it would write to standard output
        log.handlers.clear()
        log.propagate = True
        log.setLevel(logging.WARNING)
        return api.nixl_agent(uuid.uuid4().hex, api.nixl_agent_config(backends=["UCX"]))
    except Exception as error:  # of any kind: its errors have no common one
        raise WriteError(f"NIXL cannot be used: {error!r}") from None


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def _register(agent: Any, memory: memoryview) -> Any:
    """Have NIXL know memory; returns its record of that."""
    regions = [(_address(memory), len(memory), 0, "")]
    return agent.register_memory(regions, mem_type=_MEMORY_TYPE)


@define(eq=False)
class RemoteInbox:
    """The receiver's side; `memory` is the inbox's."""

    memory: memoryview
    remote: RemoteMemory = field(init=False)  # what senders must know to write to it
    _agent: Any = field(init=False)
    _registration: Any = field(init=False)

    def __attrs_post_init__(self) -> None:
        """Raises WriteError."""
        self._agent = _agent()
        self._registration = _register(self._agent, self.memory)
        self.remote = RemoteMemory(
            self._agent.get_agent_metadata(), _address(self.memory)
        )

    def close(self) -> None:
        """Have nothing written any more."""
        self._agent.deregister_memory(self._registration)


@define(eq=False)
class RemoteWriter:
    """The sender's side of a connection; methods may be called from any thread."""

    remote: RemoteMemory
    slot_bytes: int
    _agent: Any = field(init=False)
    _name: str = field(init=False)
    _lock: threading.Lock = field(init=False, factory=threading.Lock)
    _buffers: "queue.SimpleQueue[tuple[memoryview, int]]" = field(
        init=False, factory=queue.SimpleQueue
    )

    def __attrs_post_init__(self) -> None:
        """Raises WriteError."""
        self._agent = _agent()
        try:
            for _ in range(_NUM_BUFFERS):
                buffer = memoryview(bytearray(self.slot_bytes))
                _register(self._agent, buffer)
                self._buffers.put((buffer, _address(buffer)))
            self._name = self._agent.add_remote_agent(self.remote.agent)
        except Exception as error:  # as above
            raise WriteError(f"NIXL cannot be used: {error!r}") from None

    def write(self, slot: int, contents: Sequence[memoryview]) -> None:
        """Write a block to a slot. Raises WriteError."""
        try:
            buffer, address = self._buffers.get(timeout=DEAD_PEER_SECONDS)
        except queue.Empty:
            raise WriteError("NIXL has failed: all blocks are on their way") from None
        length = 0
        for chunk in contents:
            copy_bytes(buffer[length : length + len(chunk)], chunk)
            length += len(chunk)
        target = self.remote.at + slot * self.slot_bytes
        try:
            self._write(address, target, length)
        except WriteError:
            raise
        except Exception as error:  # as above
            raise WriteError(f"NIXL has failed: {error!r}") from None
        # Not after an error: the buffer may still be read from then.
        self._buffers.put((buffer, address))

    def _write(self, source: int, target: int, length: int) -> None:
        agent, end = self._agent, time.monotonic() + DEAD_PEER_SECONDS
        with self._lock:
            local_regions = agent.get_xfer_descs(
                [(source, length, 0)], mem_type=_MEMORY_TYPE
            )
            remote_regions = agent.get_xfer_descs(
                [(target, length, 0)], mem_type=_MEMORY_TYPE
            )
            handle = agent.initialize_xfer(
                "WRITE", local_regions, remote_regions, self._name
            )
            state = agent.transfer(handle)
        while state == "PROC" and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
            with self._lock:
                state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise WriteError(f"a block could not be written by NIXL: {state}")
        with self._lock:
            agent.release_xfer_handle(handle)
