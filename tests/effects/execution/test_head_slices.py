"""Which slices of a KV block the ranks of engines exchange."""

from itertools import pairwise, product

import pytest
import torch

from minfer.effects.execution.tiers.head_slices import HeadSlices, holders
from minfer.effects.models.ranks import Parallel, RankInfo

SIZES = (1, 2, 3, 4, 6, 8)


def heads_of(rank: int, ranks: int, heads: int) -> set[int]:
    """The key heads of a rank, as models are divided."""
    if ranks > heads:
        return {rank * heads // ranks}
    return {*range(rank * heads // ranks, (rank + 1) * heads // ranks)}


@pytest.mark.parametrize(
    ("heads", "sizes"),
    [
        (heads, (a, b))
        for heads in (1, 2, 4, 6, 8)
        for a, b in product(SIZES, SIZES)
        if all(heads % size == 0 or size % heads == 0 for size in (a, b))
    ],
)
def test_each_rank_gets_its_heads_and_each_slice_is_sent_once(
    heads: int, sizes: tuple[int, int]
) -> None:
    prefill, decode = (
        [HeadSlices.of(RankInfo(r, Parallel(n)), heads, sizes) for r in range(n)]
        for n in sizes
    )
    count = prefill[0].count
    assert sorted(n for slices in prefill for n in slices.sent) == [*range(count)]
    edges = [n * heads // count for n in range(count + 1)]
    all_heads = [{*range(a, b)} for a, b in pairwise(edges)]
    for engine, size in ((prefill, sizes[0]), (decode, sizes[1])):
        for rank, slices in enumerate(engine):
            own_heads = set[int]().union(*(all_heads[n] for n in slices.own))
            assert own_heads == heads_of(rank, size, heads)
            assert all(rank in holders(n, count, size) for n in slices.own)


def test_a_slice_has_a_key_of_its_own_unless_it_is_the_block() -> None:
    slices = HeadSlices.of(RankInfo(1, Parallel(2)), 8, (2, 4))
    assert slices == HeadSlices(4, (2, 3), (2, 3))
    assert slices.number(slices.key(b"key", 3)) == 3
    whole_latents = HeadSlices.of(RankInfo(1, Parallel(2)), 1, (1, 2))  # latents
    assert whole_latents == HeadSlices(1, (0,), ())
    assert whole_latents.key(b"key", 0) == b"key"
    assert torch.arange(8).chunk(4)[2].tolist() == [4, 5], "as caches are cut"


def test_beside_recurrent_layers_a_rank_exchanges_all_that_it_has() -> None:
    for ranks in (1, 2, 4):
        parallel = Parallel(tensor=ranks)
        slices = [HeadSlices.by_rank(RankInfo(rank, parallel)) for rank in range(ranks)]
        for rank, own in enumerate(slices):
            assert (own.count, own.own, own.sent) == (ranks, (rank,), (rank,))
            assert own.number(own.key(b"k" * 32, rank)) == rank
            assert holders(rank, own.count, ranks) == range(rank, rank + 1)
