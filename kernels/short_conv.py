"""Causal depthwise convolution of a few inputs, whose last ones are a row's state."""

from typing import Literal

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
from minfer.kernels.state_work import StateWork

ConvActivation = Literal["silu"]


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: ConvActivation | None,
    units: PagedUnits,
    work: StateWork,
) -> Tensor:
    """Returns activation(bias + sum_j weight[:, j] * x[t - width + 1 + j]) of each token
    t, [tokens, channels], over the inputs of its row; writes each row's last width - 1
    inputs to its state, but for rows with drafts.

    `x` [tokens, channels], channels contiguous. `weight` [channels, width], contiguous,
    of a width of 2 or more. `bias` [channels]. A unit of a state is [width - 1, channels
    of a unit]: the inputs before the row's next one, the oldest first, of as many
    neighbouring channels. Computes in float32. Values of tokens that belong to no row may
    be anything.
    """
    if not on_triton(x):
        return _reference(x, weight, bias, activation, units, work)
    from minfer.kernels.short_conv_kernels import launch  # not everywhere is Triton

    out = x.new_empty(x.shape)
    launch(x, weight, bias, out, units, work, silu=activation == "silu")
    return out


def _reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: ConvActivation | None,
    units: PagedUnits,
    work: StateWork,
) -> Tensor:
    """`short_conv` in plain torch."""
    out = torch.zeros_like(x)
    kernel = weight.float()[:, None]
    shift = None if bias is None else bias.float()
    for spans in work.spans():
        state = gather_states(units, work.table, spans.rows)
        state.masked_fill_(spans.is_new[:, None, None, None], 0)
        # [n, units, width - 1, channels of a unit] -> [n, width - 1, channels]
        before = state.transpose(1, 2).flatten(2)
        inputs = torch.cat((before.to(x.dtype), x[spans.tokens]), 1)
        convolved = F.conv1d(inputs.mT.float(), kernel, shift, groups=len(weight)).mT
        if activation == "silu":
            convolved = F.silu(convolved)
        out[spans.tokens] = convolved.to(x.dtype)
        if not spans.writes:
            continue
        last = inputs[:, spans.tokens.shape[1] :]
        by_unit = last.view(*last.shape[:2], units.units, -1).transpose(1, 2)
        scatter_states(units, work.table, spans.rows, by_unit)
        copy_states(units, work.table, spans.rows, spans.saved)
    return out
