"""Tokens that a device draws otherwise than `minfer.sampling.reference_sampler` says, and
how near a draw or a cut was: `python -m tests.effects.execution.differences --device
cuda`.

Theory. A device's logarithms and exponentials may differ from correctly rounded ones in
their last bits, and so may sums. So where two scores, or the mass up to a token and what
top-p keeps, are within 4 units in the last place of float32, either is right, and
nowhere else. Requests combine penalties, biases, allowed and bad words and min tokens
with temperature and all filters at random; rows come and go. Each token is compared; one
that differs goes on from what the device drew.
"""

import argparse
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Final

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray

from bench.results import run, show
from minfer.effects.execution.cuda.cuda_backend import CudaBackend
from minfer.effects.execution.device.device_rows import DeviceRows
from minfer.effects.execution.device.routes import Routes
from minfer.effects.execution.running.sampler import Sampler
from minfer.kernels.rows import scatter
from minfer.records.plan import NewRow
from minfer.sampling.logits import f32, shape_logits
from minfer.sampling.reference_sampler import (
    RowSampling,
    draw_key,
    gumbel,
    is_greedy,
    lowest,
    next_token,
    noise_bits,
    stream,
)
from tests.effects.execution.shapes import random_row

NEAR: Final = 4  # units in the last place
UNIT: Final = 2.0**-23  # of float32, as a share
SPREADS: Final = (0.02, 1.0, 3.0, 6.0)  # of logits
STAY: Final = 0.9  # of rows, from one draw to the next
OPTIONS: Final[dict[str, Any]] = {
    "--device": {"default": "cuda", "help": "cpu: the kernels' references"},
    "--seed": 0,
    "--rows": 32,
    "--draws": {
        "nargs": "+",
        "type": int,
        "default": (10_000, 10_000, 5_000, 96),
        "help": "how many, of each size of vocabulary",
    },
    "--vocabularies": {"nargs": "+", "type": int, "default": (60, 300, 2000, 151_936)},
}
Floats = NDArray[np.float64]


class Batch:
    """A device's sampler, and what its rows know."""

    def __init__(self, vocab: int, rows: int, device: torch.device) -> None:
        self.device = device
        self.rows = DeviceRows(rows, 1, vocab, device)
        self.sampler = Sampler(CudaBackend(device, Routes()), self.rows, rows)
        self.opened: dict[int, NewRow] = {}
        self.known: dict[int, list[int]] = {}

    def open(
        self, row: int, sampling: RowSampling, known_tokens: list[int], prompt: int
    ) -> None:
        new_row = NewRow(
            0, (str(row), 0), tuple(known_tokens), prompt, 1 << 20, sampling, ((0,),)
        )
        self.sampler.open(row, new_row)
        words = torch.cat(
            [torch.from_numpy(words_part) for words_part in self.rows.take()]
        )
        scatter(self.rows.arena, words.to(self.device))
        self.opened[row], self.known[row] = new_row, known_tokens

    def step(self, rows: list[int], logits: torch.Tensor) -> list[int]:
        """The tokens that these rows draw."""
        device_rows = torch.tensor(rows, dtype=torch.int32, device=self.device)
        positions = torch.tensor(
            [len(self.known[row]) for row in rows], device=device_rows.device
        )
        needs = self.rows.sampling_needs(rows)
        self.sampler.sample(logits.to(self.device), device_rows, positions.int(), needs)
        return self.sampler.out[: len(rows)].tolist()


@frozen(kw_only=True)
class Scale:
    """By which share values that cut are moved."""

    shares: float = 1.0  # top-p, min-p, typical-p
    mean: float = 1.0  # depth, of which typical tokens are near


def left(depth: Floats, sampling: RowSampling, scale: Scale) -> NDArray[np.bool_]:
    """Which tokens are kept of those [vocab] of these depths, by
    `minfer.sampling.reference_sampler`'s definition.
    """
    kept_mask = depth <= -lowest(sampling.min_p * scale.shares)
    if 0 < sampling.top_k < len(depth):
        kept_mask &= depth <= np.partition(depth, sampling.top_k - 1)[sampling.top_k - 1]
    mass = np.exp(-depth)
    if sampling.top_p < 1:
        _cut(kept_mask, depth, mass, f32(sampling.top_p) * scale.shares)
    if sampling.typical_p < 1:
        total = mass[kept_mask].sum()
        has_mass = kept_mask & (mass > 0)
        mean = f32((mass[has_mass] * depth[has_mass]).sum() / total * scale.mean)
        far = np.abs(depth - mean).astype(np.float32).astype(np.float64)
        _cut(kept_mask, far, mass, f32(sampling.typical_p) * scale.shares)
    return kept_mask


