"""A GPU's shaper: logit changes on the device, by `kernels/shape.py`.

Opening a row that requests changes takes a few copies and launches, in order with the
steps before and after. Other rows cost nothing, unless they follow such a row.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from attrs import define, field
from numpy.typing import NDArray
from torch import Tensor

from minfer.effects.execution.device.backend import DrawnTokens
from minfer.effects.execution.device.device_rows import DeviceRows
from minfer.effects.execution.device.streams import is_gpu
from minfer.kernels import shape as kernels
from minfer.kernels.shape import (
    ENTRIES,
    IN_PROMPT,
    PENALIZED,
    RESTRICTED,
    ShapingState,
)
from minfer.records.plan import NewRow
from minfer.sampling.logits import Shaping, is_penalized, is_shaped

NEVER_ENDS: Final = 2**31 - 1  # a position that no token has


@define(eq=False)
class Entries:
    """A row's list of tokens with logit changes; see `kernels/shape.py`."""

    tokens: list[int] = field(factory=list)
    values: list[float] = field(factory=list)
    until: list[int] = field(factory=list)
    follows: list[int] = field(factory=list)
    matched: list[int] = field(factory=list)  # before the next draw

    @classmethod
    def of(
        cls, sampling: Shaping, prompt: int, output: Sequence[int], vocab: int
    ) -> "Entries":
        """Returns the list of a row with this output, after `prompt` prompt tokens."""
        entries = cls()
        for token, bias in sampling.logit_bias:
            if bias:
                entries._add(token, bias)
        for token in sorted(sampling.stop_ids) if sampling.min_tokens else ():
            if token < vocab:
                entries._add(token, -np.inf, until=prompt + sampling.min_tokens)
        for word in sampling.bad_words:
            for index, token in enumerate(word):
                is_last = index == len(word) - 1
                is_matched = (
                    index < len(output)
                    and tuple(output[-index - 1 :]) == word[: index + 1]
                )
                entries._add(
                    token,
                    -np.inf if is_last else 0.0,
                    follows=index > 0,
                    matched=is_matched,
                )
        return entries

    def _add(
        self,
        token: int,
        value: float,
        *,
        until: int = NEVER_ENDS,
        follows: bool = False,
        matched: bool = False,
    ) -> None:
        self.tokens.append(token)
        self.values.append(value)
        self.until.append(min(until, NEVER_ENDS))
        self.follows.append(int(follows))
        self.matched.append(int(matched))


@define(eq=False)
class CudaShaper:
    """A shaper; see `backend.Shaper`. The device can be the CPU in tests."""

    rows: DeviceRows
    device: torch.device
    state: ShapingState = field(init=False)
    active: set[int] = field(factory=set)  # rows that request changes

    def __attrs_post_init__(self) -> None:
        rows = self.rows
        self.state = ShapingState.make(rows.scratch + 1, rows.vocab, self.device)

    def open(self, row: int, opened: NewRow) -> None:
        """Send a row's logit changes and its tokens to the device."""
        sampling = opened.sampling
        if not is_shaped(sampling):
            if row in self.active:
                self.active.discard(row)
                self.state.header[row].zero_()
            return
        self.active.add(row)
        prompt, output = opened.known[: opened.prompt], opened.known[opened.prompt :]
        entries = Entries.of(sampling, opened.prompt, output, self.rows.vocab)
        self._write_entries(row, entries, len(opened.known))
        if sampling.allowed_token_ids is not None:
            self._write_allowed(row, sampling.allowed_token_ids)
        if is_penalized(sampling):
            self._write_seen(row, prompt, output)
        header = np.zeros(kernels.HEADER_WORDS, np.int32)
        header[ENTRIES] = len(entries.tokens)
        header[RESTRICTED] = sampling.allowed_token_ids is not None
        header[PENALIZED] = is_penalized(sampling)
        self.state.header[row].copy_(self._to_device(header))

    def shape(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """Returns the logits that tokens are sampled from."""
        return kernels.shape(logits, rows, positions, self.rows.penalties, self.state)

    def count(self, rows: Tensor, positions: Tensor, drawn: DrawnTokens) -> None:
        """Count sampled tokens."""
        kernels.count(rows, positions, drawn.tokens, drawn.broken, self.state)

    def _write_entries(self, row: int, entries: Entries, position: int) -> None:
        """Send the list; `position` is that of the next sampled token."""
        if not (count := len(entries.tokens)):
            return
        state = self.state
        values = np.array(entries.values, np.float32).view(np.int32)
        lines = (entries.tokens, values, entries.until, entries.follows, entries.matched)
        sent = self._to_device(np.array(lines, np.int32))
        targets = (
            state.tokens,
            state.values.view(torch.int32),
            state.until,
            state.follows,
        )
        for target, line in zip(targets, sent, strict=False):
            target[row, :count].copy_(line)
        state.matched[row, position % 2, :count].copy_(sent[-1])

    def _write_allowed(self, row: int, ids: Sequence[int]) -> None:
        line = self.state.allowed[row]
        bits = np.zeros(32 * len(line), bool)
        bits[list(ids)] = True
        line.copy_(self._to_device(np.packbits(bits, bitorder="little").view("<i4")))

    def _write_seen(self, row: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        line = self.state.seen[row]
        line.zero_()
        ids = self._to_device(np.array((*prompt, *output), np.int32)).long()
        line.index_fill_(0, ids[: len(prompt)], IN_PROMPT)
        if output:
            ones = torch.ones(len(output), dtype=torch.int32, device=self.device)
            line.index_add_(0, ids[len(prompt) :], ones)

    def _to_device(self, words: NDArray[Any]) -> Tensor:
        """Returns words on the device; does not wait for the copy."""
        # Torch caches pinned memory, and does not reuse it before copies from it are
        # done.
        pinned = is_gpu(self.device)
        staged = torch.empty(words.shape, dtype=torch.int32, pin_memory=pinned)
        np.copyto(staged.numpy(), words)
        return staged.to(self.device, non_blocking=True)
