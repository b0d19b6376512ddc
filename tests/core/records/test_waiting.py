"""The line against a sorted list."""

import hypothesis.strategies as st
import pytest
from attrs import evolve
from hypothesis import given

from minfer.records.adapters import UnreadyAdapters
from minfer.records.request import Request
from minfer.records.sequence import Sequence
from minfer.records.waiting import WaitingQueue
from tests.circles import examples
from tests.core.tuned import tuned


def entry(number: int) -> Sequence:
    request = Request(id=str(number), prompt=(1,), max_tokens=1)
    return Sequence(request, 0, ((float(number % 7),), number, 0), 0.0, (1,))


@examples(15)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 400)), max_size=400))
def test_line_is_a_sorted_list(moves: list[tuple[bool, int]]) -> None:
    line, model = WaitingQueue(), dict[int, Sequence]()
    for add, number in moves:
        seq = entry(number)
        before, kept = line, list(line)
        if add and number not in model:
            line = line.insert(seq)
            model[number] = seq
        elif not add:
            line = line.remove(seq.place)
            model.pop(number, None)
        assert list(before) == kept, "the old line has not changed"
        assert line.find(seq.place) == model.get(number)
    right = sorted(model.values(), key=lambda s: s.place)
    assert list(line) == right
    assert len(line) == len(right)
    if right:
        assert line.first() == right[0]


def test_places_that_nothing_has_take_nothing_away() -> None:
    line = WaitingQueue().insert_many([entry(1), entry(2)])
    left = line.remove_many([entry(2).place, entry(3).place])
    assert [len(left), *left] == [1, entry(1)]


def test_buckets_stay_small() -> None:
    line = WaitingQueue()
    for number in range(2000):
        line = line.insert(entry(number))
    assert max(map(len, line.buckets)) < 128
    assert [s.place for s in line] == sorted(s.place for s in line)


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=120),
    st.integers(2, 4),
)
def test_a_line_of_tiny_buckets_is_a_sorted_list(
    moves: list[tuple[bool, int]], full: int
) -> None:
    """So that heads of buckets are looked for as often as what is inside them."""
    with tuned(QUEUE_BUCKET=full):
        line, model = WaitingQueue(), dict[int, Sequence]()
        for add, number in moves:
            seq = entry(number)
            if add and number not in model:
                line = line.insert(seq)
                model[number] = seq
            elif not add:
                rest = line.remove(seq.place)
                assert number in model or rest is line, "there was none"
                line = rest
                model.pop(number, None)
            assert all(line.buckets), "no bucket is empty"
            assert max(map(len, line.buckets), default=0) < full
            everybody = sorted(model.values(), key=lambda s: s.place)
            assert list(line) == everybody
            assert len(line) == len(everybody)
            assert all(line.find(one.place) is one for one in everybody)
            if everybody:
                assert (line.first(), line.last()) == (everybody[0], everybody[-1])


@tuned(QUEUE_BUCKET=8)
def test_a_full_bucket_is_split_in_the_middle() -> None:
    line = WaitingQueue()
    for number in range(7, 7 * 9, 7):  # one rank: in order of arrival
        line = line.insert(entry(number))
    assert [len(bucket) for bucket in line.buckets] == [4, 4]
    assert len(WaitingQueue().insert(entry(1)).buckets) == 1


@pytest.mark.long
@given(st.lists(st.tuples(st.sets(st.integers(0, 200)), st.booleans()), max_size=12))
@tuned(QUEUE_BUCKET=4)
def test_many_at_once_are_as_one_by_one(moves: list[tuple[set[int], bool]]) -> None:
    many, single, here = WaitingQueue(), WaitingQueue(), set[int]()
    for numbers, add in moves:
        if add:
            seqs = [entry(number) for number in numbers - here]
            many = many.insert_many(seqs)
            for seq in seqs:
                single = single.insert(seq)
            here |= numbers
        else:
            places = [entry(number).place for number in numbers]
            many = many.remove_many(places)
            for place in places:
                single = single.remove(place)
            here -= numbers
        assert list(many) == list(single)
        assert len(many) == len(here)
        assert all(0 < len(bucket) < 4 for bucket in many.buckets)
        assert all(many.find(seq.place) is seq for seq in many)


