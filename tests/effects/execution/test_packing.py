"""Plans as words: what is sent, and how often."""

from functools import partial

import numpy as np
import pytest
import torch
from attrs import evolve

from minfer.effects.execution.device.device_rows import DeviceRows
from minfer.effects.execution.device.step_shape import StepShape, max_draws, max_lines
from minfer.effects.execution.packing.inputs import ForwardWords, dummy_words, max_words
from minfer.effects.execution.packing.pack_plan import Packer
from minfer.effects.models.layout.shapes import max_step_drafts, padded_tokens
from minfer.records.config import EngineConfig
from minfer.records.plan import Draft, Plan, PrefillTokens
from minfer.records.request import Request, SamplingParams
from minfer.records.speculation import HOST, Speculation
from tests.core.executing import opened
from tests.effects.execution.tiny_engine import Model, Run


@pytest.mark.long
@pytest.mark.usefixtures("device_kind")
def test_a_steady_decode_names_its_rows_once(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, ...]] = []
    set_batch = DeviceRows.set_batch

    def counted(self: DeviceRows, rows: tuple[int, ...], size: int) -> None:
        calls.append(rows)
        set_batch(self, rows, size)

    monkeypatch.setattr(DeviceRows, "set_batch", counted)
    run = Run.start(model, num_blocks=200)
    run.serve([Request(id=str(i), prompt=(i + 2,), max_tokens=60) for i in range(8)])
    assert len(calls) == 1


# --- words ------------------------------------------------------------------------------


def packer(pad: bool) -> Packer:
    rows = DeviceRows(8, 4, 50, torch.device("cpu"))
    for row in range(6):
        request = Request(id=str(row), prompt=(row,), max_tokens=9)
        rows.open(row, opened(request, (row,)))
    rows.take()
    return Packer(rows, partial(padded, rows) if pad else lambda shape: shape)


def padded(rows: DeviceRows, shape: StepShape) -> StepShape:
    return shape.padded(rows.scratch)


# Rows 5 and 2 feed themselves; 1 goes on with its history, 4 ends it.
MIXED = Plan(
    step=0,
    run_ids=(1, 2, 3, 4),
    rows=(5, 1, 2, 4),
    starts=(7, 2, 9, 0),
    num_scheduled_tokens=(1, 3, 1, 2),
    max_sampled_tokens=(1, 0, 1, 1),
    fills=(PrefillTokens(1, (11, 12, 13)), PrefillTokens(3, (21, 22))),
)


@pytest.mark.parametrize("pad", [False, True])
def test_a_mixed_step_is_packed_as_it_is_read(pad: bool) -> None:
    [forward] = packer(pad).forwards(MIXED)
    shape = forward.shape
    decode_rows = shape.decode_rows
    assert (decode_rows, shape.longest) == ((4, 64) if pad else (2, 3))
    inputs = ForwardWords.of(torch.from_numpy(forward.words), shape)
    assert inputs.sampling_split is None
    assert inputs.prefill is not None
    tokens, chunks, draws = (
        lines.numpy()
        for lines in (
            inputs.prefill.tokens,
            inputs.prefill.chunks,
            inputs.prefill.draws,
        )
    )
    assert tokens[:, :5].tolist() == [
        [11, 12, 13, 21, 22],
        [2, 3, 4, 0, 1],
        [1, 1, 1, 4, 4],
    ]
    assert (tokens[2, 5:] == 8).all()  # the scratch row's
    assert chunks[:, :2].tolist() == [
        [1, 4],
        [2, 0],
        [3, 2],
        [decode_rows, decode_rows + 3],
    ]
    assert not chunks[2, 2:].any()
    lines = forward.draw.lines
    assert lines is not None
    assert draws[:, lines].tolist() == [[5, 2, 4], [0, 1, decode_rows + 4]]
    assert forward.draw.entries == [0, 2, 3]
    names = [owner.name[0] for owner in forward.draw.owners if owner is not None]
    assert names == ["5", "2", "4"]
    assert forward.longest == 10


