"""What a host drafts on trial is mostly what comes, and leaves nothing behind."""

from copy import deepcopy

import pytest
from attrs import evolve

from minfer.engine import step
from minfer.records.config import EngineConfig
from minfer.records.messages import Event, Execute, Executed, Propose, Submit, Tick
from minfer.records.request import Request
from minfer.records.speculation import DEVICE, HOST, Speculation
from minfer.records.state import EngineState, initial
from minfer.simulation.oracle import Oracle
from minfer.testing.trial_drafts import proposed

CONFIG = EngineConfig(
    num_blocks=60,
    block_size=4,
    max_model_len=80,
    max_num_seqs=2,
    vocab_size=40,
    depth=1,
    speculation=Speculation(drafter=HOST, drafts=4, adaptive=False),
)
WISHES = (
    Request(id="a", prompt=(1, 2, 3), max_tokens=60),
    Request(id="b", prompt=(9,), max_tokens=50, n=2),
)


def requested(
    config: EngineConfig = CONFIG,
) -> tuple[list[Propose], dict[str, list[int]]]:
    """What is proposed in a run that makes no use of it, and what came."""
    plain = evolve(config, speculation=None)
    oracle, state = Oracle(config.block_size, config.vocab_size), initial(plain)
    found, out = list[Propose](), dict[str, list[int]]()
    events: tuple[Event, ...] = (Tick(0.0), *map(Submit, WISHES))
    while True:
        moved = step(plain, state, events)
        state = moved.state
        for one in moved.commands:
            if isinstance(one, Execute):
                oracle.launch(one.plan)
        if not oracle.plans:
            return found, out
        done = oracle.collect()
        assert isinstance(done, Executed)
        found += _proposed(config, state, done, oracle)
        names = dict(zip(state.running.run_ids, state.running.ids, strict=True))
        plan = state.inflight[0]
        for gen, tokens in zip(plan.run_ids, done.yields, strict=True):
            out.setdefault("{}.{}".format(*names[gen]), []).extend(tokens)
        events = (Tick(state.time + 1), done)


def _proposed(
    config: EngineConfig, state: EngineState, done: Executed, oracle: Oracle
) -> list[Propose]:
    rows, memory = deepcopy(oracle.rows), deepcopy(oracle.memory)
    found = [*proposed(config, state, done, oracle)]
    assert oracle.rows == rows
    written = {block: slots for block, slots in oracle.memory.items() if slots}
    assert written == {block: slots for block, slots in memory.items() if slots}
    return found


def test_most_of_it_comes_and_some_does_not() -> None:
    found, out = requested()
    right, lengths = list[bool](), set[int]()
    for one in found:
        prompt = next(len(wish.prompt) for wish in WISHES if wish.id == one.id)
        came = out[f"{one.id}.{one.sample}"][one.known - prompt :]
        pairs = [*zip(one.tokens, came, strict=False)]
        first = next((k for k, pair in enumerate(pairs) if pair[0] != pair[1]), None)
        right += [True] * (len(pairs) if first is None else first)
        right += [] if first is None else [False]
        lengths.add(len(one.tokens))
    assert lengths == {1, 2, 3, 4}
    assert {(one.id, one.sample) for one in found} == {("a", 0), ("b", 0), ("b", 1)}
    assert 0.6 < sum(right) / len(right) < 0.9, "about one in four is wrong"


def test_it_ends_with_the_tokens() -> None:
    found, out = requested()
    for one in found:
        prompt = next(len(wish.prompt) for wish in WISHES if wish.id == one.id)
        whole = prompt + len(out[f"{one.id}.{one.sample}"])
        assert one.known < whole


@pytest.mark.parametrize(
    "how", [None, Speculation(drafter=DEVICE, drafts=4, adaptive=False)]
)
def test_where_the_host_does_not_draft_nothing_is_proposed(
    how: Speculation | None,
) -> None:
    assert requested(evolve(CONFIG, speculation=how))[0] == []
