"""Rows as words: what a change writes is what the device's columns then say."""

import math
from typing import Any

import pytest
import torch
from attrs import evolve

from minfer.effects.execution.device.device_rows import (
    DeviceRows,
    SamplingNeeds,
    aligned,
    row_values,
    words_of,
)
from minfer.kernels import plain
from minfer.records.config import CacheGroup
from minfer.records.request import Request, SamplingParams
from minfer.sampling import reference_sampler as sample
from minfer.sampling.params import ROW_FIELDS
from minfer.speculate.rejection import Streams
from tests.core.executing import opened

VOCAB = 50
PLAIN = SamplingParams(temperature=0.7)


@pytest.fixture
def rows() -> DeviceRows:
    return DeviceRows(5, 3, VOCAB, torch.device("cpu"))


def request(sampling: SamplingParams = PLAIN, seed: int = 7) -> Request:
    return Request(id="r", prompt=(3, 4), max_tokens=5, sampling=sampling, seed=seed)


def change(rows: DeviceRows) -> None:
    """Make all changes, as a step does."""
    words = [torch.from_numpy(words_part) for words_part in rows.take()]
    plain.scatter(rows.arena, torch.cat(words))


def test_a_row_has_a_word_for_each_field_of_the_table() -> None:
    first = opened(request(), ())
    assert set(row_values(first.sampling, VOCAB)) == set(ROW_FIELDS)
    assert len(words_of(first.sampling, VOCAB)) == len(ROW_FIELDS)


def test_a_row_has_what_it_was_opened_with(rows: DeviceRows) -> None:
    sampling = SamplingParams(temperature=0.7, top_k=4, top_p=0.9, min_p=0.25, logprobs=3)
    rows.open(2, opened(request(sampling), (8, 9), sample=1))
    change(rows)
    assert rows.sampling.temperature[:6].tolist() == pytest.approx([0, 0, 0.7, 0, 0, 0])
    assert rows.sampling.top_k[2] == 4
    assert float(rows.sampling.top_p[2]) == pytest.approx(0.9)
    assert float(rows.sampling.deepest[2]) == pytest.approx(-math.log(0.25))
    assert rows.requested_logprobs[2] == 4
    assert int(rows.stream[2]) % 2**64 == sample.stream(7, 1)
    assert rows.table[0, 2].tolist() == [8, 9, 0]
    assert rows.owners[2] is not None
    assert not rows.changes


def test_where_coins_decide_a_row_has_three_streams(rows: DeviceRows) -> None:
    assert rows.coins is rows.draft_stream is None
    three = DeviceRows(5, 3, VOCAB, torch.device("cpu"), rejects=True)
    three.open(2, opened(request(), (8,), sample=1))
    change(three)
    streams = Streams.of(7, 1)
    assert int(three.stream[2]) % 2**64 == streams.picks == sample.stream(7, 1)
    assert three.draft_stream is not None
    assert three.coins is not None
    assert int(three.draft_stream[2]) % 2**64 == streams.draft
    assert int(three.coins[2]) % 2**64 == streams.coins
    assert float(three.sampling.temperature[2]) == pytest.approx(0.7)
    assert not three.coins[[0, 1, 3, 4, 5]].any()


@pytest.mark.parametrize(
    ("settings", "needs"),
    [
        ({}, SamplingNeeds(False, False)),
        ({"top_k": 5}, SamplingNeeds(True, False)),
        ({"top_k": VOCAB}, SamplingNeeds(False, False)),
        ({"top_k": -1}, SamplingNeeds(False, False)),
        ({"top_p": 0.5}, SamplingNeeds(True, False)),
        ({"min_p": 0.5}, SamplingNeeds(True, False)),
        ({"top_k": 5, "temperature": 0}, SamplingNeeds(False, False)),
        ({"logprobs": 0}, SamplingNeeds(False, True)),
        ({"logprobs": 2, "top_p": 0.5}, SamplingNeeds(True, True)),
    ],
    ids=str,
)
def test_what_a_row_wants(
    rows: DeviceRows, settings: dict[str, Any], needs: SamplingNeeds
) -> None:
    rows.open(0, opened(request(evolve(PLAIN, **settings)), (1,)))
    rows.open(1, opened(request(), (2,)))
    assert rows.sampling_needs((0,)) == needs
    assert rows.sampling_needs((1,)) == SamplingNeeds(False, False)
    assert rows.sampling_needs((1, 0)) == needs


def test_all_that_leaves_nothing_out_is_written_alike(rows: DeviceRows) -> None:
    for row, top_k in enumerate((0, -1, VOCAB, VOCAB + 1)):
        rows.open(row, opened(request(evolve(PLAIN, top_k=top_k)), (1,)))
    change(rows)
    assert not rows.sampling.top_k.any()
    assert rows.sampling.deepest[:4].isinf().all()
    assert rows.sampling.temperature[0] > 0


def test_tables_grow_and_batches_are_padded_with_the_scratch_row(
    rows: DeviceRows,
) -> None:
    rows.set_table(1, 0, (4,))
    rows.set_table(1, 1, (7, 5))
    rows.set_batch((1, 3, 0), 4)
    change(rows)
    assert rows.table[0, 1].tolist() == [4, 7, 5]
    assert rows.batch[:4].tolist() == [1, 3, 0, rows.scratch]
    assert not rows.table[0, [0, 2, 3, 4, 5]].any()


def test_each_page_of_a_block_has_a_table() -> None:
    groups = CacheGroup(20, pages=2), CacheGroup()
    rows = DeviceRows(3, 4, 160, torch.device("cpu"), groups=groups)
    rows.set_table(1, 0, (10, 11, 12, 13), group=0)
    rows.set_table(1, 0, (20, 21), group=1)
    rows.set_table(1, 4, (14, 15), group=0)
    rows.set_table(1, 2, (22, 23), group=1)
    change(rows)
    assert rows.table[:, 1].tolist() == [
        [10, 12, 14, 0],
        [11, 13, 15, 0],
        [20, 21, 22, 23],
    ]
    assert not rows.table[:, [0, 2, 3]].any()


def test_columns_begin_where_kernels_want_them(rows: DeviceRows) -> None:
    assert all(start % 4 == 0 for start in rows.column_starts.values())
    assert [aligned(n) for n in (0, 1, 4, 5)] == [0, 4, 4, 8]
