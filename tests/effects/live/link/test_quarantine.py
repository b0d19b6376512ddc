"""Suspects run first and alone; all others wait for them, and are not forgotten."""

from hypothesis import given
from hypothesis import strategies as st

from minfer.effects.live.link.quarantine import (
    CLEARING_TOKENS,
    SUSPECT_DEATHS,
    Quarantine,
)
from tests.effects.live.link.ends import request

A, B, C = map(request, "abc")


def test_without_suspects_no_request_waits() -> None:
    line = Quarantine()
    assert (line.due(), line.closed, line.probing) == ((), False, "")
    line.hold([A, B])
    assert (line.due(), line.due()) == ((A, B), ())
    assert (line.closed, line.waiting()) == (False, set())


def test_suspects_run_one_after_the_other_and_then_all_who_waited() -> None:
    line = Quarantine()
    line.hold([C])
    line.hold([A, B], SUSPECT_DEATHS)
    assert line.due() == (A,)
    assert (line.probing, line.due(), line.closed) == ("a", (), True)
    assert line.waiting() == {"b", "c"}
    assert not line.clear("b")  # it does not run
    assert not line.clear("")
    assert line.clear("a")
    assert line.due() == (B,)
    assert line.clear("b")
    assert not line.closed
    assert line.due() == (C,)


def test_who_saw_most_engines_die_runs_first() -> None:
    line = Quarantine()
    for one, deaths in ((A, 2), (B, 4), (C, 4)):
        line.hold([one], deaths)
    for one in (B, C, A):
        assert line.due() == (one,)
        assert line.clear(one.id)
    assert not line.closed


def test_a_few_tokens_clear_no_suspect() -> None:
    line = Quarantine()
    for one in (A, B):
        line.hold([one], SUSPECT_DEATHS)
        line.due()
        assert not any(
            line.give(sample, 1) for sample in (0, 1) for _ in range(CLEARING_TOKENS)
        )
        assert line.give(1, 1)
        assert line.clear(one.id)


def test_who_is_dropped_is_not_served() -> None:
    line = Quarantine()
    line.hold([A])
    line.hold([B], SUSPECT_DEATHS)
    assert line.drop("a") == A
    assert line.drop("b") == B
    assert line.drop("a") is None
    assert (line.due(), line.closed) == ((), False)


@given(st.lists(st.sampled_from(["hold", "suspect", "due", "clear", "drop"])))
def test_everybody_is_served_once_or_dropped(moves: list[str]) -> None:
    line = Quarantine()
    came, served = [], list[str]()
    for number, move in enumerate(moves):
        match move:
            case "hold" | "suspect":
                one = request(str(number))
                came.append(one.id)
                line.hold([one], SUSPECT_DEATHS if move == "suspect" else 1)
            case "due":
                due = line.due()
                served += [one.id for one in due]
                assert not line.probing or (line.closed and len(due) <= 1)
            case "clear":
                line.clear(line.probing)
            case _ if came and (dropped := line.drop(came[0])) is not None:
                came.remove(dropped.id)
    while line.closed or line.waiting():
        line.clear(line.probing)
        served += [one.id for one in line.due()]
    assert sorted(served) == sorted(came)