@pytest.mark.parametrize("pad", [False, True])
def test_deferred_rows_keep_logits_and_others_are_sampled(pad: bool) -> None:
    [forward] = packer(pad).forwards(evolve(MIXED, deferred=(2, 3)))
    inputs = ForwardWords.of(forward.words, forward.shape)
    assert inputs.sampling_split is not None
    now, kept_rows = inputs.sampling_split
    first, second, third = (0, 1, forward.shape.decode_rows)
    assert now[[first, second, third]].tolist() == [5, 8, 8]
    assert kept_rows[[first, second, third]].tolist() == [8, 2, 4]
    assert (now == 8).sum() == len(now) - 1
    assert (kept_rows == 8).sum() == len(kept_rows) - 2
    assert forward.deferred is not None
    assert (forward.draw.entries, forward.deferred.entries) == ([0], [2, 3])
    assert forward.draw.lines == [0]


def test_a_steady_decode_is_sent_nothing() -> None:
    """Who decodes, and who of them is sampled apart, the device knows from before."""
    plan = Plan(1, (1, 2), (3, 5), (4, 6), (1, 1), (1, 1))
    packs = packer(pad=True)
    [forward] = packs.forwards(plan)
    assert forward.draw.lines is None
    assert forward.deferred is None
    change(packs.rows)
    [repeated] = packs.forwards(plan)
    assert repeated.draw is forward.draw
    bound = evolve(plan, deferred=(0,))
    [bound_forward] = packs.forwards(bound)
    assert bound_forward.shape == evolve(forward.shape, keeps_logits=True)
    assert (bound_forward.draw.entries, bound_forward.draw.lines) == ([1], [1])
    assert bound_forward.deferred is not None
    assert (bound_forward.deferred.entries, bound_forward.deferred.lines) == ([0], [0])
    change(packs.rows)
    assert packs.rows.sampling_split[:, :2].tolist() == [[8, 5], [3, 8]]
    [once_more] = packs.forwards(evolve(bound, step=2))
    assert once_more.deferred is bound_forward.deferred
    assert not packs.rows.changes
    [free] = packs.forwards(plan)
    assert free.deferred is None
    assert free.shape == forward.shape
    assert [
        *map(len, (forward.words, bound_forward.words, once_more.words, free.words))
    ] == [0] * 4


@pytest.mark.parametrize("deferred", [(), (0, 3)])
def test_shapes_do_not_depend_on_which_rows_are_deferred(
    deferred: tuple[int, ...],
) -> None:
    rows = packer(pad=True).rows
    packs = Packer(rows, lambda shape: evolve(shape, keeps_logits=True).padded(256))
    [mixed] = packs.forwards(evolve(MIXED, deferred=deferred))
    lines = ForwardWords.of(mixed.words, mixed.shape).sampling_split
    assert mixed.shape.keeps_logits
    assert lines is not None
    line = {0: 0, 2: 1, 3: mixed.shape.decode_rows}  # of the entries that draw
    expected = np.full((2, mixed.shape.draws), rows.scratch)
    for entry, place in line.items():
        expected[int(entry in deferred), place] = MIXED.rows[entry]
    assert lines.tolist() == expected.tolist()
    assert mixed.draw.entries == [entry for entry in line if entry not in deferred]
    assert (mixed.deferred is None) == (not deferred)
    [decode] = packs.forwards(Plan(1, (1, 2), (3, 5), (4, 6), (1, 1), (1, 1)))
    change(rows)
    assert (decode.shape.keeps_logits, decode.deferred) == (True, None)
    assert rows.sampling_split[:, :2].tolist() == [[3, 5], [8, 8]]


def test_a_last_input_of_a_prompt_is_one_that_a_row_feeds_itself() -> None:
    """As far as the device can tell, once it knows the token."""
    packs = packer(pad=True)
    fills = PrefillTokens(1, (11,)), PrefillTokens(3, (21,))
    plan = evolve(
        MIXED,
        num_scheduled_tokens=(1, 1, 1, 1),
        max_sampled_tokens=(1, 1, 1, 1),
        fills=fills,
    )
    [forward] = packs.forwards(plan)
    assert forward.shape == StepShape(decode_rows=4, draws=4)
    assert forward.draw.entries == [0, 1, 2, 3]
    assert (len(forward.words), forward.longest) == (0, 10)
    change(packs.rows)
    assert packs.rows.batch[:4].tolist() == [5, 1, 2, 4]
    for row, token, position in ((1, 11, 2), (4, 21, 0)):
        last_and_next = int(packs.rows.last[row]), int(packs.rows.next[row])
        assert last_and_next == (token, position)
    [next_forward] = packs.forwards(evolve(plan, step=1, fills=()))
    assert next_forward.draw is forward.draw
    assert not packs.rows.changes