def _cut(kept_mask: NDArray[np.bool_], order: Floats, mass: Floats, share: float) -> None:
    """Leave the first of those kept that hold this share of their mass."""
    ids = np.flatnonzero(kept_mask)
    ids = ids[np.argsort(order[ids], kind="stable")]
    before = np.cumsum(mass[ids]) - mass[ids]
    kept_mask[ids[before >= share * mass[ids].sum()]] = False


def reason(
    logits: Sequence[float], sampling: RowSampling, position: int, token: int
) -> str:
    """Why this token may be drawn from shaped logits: its draw is near, or a cut is."""
    x = np.array(logits, np.float32)
    if is_greedy(sampling):
        return "none"
    depth = ((x.max() - x) / np.float32(sampling.temperature)).astype(np.float64)
    key = draw_key(stream(sampling.seed, sampling.sample), position)
    noise = np.array([gumbel(noise_bits(key, t)) for t in range(len(x))])
    score = noise - depth
    steps = (0.0, -NEAR * UNIT, NEAR * UNIT)
    for share, mean in product(steps, steps):
        kept_mask = left(depth, sampling, Scale(shares=1 + share, mean=1 + mean))
        best = int(np.where(kept_mask, score, -np.inf).argmax())
        sizes = np.maximum(np.abs(noise), depth)[[token, best]]
        if kept_mask[token] and score[token] >= score[best] - NEAR * UNIT * max(sizes):
            return "cut" if share or mean else "draw"
    return "none"


def draws(
    batch: Batch, count: int, rng: random.Random
) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Rows that draw next, so many in all, and their logits; rows come and go."""
    vocab, rows = batch.rows.vocab, batch.rows.scratch
    generator = torch.Generator().manual_seed(rng.randrange(2**40))
    while count > 0:
        drawing = sorted(rng.sample(range(rows), min(count, rng.randint(1, rows))))
        for row in drawing:
            if row not in batch.opened or rng.random() > STAY:
                length = rng.randrange(1, 40)
                known_tokens = [rng.randrange(vocab) for _ in range(length)]
                batch.open(
                    row, random_row(rng, vocab), known_tokens, rng.randint(1, length)
                )
        logits = torch.randn(len(drawing), vocab, generator=generator)
        logits *= rng.choice(SPREADS)
        yield drawing, logits.bfloat16() if rng.random() < 0.5 else logits
        count -= len(drawing)


def compared(batch: Batch, count: int, rng: random.Random) -> dict[str, Any]:
    """How many of so many draws differ, and why; the first that nothing explains."""
    reasons: Counter[str] = Counter()
    unexplained: list[str] = []
    for rows, logits in draws(batch, count, rng):
        drawn = batch.step(rows, logits)
        for row, line, token in zip(rows, logits.tolist(), drawn, strict=True):
            new_row, known_tokens = batch.opened[row], batch.known[row]
            sampling, prompt = new_row.sampling, new_row.prompt
            if token != (right := next_token(line, sampling, known_tokens, prompt)):
                shaped_line = shape_logits(
                    line, sampling, known_tokens[:prompt], known_tokens[prompt:]
                )
                difference = reason(shaped_line, sampling, len(known_tokens), token)
                reasons[difference] += 1
                if difference == "none":
                    unexplained.append(
                        f"{token} for {right} after {len(known_tokens)}: {sampling}"
                    )
            known_tokens.append(token)
    return {
        "draws": count,
        "differ": reasons.total(),
        "within 4 units of a draw": reasons["draw"],
        "within 4 units of a cut": reasons["cut"],
        "neither": reasons["none"],
        "examples of neither": unexplained[:3],
    }


def measure(args: argparse.Namespace) -> Mapping[str, Any]:
    """All sizes of vocabulary."""
    device = torch.device(args.device)
    measured: dict[str, Any] = {}
    for vocab, count in zip(args.vocabularies, args.draws, strict=True):
        rng = random.Random(f"{args.seed} {vocab}")
        batch = Batch(vocab, args.rows, device)
        measured[f"{vocab} ids"] = compared(batch, count, rng)
        show({"ids": vocab, **measured[f"{vocab} ids"]})
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    return {"device": name, "differences": measured}


if __name__ == "__main__":
    run("sampling_differences", measure, OPTIONS)
