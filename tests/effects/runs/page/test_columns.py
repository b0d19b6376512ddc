"""The columns of a page against the states that they were folded out of."""

from collections import Counter

import pytest

from minfer.analysis.drafts import sample_drafts
from minfer.effects.runs.page.make import page
from minfer.effects.runs.recorded import wire_name
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    Emit,
    Ended,
    Event,
    Execute,
    Executed,
    Failed,
    Tick,
)
from tests.core.recorded import recorded
from tests.effects.runs.page.scenes import entries, requested, turns_of, unpacked


@pytest.mark.long
@pytest.mark.parametrize("seed", [*range(9), 22])
def test_columns_are_those_of_the_states(seed: int) -> None:
    config, turns = recorded(seed, 150)
    data = page("run", config, turns)
    head, columns = unpacked(data)
    states = [turn.transition.state for turn in turns]
    assert columns["turn.free"] == [state.blocks.free for state in states]
    assert columns["turn.shareable"] == [state.blocks.live for state in states]
    idle = [state.blocks.idle for state in states]
    assert columns["turn.cached"] == idle
    assert columns["turn.running"] == [len(state.running) for state in states]
    assert columns["turn.waiting"] == [len(state.waiting) for state in states]
    times = [round((state.time - states[0].time) * 1e6) for state in states]
    assert columns["turn.time"] == times
    for step, turn in zip(columns["turn.done"], turns, strict=True):
        results = {event.step for event in turn.events if isinstance(event, Executed)}
        assert step in (results & {plan.step for plan in turn.before.inflight} or {-1})
    commands = [command for turn in turns for command in turn.transition.commands]
    plans = [command.plan for command in commands if isinstance(command, Execute)]
    emits = [command for command in commands if isinstance(command, Emit)]
    assert columns["step.number"] == [plan.step for plan in plans]
    tokens = [
        d + p + drafts
        for d, p, drafts in zip(
            columns["step.decode"],
            columns["step.prefill"],
            columns["step.drafts"],
            strict=True,
        )
    ]
    assert tokens == [sum(plan.num_scheduled_tokens) for plan in plans]
    assert columns["step.chunks"] == [len(plan.fills) for plan in plans]
    assert sum(columns["turn.tokens"]) == sum(
        len(t) for emit in emits for t in emit.tokens
    )
    reasons = [reason for turn in turns for reason in turn.transition.reasons]
    expected = Counter(
        wire_name(reason) for reason in reasons if not isinstance(reason, Ended)
    )
    expected["Finished"] = sum(len(emit.finished) for emit in emits)
    logged = Counter(kind for _, kind, _, _ in entries(data))
    assert {kind: logged[kind] for kind in expected} == expected
    drafts = [
        draft for t in turns for draft in sample_drafts(t.before, t.events, t.transition)
    ]
    assert columns["draft.proposed"] == [draft.proposed for draft in drafts]
    assert columns["draft.accepted"] == [draft.accepted for draft in drafts]
    ids = [
        head["texts"][columns["sample.id"][sample]] for sample in columns["draft.sample"]
    ]
    assert ids == [draft.id for draft in drafts]
    unnamed = {kind for _, kind, name, _ in entries(data) if not name}
    assert not unnamed & {
        "Submit",
        "Chunk",
        "Admitted",
        "QueueBlocked",
        "Preempted",
        "Finished",
    }


def test_a_steady_decode_costs_no_entries() -> None:
    config = EngineConfig(num_blocks=64 * 12, max_num_seqs=64, max_model_len=1024)
    arrivals: list[Event] = [requested(str(i), 10, 600) for i in range(64)]
    data = page("run", config, turns_of(config, {0: arrivals}, 700))
    logged = Counter(kind for _, kind, _, _ in entries(data))
    assert logged == dict.fromkeys(("Submit", "Admitted", "Chunk", "Finished"), 64)


def test_a_recording_may_begin_in_the_middle() -> None:
    config, turns = recorded(10, 200)
    middle = next(
        n
        for n, turn in enumerate(turns)
        if n > 60 and turn.before.waiting and len(turn.before.running) > 1
    )
    data = page("run", config, turns[middle:])
    head, _ = unpacked(data)
    assert head["first"] == turns[middle].number
    before, logged = turns[middle].before, entries(data)
    present = [(name, cells[0]) for _, kind, name, cells in logged if kind == "Present"]
    run = before.running
    fills = [
        scheduled < base
        for scheduled, base in zip(run.scheduled, run.num_known_at_admission, strict=True)
    ]
    running = [
        (seq.request.id, 1 if fill else 2)
        for seq, fill in zip(run.seqs, fills, strict=True)
    ]
    waiting = [(seq.request.id, 3 if seq.preempted else 0) for seq in before.waiting]
    assert present == running + waiting
    ended = {name for _, kind, name, _ in logged if kind == "Finished"}
    assert {name for name, _ in present} <= ended


def test_nonsense_is_cut_off_and_does_not_raise() -> None:
    config = EngineConfig(num_blocks=40, block_size=4)
    events: list[Event] = [
        requested("a", 4, 2**62),
        requested("b", 4, 4, n=2**40),
        requested("\ud800", 2, 2),
    ]
    events += [Executed(10**30, ()), Executed(-(10**30), ()), Tick(1e308)]
    turns = turns_of(config, {0: events, 1: [Failed(10**20, "x" * 10_000)]})
    head, columns = unpacked(page("run", config, turns))
    assert "\ud800" in head["texts"]
    assert max(map(abs, columns["sample.most"] + columns["log.a"])) < 2**30