def test_other_fills_beside_it_are_chunks() -> None:
    """Of several inputs, or of one that nothing is drawn from, or where more is wanted
    than a token.
    """
    packs = packer(pad=True)
    scored = Request(id="s", prompt=(1,), max_tokens=9)
    scored = evolve(scored, sampling=SamplingParams(prompt_logprobs=1))
    packs.rows.open(3, opened(scored, (3,)))
    pooled = evolve(
        opened(Request(id="p", prompt=(1,), max_tokens=1), (0,)), pooling="last"
    )
    packs.rows.open(0, pooled)
    plan = Plan(
        step=0,
        run_ids=(1, 2, 3, 4, 5, 6),
        rows=(5, 1, 2, 4, 3, 0),
        starts=(7, 2, 9, 0, 0, 0),
        num_scheduled_tokens=(1, 1, 1, 2, 1, 1),
        max_sampled_tokens=(1, 1, 0, 1, 1, 1),
        fills=(
            PrefillTokens(1, (11,)),
            PrefillTokens(2, (12,)),
            PrefillTokens(3, (21, 22)),
            PrefillTokens(4, (31,)),
            PrefillTokens(5, (41,)),
        ),
    )
    [forward] = packs.forwards(plan)
    assert (forward.shape.decode_rows, forward.shape.chunks) == (4, 8)
    assert forward.draw.entries == [0, 1, 3, 4, 5]
    prefill = ForwardWords.of(forward.words, forward.shape).prefill
    assert prefill is not None
    assert prefill.chunks[0, :5].tolist() == [2, 4, 3, 0, packs.rows.scratch]
    assert forward.has_extra_outputs
    remembering = Packer(packs.rows, partial(padded, packs.rows), keeps_previous=True)
    [chunk_forward] = remembering.forwards(plan)
    assert (chunk_forward.shape.decode_rows, chunk_forward.shape.chunks) == (4, 8)


def change(rows: DeviceRows) -> None:
    """Do as the device does with what it is sent."""
    words = rows.take()
    if not words:
        return
    places, values = np.concatenate(words).reshape(2, -1)
    rows.arena[torch.from_numpy(places).long()] = torch.from_numpy(values)


def test_there_is_room_for_the_largest_step() -> None:
    """As many rows as there are, with as many tokens as there may be, all apart."""
    seqs, budget = 8, 64
    packs = packer(pad=True)
    max_size = max_words(packs.rows, padded_tokens(budget), max_draws(seqs))
    rows = tuple(range(seqs))
    share = budget // seqs
    fills = tuple(PrefillTokens(i, (1,) * share) for i in rows)
    for row in rows:
        request = Request(id=str(row), prompt=(row,), max_tokens=9)
        packs.rows.open(row, opened(request, (1,) * packs.rows.blocks))
    all_ones = (1,) * seqs
    plan = Plan(
        0, rows, rows, (0,) * seqs, (share,) * seqs, all_ones, fills, deferred=rows
    )
    [forward] = packs.forwards(plan)
    packs.rows.set_batch(rows, seqs)
    assert len(forward.words) + sum(map(len, packs.rows.take())) <= max_size


def test_padding_belongs_to_the_scratch_row() -> None:
    shape = StepShape(
        decode_rows=3, draws=5, tokens=64, chunks=2, longest=64, keeps_logits=True
    )
    inputs = ForwardWords.of(dummy_words(shape, 9, 50), shape)
    assert inputs.prefill is not None
    assert inputs.sampling_split is not None
    ids, positions, rows = inputs.prefill.tokens
    assert {*ids} == {0}
    assert [*positions] == [*range(50), *range(14)]
    device_rows, starts, sizes, offsets = inputs.prefill.chunks
    assert [*starts, *sizes, *offsets] == [0, 0, 50, 0, 3, 0]
    assert {*rows} == {*device_rows} == {*inputs.prefill.draws[0]} == {9}
    assert {*inputs.sampling_split.flatten()} == {9}
    assert len(dummy_words(StepShape(decode_rows=3, draws=3), 9, 50)) == 0


# --- drafts -----------------------------------------------------------------------------


