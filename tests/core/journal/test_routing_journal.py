"""Recorded routers replay, and the first turn that decides otherwise is named."""

from random import Random
from typing import Any

import pytest
from attrs import evolve, frozen

from minfer.journal.codec import CodecError
from minfer.journal.format import JournalError
from minfer.journal.routing_journal import (
    ROUTING_RECORDS,
    RoutingDivergenceError,
    RoutingJournal,
    RoutingWriter,
)
from minfer.routing.messages import (
    BlocksEvicted,
    BlocksPublished,
    CacheCleared,
    Dispatched,
    LoadReport,
    ReplicaDraining,
    ReplicaJoined,
    ReplicaLeft,
    RequestEnded,
    RequestStarted,
    RoutingRequest,
)
from minfer.routing.policies import LeastLoaded, Prefix, RoundRobin
from minfer.routing.policy import RoutingPolicy
from minfer.routing.router import apply, initial_router, route
from minfer.routing.state import RouterConfig, RouterState
from tests.core.routing.routers import SIZE, ask, keys


def story(rng: Random) -> Any:
    """Events, or a request."""
    name, number = rng.choice("abc"), f"{rng.randrange(9)}"
    blocks = [rng.randrange(2) for _ in range(rng.randrange(5))]
    request = ask(number, *blocks, tenant=rng.choice("xy"), session=rng.choice(("", "s")))
    if rng.random() < 0.5:
        return request
    return tuple(
        rng.choice(
            (
                ReplicaJoined(name),
                ReplicaDraining(name),
                ReplicaLeft(name),
                CacheCleared(name),
                BlocksPublished(name, keys(*blocks)),
                BlocksPublished(name, (b"short", *keys(*blocks))),
                BlocksPublished(name, (b"",)),
                BlocksEvicted(name, keys(*blocks)[1:]),
                LoadReport(name, rng.randrange(5), 3, 70, None),
                Dispatched(name, request),
                RequestStarted(number),
                RequestEnded(number),
                None,
                "no event",
            )
        )
        for _ in range(rng.randrange(4))
    )


def recorded(policy: Any, seed: int = 1, turns: int = 80) -> tuple[bytes, RouterState]:
    """A journal of a random run, and the state at its end."""
    writer = RoutingWriter(RouterConfig(policy, SIZE), {"what": "test"})
    return written(writer, seed, turns)


def written(
    writer: RoutingWriter, seed: int, turns: int = 80
) -> tuple[bytes, RouterState]:
    """All that a writer makes of a random run but its end, and the state at the end."""
    rng, config = Random(seed), writer.config
    lines, state = [writer.head()], initial_router(config)
    for number in range(turns):
        taken: Any = story(rng)
        if number == 0:
            taken = (ReplicaJoined("a"), ReplicaJoined("b"))
        if number == turns // 2:
            taken = None  # to be routed
        if isinstance(taken, tuple):
            applied = apply(config, state, taken)
            lines.append(writer.applied(taken, applied))
            state = applied.state
        else:
            routed = route(config, state, taken)
            lines.append(writer.routed(taken, routed))
            state = routed.state
    return b"".join(lines), state


@pytest.mark.parametrize("policy", [Prefix(), RoundRobin(), LeastLoaded()])
@pytest.mark.parametrize("seed", range(3))
def test_a_recorded_run_replays_to_the_same_state(policy: Any, seed: int) -> None:
    data, state = recorded(policy, seed)
    journal = RoutingJournal(data)
    for _ in range(2):  # it can be replayed again
        turns = [*journal.turns()]
        assert [turn.number for turn in turns] == list(range(80))
        assert journal.state == turns[-1].result.state == state
        assert (journal.count, journal.torn) == (80, 0)
    assert journal.config == RouterConfig(policy, SIZE)
    assert journal.about == {"what": "test"}
    assert any(isinstance(turn.inputs, RoutingRequest) for turn in turns)


def test_another_policy_diverges_in_the_first_turn_in_which_that_matters() -> None:
    data, _ = recorded(LeastLoaded())
    journal = RoutingJournal(data)
    first = next(t for t in journal.turns() if isinstance(t.inputs, RoutingRequest))
    journal.config = evolve(journal.config, policy=RoundRobin())
    with pytest.raises(RoutingDivergenceError) as caught:
        assert [*journal.turns()]
    assert journal.count == first.number
    found = caught.value
    assert (found.turn, found.field) == (first.number, "decision.why")
    assert (found.expected, found.found) == ("load", "turn")
    what = f"turn {first.number} decides otherwise: decision.why was 'load', is 'turn'"
    assert str(found) == what


