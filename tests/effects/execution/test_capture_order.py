"""Which graphs come first."""

import pytest
from attrs import evolve

from minfer.config import EngineConfig
from minfer.effects.execution.capture_order import capture_order
from minfer.effects.execution.device_rows import Wants
from minfer.effects.execution.kinds import DECODE, Kind, bucket_of
from minfer.speculate.length import Costs
from minfer.speculate.settings import DEVICE, HOST, Speculation

CONFIG = EngineConfig(
    num_blocks=999,
    block_size=64,
    max_model_len=8192,
    max_num_seqs=100,
    max_num_batched_tokens=4096,
    vocab_size=1000,
)
MOST = 4096
GREEDY = Wants(filtered=False, scored=False)


def splits(alone: int, context: int) -> int:
    return max(1, context // 512 // alone)


def cut(kind: Kind, context: int) -> Kind:
    return evolve(kind, splits=splits(kind.fed, context) if kind.alone else 1)


def order(
    likely: Wants = GREEDY, most: int = MOST, config: EngineConfig = CONFIG
) -> list[Kind]:
    return capture_order(config, most, likely, [1024, 2048, 4096], cut)


@pytest.mark.parametrize("filtered", [False, True])
def test_first_come_steps_of_every_size_that_draw_as_most_do(filtered: bool) -> None:
    sizes = sorted({bucket_of(n, DECODE) for n in range(1, 101)})
    found = order(Wants(filtered=filtered, scored=False))
    assert [kind.alone for kind in found[: len(sizes)]] == sizes
    for kind in found[: len(sizes)]:
        assert kind == Kind(
            alone=kind.alone,
            draws=kind.alone,
            splits=splits(kind.alone, 1024),
            filtered=filtered,
        )
    then = found[len(sizes)]
    assert (then.alone, then.tokens, then.chunks) == (0, 64, 1)


def test_every_kind_is_one_that_steps_are_padded_to_and_comes_once() -> None:
    found = order()
    assert len(found) == len({*found})
    assert all(kind.padded() == kind and kind.fits(MOST) for kind in found)
    assert not any(kind.apart for kind in found)


@pytest.mark.parametrize("alone", [0, 1, 5, 33, 100])
@pytest.mark.parametrize("tokens", [1, 63, 500, 1500])
@pytest.mark.parametrize("chunks", [1, 3])
def test_usual_steps_have_theirs_before_rare_ones(
    alone: int, tokens: int, chunks: int
) -> None:
    if chunks > tokens:
        return
    longest = tokens if chunks == 1 else min(tokens - chunks + 1, 700)
    usual = Kind(
        alone=alone, draws=alone + chunks, tokens=tokens, chunks=chunks, longest=longest
    ).padded()
    found = order()
    [at] = (
        i
        for i, kind in enumerate(found)
        if kind == usual or (alone and kind == _cut(usual))
    )
    rare = [i for i, kind in enumerate(found) if kind.scored or kind.tokens > 2048]
    assert at < min(rare)


def _cut(kind: Kind) -> Kind:
    return evolve(kind, splits=splits(kind.alone, 1024))


def test_other_ways_to_draw_and_longer_contexts_come_too() -> None:
    found = order()
    assert {(kind.filtered, kind.scored) for kind in found if not kind.tokens} == {
        (False, False),
        (True, False),
        (False, True),
    }
    assert {kind.splits for kind in found if kind.alone == 1 and not kind.tokens} == {
        2,
        4,
        8,
    }


def test_no_more_inputs_than_graphs_may_have() -> None:
    found = order(most=256)
    assert max(kind.tokens for kind in found) == 256


@pytest.mark.parametrize("drafter", [HOST, DEVICE])
@pytest.mark.parametrize(("drafts", "sizes"), [(1, {1}), (5, {1, 2, 3, 4, 6})])
def test_steps_with_drafts_come_behind_those_without(
    drafter: str, drafts: int, sizes: set[int]
) -> None:
    costs = Costs(((1, 1.0), (99, 2.0)))
    how = Speculation(drafter=drafter, drafts=drafts, rows=20, costs=costs)
    found = order(config=evolve(CONFIG, speculation=how))
    drafting = [kind for kind in found if kind.drafts]
    assert all(kind.padded() == kind for kind in drafting)
    assert all(kind.verified == kind.alone <= 24 for kind in drafting)
    assert all(kind.proposes == (drafter == DEVICE) for kind in drafting)
    assert {kind.drafts for kind in drafting} == sizes
    assert {kind.alone for kind in drafting if not kind.tokens} == {1, 2, 4, 8, 16, 24}
    first = next(i for i, kind in enumerate(found) if kind.tokens)
    assert sum(kind.drafts == max(sizes) for kind in found[:first]) == 6
    fixed = evolve(how, adaptive=False)
    without = order(config=evolve(CONFIG, speculation=fixed))
    assert {kind.drafts for kind in without} == {0, max(sizes)}
    assert [kind for kind in found if not kind.drafts] == order()
