"""The kernels of gated delta nets at Qwen3-Next's sizes, on one GPU.

    python -m bench.recurrent_gpu

Decode steps, and prefills of a prompt, through 36 layers: us of a layer, of each kernel
and of the three, in a CUDA graph over the layers, so that states come from memory; and
the floor, the bytes read and written at 4.26 TB/s. Rows with drafts read their states,
and read and write them when all drafts are accepted. `--sweep` tries other tiles of the
rule, too. `--device cpu --rows 2 --prompts 9` runs the references, without times.
"""

import argparse
from functools import partial
from itertools import product
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from bench.gpu_times import microseconds
from bench.results import run, show
from minfer.kernels import gated_rule_tunes
from minfer.kernels.gated_norm import gated_norm
from minfer.kernels.gated_rule import gated_rule
from minfer.kernels.gated_rule_tunes import RuleTune
from minfer.kernels.leaves import Norm
from minfer.kernels.paged_states import PagedUnits
from minfer.kernels.rule_arguments import DecayGates
from minfer.kernels.short_conv import short_conv
from minfer.kernels.state_work import DraftSpacing, StateChunks, StateWork

BYTES_PER_US: Final = 4.26e6
DIM, KEY_HEADS, HEADS, WIDTH, PER_PAGE = 128, 16, 32, 4, 16
VALUES, PARTS = HEADS * DIM, 2 * KEY_HEADS + HEADS  # of 128 channels
DECODES: Final = [*product((16, 32, 64, 128), (2, 4, 8), (1,))]  # columns, warps, stages
CARRIES: Final = [*product((16, 32, 64), (4, 8), (1, 2, 3))]


class Step(NamedTuple):
    work: StateWork
    states: Tensor  # pages of heads, of all layers
    inputs: Tensor  # pages of convolutions
    x: Tensor  # [tokens, channels]
    z: Tensor  # [tokens, values]
    gates: Tensor  # [tokens, 2 * heads]
    weight: Tensor  # [channels, width]
    bias: Tensor  # [heads]

    @classmethod
    def of(
        cls, rows: int, count: int, args: argparse.Namespace, *, drafts: bool = False
    ) -> "Step":
        """Rows with `count` inputs each, behind position 0; of which all but one are
        drafts, or none.
        """
        draw, device = torch.Generator().manual_seed(rows + count), args.device
        pages = [rows * args.layers * units // PER_PAGE for units in (HEADS, PARTS)]
        ids = [torch.randperm(n, generator=draw).view(rows, -1) for n in pages]
        line = torch.arange(rows, dtype=torch.int32, device=device)
        chunks = drafted = None
        counts = torch.full_like(line, count)
        if drafts:
            spacing = DraftSpacing(lead=0, stride=rows)
            drafted = StateChunks(line, counts, counts, line, count, spacing)
        elif count > 1:
            chunks = StateChunks(line, counts, counts, line * count, count)
        decode = line if count == 1 else line[:0]
        table = torch.cat(ids, 1).int().to(device)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw).to(device, torch.bfloat16)

        return cls(
            StateWork(table, decode, decode + 1, chunks, drafted),
            torch.zeros(pages[0], PER_PAGE, DIM, DIM, dtype=args.states, device=device),
            drawn(1, PER_PAGE, WIDTH - 1, DIM).repeat(pages[1], 1, 1, 1),
            drawn(rows * count, PARTS * DIM),
            drawn(rows * count, VALUES),
            drawn(rows * count, 2 * HEADS),
            drawn(PARTS * DIM, WIDTH),
            torch.full((HEADS,), -4.0, device=device),
        )

    def run(self, index: int, only: str = "all") -> Tensor:
        """Runs a layer, or one kernel of it."""
        out = self._update_states(index, only, self.work)
        if self.work.drafted is not None:
            accepted = self.work.accepted_work(self.work.drafted.counts)
            self._update_states(index, only, accepted)
        if only in ("all", "norm"):
            out = gated_norm(out, self.z, Norm(self.x[0, :DIM], 1e-6), DIM)
        return out

    def _update_states(self, index: int, only: str, work: StateWork) -> Tensor:
        """Runs the convolution and the rule, or one of them."""
        mixed, out = self.x, self.z
        if only in ("all", "convolution"):
            first = work.table.shape[1] * HEADS // (HEADS + PARTS)
            units = PagedUnits(self.inputs, index * PARTS, PARTS, first)
            mixed = short_conv(self.x, self.weight, None, "silu", units, work)
        if only in ("all", "rule"):
            parts = mixed.view(len(mixed), -1, DIM)
            out = gated_rule(
                parts[:, :KEY_HEADS],
                parts[:, KEY_HEADS:-HEADS],
                parts[:, -HEADS:],
                DecayGates(self.gates[:, HEADS:], self.bias, self.bias + 5),
                self.gates[:, :HEADS],
                PagedUnits(self.states, index * HEADS, HEADS, 0),
                work,
                l2_eps=1e-6,
                scale=DIM**-0.5,
            ).flatten(1)
        return out

    def floors(self) -> dict[str, float]:
        """us of a layer by the bytes of each kernel."""
        rows, tokens = len(self.work.table), len(self.x)
        passes = 1 + (self.work.drafted is not None)  # one of which writes the states
        states = 1 + passes
        state_bytes = states * rows * VALUES * DIM * self.states.element_size()
        inputs = states * rows * (WIDTH - 1) + 2 * passes * tokens
        counts = {
            "convolution": 2 * PARTS * DIM * inputs,
            "rule": state_bytes + 2 * passes * tokens * (PARTS * DIM + VALUES),
            "norm": 6 * tokens * VALUES,
        }
        counts["all"] = sum(counts.values())
        return {name: count / BYTES_PER_US for name, count in counts.items()}


