"""The kernel of gated_rule.py that takes one token after another."""

import triton
import triton.language as tl

from minfer.kernels.head_gates import activated
from minfer.kernels.pdl import follow
from minfer.kernels.state_kernels import unit_pointers


@triton.jit
def step_size(raw, bias, low, high):
    """The step of a decay in float32, from which the decay follows."""
    step = activated(raw.to(tl.float32) + bias, "softplus")
    return tl.minimum(tl.maximum(step, low), high)


@triton.jit
def to_next(number, lead, stride):
    """How many tokens after a row's input `number` its next input is packed."""
    ahead = 1
    if lead is not None:
        ahead = stride + tl.where(number == 0, lead, 0)
    return ahead


@triton.jit(
    do_not_specialize=["first_page", "first_unit", "first_token", "lead", "stride"]
)
def recur(
    q,
    k,
    v,
    raw,
    bias,
    rates,
    beta,
    skip,
    out,
    rows,
    starts,
    counts,
    offsets,
    table,
    pages,
    q_stride,
    k_stride,
    v_stride,
    raw_stride,
    beta_stride,
    table_stride,
    page_stride,
    first_page,
    first_unit,
    per_page,
    first_token,
    lead,
    stride,
    low,
    high,
    l2_eps,
    scale,
    writes: tl.constexpr,
    shared: tl.constexpr,
    keys: tl.constexpr,
    values: tl.constexpr,
    key_pad: tl.constexpr,
    tile: tl.constexpr,
    by_channel: tl.constexpr,
):
    """Grid [tiles of a head's values, heads, rows]: a program has `tile` columns of a
    state. Without `counts`, a row has one token, `first_token` and its number. With
    `lead` and `stride`, inputs are spaced as `DraftSpacing` says.

    Both products of the state precede the update, so that they are reduced together: the
    output is S^T q + u (k . q) of the decayed state S before it.
    """
    row = tl.program_id(2)
    head = tl.program_id(1)
    key_lane = tl.arange(0, key_pad)
    lane = tl.program_id(0) * tile + tl.arange(0, tile)
    key_mask = key_lane < keys
    mask = lane < values
    rate = tl.load(rates + head)
    if by_channel:
        shift = tl.load(bias + head * keys + key_lane, mask=key_mask, other=0.0)
    else:
        shift = tl.load(bias + head)
    follow()
    token = row.to(tl.int64) + first_token
    count = 1
    if counts is not None:
        token = tl.load(offsets + row).to(tl.int64)
        count = tl.load(counts + row)
    if count == 0:
        return
    table += tl.load(rows + row).to(tl.int64) * table_stride
    unit = first_unit + head
    state_pointers = unit_pointers(
        pages, page_stride, table, first_page, unit, per_page, keys * values, None
    )
    state_pointers += key_lane[:, None] * values + lane[None, :]
    state_mask = key_mask[:, None] & mask[None, :]
    old_end = tl.where(tl.load(starts + row) != 0, values, 0)
    is_old = key_mask[:, None] & (lane < old_end)[None, :]
    state = tl.load(state_pointers, mask=is_old, other=0.0).to(tl.float32)
    key_pointers = k + token * k_stride + head // shared * keys + key_lane
    query_pointers = q + token * q_stride + head // shared * keys + key_lane
    value_pointers = v + token * v_stride + head * values + lane
    raw_pointers = raw + token * raw_stride + head
    if by_channel:
        raw_pointers = raw + token * raw_stride + head * keys + key_lane
    if beta is not None:
        beta += token * beta_stride + head
    heads = tl.num_programs(1)
    out_pointers = out + (token * heads + head) * values + lane
    for number in range(count):
        ahead = to_next(number, lead, stride)
        key = tl.load(key_pointers, mask=key_mask, other=0.0).to(tl.float32)
        query = tl.load(query_pointers, mask=key_mask, other=0.0).to(tl.float32)
        value = tl.load(value_pointers, mask=mask, other=0.0).to(tl.float32)
        if l2_eps is not None:
            key *= tl.rsqrt(tl.sum(key * key, 0) + l2_eps)
            query *= tl.rsqrt(tl.sum(query * query, 0) + l2_eps)
        query *= scale
        if by_channel:
            step = step_size(
                tl.load(raw_pointers, mask=key_mask, other=0.0), shift, low, high
            )
            state *= tl.exp(-rate * step)[:, None]
        else:
            step = step_size(tl.load(raw_pointers), shift, low, high)
            state *= tl.exp(-rate * step)
        result = tl.sum(state * query[:, None], 0)
        if beta is None:
            new = value * step
        else:
            strength = activated(tl.load(beta).to(tl.float32), "sigmoid")
            new = (value - tl.sum(state * key[:, None], 0)) * strength
            beta += ahead * beta_stride
        state += key[:, None] * new[None, :]
        result += new * tl.sum(key * query, 0)
        if skip is not None:
            result += value * tl.load(skip + head)
        tl.store(out_pointers, result, mask=mask)
        key_pointers += ahead * k_stride
        query_pointers += ahead * q_stride
        value_pointers += ahead * v_stride
        raw_pointers += ahead * raw_stride
        out_pointers += ahead * heads * values
    tl.store(state_pointers, state, mask=state_mask & writes)
