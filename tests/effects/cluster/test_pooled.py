"""Vectors cross the line between an engine and API servers, whatever happens to
either.
"""

import pytest
from attrs import evolve

from minfer.effects.live.client import EngineMessage, TurnOutputs
from minfer.records.request import PromptOnly, Request
from minfer.records.sequence import SampleId
from tests.circles import seeds
from tests.core.world import pooled_reference
from tests.effects.cluster.world import CONFIG, Frontend, World

Vectors = dict[SampleId, list[bytes]]


def listened(api_server: Frontend) -> Vectors:
    """The vectors that an API server will have heard of, by sample."""
    vectors: Vectors = {}

    def hear(message: EngineMessage) -> None:
        assert isinstance(message, TurnOutputs)
        for name, vector in zip(message.ids, message.pooled, strict=False):
            if vector:
                vectors.setdefault(name, []).append(vector)

    api_server.remote.listen(hear)
    return vectors


def pooled(world: World, pooling: str) -> Request:
    request = world.any_request()
    return evolve(request, max_tokens=0, n=1, prompt_only=PromptOnly(pooling))


@pytest.mark.long
@seeds(10, 100)
def test_every_front_has_the_vectors_of_its_own_prompts_once(seeds: range) -> None:
    total = 0
    for seed in seeds:
        world = World(seed, api_servers=2)
        heard = [listened(api_server) for api_server in world.api_servers]
        for turn in range(8):
            api_server = world.api_servers[turn % 2]
            world.ask(api_server, pooled(world, ("last", "mean")[turn // 2 % 2]))
        world.run(300)
        for api_server, found in zip(world.api_servers, heard, strict=True):
            expected = {
                (name, 0): [pooled_reference(request, CONFIG.block_size)]
                for name, request in api_server.requested.items()
                if request.pooling and api_server.ended[name, 0].reason == "length"
            }
            assert found == expected
            total += len(expected)
    assert total > 3 * len(seeds), "nearly all were cancelled"
