"""Each API server is told of its own rows, and of the batch's ids only when
they change.
"""

from hypothesis import given
from hypothesis import strategies as st

from minfer.effects.cluster.engine_server.output_routing import OutputRouter, Session
from minfer.effects.cluster.link import link_messages as wire
from minfer.effects.live.client import TurnOutputs
from minfer.records.messages import Finished

NAMES = "abcdef"
BATCHES = st.lists(st.lists(st.sampled_from(NAMES), unique=True), min_size=1, max_size=6)


@given(BATCHES, st.lists(st.integers(-1, 2), min_size=6, max_size=6), st.data())
def test_each_front_gets_its_own_and_nothing_else(
    batches: list[list[str]], owned: list[int], data: st.DataObject
) -> None:
    sessions = [Session(lambda _: None) for _ in range(3)]
    owners = {
        name: sessions[index]
        for name, index in zip(NAMES, owned, strict=True)
        if index >= 0
    }
    heard: dict[int, list[tuple[str, int]]] = {id(session): [] for session in sessions}
    last_ids: dict[int, tuple[tuple[str, int], ...]] = {}
    right: list[tuple[str, int]] = []
    shares = OutputRouter()
    for names in batches:
        batch = tuple((name, 0) for name in names)
        for token in range(data.draw(st.integers(1, 3))):
            news = TurnOutputs(time=0.0, ids=batch, tokens=tuple((token,) for _ in batch))
            right += [(name, token) for name in names]
            for session, reported in shares.route(news, sessions, owners):
                if reported.ids is not None:
                    last_ids[id(session)] = reported.ids
                rows = zip(last_ids[id(session)], reported.tokens, strict=True)
                heard[id(session)] += [(name, tokens[0]) for (name, _), tokens in rows]
                assert reported.ids is None or token == 0, "it was told before"
    for session in sessions:
        expected = [
            (name, token)
            for name, token in right
            if name in owners and owners[name] is session
        ]
        assert heard[id(session)] == expected


def test_ends_are_sent_to_fronts_with_no_rows() -> None:
    first, second = Session(lambda _: None), Session(lambda _: None)
    shares = OutputRouter()
    end = Finished("a", 0, "cancelled", 0)
    news = TurnOutputs(time=1.0, finished=(end,), ids=(("b", 0),), tokens=((5,),))
    reported = dict(shares.route(news, [first, second], {"a": first, "b": second}))
    assert reported == {
        first: wire.ApiServerOutputs(1.0, finished=(end,)),
        second: wire.ApiServerOutputs(1.0, ids=(("b", 0),), tokens=((5,),)),
    }


def test_drafts_are_reported_with_the_rows_that_had_them() -> None:
    first, second = Session(lambda _: None), Session(lambda _: None)
    batch = (("a", 0), ("b", 0), ("c", 0))
    news = TurnOutputs(time=1.0, ids=batch, tokens=((5,), (6, 7), (8,)), drafts=(0, 3, 2))
    readers = {"a": first, "b": second, "c": first}
    reported = dict(OutputRouter().route(news, [first, second], readers))
    assert (reported[first].drafts, reported[second].drafts) == ((0, 2), (3,))
    read = wire.read_to_api_server(wire.encode(reported[second]))
    assert read == reported[second]
