"""Causal convolutions of sequences that come in steps, against transformers' of the whole
sequence.
"""

import pytest
import torch
from torch import Tensor
from transformers.models.lfm2 import modeling_lfm2 as lfm2

from minfer.kernels import short_conv_kernels
from minfer.kernels.short_conv import ConvActivation, short_conv
from minfer.kernels.state_work import StateWork

from .conftest import ints
from .paged import PagedRows
from .test_fused import LIMIT, TYPES, error, randn

UNITS, UNIT = 3, 24  # blocks of channels, and the channels of one
CHANNELS = UNITS * UNIT


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("width", "has_bias", "activation"), [(4, True, "silu"), (3, False, None)]
)
def test_steps_give_what_transformers_gives_at_once(
    device: str,
    dtype: torch.dtype,
    width: int,
    has_bias: bool,
    activation: ConvActivation | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Several tiles, of which the last is partly outside.
    monkeypatch.setattr(short_conv_kernels, "DECODE_CHANNELS", 2 * 32)
    monkeypatch.setattr(short_conv_kernels, "CHUNK_CHANNELS", 16)
    weight = randn(CHANNELS, width, dtype=dtype, device=device, seed=1)
    bias = randn(CHANNELS, dtype=dtype, device=device, seed=2) if has_bias else None
    rows = PagedRows(3, UNITS, width - 1, UNIT, dtype=dtype, device=device)
    sequences = [randn(n, CHANNELS, dtype=dtype, device=device, seed=n) for n in (90, 8)]
    outs: dict[int, list[Tensor]] = {0: [], 2: []}

    def step(work: StateWork, *parts: tuple[int, Tensor]) -> None:
        x = torch.cat([inputs for _, inputs in parts])
        x = torch.cat((x, x), 1)[:, :CHANNELS]  # the stride of tokens is wider
        out = short_conv(x, weight, bias, activation, rows.units, work)
        places = out.split_with_sizes([len(inputs) for _, inputs in parts])
        for (row, _), piece in zip(parts, places, strict=True):
            outs[row].append(piece)

    first, second = sequences
    step(rows.work({2: 0}, (0, 0, 20)), (2, second[:1]), (0, first[:20]))
    step(rows.work({2: 1}, (0, 20, 67), padding=2), (2, second[1:2]), (0, first[20:87]))
    step(rows.work({0: 87, 2: 2}), (0, first[87:88]), (2, second[2:3]))
    step(rows.work({}, (2, 3, 5), (0, 88, 2)), (2, second[3:]), (0, first[88:]))
    for row, x in ((0, first), (2, second)):
        expected = lfm2.causal_conv1d_fn(
            x.double().mT[None],
            weight.double(),
            None if bias is None else bias.double(),
            activation,
        )
        assert error(torch.cat(outs[row]), expected[0].mT) < LIMIT[dtype]
        last = x[1 - width :].view(-1, UNITS, UNIT).transpose(0, 1)
        assert torch.equal(rows.states(row)[0], last.cpu())
    assert rows.written() == 2 * (width - 1) * CHANNELS


@pytest.mark.usefixtures("poisoned")
def test_a_state_of_more_inputs_than_a_block(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No program reads it after another wrote it."""
    monkeypatch.setattr(short_conv_kernels, "CHUNK_TOKENS", 2)
    width = 6
    weight = randn(CHANNELS, width, dtype=torch.float32, device=device, seed=1)
    rows = PagedRows(1, UNITS, width - 1, UNIT, dtype=torch.float32, device=device)
    x = randn(18, CHANNELS, dtype=torch.float32, device=device, seed=2)
    outs = []
    for start, count in ((0, 7), (7, 11)):
        work, part = rows.work({}, (0, start, count)), x[start : start + count]
        outs.append(short_conv(part, weight, None, None, rows.units, work))
    expected = lfm2.causal_conv1d_fn(x.mT[None], weight, None, None)[0].mT
    assert error(torch.cat(outs), expected.double()) < 1e-6


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("width", [3, 4])
def test_states_take_in_the_accepted_inputs_alone(
    device: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows with drafts, 3 and 1, of which 3 and 0 are accepted, beside a decode
    row.
    """
    monkeypatch.setattr(short_conv_kernels, "CHUNK_TOKENS", 2)
    weight = randn(CHANNELS, width, dtype=torch.float32, device=device, seed=1)
    rows = PagedRows(3, UNITS, width - 1, UNIT, dtype=torch.float32, device=device)
    texts = [
        randn(9, CHANNELS, dtype=torch.float32, device=device, seed=n) for n in (4, 5, 6)
    ]
    starts, accepted = (5, 1, 4), (4, 1)

    def convolve(x: Tensor, work: StateWork) -> Tensor:
        return short_conv(x, weight, None, "silu", rows.units, work)

    for row, (x, start) in enumerate(zip(texts, starts, strict=True)):
        convolve(x[:start], rows.work({}, (row, 0, start)))
    before = rows.states(0, 1)
    work = rows.drafted_work({0: (5, 4), 1: (1, 2)}, {2: 4}, places=3)
    drafted = [
        x[start : start + 4] for x, start in zip(texts[:2], starts[:2], strict=True)
    ]
    mixed = rows.interleaved(drafted, [texts[2][4:5]])
    out = convolve(mixed, work)
    assert torch.equal(rows.states(0, 1), before)
    convolve(mixed, work.accepted_work(ints(accepted, device)))
    places = [[0, 3, 5, 7], [1, 4], [2]]
    for row, (x, start) in enumerate(zip(texts, starts, strict=True)):
        expected = lfm2.causal_conv1d_fn(x.mT[None], weight, None, "silu")[0].mT
        at = places[row]
        assert error(out[at], expected[start : start + len(at)].double()) < 1e-6
        inputs = torch.cat((torch.zeros_like(x), x[: start + (*accepted, 1)[row]]))
        last = inputs[1 - width :].view(-1, UNITS, UNIT).transpose(0, 1)
        assert torch.equal(rows.states(row)[0], last.cpu())
