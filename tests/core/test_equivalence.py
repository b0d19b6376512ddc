"""What must not change tokens: pool size, chunking, depth, prefix cache, preemption."""

from collections.abc import Sequence
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
from attrs import evolve
from hypothesis import given

from minfer.blocks.keys import root_key
from minfer.engine import step
from minfer.records.config import EngineConfig
from minfer.records.messages import Emit, Execute, Executed, Submit, Tick
from minfer.records.request import Request
from minfer.records.sequence import SampleId
from minfer.records.state import Transition, initial
from minfer.simulation.oracle import Oracle
from tests.circles import claimed, examples
from tests.core.tuned import tiny, tuned
from tests.core.world import VOCAB, World, big_config, tiny_config

ROOMY = EngineConfig(
    num_blocks=4096,
    block_size=4,
    max_model_len=64,
    max_num_seqs=64,
    max_num_batched_tokens=4096,
    vocab_size=VOCAB,
    depth=1,
)


def outputs(
    config: EngineConfig, requests: Sequence[Request], *, cache: bool = True
) -> dict[SampleId, tuple[int, ...]]:
    """Tokens of every sample, served together; without `cache` every request has its own
    salt.
    """
    state, oracle = initial(config), Oracle(config.block_size, VOCAB)
    out: dict[SampleId, tuple[int, ...]] = {}
    inbox = [
        Submit(r if cache else evolve(r, root=root_key(b"", r.id.encode())))
        for r in requests
    ]
    for turn in range(100_000):
        results = (oracle.collect(),) if oracle.plans else ()
        moved = step(config, state, (Tick(float(turn)), *results, *inbox))
        inbox, state = [], moved.state
        for command in moved.commands:
            if isinstance(command, Execute):
                oracle.launch(command.plan)
            elif isinstance(command, Emit):
                for name, tokens in zip(command.ids, command.tokens, strict=True):
                    out[name] = out.get(name, ()) + tokens
                assert not [f for f in command.finished if f.reason == "rejected"]
        if not state.requests:
            return out
    raise AssertionError("never drained")


def some_requests(seed: int) -> list[Request]:
    """Eight requests with related prompts that fit into 16 blocks of 4."""
    maker = World(ROOMY, Random(seed))
    made = [maker.some_request() for _ in range(8)]
    return [
        evolve(
            r,
            id=str(i),
            prompt=r.prompt[:30] or (1,),
            max_tokens=min(r.max_tokens, 30),
            keys=(),
            output=r.output[: min(r.max_tokens, 30) - 1],
        )
        for i, r in enumerate(made)
    ]


@pytest.mark.long
@examples(15)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(16, 40),
    budget=st.integers(4, 64),
    seqs=st.integers(1, 4),
    depth=st.integers(1, 3),
    cache=st.booleans(),
)
def test_tokens_do_not_depend_on_how_they_are_scheduled(
    seed: int,
    num_blocks: int,
    budget: int,
    seqs: int,
    depth: int,
    cache: bool,
) -> None:
    requests = some_requests(seed)
    tight = evolve(
        ROOMY,
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
        max_num_seqs=seqs,
        depth=depth,
    )
    assert outputs(tight, requests, cache=cache) == outputs(ROOMY, requests, cache=False)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_block_size_only_matters_to_the_oracle_itself(block_size: int) -> None:
    requests = some_requests(7)
    roomy = evolve(ROOMY, block_size=block_size)
    tight = evolve(
        roomy, num_blocks=96 // block_size, max_num_seqs=3, max_num_batched_tokens=8
    )
    assert outputs(tight, requests) == outputs(roomy, requests, cache=False)


def test_the_same_events_give_the_same_commands() -> None:
    requests = some_requests(3)
    runs = []
    for _ in range(2):
        state, story = initial(ROOMY), []
        oracle = Oracle(ROOMY.block_size, VOCAB)
        moved = step(ROOMY, state, tuple(Submit(r) for r in requests))
        while moved.state.inflight:
            story.append((moved.commands, moved.reasons))
            for command in moved.commands:
                if isinstance(command, Execute):
                    oracle.launch(command.plan)
            done = oracle.collect()
            assert isinstance(done, Executed)
            moved = step(ROOMY, moved.state, (done,))
        runs.append(story)
    assert runs[0] == runs[1]


class Reported(World):
    """A world that remembers all that was decided."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.story: list[tuple[Any, Any]] = []

    def _perform(self, turn: Transition) -> None:
        self.story.append((turn.commands, turn.reasons))
        super()._perform(turn)


def decided(seed: int, config: EngineConfig) -> list[tuple[Any, Any]]:
    """All commands and reasons of one world under fire."""
    world = Reported(config, Random(seed))
    world.hungry, world.big = True, config.max_model_len > 100
    for number in range(40):
        if number % 4 == 0:
            world.burst(4)
            world.cancel_some()
        world.fail() if number % 9 == 8 else world.turn()
    world.drain()
    return world.story


@pytest.mark.long
@pytest.mark.parametrize("seed", [*range(4), *claimed(range(4, 25))])
def test_thresholds_change_no_decision(seed: int) -> None:
    """Nor do they change what is told to the device: each is another way to the same
    result.
    """
    rng = Random(seed)
    config = big_config(rng) if seed % 12 == 0 else tiny_config(rng)
    config = evolve(config, max_num_seqs=6, max_num_batched_tokens=64)
    usual = decided(seed, config)
    with tuned(**tiny(rng)):
        assert decided(seed, config) == usual
