"""Kinds of steps, and what they are padded to."""

from itertools import product

import pytest
from attrs import asdict, evolve

from minfer.effects.execution.device.step_shape import (
    CHUNK_SIZES,
    DECODE_DIVISIONS,
    MAX_LONE_CHUNK_ROWS,
    TOKENS_PER_PADDING_ROW,
    StepShape,
    bucket_of,
    max_lines,
    mixed_bucket_of,
)
from minfer.effects.models.layout.shapes import max_step_drafts
from minfer.records.config import EngineConfig
from minfer.records.speculation import HOST, Speculation

SEQS = 256  # of the engine
SAME = ("filtered", "scored", "splits", "keeps_logits", "proposes")
SIZES = ("decode_rows", "tokens", "chunks", "draws", "longest", "verified", "drafts")


@pytest.mark.parametrize("decode_rows", [0, 1, 5, 100])
@pytest.mark.parametrize("tokens", [40, 1500, 3000])
@pytest.mark.parametrize("chunks", [1, 9, 32, 33, 40])
def test_a_padded_kind_has_room_for_the_exact_one(
    tokens: int, chunks: int, decode_rows: int
) -> None:
    for longest in {tokens - chunks + 1, -(-tokens // chunks)}:
        shape = StepShape(
            decode_rows=decode_rows,
            draws=decode_rows + chunks,
            tokens=tokens,
            chunks=chunks,
            longest=longest,
        )
        assert shape.fits(1 << 14) == (chunks <= CHUNK_SIZES[-1])
        if shape.fits(1 << 14):
            check(shape)


@pytest.mark.parametrize("decode_rows", [1, 5, 100])
def test_so_has_that_of_a_step_without_history(decode_rows: int) -> None:
    check(
        StepShape(
            decode_rows=decode_rows,
            draws=decode_rows,
            filtered=True,
            scored=True,
            keeps_logits=True,
        )
    )


@pytest.mark.parametrize("decode_rows", [1, 5, 100])
@pytest.mark.parametrize("verified", [1, 3, 70])
@pytest.mark.parametrize("tokens", [0, 40])
@pytest.mark.parametrize("drafts", [1, 5, 7])
def test_so_has_that_of_a_step_with_drafts(
    decode_rows: int, verified: int, tokens: int, drafts: int
) -> None:
    shape = StepShape(
        decode_rows=decode_rows,
        draws=decode_rows,
        verified=min(decode_rows, verified),
        drafts=drafts,
    )
    if tokens:
        shape = evolve(
            shape, tokens=tokens, chunks=1, longest=tokens, draws=decode_rows + 1
        )
    check(shape)
    padded = shape.padded(SEQS)
    assert padded.decode_inputs >= shape.decode_inputs
    assert padded.lines >= shape.lines
    assert padded.verified <= padded.decode_rows
    assert evolve(shape, proposes=True).padded(SEQS) != padded


@pytest.mark.parametrize(
    ("decode_rows", "verified", "drafts", "padded"),
    [(4, 1, 6, 4), (13, 2, 8, 16), (40, 21, 5, 40), (64, 1, 2, 64), (64, 3, 3, 4)],
)
def test_where_it_costs_little_all_rows_have_drafts(
    decode_rows: int, verified: int, drafts: int, padded: int
) -> None:
    """Of such steps there are graphs."""
    shape = StepShape(
        decode_rows=decode_rows, draws=decode_rows, verified=verified, drafts=drafts
    )
    assert shape.padded(SEQS).verified == padded


def test_there_is_room_for_the_drafts_of_every_step() -> None:
    for seqs, budget, rows, drafts in product((1, 7, 100), (128, 900), (0, 5), (1, 5)):
        spec_config = Speculation(drafter=HOST, drafts=drafts, rows=rows, adaptive=False)
        config = EngineConfig(
            num_blocks=9,
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            speculation=spec_config,
        )
        room, lines = max_step_drafts(config), max_lines(config)
        for decode_rows in range(
            1, min(seqs, rows or seqs) + 1
        ):  # in more there are none
            shape = StepShape(
                decode_rows=decode_rows,
                draws=decode_rows,
                verified=decode_rows,
                drafts=drafts,
            )
            for each_shape in (shape, shape.padded(seqs)):
                assert each_shape.verified <= room
                fitting = evolve(
                    each_shape, drafts=min(each_shape.drafts, room // each_shape.verified)
                )
                assert fitting.lines <= lines
                assert fitting == each_shape or decode_rows * (1 + drafts) > budget / 2


def check(shape: StepShape) -> None:
    padded = shape.padded(SEQS)
    exact, room = asdict(shape), asdict(padded)
    assert all(room[size] >= exact[size] for size in SIZES)
    assert all(room[name] == exact[name] for name in SAME)
    assert padded.longest <= padded.tokens
    assert padded.padded(SEQS) == padded
    assert padded.fits(1 << 14)


def test_too_many_tokens_do_not_fit() -> None:
    shape = StepShape(decode_rows=0, draws=1, tokens=130, chunks=1, longest=130)
    assert shape.fits(192)
    assert not shape.fits(191)


def test_beside_few_prefill_tokens_there_are_few_sizes_of_decode_rows() -> None:
    sizes = [mixed_bucket_of(n, 16, SEQS) for n in range(257)]
    assert all(size >= n for n, size in enumerate(sizes))
    assert sorted({*sizes[:65]}) == [0, 1, 2, 4, 8, 16, 32, 64]
    assert all(size <= 1.5 * n for n, size in enumerate(sizes) if n > 64)


@pytest.mark.parametrize("seqs", [1, 5, 8, 100, 256, 1000])
@pytest.mark.parametrize("tokens", [64, 192, 512, 1024, 3072, 8192])
def test_beside_more_prefill_tokens_there_are_fewer(tokens: int, seqs: int) -> None:
    most = mixed_bucket_of(seqs, 0, seqs)
    for count in range(seqs + 1):
        size, exact = (mixed_bucket_of(count, beside, seqs) for beside in (tokens, 0))
        assert count <= size <= most
        assert size < exact + max(1, tokens // TOKENS_PER_PADDING_ROW)
        assert mixed_bucket_of(size, tokens, max(size, seqs)) == size
        assert bool(size) == bool(count)
    if tokens == 8192 and seqs <= 256:
        assert {mixed_bucket_of(count, tokens, seqs) for count in range(seqs + 1)} == {
            0,
            most,
        }


def test_a_lone_chunk_has_graphs_of_its_own_only_beside_few_rows() -> None:
    lone = StepShape(
        decode_rows=MAX_LONE_CHUNK_ROWS,
        draws=MAX_LONE_CHUNK_ROWS + 1,
        tokens=64,
        chunks=1,
        longest=64,
    )
    assert lone.padded(SEQS).chunks == 1
    assert (
        evolve(lone, decode_rows=MAX_LONE_CHUNK_ROWS + 1).padded(SEQS).chunks
        == CHUNK_SIZES[1]
    )


@pytest.mark.parametrize("draws", [*range(1, 40), 100, 250])
def test_deferred_draws_are_padded_by_their_number_only(draws: int) -> None:
    late = StepShape(
        decode_rows=0, draws=draws, filtered=True, scored=True, deferred_draws=True
    )
    padded = late.padded(SEQS)
    assert padded == evolve(late, draws=bucket_of(draws, DECODE_DIVISIONS))
    assert draws <= padded.draws <= max(draws + 7, draws * (1 + 2 / DECODE_DIVISIONS))
    assert padded.padded(SEQS) == padded
    assert padded.fits(1)
    assert padded.sampling_needs == late.sampling_needs


def test_deferred_draws_have_few_sizes() -> None:
    sizes = {
        StepShape(decode_rows=0, draws=n, deferred_draws=True).padded(SEQS).draws
        for n in range(1, 257)
    }
    assert {1, 2, 4, 8} < sizes
    assert len(sizes) < 40


def test_deferred_draws_share_no_graph_with_a_step_of_as_many_rows() -> None:
    step = StepShape(decode_rows=8, draws=8, keeps_logits=True)
    assert StepShape(decode_rows=0, draws=8, deferred_draws=True).padded(
        SEQS
    ) != step.padded(SEQS)
