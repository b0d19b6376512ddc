"""What attention to drafts takes on a GPU: `python -m bench.draft_attention`.

A layer of a model at a time, in CUDA graphs, of rows that each have a last token and some
drafts: as one chunk of a row, whose queries share the tiles of its context; as a row for
each of them; and the last tokens alone, which is what a step without drafts does. Both
ways have to agree. Ratios are to the last: how much longer a step's attention gets by
drafts.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor
from triton.testing import do_bench_cudagraph

from bench.results import run, show, spread
from bench.shapes import SHAPES
from minfer.kernels.attention import DraftLayout, decode_attention, prefill_attention
from minfer.kernels.attention_tunes import num_splits

BLOCK: Final = 16
BATCHES: Final = (1, 8, 64)
CONTEXTS: Final = (640, 4096, 32_768)
MAX_BATCH_TOKENS: Final = 1 << 20  # tokens of a batch: a layer of them has to fit
TOLERANCE: Final = 2e-2  # bfloat16, sums in another order
OPTIONS: Final[dict[str, Any]] = {
    "--shape": {"choices": [*SHAPES], "default": "7B"},
    "--drafts": {"type": int, "default": 4, "help": "of each row"},
}


@frozen(eq=False)
class Work:
    """Rows in a paged cache of one layer, each with a last token and drafts."""

    q: Tensor  # [rows * (1 + drafts), heads, dim]: last tokens, then a line of each place
    keys: Tensor
    values: Tensor
    table: Tensor
    contexts: Tensor  # [rows]: of last tokens
    drafts: int

    @classmethod
    def of(cls, shape: str, rows: int, context: int, drafts: int) -> "Work":
        """Random contents, in blocks in random order."""
        hidden, _, _, heads, kv_heads, *_ = SHAPES[shape]
        dim, blocks = hidden // heads, -(-(context + drafts) // BLOCK)
        make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        cache = torch.randn(2, rows * blocks, BLOCK, kv_heads, dim, **make)
        order = torch.randperm(rows * blocks, device="cuda").int()
        contexts = torch.full((rows,), context, dtype=torch.int32, device="cuda")
        q = torch.randn(rows * (1 + drafts), heads, dim, **make)
        return cls(q, cache[0], cache[1], order.view(rows, blocks), contexts, drafts)

    @property
    def splits(self) -> int:
        """As an executor has it."""
        _, size, kv_heads, dim = self.keys.shape
        longest = self.table.shape[1] * size
        return num_splits(len(self.contexts), kv_heads, dim, longest)

    @property
    def ways(self) -> dict[str, Callable[[], Tensor]]:
        """What is timed; its arguments are made before."""
        last_tokens = self.q[: len(self.contexts)]
        return {
            "alone": self._decode(last_tokens, 1),
            "lines": self._decode(self.q, 1 + self.drafts),
            "chunks": self._chunks(),
        }

    def _decode(self, q: Tensor, places: int) -> Callable[[], Tensor]:
        """Each token as a row of its own."""
        owners = self._firsts().repeat(places)
        contexts = torch.cat([self.contexts + place for place in range(places)])
        cache_args = self.keys, self.values, self.table, owners, contexts
        scale = q.shape[2] ** -0.5
        return partial(decode_attention, q, *cache_args, scale, splits=self.splits)

    def _chunks(self) -> Callable[[], Tensor]:
        """All tokens of a row at once."""
        firsts, places = self._firsts(), 1 + self.drafts
        counts = torch.full_like(firsts, places)
        cache_args = self.keys, self.values, self.table, firsts, self.contexts - 1, counts
        return partial(
            prefill_attention,
            self.q,
            *cache_args,
            firsts,
            self.q.shape[2] ** -0.5,
            max_count=places,
            splits=self.splits,
            draft_layout=DraftLayout(skip=len(firsts), stride=len(firsts)),
        )

    def _firsts(self) -> Tensor:
        return torch.arange(len(self.contexts), device="cuda", dtype=torch.int32)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for rows in BATCHES:
        for context in (
            length for length in CONTEXTS if rows * length <= MAX_BATCH_TOKENS
        ):
            work = Work.of(args.shape, rows, context, args.drafts)
            ways = work.ways
            difference = (ways["chunks"]() - ways["lines"]()).abs().max().item()
            if difference > TOLERANCE:
                raise RuntimeError(
                    f"{rows} rows of {context} tokens differ by {difference}"
                )
            times = {
                name: [1e3 * ms for ms in do_bench_cudagraph(way, return_mode="all")]
                for name, way in ways.items()
            }
            base = spread(times["alone"])["median"]
            spreads = {name: spread(values) for name, values in times.items()}
            ratios = {name: figure["median"] / base for name, figure in spreads.items()}
            results[f"{rows} rows, {context} tokens"] = {"us": spreads, "ratio": ratios}
            show({f"{rows} rows, {context} tokens, {base:.1f} us without": ratios})
    return {"shape": args.shape, "drafts": args.drafts, "figures": results}


if __name__ == "__main__":
    run("draft_attention", measure, OPTIONS)
