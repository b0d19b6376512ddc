"""Vectors cross the line between an engine and fronts, whatever happens to either."""

import pytest
from attrs import evolve

from minfer.effects.cluster.link import link_messages as wire
from minfer.effects.live.client import EngineMessage, TurnOutputs
from minfer.records.request import Request
from minfer.records.sequence import SampleId
from tests.circles import seeds
from tests.core.world import pooled_reference
from tests.effects.cluster.world import CONFIG, Front, World

Vectors = dict[SampleId, list[bytes]]


def test_a_column_of_vectors_crosses_as_it_is() -> None:
    reported = wire.FrontOutputs(
        time=1.0, ids=(("a", 0),), tokens=((),), pooled=(b"\0\1\2\3",)
    )
    assert wire.read_to_front(wire.encode(reported)) == reported


def listened(front: Front) -> Vectors:
    """The vectors that a front will have heard of, by sample."""
    vectors: Vectors = {}

    def hear(message: EngineMessage) -> None:
        assert isinstance(message, TurnOutputs)
        for name, vector in zip(message.ids, message.pooled, strict=False):
            if vector:
                vectors.setdefault(name, []).append(vector)

    front.remote.listen(hear)
    return vectors


def pooled(world: World, pooling: str) -> Request:
    request = world.any_request()
    return evolve(
        request, max_tokens=0, n=1, pooling=pooling, reads_cache=pooling == "last"
    )


@pytest.mark.long
@seeds(10, 100)
def test_every_front_has_the_vectors_of_its_own_prompts_once(seeds: range) -> None:
    total = 0
    for seed in seeds:
        world = World(seed, fronts=2)
        heard = [listened(front) for front in world.fronts]
        for turn in range(8):
            front = world.fronts[turn % 2]
            world.ask(front, pooled(world, ("last", "mean")[turn // 2 % 2]))
        world.run(300)
        for front, vectors in zip(world.fronts, heard, strict=True):
            expected = {
                (name, 0): [pooled_reference(request, CONFIG.block_size)]
                for name, request in front.requested.items()
                if request.pooling and front.ended[name, 0].reason == "length"
            }
            assert vectors == expected
            total += len(expected)
    assert total > 3 * len(seeds), "nearly all were cancelled"