# Rows 1 and 4 have drafts, the device's draft model says those of 4; 5 and 2 have none.
DRAFTED = Plan(
    step=0,
    run_ids=(1, 2, 3, 4),
    rows=(5, 1, 2, 4),
    starts=(7, 2, 9, 3),
    num_scheduled_tokens=(1, 4, 1, 3),
    max_sampled_tokens=(1, 4, 1, 3),
    drafts=(Draft(1, (11, 12, 13)), Draft(3)),
)


@pytest.mark.parametrize("pad", [False, True])
def test_rows_with_drafts_come_first(pad: bool) -> None:
    packs = packer(pad)
    packs.drafts = 99
    [forward] = packs.forwards(DRAFTED)
    shape = forward.shape
    padding = 2 if pad else 0  # all four rows have lines for drafts
    assert (shape.verified, shape.drafts, shape.proposes) == (2 + padding, 3, True)
    assert forward.draw.entries == [1, 3, 0, 2]
    assert forward.longest == 10
    inputs = ForwardWords.of(forward.words, shape)
    assert inputs.drafts is not None
    assert inputs.drafts.counts.tolist() == [3, 2] + [0] * padding
    emitted = [[11, 12, 13], [-1, -1, 0]] + [[0, 0, 0]] * padding
    assert inputs.drafts.tokens.T.tolist() == emitted
    assert forward.draw.draft_outputs is not None
    assert forward.draw.draft_outputs.entries == [1, 3]
    _, batch = packs.rows.changes[-1]
    assert batch[:4].tolist() == [1, 4, 5, 2]


def test_a_step_without_drafts_behind_it_has_its_rows_in_order() -> None:
    packs = packer(pad=True)
    packs.drafts = 99
    plain = evolve(
        DRAFTED, num_scheduled_tokens=(1,) * 4, max_sampled_tokens=(1,) * 4, drafts=()
    )
    for plan in (DRAFTED, plain, DRAFTED):
        [forward] = packs.forwards(plan)
        _, batch = packs.rows.changes[-1]
        named = [plan.rows[place] for place in forward.draw.entries]
        assert batch[:4].tolist() == named
        assert (forward.draw.draft_outputs is None) == (not plan.drafts)


BESIDE = evolve(
    MIXED,
    num_scheduled_tokens=(1, 3, 3, 2),
    max_sampled_tokens=(1, 0, 3, 1),
    drafts=(Draft(2),),
)


@pytest.mark.parametrize("pad", [False, True])
def test_rows_with_drafts_and_prompts_are_two_forwards(pad: bool) -> None:
    """Each of a kind that there is a graph for."""
    packs = packer(pad)
    packs.drafts, packs.separates_drafts = 99, True
    rows, prompts = packs.forwards(BESIDE)
    assert (rows.shape.tokens, rows.shape.decode_rows, rows.shape.drafts) == (0, 2, 2)
    assert rows.draw.entries == [2, 0]
    assert rows.draw.draft_outputs is not None
    assert rows.longest == 10
    inputs = ForwardWords.of(rows.words, rows.shape)
    assert inputs.drafts is not None
    assert inputs.drafts.counts.tolist()[:1] == [2]
    assert (prompts.shape.decode_rows, prompts.shape.drafts) == (0, 0)
    assert prompts.draw.entries == [3]
    assert prompts.draw.draft_outputs is None
    inputs = ForwardWords.of(prompts.words, prompts.shape)
    assert inputs.prefill is not None
    assert inputs.prefill.chunks[3, :2].tolist() == [0, 3]
    assert inputs.prefill.draws[:, 0].tolist() == [4, 4]


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("deferred", [(), (0,)])
def test_or_one_in_which_drafts_come_before_prompts(
    deferred: tuple[int, ...], separate: bool
) -> None:
    """Without graphs, or beside rows apart."""
    packs = packer(pad=False)
    packs.drafts, packs.separates_drafts = 99, separate and bool(deferred)
    [forward] = packs.forwards(evolve(BESIDE, deferred=deferred))
    inputs = ForwardWords.of(forward.words, forward.shape)
    assert inputs.prefill is not None
    assert inputs.drafts is not None
    kept_entries = [] if forward.deferred is None else forward.deferred.entries
    assert (forward.draw.entries, kept_entries) == (
        ([2, 3], [0]) if deferred else ([2, 0, 3], [])
    )
    assert inputs.prefill.chunks[3].tolist() == [4, 7]  # behind two rows and two drafts
    assert inputs.prefill.draws.tolist() == [[2, 5, 4], [0, 1, 8]]
    assert inputs.drafts.counts.tolist() == [2]


