"""A state without token ids is the one that a replay without them is in."""

from typing import Any

import attrs
import pytest

from minfer.engine import step
from minfer.journal.codec import dump, load
from minfer.journal.projection import projected
from minfer.journal.redact import redacted, redacted_client, redacted_config
from minfer.journal.redact_state import can_be_redacted, redacted_state
from minfer.policies.fair_queue import Account, Accounts
from minfer.records.config import EngineConfig
from minfer.records.messages import Executed, Submit
from minfer.records.plan import Plan
from minfer.records.request import Request
from minfer.records.state import EngineState
from minfer.values.pmap import Map
from tests.circles import seeds
from tests.core.journal.made import opened, run
from tests.core.journal.test_redact import SECRET, blind
from tests.core.recorded import recorded
from tests.core.world import VOCAB


def comparable(state: EngineState) -> dict[str, Any]:
    """All of a state, but for what is not read any more: what plans in flight told
    the device, and that a stop id may be among those of no running sample.
    """
    reported = {a.name: getattr(state, a.name) for a in attrs.fields(EngineState)}
    reported["inflight"] = [bare(plan) for plan in state.inflight]
    del reported["stops"]
    return reported


def bare(plan: Plan) -> Plan:
    places = tuple(attrs.evolve(fill, tokens=()) for fill in plan.fills)
    return attrs.evolve(plan, fills=places, drafts=(), opens=())


@pytest.mark.long
@seeds(16, 120)
def test_it_is_the_state_of_a_replay(seeds: range) -> None:
    """After every turn: with hits, outputs in blocks, preemptions and failed steps."""
    compared = runs = 0
    for seed in seeds:
        config, turns = recorded(seed)
        if not can_be_redacted(config):
            continue
        runs += 1
        journal = opened(blind(config, turns))
        for mine, theirs in zip(turns, journal.turns(), strict=True):
            state = redacted_state(config, mine.transition.state, SECRET)
            other = theirs.transition.state
            assert projected(state) == projected(other)
            assert comparable(state) == comparable(other), (seed, mine.number)
            for seq in state.running.seqs:
                assert seq.request.stop_ids <= state.stops
            compared += len(state.running) > 0
    assert runs > len(seeds) / 16
    assert compared > 20 * runs


def test_a_conversation_is_that_of_a_replay() -> None:
    """The first answer fills blocks, which the second prompt hits."""
    config = EngineConfig(num_blocks=40, block_size=4, vocab_size=50, depth=1)
    prompt, answer = (1, 2, 3, 4, 5), tuple(range(7, 20))
    again = (*prompt, *answer, 6)
    turns = run(
        config,
        (Submit(Request(id="1", prompt=prompt, max_tokens=len(answer))),),
        *((Executed(number, ((token,),)),) for number, token in enumerate(answer)),
        (Submit(Request(id="2", prompt=again, max_tokens=2)),),
    )
    replayed, chunks = list(opened(blind(config, turns)).turns()), 0
    for mine, theirs in zip(turns, replayed, strict=True):
        state = redacted_state(config, mine.transition.state, SECRET)
        assert comparable(state) == comparable(theirs.transition.state)
        chunks += sum(len(chain.chunks) for chain in state.running.chains)
    assert any(seq.keys for seq in state.running.seqs)
    assert chunks > 0


@pytest.mark.long
@seeds(3, 60)
def test_from_it_on_decisions_replay(seeds: range) -> None:
    for seed in seeds:
        config, turns = recorded(seed)
        if not can_be_redacted(config):
            continue
        for begin in range(1, len(turns), 7):
            before = turns[begin].before
            state = redacted_state(config, before, SECRET)
            state = load(dump(state))  # as from a file
            for turn in turns[begin:]:
                events = redacted(config, turn.before, turn.events, SECRET)
                moved = step(redacted_config(config), state, events)
                state = moved.state
                assert len(moved.reasons) == len(turn.transition.reasons)
            assert projected(state) == projected(
                redacted_state(config, turns[-1].transition.state, SECRET)
            )


@pytest.mark.long
def test_nothing_of_the_text_is_in_it() -> None:
    """No token, content key, seed or name, in all that is written of it."""
    config, turns = recorded(39)
    assert can_be_redacted(config)
    requests = [e.request for t in turns for e in t.events if isinstance(e, Submit)]
    for turn in turns:
        state = redacted_state(config, turn.transition.state, SECRET)
        reported = repr(dump(state))
        keys = [
            *turn.transition.state.blocks.prefix.nodes,
            *(one.root for one in requests),
        ]
        assert not any(key and key.hex() in reported for key in keys)
        tokens = tokens_of(state)
        assert {token for token in tokens if token < VOCAB} <= {0, 1}
        for seq in (*state.waiting, *state.running.seqs):
            assert seq.request.seed == 0
            assert seq.request.client not in {"a", "b", "c"}


def tokens_of(state: EngineState) -> set[int]:
    """All token ids in a state."""
    run = state.running
    found = [seq.history for seq in (*state.waiting, *run.seqs)]
    found += [seq.request.prompt for seq in (*state.waiting, *run.seqs)]
    found += [
        *run.tails,
        *run.fresh,
        *(part for one in run.chains for part in one.chunks),
    ]
    found += [fill.tokens for plan in state.inflight for fill in plan.fills]
    assert not any(plan.opens for plan in state.inflight)
    return {token for some in found for token in some}


def test_clients_have_the_names_that_events_give_them() -> None:
    config, turns = recorded(1)
    account = Account(3.0, 1.0, 1)
    policy = Accounts(Map({0: 1.0}), Map({(0, "Ann"): account, (0, ""): account}))
    shut = frozenset({"Ann"})
    state = attrs.evolve(turns[0].before, policy=policy, deferred_clients=shut)
    shown = redacted_state(config, state, SECRET)
    ann = redacted_client(SECRET, "Ann")
    assert shown.deferred_clients == {ann}
    assert shown.policy == Accounts(
        Map({0: 1.0}), Map({(0, ann): account, (0, ""): account}), policy.limit
    )
    assert "Ann" not in ann
