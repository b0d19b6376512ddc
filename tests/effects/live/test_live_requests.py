"""A record is there while its client has the request, or something reads its outputs."""

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from minfer.effects.live.errors import RequestError
from minfer.effects.live.live_requests import LiveRequests, Stage
from tests.effects.cluster.ends import request

SERVED = {Stage.COMPILING, Stage.SUBMITTED}


def test_a_request_that_is_passed_on_keeps_its_record() -> None:
    live, one = LiveRequests(), request()
    record = live.add(one, read=True)
    assert live.add(one) is record, "as by the engine client, after a front"
    assert (record.read, record.request) == (True, one)
    assert not live.known("a")
    record.stage = Stage.SUBMITTED
    assert live.known("a")
    assert live.served() == {"a": record}


@pytest.mark.parametrize("stage", Stage)
def test_an_id_is_in_use_until_its_record_is_gone(stage: Stage) -> None:
    live, one = LiveRequests(), request()
    live.add(one, read=True).stage = stage
    says = "a request with the id 'a' is being served; ids must differ"
    with pytest.raises(RequestError, match=says):
        live.check_new(evolve(one))  # an equal one, of another caller
    if stage is not Stage.NEW:
        with pytest.raises(RequestError, match=says):
            live.add(one)
    assert len(live) == 1
    live.end("a")
    live.release("a")
    assert live.add(evolve(one)).stage is Stage.NEW


MOVES = st.sampled_from(["add", "read", "submit", "compile", "search", "end", "release"])


@given(st.lists(MOVES, max_size=12))
def test_a_record_is_there_while_it_is_needed(moves: list[str]) -> None:
    live = LiveRequests()
    there, read, stage = False, False, Stage.NEW
    for move in moves:
        match move:
            case "add" | "read" if not there:
                there, read, stage = True, move == "read", Stage.NEW
                live.add(request(), read=read)
            case "submit" | "compile" | "search" if there and stage is not Stage.ENDED:
                stage = {
                    "submit": Stage.SUBMITTED,
                    "compile": Stage.COMPILING,
                    "search": Stage.SEARCHING,
                }[move]
                live["a"].stage = stage
            case "end":
                live.end("a")
                there, stage = there and read, Stage.ENDED
            case "release":
                live.release("a")
                read = False
                there = there and stage not in {Stage.NEW, Stage.ENDED}
        assert ("a" in live) == there
        assert live.known("a") == ("a" in live.served()) == (there and stage in SERVED)
        assert not there or live["a"].read == read
