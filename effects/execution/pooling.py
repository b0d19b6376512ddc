"""Prompts as vectors: hidden states after the final norm, pooled on the device.

    a plan's chunks of pooled rows ---> Wanted: which tokens' states
    the model ---> states ---> Pooler: of the last input, or summed up from chunk to chunk
    a prompt's end ---> its vector, float32, to the host beside the step's tokens

The mean of a row is over all that it computed since it was opened, so its first chunk is
the prompt's beginning: the engine sees to that, and begins such a row anew after a step
that failed. Steps with pooled rows are launched one by one, never as a graph: how many
states they need differs from step to step, and there is no token to wait for.
"""

import numpy as np
import torch
from attrs import define, frozen
from numpy.typing import NDArray
from torch import Tensor

from minfer.effects.execution.device_rows import DeviceRows
from minfer.effects.execution.executor import LogitsError, names_of
from minfer.effects.execution.streams import is_gpu
from minfer.effects.models.batch import Tap
from minfer.plan import MEAN, Open, Plan, Pooled


@frozen(eq=False)
class Part:
    """One chunk of a pooled row: which of the states are its, and what to do."""

    place: int  # in the plan's columns
    row: int  # device row
    owner: Open
    first: int  # of its states
    count: int
    begins: bool  # the prompt begins with this chunk
    ends: bool  # and ends with it


@frozen(eq=False)
class Wanted:
    """The states that a step's pooled rows need."""

    tokens: NDArray[np.int32]  # among the packed ones
    parts: tuple[Part, ...]

    @classmethod
    def of(
        cls, plan: Plan, rows: DeviceRows, counts: list[int], decode_rows: int
    ) -> "Wanted | None":
        """What the chunks of a plan need, of so many inputs each, packed behind so many
        decode rows; None if no row is pooled.
        """
        tokens: list[NDArray[np.int32]] = []
        parts = list[Part]()
        total, end = 0, decode_rows
        for fill, count in zip(plan.fills, counts, strict=True):
            end += count
            row, start = plan.rows[fill.index], plan.starts[fill.index]
            owner = rows.owners[row]
            if owner is None or not owner.pooling:
                continue
            ends = start + count == owner.prompt
            few = count if owner.pooling == MEAN else int(ends)
            if few:
                tokens.append(np.arange(end - few, end, dtype=np.int32))
                begins = start == 0
                parts.append(Part(fill.index, row, owner, total, few, begins, ends))
                total += few
        return cls(np.concatenate(tokens), tuple(parts)) if parts else None


@frozen(eq=False)
class Vectors:
    """What comes back of a step: the vectors of prompts that have ended."""

    parts: tuple[Part, ...]  # theirs
    values: Tensor  # on the host, [parts, hidden] float32, once the step is done

    def read(self, rows: int) -> Pooled:
        """As results have them: one entry for each row. Raises LogitsError."""
        found = self.values.numpy()
        finite = np.isfinite(found).all(1)
        if not finite.all():
            each = zip(self.parts, finite, strict=True)
            bad = names_of(part.owner for part, good in each if not good)
            raise LogitsError(f"the model's states are not finite for request {bad}")
        out = [b""] * rows
        for part, line in zip(self.parts, found, strict=True):
            out[part.place] = line.astype("<f4").tobytes()
        return tuple(out)


@define(eq=False)
class Pooler:
    """What the device keeps of prompts that are pooled and have not ended."""

    rows: int
    hidden: int  # elements of a state
    dtype: torch.dtype  # of states
    device: torch.device
    sums: Tensor | None = None  # [rows, hidden] float32, once there is a mean

    def tap(self, wanted: Wanted) -> Tap:
        """Where the model is to put the states of a step."""
        tokens = torch.from_numpy(wanted.tokens)
        if is_gpu(self.device):
            tokens = tokens.pin_memory().to(self.device, non_blocking=True)
        states = torch.empty(
            len(wanted.tokens), self.hidden, dtype=self.dtype, device=self.device
        )
        return Tap(tokens, states)

    def pool(self, wanted: Wanted, states: Tensor) -> Vectors | None:
        """Add a step's `states` to their rows; on its way to the host, what has ended."""
        made = list[Tensor]()
        ended = list[Part]()
        for part in wanted.parts:
            own = states[part.first : part.first + part.count]
            vector = self._summed(part, own) if part.owner.pooling == MEAN else own[0]
            if part.ends:
                made.append(vector.float())
                ended.append(part)
        if not ended:
            return None
        found = torch.stack(made)
        host = torch.empty(found.shape, dtype=found.dtype, pin_memory=is_gpu(self.device))
        host.copy_(found, non_blocking=True)
        return Vectors(tuple(ended), host)

    def _summed(self, part: Part, own: Tensor) -> Tensor:
        """The mean of a row's states so far."""
        total = own.sum(0, dtype=torch.float32)
        if part.begins and part.ends:
            return total / part.owner.prompt
        if self.sums is None:
            self.sums = total.new_zeros(self.rows, self.hidden)
        kept = self.sums[part.row]
        if not part.begins:
            total = kept + total
        kept.copy_(total)
        return total / part.owner.prompt
