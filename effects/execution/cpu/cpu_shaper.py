"""The CPU's shaper: the logit changes of `minfer.sampling.logits`, in numpy, row by row.

A row keeps the distinct tokens of its prompt and output, and how often each is in the
output, so penalties take time by the number of these tokens, not by the vocabulary.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from attrs import define, field
from numpy.typing import NDArray
from torch import Tensor

from minfer.effects.execution.device.backend import DrawnTokens
from minfer.effects.execution.device.device_rows import DeviceRows
from minfer.records.plan import NewRow
from minfer.sampling.logits import Shaping, hidden_ids, is_penalized, is_shaped

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
_MIN_ROOM_TOKENS = 256  # tokens; doubled whenever it is full


@define(eq=False)
class TokenCounts:
    """The distinct tokens of a prompt and its output."""

    ids: Ints
    counts: Floats  # in the output
    indices: dict[int, int]  # index of each token in these

    @classmethod
    def of(cls, prompt: Sequence[int], output: Sequence[int]) -> "TokenCounts":
        """Count the tokens of a prompt and an output."""
        totals = Counter(dict.fromkeys(prompt, 0))
        totals.update(output)
        room = max(_MIN_ROOM_TOKENS, 2 * len(totals))
        ids, counts = np.zeros(room, np.int64), np.zeros(room, np.float32)
        ids[: len(totals)] = list(totals.keys())
        counts[: len(totals)] = list(totals.values())
        return cls(ids, counts, {token: place for place, token in enumerate(totals)})

    def add(self, token: int) -> None:
        """Count one more output token."""
        place = self.indices.setdefault(token, len(self.indices))
        if place == len(self.ids):
            self.ids = np.resize(self.ids, 2 * place)
            self.counts = np.concatenate([self.counts, np.zeros(place, np.float32)])
        self.ids[place] = token
        self.counts[place] += 1


@define(eq=False)
class RowShaping:
    """One row's logit changes, and the tokens that they depend on."""

    sampling: Shaping
    output: list[int]
    seen: TokenCounts | None  # None: no token is penalized
    never: Ints | None  # ids that are not allowed
    biased: Ints
    bias: Floats

    @classmethod
    def of(cls, opened: NewRow, vocab: int) -> "RowShaping":
        """Build from an opened row."""
        sampling = opened.sampling
        prompt, output = opened.known[: opened.prompt], opened.known[opened.prompt :]
        never = None
        if sampling.allowed_token_ids is not None:
            left_out = np.ones(vocab, bool)
            left_out[list(sampling.allowed_token_ids)] = False
            never = np.flatnonzero(left_out)
        return cls(
            sampling=sampling,
            output=list(output),
            seen=TokenCounts.of(prompt, output) if is_penalized(sampling) else None,
            never=never,
            biased=np.array([token for token, _ in sampling.logit_bias], np.int64),
            bias=np.array([bias for _, bias in sampling.logit_bias], np.float32),
        )

    def change(self, logits: Floats) -> None:
        """Change a row's logits [vocab] in place."""
        if self.never is not None:
            logits[self.never] = -np.inf
        for token in hidden_ids(self.sampling, self.output):
            if token < len(logits):
                logits[token] = -np.inf
        logits[self.biased] += self.bias
        if self.seen is not None:
            self._penalize(logits, self.seen)

    def _penalize(self, logits: Floats, seen: TokenCounts) -> None:
        sampling, count = self.sampling, len(seen.indices)
        ids, counts = seen.ids[:count], seen.counts[:count]
        x = logits[ids]
        factor = np.float32(sampling.repetition_penalty)
        x = np.where(x > 0, x / factor, x * factor)
        x -= np.float32(sampling.frequency_penalty) * counts
        x[counts > 0] -= np.float32(sampling.presence_penalty)
        logits[ids] = x


@define(eq=False)
class CpuShaper:
    """A shaper; see `backend.Shaper`."""

    rows: DeviceRows
    # by row, of those that request it
    shapes: dict[int, RowShaping] = field(factory=dict)

    def open(self, row: int, opened: NewRow) -> None:
        """Note a row's logit changes and its tokens."""
        self.shapes.pop(row, None)
        if is_shaped(opened.sampling):
            self.shapes[row] = RowShaping.of(opened, self.rows.vocab)

    def shape(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """Returns the logits that tokens are sampled from."""
        del positions  # a row's own tokens give its position
        shaped: Tensor = logits.to(torch.float32, copy=True)
        values: Floats = shaped.numpy()
        with np.errstate(over="ignore", invalid="ignore"):  # of broken rows
            for line, row in zip(values, rows.tolist(), strict=True):
                if row in self.shapes:
                    self.shapes[row].change(line)
        return shaped

    def count(self, rows: Tensor, positions: Tensor, drawn: DrawnTokens) -> None:
        """Count sampled tokens."""
        del positions
        for row, token in zip(rows.tolist(), drawn.tokens.tolist(), strict=True):
            if (shape := self.shapes.get(row)) is not None:
                shape.output.append(token)
                if shape.seen is not None:
                    shape.seen.add(token)
