"""What the device keeps of each row between steps, and the words that change it.

All of it lies in one int32 arena (`kernels/rows.py`), so a step's changes are (index,
value) pairs that travel with the step's own inputs in one copy.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from minfer.plan import Open
from minfer.sample import is_greedy, lowest, stream

Words = NDArray[np.int32]
EMPTY = np.empty(0, np.int32)


def aligned(words: int) -> int:
    """Up to the next 16 bytes: kernels are compiled apart for pointers that are not."""
    return -(-words // 4) * 4


class DeviceRows:
    """The rows of an engine, and a scratch row, the last one, that pads batches."""

    def __init__(self, rows: int, blocks: int, device: torch.device) -> None:
        """`rows` of the engine; `blocks` of a table."""
        self.scratch, count = rows, rows + 1
        sizes = {
            "stream": 2 * count,
            "last": count,
            "next": count,
            "temperature": count,
            "top_k": count,
            "top_p": count,
            "deepest": count,
            "asked": count,
            "table": count * blocks,
            "batch": 2 * rows + 64,
        }
        sizes = {name: aligned(size) for name, size in sizes.items()}
        starts = np.cumsum([0, *sizes.values()]).tolist()
        self.at = dict(zip(sizes, starts, strict=False))
        self.arena = torch.zeros(starts[-1], dtype=torch.int32, device=device)
        part = {k: self.arena[self.at[k] : self.at[k] + n] for k, n in sizes.items()}
        self.last, self.next, self.top_k = part["last"], part["next"], part["top_k"]
        self.temperature = part["temperature"].view(torch.float32)
        self.top_p = part["top_p"].view(torch.float32)
        self.deepest = part["deepest"].view(torch.float32)
        self.stream = part["stream"].view(torch.int64)
        self.asked = part["asked"]  # 1 + how many log-probabilities; 0: none
        self.table, self.blocks = (
            part["table"][: count * blocks].view(count, blocks),
            blocks,
        )
        self.batch = part["batch"]  # the rows of a decode step, in its order
        self.changes: list[
            tuple[Words, Words]
        ] = []  # places in the arena, and what goes there

    def set_table(self, row: int, at: int, blocks: tuple[int, ...]) -> None:
        """Note entries of a row's table from `at` on."""
        self._set(self.at["table"] + row * self.blocks + at, np.array(blocks, np.int32))

    def set_batch(self, rows: tuple[int, ...], size: int) -> None:
        """Note who decodes, padded to `size`."""
        padded = np.full(size, self.scratch, np.int32)
        padded[: len(rows)] = rows
        self._set(self.at["batch"], padded)

    def open(self, row: int, opened: Open, vocab: int) -> None:
        """Note all that a row keeps for a generation."""
        params, at = opened.sampling, self.at
        heat, deepest = (
            0.0 if is_greedy(params) else params.temperature,
            -lowest(params.min_p),
        )
        words = np.empty(7, np.int32)
        noise = stream(params.seed, params.sample)
        words[:2] = np.array([noise], np.uint64).view(np.int32)
        words[2:5] = np.array([heat, params.top_p, deepest], np.float32).view(np.int32)
        words[5] = params.top_k if 0 < params.top_k < vocab else 0
        words[6] = 0 if params.logprobs is None else 1 + min(params.logprobs, vocab)
        places = [at["stream"] + 2 * row, at["stream"] + 2 * row + 1]
        places += [
            at[k] + row for k in ("temperature", "top_p", "deepest", "top_k", "asked")
        ]
        self.changes.append((np.array(places, np.int32), words))
        (table,) = opened.tables  # layers are of one group here
        self.set_table(row, 0, table)

    def _set(self, first: int, what: Words) -> None:
        self.changes.append((np.arange(first, first + len(what), dtype=np.int32), what))

    def take(self) -> list[Words]:
        """The changes, which are then done with: all places, then all values."""
        places, values = zip(*self.changes, strict=True) if self.changes else ((), ())
        self.changes = []
        return [*places, *values]
