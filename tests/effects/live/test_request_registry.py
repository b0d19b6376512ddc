"""A record is there while its client has the request, or something reads its outputs."""

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from minfer.effects.live.errors import RequestError
from minfer.effects.live.request_registry import RequestRegistry, RequestStage
from tests.effects.cluster.ends import request

SERVED = {RequestStage.COMPILING, RequestStage.SUBMITTED}


def test_a_request_that_is_passed_on_keeps_its_record() -> None:
    live, submitted = RequestRegistry(), request()
    record = live.add(submitted, read=True)
    assert live.add(submitted) is record, "as by the engine client, after an API server"
    assert (record.read, record.request) == (True, submitted)
    assert not live.is_served("a")
    record.stage = RequestStage.SUBMITTED
    assert live.is_served("a")
    assert live.served() == {"a": record}


@pytest.mark.parametrize("stage", RequestStage)
def test_an_id_is_in_use_until_its_record_is_gone(stage: RequestStage) -> None:
    live, submitted = RequestRegistry(), request()
    live.add(submitted, read=True).stage = stage
    says = "a request with the id 'a' is being served; ids must differ"
    with pytest.raises(RequestError, match=says):
        live.check_new(evolve(submitted))  # an equal one, of another caller
    if stage is not RequestStage.NEW:
        with pytest.raises(RequestError, match=says):
            live.add(submitted)
    assert len(live) == 1
    live.end("a")
    live.release("a")
    assert live.add(evolve(submitted)).stage is RequestStage.NEW


MOVES = st.sampled_from(["add", "read", "submit", "compile", "search", "end", "release"])


@given(st.lists(MOVES, max_size=12))
def test_a_record_is_there_while_it_is_needed(moves: list[str]) -> None:
    live = RequestRegistry()
    present, read, stage = False, False, RequestStage.NEW
    for move in moves:
        match move:
            case "add" | "read" if not present:
                present, read, stage = True, move == "read", RequestStage.NEW
                live.add(request(), read=read)
            case "submit" | "compile" | "search" if (
                present and stage is not RequestStage.ENDED
            ):
                stage = {
                    "submit": RequestStage.SUBMITTED,
                    "compile": RequestStage.COMPILING,
                    "search": RequestStage.SEARCHING,
                }[move]
                live["a"].stage = stage
            case "end":
                live.end("a")
                present, stage = present and read, RequestStage.ENDED
            case "release":
                live.release("a")
                read = False
                present = present and stage not in {RequestStage.NEW, RequestStage.ENDED}
        assert ("a" in live) == present
        assert (
            live.is_served("a") == ("a" in live.served()) == (present and stage in SERVED)
        )
        assert not present or live["a"].read == read
