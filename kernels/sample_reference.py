"""Sampling in plain torch, by sorting: the reference of sample.py's kernels, and the
CPU's version without Triton.

It is `minfer.sampling.reference_sampler` over a batch, operation by operation. Other
rules of sampling use its parts (reject.py): a row's values (`SamplingValues`), the
filters, the noise of ids, and the choice among equals.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Numbers of `minfer.sampling.reference_sampler`: steps (shift, factor) that mix bits, and
# others.
STEPS64 = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
STEPS32 = ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB), (14, 1))
GOLDEN = 0x9E3779B97F4A7C15
LARGEST_V = 1 - 2**-24
GREEDY_BELOW = 1e-5
WORD = 2**64  # int64 wraps: values above its largest are negative


class SamplingValues(NamedTuple):
    """The sampling values of rows: [device rows] each, or [rows, 1] in the reference."""

    temperature: Tensor  # float32
    top_k: Tensor  # int32; 0: all
    top_p: Tensor  # float32; 1: all
    deepest: Tensor  # float32: -log of min-p; inf: all
    typical_p: Tensor  # float32; 1: all

    def of_rows(self, rows: Tensor) -> "SamplingValues":
        """Returns the values [rows, 1] of these device rows, int64."""
        return SamplingValues(*(column[rows, None] for column in self))

    @property
    def greedy(self) -> Tensor:
        """Whether the largest logit is taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def divisor(self) -> Tensor:
        """The temperature; 1 for greedy rows."""
        return self.temperature.where(~self.greedy, 1)


def reference(
    logits: Tensor,
    rows: Tensor,
    values: SamplingValues,
    streams: Tensor,
    positions: Tensor,
    *,
    filtered: bool = True,
) -> tuple[Tensor, Tensor]:
    """`sample` in plain torch, by sorting."""
    del filtered  # a promise, which only saves time
    owner = rows.long()
    values = values.of_rows(owner)
    x = comparable(logits)
    largest = x.amax(1, True)
    depth, ids = ((largest - x) / values.divisor).sort(stable=True)
    is_kept = kept_tokens(depth, ids, values)
    times = waiting(streams[owner, None], positions[:, None].long(), ids)
    score = (-depth - times.log() * ~values.greedy).where(
        is_kept | values.greedy, -torch.inf
    )
    fine = largest.abs() < torch.inf
    tokens = first_largest(score, ids).where(fine, 0)
    return tokens[:, 0].int(), (~fine)[:, 0].int()


def comparable(logits: Tensor) -> Tensor:
    """Logits in float32, where NaN counts as the largest."""
    return logits.float().nan_to_num(torch.inf, torch.inf, -torch.inf)


def first_largest(score: Tensor, ids: Tensor) -> Tensor:
    """The lowest of the `ids` [rows, 1] with the largest score."""
    vocab = score.shape[1]
    return ids.where(score == score.amax(1, True), vocab).amin(1, True)


def kept_tokens(depth: Tensor, ids: Tensor, values: SamplingValues) -> Tensor:
    """The tokens that filters keep: depth [rows, vocab] is rising, of tokens `ids`."""
    likeliest = _kept_by_depth(depth, values.top_k, values.top_p, values.deepest)
    return _typical(depth, ids, likeliest, values.typical_p)


def _kept_by_depth(
    depth: Tensor, top_k: Tensor, top_p: Tensor, deepest: Tensor
) -> Tensor:
    """The tokens that are kept: depth [rows, vocab] is rising, the others are
    [rows, 1].
    """
    vocab = depth.shape[1]
    last = top_k.long().where((top_k > 0) & (top_k < vocab), vocab) - 1
    is_kept = depth <= depth.gather(1, last).minimum(deepest)
    cumulative_mass = ((-depth).double().exp() * is_kept).cumsum(1)
    before = F.pad(cumulative_mass[:, :-1], (1, 0))
    return is_kept & ((before < top_p.double() * cumulative_mass[:, -1:]) | (top_p >= 1))


def _typical(depth: Tensor, ids: Tensor, is_kept: Tensor, typical_p: Tensor) -> Tensor:
    """Those of the kept tokens that typical-p keeps; `ids` are the tokens of the
    depths.
    """
    mass = (-depth).double().exp() * is_kept
    total = mass.sum(1, True)
    mean = (mass * depth.where(mass > 0, 0)).sum(1, True) / total
    distance = (depth - mean.float()).abs().where(is_kept, torch.inf)
    by_id = ids.argsort(1)
    order = by_id.gather(1, distance.gather(1, by_id).sort(dim=1, stable=True).indices)
    cumulative_mass = mass.gather(1, order).cumsum(1)
    before = F.pad(cumulative_mass[:, :-1], (1, 0))
    near = torch.zeros_like(is_kept).scatter(
        1, order, before < typical_p.double() * total
    )
    return is_kept & (near | (typical_p >= 1))


def waiting(streams: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """-log(1 - v): the waiting times of ids [rows, vocab], whose negative logarithms are
    the noise; streams and positions are [rows, 1].
    """
    return -(-uniform(streams, positions, ids)).log1p()


def uniform(streams: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """v, between 0 and 1, of ids [rows, vocab]; streams and positions are [rows, 1]."""
    key = streams + (positions + 1) * (GOLDEN - WORD)
    for shift, factor in STEPS64:
        high = key >> shift & 2 ** (64 - shift) - 1  # a shift of unsigned integers
        key = (key ^ high) * (factor if factor == 1 else factor - WORD)
    bits = (ids + key) & 0xFFFFFFFF
    for i, (shift, factor) in enumerate(STEPS32):
        bits = (bits ^ bits >> shift) * factor
        if i == 0:
            bits = bits ^ (key >> 32)
        bits = bits & 0xFFFFFFFF
    return ((bits.float() + 0.5) * 2.0**-32).clamp(max=LARGEST_V)
