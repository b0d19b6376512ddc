"""The selective scan of Mamba, the first one (Gu and Dao 2023), with states in pages.

A channel's state s [N] takes an input x, a step, and a token's B and C [N]:

    s <- exp(-rate * step) * s + step * x * B      a rate for each of the N numbers
    y = (C . s + skip * x) * silu(gate)

with step = softplus(raw + bias). As each number of a channel decays at a rate of its own,
a chunk is not a product of matrices as in Mamba 2 (gated_rule.py): tokens go one after
another, and a program has some channels' states in registers.

Decode rows are bound by memory: a state of 8,192 channels of 16 numbers in float32 is 0.5
MB, so that 256 rows read and write 268 MB a layer, 64 us at 4.2 TB/s. Chunks are bound by
the latency of a token, as each waits for the state of the one before it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from minfer.kernels import on_triton
from minfer.kernels.paged_states import (
    PagedUnits,
    copy_states,
    gather_states,
    scatter_states,
)
from minfer.kernels.plain import SOFTPLUS_LINEAR_FROM
from minfer.kernels.scan_arguments import ScanArguments, ScanWeights
from minfer.kernels.state_work import StateWork


def selective_scan(
    x: Tensor,
    raw: Tensor,
    b: Tensor,
    c: Tensor,
    gate: Tensor,
    weights: ScanWeights,
    units: PagedUnits,
    work: StateWork,
) -> Tensor:
    """Returns y [tokens, channels] of each token, in the dtype of `x`; updates the states
    of the rows, but for those with drafts.

    `x`, `raw` (of steps) and `gate` [tokens, channels], `b` and `c` [tokens, N]: rows
    contiguous, their strides may be larger. A unit of the state is [N, channels of a
    unit], of neighbouring channels. Computes in float32. Values of tokens that belong to
    no row may be anything.
    """
    scan = ScanArguments(x, raw, b, c, gate, weights, units, work)
    if not on_triton(x):
        return _reference(scan)
    from minfer.kernels.selective_scan_kernels import launch  # not everywhere is Triton

    out = x.new_empty(x.shape)
    launch(scan, out)
    return out


def _reference(scan: ScanArguments) -> Tensor:
    """`selective_scan` in plain torch."""
    x, raw, b, c, gate, weights, units, work = scan
    inputs, read, written = x.float(), c.float(), b.float()
    steps = F.softplus(raw.float() + weights.bias, threshold=SOFTPLUS_LINEAR_FROM)
    rates = weights.rates.mT  # [N, channels]
    out = torch.zeros_like(inputs)
    for spans in work.spans():
        # [n, units, N, channels of a unit] -> [n, N, channels]
        by_unit = gather_states(units, work.table, spans.rows).float()
        state = by_unit.transpose(1, 2).flatten(2)
        state.masked_fill_(spans.is_new[:, None, None], 0)
        for token in spans.tokens.unbind(1):
            step = steps[token]
            state *= (-rates * step[:, None]).exp()
            state.addcmul_(written[token][..., None], (step * inputs[token])[:, None])
            out[token] = torch.einsum("snc,sn->sc", state, read[token])
        if not spans.writes:
            continue
        states = state.view(*state.shape[:2], units.units, -1).transpose(1, 2)
        scatter_states(units, work.table, spans.rows, states)
        copy_states(units, work.table, spans.rows, spans.saved)
    return ((out + inputs * weights.skip) * F.silu(gate.float())).to(x.dtype)