@tuned(QUEUE_BUCKET=4)
def test_many_share_the_buckets_that_they_do_not_touch() -> None:
    line = WaitingQueue().insert_many(map(entry, range(0, 70, 7)))  # all of one rank
    longer = line.insert_many([entry(700), entry(707)])
    assert longer.buckets[0] is line.buckets[0]
    assert longer.remove_many([entry(700).place]).buckets[0] is line.buckets[0]


@tuned(QUEUE_BUCKET=4)
def test_many_between_others_push_none_out() -> None:
    line = WaitingQueue().insert_many(map(entry, range(0, 140, 14)))  # all of one rank
    more = line.insert_many(map(entry, (7, 63)))
    assert list(more) == [
        *map(entry, (0, 7, *range(14, 57, 14), 63, *range(70, 140, 14)))
    ]


@tuned(QUEUE_BUCKET=8)
def test_many_that_do_not_fill_a_bucket_stay_together() -> None:
    line = WaitingQueue().insert_many(entry(7 * number) for number in range(1, 8))
    assert [len(bucket) for bucket in line.buckets] == [7]
    more = line.insert_many(entry(7 * number) for number in range(8, 11))
    assert [len(bucket) for bucket in more.buckets] == [4, 4, 2]
    just_full = line.insert_many([entry(7 * 8)])
    assert [len(bucket) for bucket in just_full.buckets] == [4, 4]


@examples(25)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.sampled_from("abc")), max_size=60),
    st.sets(st.integers(0, 60)),
    st.sets(st.sampled_from("abcd")),
    st.sets(st.integers(0, 60)),
    st.integers(2, 5),
)
def test_the_first_who_is_not_held_back_with_its_client(
    entries: list[tuple[int, str]],
    gone: set[int],
    deferred: set[str],
    back: set[int],
    full: int,
) -> None:
    """Against a list; who has been in passes."""
    model = {}
    for number, client in entries:
        one = entry(number)
        request = evolve(one.request, client=client)
        model[number] = evolve(one, request=request, preempted=int(number in back))
    left = [seq for number, seq in model.items() if number not in gone]
    some = sorted(number for number in gone if number in model)
    with tuned(QUEUE_BUCKET=full):
        line = WaitingQueue().insert_many(model.values())
        for number in some[::2]:
            line = line.remove(model[number].place)
        line = line.remove_many(model[number].place for number in some[1::2])
    may = [
        seq
        for seq in sorted(left, key=lambda seq: seq.place)
        if seq.preempted or seq.request.client not in deferred
    ]
    assert line.first_but(deferred) == next(iter(may), None)
    assert sum(line.counts.values()) == sum(not seq.preempted for seq in left)
    assert all(line.counts.values())


NAMES = st.sampled_from(("a1", "b2", "c3"))


@examples(25)
@given(
    st.dictionaries(st.integers(0, 60), st.just("") | NAMES, max_size=9),
    st.sets(st.integers(0, 60)),
    st.frozensets(NAMES),
    st.none() | st.frozensets(NAMES),
    st.sets(st.integers(0, 60).map(str)),
)
def test_the_first_whose_adapter_is_ready(
    adapters: dict[int, str],
    gone: set[int],
    passed: frozenset[str],
    ready: frozenset[str] | None,
    loading: set[str],
) -> None:
    """Against a list."""
    model = []
    for number, adapter in adapters.items():
        seq = entry(number)
        model.append(evolve(seq, request=evolve(seq.request, adapter=adapter)))
    line = WaitingQueue().insert_many(model)
    line = line.remove_many(entry(number).place for number in gone)
    left = sorted(
        [seq for seq in model if int(seq.request.id) not in gone],
        key=lambda seq: seq.place,
    )
    ready = None if ready is None else ready - passed
    unready = UnreadyAdapters(passed, ready)
    may = [
        seq
        for seq in left
        if not seq.request.adapter
        or (
            seq.request.adapter not in passed
            and (ready is None or seq.request.adapter in ready)
        )
    ]
    assert line.first_but((), (), unready) == next(iter(may), None)
    assert line._has_ready(unready) == bool(may), "else all of the queue is searched"
    may = [seq for seq in may if seq.request.id not in loading]
    assert line.first_but((), loading, unready) == next(iter(may), None)
    assert line.num_with_adapter == sum(line.adapters.values())


def test_an_empty_queue_has_no_head() -> None:
    assert WaitingQueue().first_but(set()) is WaitingQueue().first_but({"a"}) is None


def test_a_deferred_client_without_waiting_requests_defers_none() -> None:
    assert WaitingQueue().insert(entry(1)).first_but({"gone"}) == entry(1)
