"""Suspects run first and alone; all others wait for them, and are not forgotten."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from minfer.effects.cluster.link.crash_rule import (
    CLEARING_TOKENS,
    REST_SECONDS,
    SOLO_SECONDS,
    SUSPECT_DEATHS,
)
from minfer.effects.cluster.link.quarantine import Quarantine, QuarantinedRequest
from minfer.records.request import Request
from tests.effects.cluster.ends import request

A, B, C = map(request, "abc")
MANY = CLEARING_TOKENS + 1


def due(line: Quarantine, *running: str, now: float = 0.0) -> tuple[Request, ...]:
    return line.take_due(lambda: running, now)


def suspect(request: Request, deaths: int = SUSPECT_DEATHS) -> list[QuarantinedRequest]:
    return [QuarantinedRequest(request, deaths)]


def test_without_suspects_no_request_waits() -> None:
    line = Quarantine()
    assert (due(line), line.probing) == ((), "")
    line.add([QuarantinedRequest(A), QuarantinedRequest(B)])
    assert (due(line, "c"), due(line)) == ((A, B), ())
    assert line.waiting() == set()


def test_suspects_run_one_after_the_other_and_then_all_who_waited() -> None:
    line = Quarantine()
    line.add([QuarantinedRequest(C)])
    line.add(suspect(A) + suspect(B))
    assert due(line) == (A,)
    assert (line.probing, line.started, due(line)) == ("a", True, ())
    assert line.waiting() == {"b", "c"}
    assert not line.clear("b", 0.0)  # it does not run
    assert not line.clear("", 0.0)
    assert line.clear("a", 0.0)
    assert due(line) == (B,)
    assert line.clear("b", 0.0)
    assert due(line) == (C,)


def test_a_suspect_waits_until_no_other_request_runs() -> None:
    line = Quarantine()
    line.add(suspect(request("a#1")))
    assert due(line, "b") == ()
    assert (line.probing, line.started) == ("a#1", False)
    assert not line.clear("a#1", 0.0), "it does not run yet"
    line.add([QuarantinedRequest(C)])
    assert due(line, "b") == ()
    (started,) = due(line, "a#0")  # another sample of the same request
    assert started.id == "a#1"
    line.clear("a#1", 0.0)
    line.add(suspect(B))
    assert due(line, "a#1") == ()
    assert line.drop("b") == B
    assert due(line, "a#1") == (C,)


def test_who_saw_most_engines_die_runs_first() -> None:
    line = Quarantine()
    for suspected, deaths in ((A, 2), (B, 4), (C, 4)):
        line.add(suspect(suspected, deaths))
    for suspected in (B, C, A):
        assert due(line) == (suspected,)
        assert line.clear(suspected.id, 0.0)


def test_a_few_tokens_clear_no_suspect() -> None:
    line = Quarantine()
    for suspected in (A, B):
        line.add([QuarantinedRequest(suspected, SUSPECT_DEATHS, to_clear=11)])
        due(line)
        assert not any(
            line.count_tokens(sample, 1) for sample in (0, 1) for _ in range(11)
        )
        assert line.count_tokens(1, 1)
        assert line.clear(suspected.id, 0.0)


def test_who_is_dropped_is_not_served() -> None:
    line = Quarantine()
    line.add([QuarantinedRequest(A)])
    line.add(suspect(B))
    assert line.drop("a") == A
    assert line.drop("b") == B
    assert line.drop("a") is None
    assert (due(line), line.probing) == ((), "")


def test_isolated_requests_run_alone_to_their_ends_and_others_have_as_much_time() -> None:
    line = Quarantine()
    line.add(
        [
            QuarantinedRequest(A, isolated=True),
            QuarantinedRequest(B, isolated=True),
            QuarantinedRequest(C),
        ]
    )
    assert due(line, now=5.0) == (A,)
    assert not line.count_tokens(0, MANY)
    assert line.clear("a", 5.1)
    assert due(line, now=5.1) == (C,)
    assert due(line, now=5.0 + REST_SECONDS) == ()
    assert due(line, "c", now=5.2 + REST_SECONDS) == (), "it waits until it is alone"
    assert due(line, now=20.0) == (B,)
    assert not line.is_over(19.0 + SOLO_SECONDS)
    assert line.is_over(20.0 + SOLO_SECONDS)
    assert line.clear("b", 20.0 + SOLO_SECONDS)
    line.add([QuarantinedRequest(A, isolated=True)])
    assert due(line, now=20.0 + 2 * SOLO_SECONDS - 0.1) == ()
    assert due(line, now=20.0 + 2 * SOLO_SECONDS) == (A,)


@given(
    st.lists(st.sampled_from(["hold", "suspect", "isolated", "due", "clear", "drop"])),
    st.randoms(use_true_random=False),
)
def test_everybody_is_served_once_or_dropped(moves: list[str], rng: Random) -> None:
    """A probe never begins beside others, and nothing begins beside it."""
    line = Quarantine()
    arrived, served, running, now = [], list[str](), set[str](), 0.0

    def serve() -> None:
        started = [new_request.id for new_request in line.take_due(lambda: running, now)]
        assert not line.started or not started or not running
        served.extend(started)
        running.update(started)

    for number, move in enumerate(moves):
        now += rng.random()
        match move:
            case "hold" | "suspect" | "isolated":
                new_request = request(str(number))
                arrived.append(new_request.id)
                deaths = SUSPECT_DEATHS if move == "suspect" else 1
                line.add(
                    [QuarantinedRequest(new_request, deaths, isolated=move == "isolated")]
                )
            case "due":
                serve()
            case "clear" if running:
                line.clear(name := rng.choice(sorted(running)), now)
                running.remove(name)
            case _ if arrived and (dropped := line.drop(arrived[0])) is not None:
                arrived.remove(dropped.id)
    while line.waiting() or line.probing:
        for name in sorted(running):
            line.clear(name, now)
        running.clear()
        now += SOLO_SECONDS
        serve()
    assert sorted(served) == sorted(arrived)
