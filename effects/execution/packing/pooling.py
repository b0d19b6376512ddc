"""Prompts as vectors: hidden states after the final norm, pooled on the device.

    a plan's chunks of pooled rows ---> Wanted: which tokens' states
    the model ---> states ---> Pooler: of the last input, or summed up from chunk to chunk
    a prompt's end ---> its vector, float32, to the host beside the step's tokens

A row's mean is over all tokens computed since it was opened, so its first chunk must be
the prompt's beginning: the engine ensures that, and restarts such a row after a failed
step. Steps with pooled rows are launched without a graph: the number of states differs
from step to step, and no token waits for them.
"""

import numpy as np
import torch
from attrs import define, frozen
from numpy.typing import NDArray
from torch import Tensor

from minfer.effects.execution.contract import LogitsError, names_of
from minfer.effects.execution.device.device_rows import DeviceRows
from minfer.effects.execution.device.streams import is_gpu
from minfer.effects.models.architecture.batch import TappedTokens
from minfer.records.plan import NewRow, Plan, Pooled
from minfer.records.request import MEAN


@frozen(eq=False)
class PooledChunk:
    """One chunk of a pooled row: its states, and what to do with them."""

    entry: int  # of the plan
    row: int  # device row
    owner: NewRow
    first: int  # of its states
    count: int
    begins: bool  # the prompt begins with this chunk
    ends: bool  # and ends with it


@frozen(eq=False)
class PooledStates:
    """The states that a step's pooled rows need."""

    tokens: NDArray[np.int32]  # among the packed ones
    chunks: tuple[PooledChunk, ...]

    @classmethod
    def of(
        cls, plan: Plan, rows: DeviceRows, counts: list[int], decode_rows: int
    ) -> "PooledStates | None":
        """Returns the states that a plan's chunks need, which have `counts` tokens and
        are packed behind `decode_rows` rows; None if no row is pooled.
        """
        tokens: list[NDArray[np.int32]] = []
        chunks = list[PooledChunk]()
        total, end = 0, decode_rows
        for fill, count in zip(plan.fills, counts, strict=True):
            end += count
            row, start = plan.rows[fill.index], plan.starts[fill.index]
            owner = rows.owners[row]
            if owner is None or not owner.pooling:
                continue
            ends = start + count == owner.prompt
            count_needed = count if owner.pooling == MEAN else int(ends)
            if count_needed:
                tokens.append(np.arange(end - count_needed, end, dtype=np.int32))
                begins = start == 0
                chunks.append(
                    PooledChunk(fill.index, row, owner, total, count_needed, begins, ends)
                )
                total += count_needed
        return cls(np.concatenate(tokens), tuple(chunks)) if chunks else None


@frozen(eq=False)
class Vectors:
    """A step's results: the vectors of prompts that have ended."""

    chunks: tuple[PooledChunk, ...]  # theirs
    values: Tensor  # on the host, [parts, hidden] float32, once the step is done

    def read(self, rows: int) -> Pooled:
        """Returns one entry for each row, as results have them. Raises LogitsError."""
        vectors = self.values.numpy()
        finite = np.isfinite(vectors).all(1)
        if not finite.all():
            checked = zip(self.chunks, finite, strict=True)
            bad = names_of(chunk.owner for chunk, is_finite in checked if not is_finite)
            raise LogitsError(f"the model's states are not finite for request {bad}")
        out = [b""] * rows
        for chunk, line in zip(self.chunks, vectors, strict=True):
            out[chunk.entry] = line.astype("<f4").tobytes()
        return tuple(out)


@define(eq=False)
class Pooler:
    """The device's state of pooled prompts that have not ended."""

    rows: int
    hidden: int  # elements of a state
    dtype: torch.dtype  # of states
    device: torch.device
    sums: Tensor | None = None  # [rows, hidden] float32, once a mean is requested

    def tap(self, pooled_states: PooledStates) -> TappedTokens:
        """Returns the buffer for a step's states."""
        tokens = torch.from_numpy(pooled_states.tokens)
        if is_gpu(self.device):
            tokens = tokens.pin_memory().to(self.device, non_blocking=True)
        # Stages before the last write nothing there, and what is read has to be finite.
        states = torch.zeros(
            len(pooled_states.tokens), self.hidden, dtype=self.dtype, device=self.device
        )
        return TappedTokens(tokens, states)

    def pool(self, pooled_states: PooledStates, states: Tensor) -> Vectors | None:
        """Add a step's `states` to their rows; returns the vectors of ended prompts,
        which are being copied to the host.
        """
        vectors = list[Tensor]()
        ended = list[PooledChunk]()
        for chunk in pooled_states.chunks:
            chunk_states = states[chunk.first : chunk.first + chunk.count]
            vector = (
                self._summed(chunk, chunk_states)
                if chunk.owner.pooling == MEAN
                else chunk_states[0]
            )
            if chunk.ends:
                vectors.append(vector.float())
                ended.append(chunk)
        if not ended:
            return None
        stacked = torch.stack(vectors)
        host = torch.empty(
            stacked.shape, dtype=stacked.dtype, pin_memory=is_gpu(self.device)
        )
        host.copy_(stacked, non_blocking=True)
        return Vectors(tuple(ended), host)

    def _summed(self, chunk: PooledChunk, states: Tensor) -> Tensor:
        """Add a chunk's states to the row's sum; returns the sum so far over the prompt's
        length.
        """
        total = states.sum(0, dtype=torch.float32)
        if chunk.begins and chunk.ends:
            return total / chunk.owner.prompt
        if self.sums is None:
            self.sums = total.new_zeros(self.rows, self.hidden)
        row_sum = self.sums[chunk.row]
        if not chunk.begins:
            total = row_sum + total
        row_sum.copy_(total)
        return total / chunk.owner.prompt
