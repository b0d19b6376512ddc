"""Journals of routers and of replicas that agree, and those that do not."""

from collections.abc import Sequence

import pytest
from attrs import evolve

from minfer.journal.agreement import (
    Agreement,
    Disagreement,
    EngineRequest,
    ReplicaRecord,
    RouterRecord,
    compare,
)
from minfer.journal.routed_requests import RoutedRequest


def router(*sent: str, name: str = "r", closed: bool = True) -> RouterRecord:
    """Of requests, each as in `a0`: a goes to 0; in `a0!`, its first token came."""
    each = [RoutedRequest(s[0], s[1], 0, None, started="!" in s) for s in sent]
    return RouterRecord(name, each, closed)


def replica(*asked: str) -> ReplicaRecord:
    """Of requests; `a#` is one that was resubmitted."""
    return ReplicaRecord([EngineRequest(one[0], one.endswith("#")) for one in asked])


def test_what_was_sent_is_there_and_nothing_else() -> None:
    routers = [router("a0!", "b1!", "a1!"), router("c0!")]
    found = compare(routers, {"0": replica("a", "c"), "1": replica("b", "a#")})
    assert found == Agreement(sent=4, found=4)
    assert found.holds


@pytest.mark.parametrize(
    ("sent", "asked", "expected"),
    [
        (["a0!", "b0"], ["a"], Agreement(sent=2, found=1, unstarted=1)),
        (["a0!"], [], Agreement(sent=1, missing=[Disagreement("a", "0", "r")])),
        (["a0"], ["a", "b"], Agreement(sent=1, found=1, unsent=[Disagreement("b", "0")])),
        (["a1!"], [], Agreement(sent=1, absent={"1": 1})),
    ],
)
def test_what_is_in_one_journal_alone(
    sent: Sequence[str], asked: Sequence[str], expected: Agreement
) -> None:
    found = compare([router(*sent)], {"0": replica(*asked)})
    assert found == expected
    assert found.holds is not bool(found.missing or found.unsent or found.absent)


def test_one_that_went_elsewhere_alone_is_counted_and_a_new_one_is_not() -> None:
    """What kills engines is resubmitted without a decision; a new request never is."""
    zero = {"0": replica("a"), "1": replica("a#")}
    assert compare([router("a0!")], zero) == Agreement(sent=1, found=1, alone=1)
    zero["1"] = replica("a")
    assert compare([router("a0!")], zero).unsent == [Disagreement("a", "1")]


def test_a_journal_of_a_replica_without_its_beginning_proves_nothing_missing() -> None:
    part = evolve(replica("b"), complete=False)
    found = compare([router("a0!", "b0!")], {"0": part})
    assert found == Agreement(sent=2, found=1, unrecorded=1)


def test_a_router_that_was_cut_short_may_have_sent_what_came_behind_its_end() -> None:
    short, other = router("b0!", closed=False), router("d0!")
    asked = {"0": replica("a", "b", "c", "d")}
    found = compare([short, other], asked)
    assert found == Agreement(sent=2, found=2, late=1, unsent=[Disagreement("a", "0")])
    never = router(closed=False)
    assert compare([other, never], {"0": replica("d", "e")}).late == 1


def test_a_request_may_end_with_the_token_of_the_replica_that_prefills() -> None:
    prefills = evolve(router("a0!"), prefills=True)
    both = {"0": replica("a"), "1": replica()}
    assert compare([prefills, router("a1!")], both).unstarted == 1
    both["0"] = replica()
    assert compare([prefills, router("a1!")], both).missing == [
        Disagreement("a", "0", "r")
    ]
