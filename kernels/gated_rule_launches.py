"""The launches of gated_rule.py's kernels."""

from typing import Any, Final

import torch
import triton
from torch import Tensor

from minfer.kernels.attention_tunes import padded
from minfer.kernels.chunked_rule_kernels import FACTORS, carry, prepare, prepare_channels
from minfer.kernels.gated_rule_kernels import recur
from minfer.kernels.gated_rule_tunes import (
    BLOCK,
    CHANNEL_BLOCK,
    MAX_RECURRENT_TOKENS,
    PREPARE_WARPS,
    carry_tune,
    decode_tune,
)
from minfer.kernels.paged_states import copy_states
from minfer.kernels.pdl import early
from minfer.kernels.rule_arguments import RuleArguments
from minfer.kernels.state_kernels import most_blocks
from minfer.kernels.state_work import StateChunks
from minfer.kernels.target import capability

# Dtypes of chunks that go block by block: tensor cores have no products of float32.
BLOCK_TYPES: Final = (torch.bfloat16, torch.float16)


def launch(rule: RuleArguments, out: Tensor) -> None:
    """Launch the rule of decode rows, and of chunks, into `out`."""
    if len(rule.work.rows):
        _launch_tokens(rule, out, None, writes=True)
    for chunks, writes in rule.work.all_chunks:
        is_long = chunks.longest > MAX_RECURRENT_TOKENS and chunks.spacing is None
        if is_long and rule.v.dtype in BLOCK_TYPES:
            _launch_blocks(rule, out, chunks)
        else:
            _launch_tokens(rule, out, chunks, writes=writes)
        copy_states(rule.units, rule.work.table, chunks.rows, chunks.saved)


def _launch_tokens(
    rule: RuleArguments, out: Tensor, chunks: StateChunks | None, *, writes: bool
) -> None:
    """Launch the rule of decode rows, or of chunks token by token."""
    heads, values = rule.v.shape[1:]
    keys = rule.k.shape[2]
    rows = rule.work if chunks is None else chunks
    longest = 1 if chunks is None else chunks.longest
    tune = decode_tune(values, len(rows.rows) * heads, longest)
    spacing = None if chunks is None else chunks.spacing
    recur[triton.cdiv(values, tune.columns), heads, len(rows.rows)](
        **_gates(rule),
        **_states(rule),
        out=out,
        rows=rows.rows,
        starts=rows.starts,
        counts=None if chunks is None else chunks.counts,
        offsets=None if chunks is None else chunks.offsets,
        first_token=rule.work.first_token if chunks is None else 0,
        lead=None if spacing is None else spacing.lead,
        stride=None if spacing is None else spacing.stride,
        writes=writes,
        q=rule.q,
        k=rule.k,
        q_stride=rule.q.stride(0),
        k_stride=rule.k.stride(0),
        shared=heads // rule.k.shape[1],
        keys=keys,
        key_pad=padded(keys),
        tile=tune.columns,
        by_channel=rule.decay.by_channel,
        num_warps=tune.warps,
        launch_pdl=early(rule.v),
    )


def _launch_blocks(rule: RuleArguments, out: Tensor, chunks: StateChunks) -> None:
    """Launch the rule of chunks block by block."""
    tokens, heads, values = rule.v.shape
    keys, count = rule.k.shape[2], len(chunks.rows)
    by_channel = rule.decay.by_channel
    block = CHANNEL_BLOCK if by_channel else BLOCK
    blocks = most_blocks(tokens, count, block)
    shape: dict[str, Any] = {
        "keys": keys,
        "key_pad": padded(keys),
        "block": block,
        "pad": triton.next_power_of_2(count),
        "launch_pdl": early(rule.v),
    }
    prepared = _prepare(rule, chunks, blocks, shape)
    tune = carry_tune(keys, values, capability(rule.v.device))
    carry[triton.cdiv(values, tune.columns), heads, count](
        **prepared,
        **_states(rule),
        **shape,
        out=out,
        rows=chunks.rows,
        starts=chunks.starts,
        counts=chunks.counts,
        offsets=chunks.offsets,
        q_stride=prepared["q"].stride(0),
        k_stride=prepared["k"].stride(0),
        shared=heads // prepared["k"].shape[1],
        tile=tune.columns,
        num_warps=tune.warps,
        num_stages=tune.stages,
    )


def _prepare(
    rule: RuleArguments, chunks: StateChunks, blocks: int, shape: dict[str, Any]
) -> dict[str, Any]:
    """Launch what does not depend on the states. Returns what `carry` needs of the
    blocks, by the names of its arguments.
    """
    heads, q, k = rule.v.shape[1], rule.q, rule.k
    squares = blocks, heads, shape["block"], shape["block"]
    prepared: dict[str, Any] = {
        "inverses": None if rule.beta is None else k.new_empty(squares),
        "scores": k.new_empty(squares),
    }
    arguments: dict[str, Any] = {
        **_gates(rule),
        **shape,
        **prepared,
        "q": q,
        "k": k,
        "counts": chunks.counts,
        "offsets": chunks.offsets,
        "q_stride": q.stride(0),
        "k_stride": k.stride(0),
        "chunks": len(chunks.rows),
        "shared": heads // k.shape[1],
        "num_warps": PREPARE_WARPS,
    }
    if rule.decay.by_channel:
        return {**prepared, **_prepare_channels(rule, arguments, blocks)}
    factors = k.new_empty(blocks, heads, FACTORS, shape["block"], dtype=torch.float32)
    prepare[blocks, heads](**arguments, factors=factors)
    plain = {"q": q, "k": k, "written_keys": None, "totals": None}
    return {**prepared, **plain, "factors": factors}


def _prepare_channels(
    rule: RuleArguments, arguments: dict[str, Any], blocks: int
) -> dict[str, Any]:
    """`_prepare` under decays of each channel: returns the scaled queries and keys, and
    what states keep of each channel, by the names of `carry`'s arguments.
    """
    (tokens, heads, _), keys = rule.v.shape, arguments["keys"]
    queries, read_keys, written_keys = rule.k.new_empty(3, tokens, heads, keys).unbind()
    totals = rule.k.new_empty(blocks, heads, keys, dtype=torch.float32)
    prepare_channels[blocks, heads](
        **arguments,
        queries=queries,
        read_keys=read_keys,
        written_keys=written_keys,
        totals=totals,
    )
    return {
        "q": queries,
        "k": read_keys,
        "written_keys": written_keys,
        "totals": totals,
        "factors": None,
    }


def _gates(rule: RuleArguments) -> dict[str, Any]:
    """Returns the arguments of kernels that make decays and strengths of gates, and
    normalise.
    """
    decay, beta = rule.decay, rule.beta
    return {
        "raw": decay.raw,
        "bias": decay.bias,
        "rates": decay.rates,
        "beta": beta,
        "raw_stride": decay.raw.stride(0),
        "beta_stride": 0 if beta is None else beta.stride(0),
        "low": decay.low,
        "high": decay.high,
        "l2_eps": rule.l2_eps,
        "scale": rule.scale,
    }


def _states(rule: RuleArguments) -> dict[str, Any]:
    """Returns the arguments of kernels that read values and update states."""
    units, table = rule.units, rule.work.table
    return {
        "v": rule.v,
        "skip": rule.skip,
        "table": table,
        "pages": units.pages,
        "v_stride": rule.v.stride(0),
        "table_stride": table.stride(0),
        "page_stride": units.pages.stride(0),
        "first_page": units.first_page,
        "first_unit": units.first_unit,
        "per_page": units.pages.shape[1],
        "values": rule.v.shape[2],
    }
