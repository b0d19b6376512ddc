"""Sampling on the device: `minfer.sampling.reference_sampler` for a batch, without a
sort.

Theory. The sampled token is the one with the largest noise - depth of the kept tokens:
depth = (largest logit - logit) / temperature, noise = -log(E), E hashed from the id.
`scan` finds each chunk's winner, its least E exp(depth) with depth below its own maximum,
and `finish` compares a row's winners exactly. So only tokens of one chunk may swap, if
their scores agree to 1e-6.

Min-p is a maximal depth. Top-k and top-p are weighted quantiles of depth: the least depth
that has k tokens within it; the least up to which tokens hold `top_p` of the mass; then
one of the ids exactly at that depth. Each takes up to 8 passes, 4 bits a pass, by one
program, so they must go over few tokens: a list of the tokens of which it is not yet
clear whether they are kept. It is made in two steps:
- `bound`, once a row: `scan` stores the largest of every 128 logits and the sum of their
  exponentials. No kept token is deeper than a depth with k groups' largest within it, or
  beyond which less than 1 - top_p is left: of a group all, or all but its largest if that
  is within, and 128 exp(-depth) at most. If few tokens are kept, that is close to the
  edge: hardly a group has two. Else the edge is guessed: a sample of 4,096 logits
  estimates the mass beyond a depth, within a range that has a twentieth of the tokens.
- `gather` lists the tokens within such a range. Those before it are surely kept: their
  masses are summed, and of them only those with the shortest waiting times can win: whose
  E exp(depth) is below some 24 over their mass, of which there are some 24 in any row
  (-log (1 - v) is at least v, so that comparing v is enough). `finish` checks whether the
  edge is in the range, and searches for it in one of 16 bins of the range. If the guess
  was wrong, or no token waited so little (one row in e^24), it takes all ids instead of
  the list, which only costs time.
A list's order is a race without effect on the result: counts and masses are integers (in
units of 2^-43). If more filters follow (top-p after top-k, typical-p), a list has all
tokens up to the edge.

Typical-p is a quantile, too: not of depth, but of its distance from the mean depth of the
tokens left by the others (-log p is depth + log Z, and log Z cancels). If it is the only
filter, the mean is computed from what `scan` stores of each group, and the list is of ids
above both the depth below which less than 1 - typical_p is left, and twice the mean: ids
below these are farther from the mean than all above. So a flat row's list is long.

Arithmetic, for 152k bfloat16 logits, 4.2 TB/s, 132 x 128 lanes at 1.7 GHz: a row is 0.3
MB in 75 programs and costs its 2 launches, 4 if filtered. 256 rows are 78 MB, 19 us to
read; an instruction for each of their logits is 1.35 us: noise, if `scan` computes it, is
75, 100 us in all. `gather` needs no logarithms, and takes some 85 if most tokens are
surely kept. Its programs without a token up to the edge end after one load, some 10 us
for a launch.

Where ranks have a part of the vocabulary each, `sample_divided` samples rows that are not
filtered without gathering their logits: ranks exchange what `scan` finds of each chunk,
12 bytes instead of 2,048 logits. Parts begin with a chunk, so chunks, and all results,
are those of gathered logits.
"""

from torch import Tensor

from minfer.kernels import on_triton
from minfer.kernels.pdl import early
from minfer.kernels.sample_launches import (
    Arguments,
    Exchange,
    Workspace,
    launch_bound,
    launch_divided,
    launch_finish,
    launch_gather,
    launch_scan,
)
from minfer.kernels.sample_launches import ProgramSizes as ProgramSizes
from minfer.kernels.sample_reference import SamplingValues
from minfer.kernels.sample_reference import reference as reference

MAX_LOGITS = 1 << 20  # of a row: masses are summed in 63 bits, and ids have 20


SIZES = ProgramSizes(
    chunk=2048,
    group=128,
    span=4096,
    block=1024,
    tile=512,
    samples=4096,
    waits=24,
    max_unguessed=1024,
)


def sample(
    logits: Tensor,
    rows: Tensor,
    values: SamplingValues,
    streams: Tensor,
    positions: Tensor,
    *,
    filtered: bool = True,
) -> tuple[Tensor, Tensor]:
    """Sample a token a row: (tokens [rows] int32, broken [rows] int32).

    `logits` [rows, vocab], rows contiguous, `positions` [rows] of the sampled tokens. Row
    i is of device row rows[i], of which `values` and `streams` (int64, of
    `minfer.sampling.reference_sampler.stream`) have the sampling values and the noise.
    `filtered` False promises that no row filters tokens. Broken (1, token 0) are rows
    with NaN, +inf or only -inf.
    Raises ValueError for more than 2^20 logits in a row.
    """
    if logits.shape[1] > MAX_LOGITS:
        raise ValueError(
            f"{logits.shape[1]} logits in a row: sampling adds up masses of "
            f"{MAX_LOGITS} at most"
        )
    pick = _launch if on_triton(logits) else reference
    return pick(
        logits,
        rows,
        values,
        streams,
        positions,
        filtered=filtered,
    )


def _launch(
    logits: Tensor,
    rows: Tensor,
    values: SamplingValues,
    streams: Tensor,
    positions: Tensor,
    *,
    filtered: bool,
) -> tuple[Tensor, Tensor]:
    """`sample` by the kernels."""
    row_arguments = _row_arguments(logits, rows, values, logits.shape[1])
    noise = {"streams": streams, "positions": positions}
    workspace = Workspace.of(SIZES, logits, rows, filtered=filtered)
    launch_scan(row_arguments, noise, workspace, filtered=filtered)
    bounds = {"tops": workspace.tops, "bounds": workspace.tops, "masses": streams}
    if filtered:
        bounds = launch_bound(row_arguments, workspace)
        launch_gather(row_arguments, noise, bounds, workspace)
    launch_finish(row_arguments, noise, bounds, workspace, filtered=filtered)
    return workspace.out, workspace.bad


def sample_divided(
    logits: Tensor,
    rows: Tensor,
    values: SamplingValues,
    streams: Tensor,
    positions: Tensor,
    *,
    vocab: int,
    first: int,
    exchange: Exchange,
) -> tuple[Tensor, Tensor] | None:
    """`sample` on ranks that have a part of the vocabulary each, for rows that filter no
    tokens; the results are the same on all ranks. None without Triton, and where parts
    are not whole chunks: then logits must be gathered.

    `logits` [rows, columns] are of the tokens from `first` on, as many on each rank;
    those behind the vocabulary are ignored. `exchange` returns the columns of all ranks.
    """
    if logits.shape[1] % SIZES.chunk or vocab > MAX_LOGITS or not on_triton(logits):
        return None
    row_arguments = _row_arguments(logits, rows, values, vocab)
    noise = {"streams": streams, "positions": positions}
    return launch_divided(row_arguments, noise, SIZES, first, exchange)


def _row_arguments(
    logits: Tensor, rows: Tensor, values: SamplingValues, vocab: int
) -> Arguments:
    return {
        "logits": logits,
        "stride": logits.stride(0),
        "rows": rows,
        "temperatures": values.temperature,
        "top_ks": values.top_k,
        "top_ps": values.top_p,
        "deepests": values.deepest,
        "typical_ps": values.typical_p,
        "vocab": vocab,
        "launch_pdl": early(logits),
    }