def times(step: Step, args: argparse.Namespace) -> dict[str, Any]:
    def us(only: str) -> float:
        return microseconds([partial(step.run, i, only) for i in range(args.layers)])

    floors = step.floors()
    figures: dict[str, Any] = {"floor, us": floors, "us": {n: us(n) for n in floors}}
    names, tunes = ["DECODE", "DECODE_FEW", "TOKENS"], DECODES
    if step.work.chunks:
        names, tunes = ["CARRY"], CARRIES
    for tune in tunes if args.sweep else ():
        tried: dict[str, Any] = dict.fromkeys(names, RuleTune(*tune))
        with patch.multiple(gated_rule_tunes, **tried):
            figures[f"rule, us, {tune}"] = us("rule")
    show(figures)
    return figures


def measure(args: argparse.Namespace) -> dict[str, Any] | None:
    """Every number of rows, without and with drafts, and every prompt."""
    results: dict[str, Any] = {}
    drafted = [*product(args.rows, [1 + count for count in args.drafts])]
    sizes = [*product(args.rows, [1]), *drafted, *product([1], args.prompts)]
    for place, (rows, count) in enumerate(sizes):
        drafts = 0 <= place - len(args.rows) < len(drafted)
        step = Step.of(rows, count, args, drafts=drafts)
        if args.device == "cpu":
            show({"shape": [*step.run(0).shape]})
        else:
            name = f"{rows} rows of {count}" + ", with drafts" * drafts
            results[name] = times(step, args)
    return results or None


if __name__ == "__main__":
    integers = {"type": int, "nargs": "*"}
    options = {
        "--device": "cuda",
        "--states": {"type": partial(getattr, torch), "default": torch.float32},
        "--layers": 36,
        "--rows": {**integers, "default": [1, 8, 64, 256]},
        "--drafts": {**integers, "default": [3]},
        "--prompts": {**integers, "default": [512, 8192, 32_000]},
        "--sweep": {"action": "store_true"},
    }
    run("recurrent_gpu", measure, options)