def test_reasons_of_events_are_compared_too() -> None:
    config = RouterConfig(LeastLoaded(), SIZE)
    writer, state = RoutingWriter(config), initial_router(config)
    joined = apply(config, state, (ReplicaJoined("a"),))
    left = apply(config, joined.state, (ReplicaLeft("a"),))
    data = writer.head() + writer.applied((ReplicaLeft("a"),), left)
    with pytest.raises(RoutingDivergenceError) as caught:
        assert [*RoutingJournal(data).turns()]
    assert (caught.value.turn, caught.value.field) == (0, "reasons")


def test_a_last_line_that_is_cut_off_is_left_out() -> None:
    data, _ = recorded(Prefix())
    last = data[:-1].rindex(b"\n") + 1
    for end in (last + 1, len(data) - 1):
        journal = RoutingJournal(data[:end])
        assert len([*journal.turns()]) == 79
        assert (journal.count, journal.torn) == (79, end - last)
    empty = RoutingJournal(data.split(b"\n")[0])
    assert [*empty.turns()] == []
    assert (empty.count, empty.torn) == (0, 0)


def test_the_end_of_a_router_that_was_closed_is_the_last_line() -> None:
    writer = RoutingWriter(RouterConfig(Prefix(), SIZE))
    data, state = written(writer, seed=1)
    end = writer.end()
    for whole, closed in ((data, False), (data + end, True), (data + end[:-1], False)):
        journal = RoutingJournal(whole)
        assert len([*journal.turns()]) == 80
        assert (journal.closed, journal.state) == (closed, state)
    with pytest.raises(JournalError, match="lines follow its end"):
        assert [*RoutingJournal(data + end + end).turns()]
    missing = data[: data[:-1].rindex(b"\n") + 1] + end
    with pytest.raises(JournalError, match="turn 79 cannot be read"):
        assert [*RoutingJournal(missing).turns()]


def test_missing_changed_and_unreadable_lines_are_named() -> None:
    data, _ = recorded(Prefix())
    lines = data.split(b"\n")
    missing = b"\n".join(lines[:9] + lines[10:])
    with pytest.raises(JournalError, match="turn 8 does not follow from those before it"):
        assert [*RoutingJournal(missing).turns()]
    at = next(at for at, line in enumerate(lines) if b'"waiting":' in line)
    changed = lines[at].replace(b'"running":3', b'"running":4')
    assert changed != lines[at]
    broken = b"\n".join([*lines[:at], changed, *lines[at + 1 :]])
    with pytest.raises(JournalError, match=f"turn {at - 1} does not follow"):
        assert [*RoutingJournal(broken).turns()]
    for noise in (b"{", b"[]", b"{}", b'{"digest":1}', b"\xff"):
        with pytest.raises(JournalError, match="turn 4 "):
            assert [*RoutingJournal(b"\n".join([*lines[:5], noise, *lines[6:]])).turns()]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "no routing journal"),
        (b"[]\n", "no routing journal"),
        (b"\xff\n", "no routing journal"),
        (b'{"minfer journal": 1}', "no routing journal"),
        (b'{"minfer routing journal": 3}', "format 3, and this minfer reads format 2"),
        (
            b'{"minfer routing journal": 1}',
            r"format 1, .* minfer 0\.1\.0 \(commit 964bfc75\), the last that reads it",
        ),
        (b'{"minfer routing journal": 2}', "its head cannot be read"),
        (
            b'{"minfer routing journal": 2, "config": {"is": "X"}, "about": {}}',
            "there is no record 'X'",
        ),
        (b'{"minfer routing journal": 2, "config": 3, "about": {}}', "another type"),
    ],
)
def test_what_is_no_journal_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(JournalError, match=why):
        RoutingJournal(data)


@frozen
class Mine(RoundRobin):
    """A policy of a program's own."""


class NoRecord(RoutingPolicy):
    def choose(self, *_: Any) -> Any: ...


def test_policies_of_programs_are_named() -> None:
    data, state = recorded(Mine())
    with pytest.raises(JournalError, match="no record 'Mine'"):
        RoutingJournal(data)
    journal = RoutingJournal(data, ROUTING_RECORDS | {"Mine": Mine})
    assert len([*journal.turns()]) == 80
    assert journal.state == state
    with pytest.raises(CodecError, match="NoRecord cannot be written"):
        RoutingWriter(RouterConfig(NoRecord())).head()


def test_keys_are_written_as_one_text() -> None:
    config = RouterConfig(LeastLoaded(), SIZE)
    many = keys(*range(100))
    line = RoutingWriter(config).applied(
        (BlocksPublished("a", many),), apply(config, initial_router(config), ())
    )
    assert len(line) < 100 * 44 + 200
