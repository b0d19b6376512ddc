"""A thread that performs transfers, one after the other, and reports their ends."""

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch
from attrs import define, field

from minfer.records.messages import Lost, Moved, TransferCommand

ReportEnd = Callable[[Moved | Lost], None]
Command = TypeVar("Command", bound=TransferCommand)
_log = logging.getLogger("minfer.executor")


@define(eq=False)
class TransferThread(Generic[Command]):
    """Performs transfers of one kind; nothing of one is written any more when `perform`
    returns, or raises.
    """

    name: str
    perform: Callable[[Command], None]
    quiet: tuple[type[Exception], ...] = ()  # errors that are logged already
    queue: "SimpleQueue[tuple[Command, ReportEnd] | None]" = field(factory=SimpleQueue)
    thread: threading.Thread = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (item := self.queue.get()) is not None:
            command, report = item
            try:
                with torch.inference_mode():
                    self.perform(command)
            except self.quiet as error:
                report(Lost(command.number, str(error)))
            except Exception as error:
                _log.warning("KV pages could not be copied: %s", error)
                report(Lost(command.number, repr(error)))
            else:
                report(Moved(command.number))

    def begin(self, command: Command, report: ReportEnd) -> None:
        """Begin a transfer; `report` is called at its end, in this thread."""
        self.queue.put((command, report))

    def close(self) -> None:
        """Perform what has begun, and end."""
        self.queue.put(None)
        self.thread.join()