@pytest.mark.parametrize(("deferred", "inputs"), [((), [3, 4]), ((0,), [7, 8])])
def test_prompts_are_scored_at_their_own_inputs(
    deferred: tuple[int, ...], inputs: list[int]
) -> None:
    """Behind a prompt, and rows and drafts if these are of the same forward."""
    packs = packer(pad=False)
    packs.drafts, packs.separates_drafts = 99, True
    sampling = SamplingParams(prompt_logprobs=0)
    scored = Request(id="x", prompt=(1, 5, 21, 22), max_tokens=9, sampling=sampling)
    packs.rows.open(4, opened(scored, (4,)))
    *_, forward = packs.forwards(evolve(BESIDE, deferred=deferred))
    assert forward.scored is not None
    assert forward.scored.inputs.tolist() == inputs


def uneven(rows: int, deepest: int) -> Plan:
    """A step in which one of these rows has so many drafts, and each other one."""
    all_rows = tuple(range(rows))
    counts = (2,) * (rows - 1) + (1 + deepest,)
    proposed = tuple(Draft(row, (7,) * (counts[row] - 1)) for row in all_rows)
    return Plan(0, all_rows, all_rows, (3,) * rows, counts, counts, drafts=proposed)


@pytest.mark.parametrize("budget", [16, 30, 100, 129, 500])
def test_no_draft_that_fits_into_the_budget_is_left_out(budget: int) -> None:
    """Not for the sake of padding either."""
    spec_config = Speculation(drafter=HOST, drafts=64, adaptive=False)
    config = EngineConfig(
        num_blocks=9,
        max_num_seqs=8,
        max_num_batched_tokens=budget,
        speculation=spec_config,
    )
    packs = packer(pad=True)
    packs.drafts = max_step_drafts(config)
    for rows in range(1, 7):
        for deepest in range(1, min(64, budget // rows - 1) + 1):
            [forward] = packs.forwards(uneven(rows, deepest))
            shape = forward.shape
            assert shape.verified * shape.drafts <= packs.drafts
            assert shape.lines <= max_lines(config)
            inputs = ForwardWords.of(forward.words, shape)
            assert inputs.drafts is not None
            counts = inputs.drafts.counts[:rows].tolist()
            assert counts == [1] * (rows - 1) + [deepest]
            assert (inputs.drafts.tokens[:deepest, rows - 1] == 7).all()


def test_there_is_room_for_the_streams_of_all_rows() -> None:
    """Those by which drafts stand, too."""
    request = Request(id="", prompt=(3,), max_tokens=9)
    all_rows = [
        DeviceRows(8, 4, 50, torch.device("cpu"), rejects=coins)
        for coins in (False, True)
    ]
    for rows in all_rows:
        for row in range(8):
            rows.open(row, opened(request, (1, 2, 3, 4)))
            rows.set_last(row, 1)
    used_words = [sum(map(len, rows.take())) for rows in all_rows]
    max_sizes = [max_words(rows, 64, 8) for rows in all_rows]
    assert used_words[1] - used_words[0] == max_sizes[1] - max_sizes[0] == 2 * 8 * 4
    assert used_words[1] <= max_sizes[1] - 3 * 64


@pytest.mark.parametrize(("seqs", "drafts"), [(8, 1), (8, 7), (1, 8), (3, 5)])
def test_there_is_room_for_the_words_of_all_drafts(seqs: int, drafts: int) -> None:
    packs = packer(pad=True)
    room = packs.drafts = 64
    rows = tuple(range(seqs))
    counts = (1 + drafts,) * seqs
    proposed = tuple(Draft(row, (1,) * drafts) for row in rows)
    plan = Plan(0, rows, rows, (3,) * seqs, counts, counts, drafts=proposed)
    max_size = max_words(packs.rows, 64, max_draws(seqs), room)
    [forward] = packs.forwards(plan)
    used_words = len(forward.words) + sum(map(len, packs.rows.take()))
    assert used_words <= max_size - 2 * seqs * packs.rows.blocks  # and all tables
