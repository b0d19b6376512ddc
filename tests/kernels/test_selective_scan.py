"""Selective scans of sequences that come in steps, against transformers' of the whole
sequence.
"""

import pytest
import torch
from torch import Tensor
from transformers.models.jamba import modeling_jamba as jamba

from minfer.kernels import selective_scan_kernels
from minfer.kernels.scan_arguments import ScanWeights
from minfer.kernels.selective_scan import selective_scan
from minfer.kernels.state_work import StateWork

from .conftest import ints
from .paged import PagedRows
from .test_fused import LIMIT, TYPES, error, randn

UNITS, UNIT, SIZE = 3, 24, 6  # blocks of channels, the channels of one, their numbers
CHANNELS = UNITS * UNIT
WIDTHS = (CHANNELS, CHANNELS, SIZE, SIZE, CHANNELS)  # of x, steps, B, C, gates


def expected(inputs: Tensor, weights: ScanWeights) -> tuple[Tensor, Tensor]:
    """Results [tokens, channels] by transformers in float64, and the last states
    [channels, N].
    """
    x, raw, b, c, gate = inputs.double().split_with_sizes(WIDTHS, 1)
    bias, rates, skip = (weight.double() for weight in weights)
    out, state = jamba.mamba_selective_scan(
        *(x.mT[None], raw.mT[None], -rates, b.mT[None], c.mT[None]),
        D=skip,
        z=gate.mT[None],
        delta_bias=bias,
        delta_softplus=True,
        return_last_state=True,
    )
    return out[0].mT, state[0]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_steps_give_what_transformers_gives_at_once(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several tiles, of which the last is partly outside.
    monkeypatch.setattr(selective_scan_kernels, "CHANNELS", 32)
    weights = ScanWeights(
        2 * randn(CHANNELS, dtype=torch.float32, device=device, seed=1),
        randn(CHANNELS, SIZE, dtype=torch.float32, device=device, seed=2).exp(),
        randn(CHANNELS, dtype=torch.float32, device=device, seed=3),
    )
    rows = PagedRows(3, UNITS, SIZE, UNIT, dtype=torch.float32, device=device)
    sequences = [
        randn(n, sum(WIDTHS), dtype=dtype, device=device, seed=n) for n in (37, 8)
    ]
    outs: dict[int, list[Tensor]] = {0: [], 2: []}

    def step(work: StateWork, *parts: tuple[int, Tensor]) -> None:
        x, raw, b, c, gate = torch.cat([part for _, part in parts]).split_with_sizes(
            WIDTHS, 1
        )
        out = selective_scan(x, raw, b, c, gate, weights, rows.units, work)
        places = out.split_with_sizes([len(inputs) for _, inputs in parts])
        for (row, _), piece in zip(parts, places, strict=True):
            outs[row].append(piece)

    first, second = sequences
    step(rows.work({2: 0}, (0, 0, 11)), (2, second[:1]), (0, first[:11]))
    step(rows.work({2: 1}, (0, 11, 22), padding=2), (2, second[1:2]), (0, first[11:33]))
    step(rows.work({0: 33, 2: 2}), (0, first[33:34]), (2, second[2:3]))
    step(rows.work({}, (2, 3, 5), (0, 34, 3)), (2, second[3:]), (0, first[34:]))
    for row, inputs in ((0, first), (2, second)):
        result, last = expected(inputs, weights)
        assert error(torch.cat(outs[row]), result) < LIMIT[dtype]
        state = rows.states(row)[0].transpose(1, 2).flatten(0, 1)
        assert error(state, last.cpu()) < LIMIT[torch.float32]
    assert rows.written() == 2 * SIZE * CHANNELS


@pytest.mark.usefixtures("poisoned")
def test_states_take_accepted_drafts_alone(device: str) -> None:
    """Two rows with drafts, 3 and 1, of which 3 and 0 are accepted, beside a decode
    row.
    """
    kind = torch.float32
    weights = ScanWeights(
        2 * randn(CHANNELS, dtype=kind, device=device, seed=1),
        randn(CHANNELS, SIZE, dtype=kind, device=device, seed=2).exp(),
        randn(CHANNELS, dtype=kind, device=device, seed=3),
    )
    rows = PagedRows(3, UNITS, SIZE, UNIT, dtype=kind, device=device)
    texts = [randn(9, sum(WIDTHS), dtype=kind, device=device, seed=n) for n in (4, 5, 6)]
    starts, accepted = (5, 1, 4), (4, 1)

    def scan(inputs: Tensor, work: StateWork) -> Tensor:
        x, raw, b, c, gate = inputs.split_with_sizes(WIDTHS, 1)
        return selective_scan(x, raw, b, c, gate, weights, rows.units, work)

    for row, (inputs, start) in enumerate(zip(texts, starts, strict=True)):
        scan(inputs[:start], rows.work({}, (row, 0, start)))
    before = rows.states(0, 1)
    work = rows.drafted_work({0: (5, 4), 1: (1, 2)}, {2: 4}, places=3)
    drafted = [
        inputs[start : start + 4]
        for inputs, start in zip(texts[:2], starts[:2], strict=True)
    ]
    mixed = rows.interleaved(drafted, [texts[2][4:5]])
    out = scan(mixed, work)
    assert torch.equal(rows.states(0, 1), before)
    scan(mixed, work.accepted_work(ints(accepted, device)))
    places = [[0, 3, 5, 7], [1, 4], [2]]
    for row, (inputs, start) in enumerate(zip(texts, starts, strict=True)):
        at, end = places[row], start + (*accepted, 1)[row]
        result, _ = expected(inputs, weights)
        assert error(out[at], result[start : start + len(at)]) < LIMIT[kind]
        _, last = expected(inputs[:end], weights)
        state = rows.states(row)[0].transpose(1, 2).flatten(0, 1)
        assert error(state, last.cpu()) < LIMIT[kind]
