"""The masks on a device: their copies, and the buffer that deferred draws read.

Masks are copied on a stream of their own, in parallel with the forward that still runs.
The buffer is fixed, as graphs read it: so a copy waits for the previous draws, and the
next draws wait for the copy.
"""

from collections import deque
from typing import Final

import torch
from attrs import frozen

from minfer.effects.execution.device.streams import host_words, new_event, new_stream, on
from minfer.effects.execution.running.deferred_sampling import (
    Bits,
    DeferredDraws,
    mask_words,
    write_masks,
)

HOST_BUFFERS: Final = 4  # the copies that can wait for the previous draws


@frozen(eq=False)
class MaskBuffer:
    """Masks on the host, in pinned memory."""

    lines: torch.Tensor  # [draws, words] int32
    words: Bits  # the same
    copied: torch.cuda.Event | None  # to the device; None on the CPU


class DeviceMasks:
    """The masks of the next deferred draws."""

    def __init__(self, draws: int, vocab: int, device: torch.device) -> None:
        """Masks for up to `draws` draws. Allocates memory at first use."""
        self._vocab = vocab
        self._device = device
        self._shape = draws, mask_words(vocab)
        self._host = deque[MaskBuffer]()
        self._lent: dict[int, MaskBuffer] = {}  # by step
        self._copies = new_stream(device)
        self._drawn = new_event(device)  # when the last draws had read the masks
        self._lines: torch.Tensor | None = None

    @property
    def lines(self) -> torch.Tensor:
        """[draws, words] int32: a bit for each token id, the lowest first."""
        # never while a graph is captured: a dummy step runs before
        if self._lines is None:
            device = self._device
            self._lines = torch.full(self._shape, -1, dtype=torch.int32, device=device)
            self.read()  # orders copies on the other stream after this
        return self._lines

    def lend(self, step: int) -> Bits:
        """Lend memory for the masks of a step, a line for each draw, until they are
        sent.
        """
        buffer = self._lent[step] = self._next()
        return buffer.words

    def lent(self, step: int) -> Bits:
        """Returns the memory that was lent for a step."""
        return self._lent[step].words

    def forget(self, step: int | None = None) -> None:
        """Take back what was lent for a step, or for all: it will not be sent."""
        if step is None:
            self._lent.clear()
        else:
            self._lent.pop(step, None)

    def send(self, draws: DeferredDraws, stream: torch.cuda.Stream | None = None) -> None:
        """Copy the masks of draws to the device, before all that is launched from now on;
        `stream` is the current one, if the caller has it. Raises MaskError.
        """
        lent = self._lent.pop(draws.step, None)
        buffer, device_lines = lent or self._next(), self.lines
        host_lines = buffer.lines
        if draws.lines is None:
            count = write_masks(draws, self._vocab, buffer.words)
        else:
            count = len(draws.lines)
            if lent is None:
                raise AssertionError(f"no masks of step {draws.step} were written here")
            if draws.lines != range(count):  # rows have new owners, or another order
                buffer.words[:count] = buffer.words[list(draws.lines)]
        if self._copies is None or self._drawn is None or buffer.copied is None:
            device_lines[:count] = host_lines[:count]
            return
        self._copies.wait_event(self._drawn)
        with on(self._copies):
            device_lines[:count].copy_(host_lines[:count], non_blocking=True)
        buffer.copied.record(self._copies)
        stream = stream or torch.cuda.current_stream(self._device)
        stream.wait_event(buffer.copied)

    def read(self, stream: torch.cuda.Stream | None = None) -> None:
        """Note that all reads of the masks were launched, on the current `stream`."""
        if self._drawn is not None:
            self._drawn.record(stream)

    def _next(self) -> MaskBuffer:
        """Returns the host buffer that was used least recently and is not lent, once its
        copy is done.
        """
        while len(self._host) < HOST_BUFFERS + len(self._lent):
            lines = host_words(self._shape, self._device)
            self._host.append(MaskBuffer(lines, lines.numpy(), new_event(self._device)))
        self._host.rotate(-1)
        while any(buffer is self._host[0] for buffer in self._lent.values()):
            self._host.rotate(-1)
        buffer = self._host[0]
        if buffer.copied is not None:
            buffer.copied.synchronize()
        return buffer
