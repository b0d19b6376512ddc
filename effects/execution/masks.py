"""The masks of a device: on their way there, and where the late draws read them.

They are copied on a stream of their own, beside the forward that still runs. Where they
lie is one place, as graphs read there: so a copy waits for the draws before, and the
draws that follow wait for it.
"""

from collections import deque
from typing import Final

import torch
from attrs import frozen

from minfer.effects.execution.late_draws import Bits, LateDraw, mask_words, write_masks
from minfer.effects.execution.streams import host_words, new_event, new_stream, on

TURNS: Final = 4  # host buffers: as many copies can wait for the draws before them


@frozen(eq=False)
class Buffer:
    """Masks on the host, in pinned memory."""

    lines: torch.Tensor  # [draws, words] int32
    words: Bits  # the same
    copied: torch.cuda.Event | None  # to the device; None on the CPU


class Masks:
    """Those of the draws that come next."""

    def __init__(self, draws: int, vocab: int, device: torch.device) -> None:
        """Masks for so many draws. Takes memory once it is needed."""
        self._vocab = vocab
        self._device = device
        self._shape = draws, mask_words(vocab)
        self._host = deque[Buffer]()
        self._lent: dict[int, Buffer] = {}  # by step
        self._copies = new_stream(device)
        self._drawn = new_event(device)  # when the last draws had read them
        self._lines: torch.Tensor | None = None

    @property
    def lines(self) -> torch.Tensor:
        """[draws, words] int32: a bit for each token id, the lowest first."""
        if self._lines is None:  # never while a graph is captured: that step ran before
            device = self._device
            self._lines = torch.full(self._shape, -1, dtype=torch.int32, device=device)
            self.read()  # else a copy beside this stream could come before that
        return self._lines

    def lend(self, step: int) -> Bits:
        """Memory for the masks of a step, a line for each draw, until they are sent."""
        buffer = self._lent[step] = self._next()
        return buffer.words

    def forget(self, step: int | None = None) -> None:
        """What was lent for a step, or for any, will not be sent."""
        if step is None:
            self._lent.clear()
        else:
            self._lent.pop(step, None)

    def send(self, late: LateDraw, stream: torch.cuda.Stream | None = None) -> None:
        """Have the masks of draws there before what is launched from now on; `stream` is
        the current one, for who knows it. Raises MaskError.
        """
        lent = self._lent.pop(late.step, None)
        buffer, there = lent or self._next(), self.lines
        here = buffer.lines
        if late.lines is None:
            count = write_masks(late, self._vocab, buffer.words)
        else:
            count = len(late.lines)
            if lent is None:
                raise AssertionError(f"no masks of step {late.step} were written here")
            if late.lines != range(count):  # rows have gone, or draw in another order
                buffer.words[:count] = buffer.words[list(late.lines)]
        if self._copies is None or self._drawn is None or buffer.copied is None:
            there[:count] = here[:count]
            return
        self._copies.wait_event(self._drawn)
        with on(self._copies):
            there[:count].copy_(here[:count], non_blocking=True)
        buffer.copied.record(self._copies)
        stream = stream or torch.cuda.current_stream(self._device)
        stream.wait_event(buffer.copied)

    def read(self, stream: torch.cuda.Stream | None = None) -> None:
        """What was launched so far, on the current `stream`, has read them."""
        if self._drawn is not None:
            self._drawn.record(stream)

    def _next(self) -> Buffer:
        """The host's buffer whose turn was longest ago, once its copy is done; none that
        is lent.
        """
        while len(self._host) < TURNS + len(self._lent):
            lines = host_words(self._shape, self._device)
            self._host.append(Buffer(lines, lines.numpy(), new_event(self._device)))
        self._host.rotate(-1)
        while any(one is self._host[0] for one in self._lent.values()):
            self._host.rotate(-1)
        buffer = self._host[0]
        if buffer.copied is not None:
            buffer.copied.synchronize()
        return buffer
