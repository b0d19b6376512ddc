"""Requests that killed engines are known for a while, by client and digest."""

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from minfer.effects.cluster.link import crash_denylist
from minfer.effects.cluster.link.crash_denylist import (
    CrashDenylist,
    CrashingRequest,
    request_digest,
)
from minfer.effects.cluster.link.crash_rule import MAX_CLIENT_DEATHS, REFUSED_SECONDS
from minfer.records.request import PromptOnly, SamplingParams
from tests.effects.cluster.ends import request


def test_a_digest_is_of_what_determines_the_work() -> None:
    asked = request(n=2, stop_ids=frozenset((3, 1)))
    same = evolve(asked, id="b", seed=9, client="x", root=b"salt", output=(), priority=1)
    assert request_digest(asked) == request_digest(same)
    variants = [
        evolve(asked, prompt=(1, 2)),
        evolve(asked, max_tokens=8),
        evolve(asked, n=1),
        evolve(asked, adapter="0f"),
        evolve(asked, stop_ids=frozenset((3,))),
        evolve(asked, bad_words=((5,),)),
        evolve(asked, sampling=SamplingParams(temperature=0.5)),
        evolve(asked, n=1, max_tokens=0, prompt_only=PromptOnly()),
        evolve(asked, n=1, max_tokens=0, prompt_only=PromptOnly("last")),
    ]
    digests = {request_digest(request) for request in (asked, *variants)}
    assert len(digests) == 1 + len(variants)


@given(
    st.lists(
        st.tuples(
            st.sampled_from("xyz"),
            st.integers(0, 5),
            st.integers(1, 3),
            st.floats(0.0, 300.0),
        )
    )
)
def test_they_are_known_for_ten_minutes(
    deaths: list[tuple[str, int, int, float]],
) -> None:
    """As in a list of all of them, with the times at which engines died."""
    now = 0.0
    denylist = CrashDenylist(lambda: now)
    entries: list[tuple[float, str, bytes, int]] = []
    for client, number, engines, pause in deaths:
        now += pause
        digest = bytes([number])
        entries = [entry for entry in entries if entry[0] > now - REFUSED_SECONDS]
        new = (client, digest) not in [entry[1:3] for entry in entries]
        assert bool(denylist.add([CrashingRequest(client, digest, engines)])) == new
        if new:
            entries.append((now, client, digest, engines))
        ages = [
            CrashingRequest(name, key, ended, now - added)
            for added, name, key, ended in entries
        ]
        assert list(denylist.all()) == ages
        for name in "xyz":
            of_client = [entry for entry in entries if entry[1] == name]
            assert denylist.isolates(name) == (
                sum(entry[3] for entry in of_client) > MAX_CLIENT_DEATHS
            )
            for number in range(6):
                right = bytes([number]) in [entry[2] for entry in of_client]
                assert denylist.contains(name, bytes([number])) == right


def test_what_another_process_knew_has_its_age() -> None:
    now = 1000.0
    denylist = CrashDenylist(lambda: now)
    old, new = request("a", n=1), request("a", n=2)
    ages = {old: REFUSED_SECONDS - 1, new: 0.0}
    denylist.add(
        [
            CrashingRequest("", request_digest(request), 1, age)
            for request, age in ages.items()
        ]
    )
    assert denylist.refuses(evolve(old, seed=5))
    now += 2.0
    assert not denylist.refuses(old)
    assert denylist.refuses(new)


def test_their_number_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crash_denylist, "MAX_CRASHING_REQUESTS", 3)
    denylist = CrashDenylist(lambda: 0.0)
    denylist.add([CrashingRequest(f"{number}", b"", 9) for number in range(5)])
    assert [denylist.has_client(f"{number}") for number in range(5)] == [False] * 2 + [
        True
    ] * 3
    assert not denylist.isolates("0")
    assert denylist.isolates("4")
