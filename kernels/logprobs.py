"""Log-probabilities of the sampled tokens, and the likeliest tokens, without normalising
the logits.

Theory. A token's *key* is an integer: the order of its logit, then its inverted id; so
the larger key is the likelier token's, or the lower id's of two that tie. `_scan` reads
each chunk of a row once: its log-sum-exp in two numbers, how many keys reach the sampled
token's, and its k largest keys, one maximum after the other, in registers. `_finish` does
the same with the results of the chunks. Rows that request nothing end after one load; a
row's result depends on that row alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minfer.kernels import on_triton, plain
from minfer.kernels.pdl import early, follow

CHUNK = 2048  # logits of a program
SCAN_WARPS = 4
FINISH_WARPS = 8
LOWEST = tl.constexpr(-3.4028234663852886e38)  # finite: -inf - -inf would be NaN
NONE = tl.constexpr(-(2**63))  # less than every key


@triton.jit
def _key(x, ids):
    """The keys of ids with logits x: the larger is the likelier token's."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0 is 0
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def _scan(
    logits,
    stride,
    tokens,
    rows,
    requested,
    stats,
    lists,
    vocab,
    max_listed: tl.constexpr,
    chunk: tl.constexpr,
):
    """Grid [chunks, rows]: the results of a chunk of a row.

    stats [rows, 3, chunks]: its largest logit, its sum of exponentials, and how many keys
    reach the sampled token's. lists [rows, max_listed, chunks]: its largest keys.
    """
    follow()
    chunk_index = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    num_chunks = tl.num_programs(0)
    count = tl.load(requested + tl.load(rows + row))
    if count > 0:
        line = logits + row * stride
        ids = chunk_index * chunk + tl.arange(0, chunk)
        x = tl.load(line + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        token = tl.load(tokens + row)
        sampled_key = _key(tl.load(line + token).to(tl.float32), token)
        keys = tl.where(ids < vocab, _key(x, ids), NONE)
        top = tl.maximum(tl.max(x, 0), LOWEST)
        stat_pointers = stats + row * 3 * num_chunks + chunk_index
        tl.store(stat_pointers, top)
        tl.store(stat_pointers + num_chunks, tl.sum(tl.exp(x - top), 0))
        tl.store(
            stat_pointers + 2 * num_chunks,
            tl.sum((keys >= sampled_key).to(tl.int32), 0).to(tl.float32),
        )
        for i in range(count - 1):
            best = tl.max(keys, 0)
            tl.store(lists + (row * max_listed + i) * num_chunks + chunk_index, best)
            keys = tl.where(keys == best, NONE, keys)


@triton.jit
def _finish(
    logits,
    stride,
    tokens,
    rows,
    requested,
    stats,
    lists,
    out,
    num_chunks,
    max_listed: tl.constexpr,
    pad: tl.constexpr,
    wide: tl.constexpr,
):
    """Grid [rows]: a row's results from those of its chunks."""
    follow()
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, pad)
    key_lanes = tl.arange(0, wide)
    count = tl.load(requested + tl.load(rows + row))
    if count > 0:
        stat_pointers = stats + row * 3 * num_chunks + lanes
        top = tl.load(stat_pointers, mask=lanes < num_chunks, other=float("-inf"))
        mass = tl.load(stat_pointers + num_chunks, mask=lanes < num_chunks, other=0.0)
        rank = tl.sum(
            tl.load(stat_pointers + 2 * num_chunks, mask=lanes < num_chunks, other=0.0), 0
        )
        largest = tl.max(top, 0)
        total = tl.log(tl.sum(mass * tl.exp(top - largest), 0))  # relative to the largest
        ids = out + 2 * row * (max_listed + 1)
        values = out + (2 * row + 1) * (max_listed + 1)
        sampled_logit = tl.load(logits + row * stride + tl.load(tokens + row)).to(
            tl.float32
        )
        tl.store(ids, rank.to(tl.int32))
        tl.store(values, (sampled_logit - largest - total).to(tl.int32, bitcast=True))
        keys = tl.load(
            lists + row * max_listed * num_chunks + key_lanes,
            mask=key_lanes < (count - 1) * num_chunks,
            other=NONE,
        )
        for i in range(1, count):
            best = tl.max(keys, 0)
            order = (best >> 32).to(tl.int32)
            x = (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
            tl.store(ids + i, 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32))
            tl.store(values + i, (x - largest - total).to(tl.int32, bitcast=True))
            keys = tl.where(keys == best, NONE, keys)


def logprobs(
    logits: Tensor, tokens: Tensor, rows: Tensor, requested: Tensor, out: Tensor
) -> None:
    """Natural log-probabilities, in float32, of the sampled tokens and of the likeliest
    ones.

    `logits` [rows, vocab], rows contiguous; `tokens` and `rows` [rows] int32: the sampled
    tokens, and their device rows; `requested` [device rows] int32: 0 for nothing, else 1
    + k, with k <= vocab. For a row that requests some, `out` [rows, 2, 1 + max_listed]
    int32 gets, first, the sampled token's rank (1 is the likeliest) and the k <=
    max_listed likeliest ids; second, the bits of the log-probabilities of the sampled
    token and of these. Of tokens that tie, the lower id counts as the likelier.
    """
    if not on_triton(logits):
        plain.logprobs(logits, tokens, rows, requested, out)
        return
    count, vocab = logits.shape
    max_listed = out.shape[2] - 1
    num_chunks = triton.cdiv(vocab, CHUNK)
    arguments = {
        "logits": logits,
        "stride": logits.stride(0),
        "tokens": tokens,
        "rows": rows,
        "requested": requested,
        "stats": logits.new_empty(count, 3, num_chunks, dtype=torch.float32),
        "lists": logits.new_empty(count, max_listed, num_chunks, dtype=torch.int64),
        "max_listed": max_listed,
        "launch_pdl": early(logits),
    }
    _scan[num_chunks, count](**arguments, vocab=vocab, chunk=CHUNK, num_warps=SCAN_WARPS)
    _finish[count,](
        **arguments,
        out=out,
        num_chunks=num_chunks,
        pad=triton.next_power_of_2(num_chunks),
        wide=triton.next_power_of_2(max_listed * num_chunks),
        num_warps=FINISH_WARPS,
    )
