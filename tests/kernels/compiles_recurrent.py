"""Compile the kernels of recurrent layers for a Hopper GPU where there is none, as
`compiles.py` does others: `python -m tests.kernels.compiles_recurrent`: of Qwen3-Next,
Kimi-Linear, Granite 4, Falcon-H1, Jamba and LFM2. With `--few`, the rule in chunks, which
takes longest, is left out.
"""

import sys
from typing import NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from minfer import kernels
from minfer.kernels import target
from minfer.kernels.gated_norm import gated_norm
from minfer.kernels.gated_rule import gated_rule
from minfer.kernels.leaves import Norm
from minfer.kernels.paged_states import PagedUnits
from minfer.kernels.rule_arguments import DecayGates
from minfer.kernels.scan_arguments import ScanWeights
from minfer.kernels.selective_scan import selective_scan
from minfer.kernels.short_conv import ConvActivation, short_conv
from minfer.kernels.state_work import DraftSpacing, StateChunks, StateWork

from .compiles import HOPPER, compiled, half, ints
from .specialization import Elsewhere

TOKENS, ROWS, CHUNKS, PAGES = 512, 4, 2, 3
DRAFTS = 3  # of a row


class Sizes(NamedTuple):
    """A layer's heads."""

    key_heads: int
    heads: int
    keys: int  # K
    values: int  # V
    is_delta: bool = True
    by_channel: bool = False


QWEN, KIMI = Sizes(16, 32, 128, 128), Sizes(32, 32, 128, 128, by_channel=True)
GRANITE, FALCON = (Sizes(1, n, k, 64, is_delta=False) for n, k in ((128, 128), (32, 256)))


def work(*, chunks: bool) -> StateWork:
    """Decode rows, or chunks."""
    table, none, columns = ints(9, PAGES), ints(0), ints(CHUNKS)
    if not chunks:
        return StateWork(table, ints(ROWS), ints(ROWS), None)
    spans = StateChunks(columns, columns, columns, columns, longest=TOKENS)
    return StateWork(table, none, none, spans)


def drafted_work() -> StateWork:
    """Decode rows, all with drafts."""
    table, none, columns = ints(9, PAGES), ints(0), ints(ROWS)
    spacing = DraftSpacing(lead=0, stride=ROWS)
    drafted = StateChunks(columns, columns, columns, columns, 1 + DRAFTS, spacing)
    return StateWork(table, none, none, None, drafted=drafted, first_token=ROWS)


def drafted_steps() -> tuple[StateWork, StateWork]:
    """A step of rows with drafts, and what updates their states."""
    step = drafted_work()
    return step, step.accepted_work(ints(ROWS))


def paged(units: int, *shape: int, dtype: torch.dtype) -> PagedUnits:
    return PagedUnits(torch.empty(8, units, *shape, dtype=dtype), units, units, 1)


def rule(sizes: Sizes, states: torch.dtype, step: StateWork) -> None:
    """The rule of a step."""
    tokens = TOKENS if step.chunks is not None else ROWS
    key_size, heads = sizes.key_heads * sizes.keys, sizes.heads
    mixed = half(tokens, 2 * key_size + heads * sizes.values)
    q, k = (
        mixed[:, i * key_size :][:, :key_size].view(tokens, sizes.key_heads, sizes.keys)
        for i in (0, 1)
    )
    v = mixed[:, 2 * key_size :].view(tokens, heads, sizes.values)
    gates = (heads, sizes.keys) if sizes.by_channel else (heads,)
    ones = torch.ones(heads)
    gated_rule(
        q,
        k,
        v,
        DecayGates(half(tokens, *gates), torch.ones(gates), ones),
        half(tokens, heads) if sizes.is_delta else None,
        paged(heads, sizes.keys, sizes.values, dtype=states),
        step,
        skip=None if sizes.is_delta else ones,
        l2_eps=1e-6 if sizes.is_delta else None,
        scale=sizes.keys**-0.5,
    )


def convolution(channels: int, width: int, bias: Tensor | None) -> None:
    """Of decode rows, of chunks, and of rows with drafts."""
    units = paged(channels // 128, width - 1, 128, dtype=torch.bfloat16)
    activation: ConvActivation | None = None if bias is None else "silu"
    for step in (work(chunks=False), work(chunks=True), *drafted_steps()):
        x = half(TOKENS if step.chunks is not None else ROWS, channels)
        short_conv(x, half(channels, width), bias, activation, units, step)


def scan(channels: int, numbers: int, states: torch.dtype) -> None:
    """Of decode rows, of chunks, and of rows with drafts."""
    units = paged(channels // 32, numbers, 32, dtype=states)
    vector = torch.ones(channels)
    weights = ScanWeights(vector, torch.ones(channels, numbers), vector)
    for step in (work(chunks=False), work(chunks=True), *drafted_steps()):
        tokens = TOKENS if step.chunks is not None else ROWS
        x, gate = half(tokens, 2 * channels).chunk(2, 1)
        b, c = half(tokens, numbers), half(tokens, numbers)
        selective_scan(x, x, b, c, gate, weights, units, step)


def main(skip_slow: bool) -> None:
    driver.set_active(Elsewhere(HOPPER))
    JITFunction.run = compiled
    target.default_capability = HOPPER
    kernels.interpreting = True  # kernels take tensors of the CPU
    convolution(8192, 4, half(8192))
    convolution(2048, 3, None)
    for states in (torch.float32, torch.bfloat16):
        scan(8192, 16, states)
    x = half(ROWS, 4096)
    gated_norm(x, x, Norm(half(128), 1e-6), 128)
    gated_norm(x, x, Norm(half(128), 1e-6), 128, "sigmoid")
    gated_norm(x, x, Norm(half(4096), 1e-6), 4096, gate_first=True)
    for sizes in (QWEN, KIMI, GRANITE, FALCON):
        for step in (work(chunks=False), *drafted_steps()):
            rule(sizes, torch.float32, step)
    rule(QWEN, torch.bfloat16, work(chunks=False))
    if not skip_slow:
        for sizes in (QWEN, KIMI, GRANITE, FALCON):
            rule(sizes, torch.float32, work(chunks=True))


if __name__ == "__main__":
    main(skip_slow="--few" in sys.argv)
