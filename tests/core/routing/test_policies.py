"""What each routing policy promises; the kit tries them under stories."""

from collections import Counter
from fractions import Fraction
from math import ceil
from random import Random
from typing import Any

import pytest
from attrs import evolve

from minfer.routing.accounts import MAX_ADAPTERS
from minfer.routing.messages import (
    BlocksPublished,
    Deferred,
    Dispatched,
    Estimate,
    LoadReport,
    Placed,
    ReplicaChoice,
    ReplicaDraining,
    ReplicaJoined,
    ReplicaLeft,
    RequestEnded,
    RequestStarted,
)
from minfer.routing.policies import (
    ROUTING_POLICIES,
    LeastLoaded,
    Prefix,
    PrefixHash,
    RoundRobin,
    routing_policy_named,
)
from minfer.routing.rendezvous import best_replica, text_key
from minfer.values.checks import ConfigError
from tests.core.routing.routers import Desk, ask, keys

# one unit of time for a token, ten for a sequence
PLAIN = Prefix(
    token=1.0, miss=1.0, row=0.1, output=100, affinity=0.0, least=0, patience=1e6
)


def reason(desk: Desk, *args: Any, **more: Any) -> Placed:
    found = desk.route(ask(*args, **more)).reason
    assert isinstance(found, Placed)
    return found


def test_policies_have_names() -> None:
    assert {name: type(routing_policy_named(name)) for name in ROUTING_POLICIES} == {
        "prefix": Prefix,
        "prefix_hash": PrefixHash,
        "least_loaded": LeastLoaded,
        "round_robin": RoundRobin,
    }
    with pytest.raises(ConfigError, match="no routing policy 'x', only prefix, "):
        routing_policy_named("x")


@pytest.mark.parametrize(
    ("kind", "field", "least"),
    [
        (Prefix, "token", 0.0),
        (Prefix, "miss", 0.0),
        (Prefix, "row", 0.0),
        (Prefix, "output", 0),
        (Prefix, "affinity", 0.0),
        (Prefix, "least", 0),
        (Prefix, "patience", 0.0),
        (PrefixHash, "blocks", 1),
        (PrefixHash, "load", 1.0),
    ],
)
def test_numbers_have_bounds(kind: Any, field: str, least: float) -> None:
    kind(**{field: least})
    with pytest.raises(ConfigError, match=f"routing policy: {field} must be"):
        kind(**{field: least - 1})


# --- round robin and least loaded -------------------------------------------------------


def test_round_robin_takes_turns_by_name() -> None:
    desk = Desk("abc", RoundRobin())
    assert [desk.placed(ask(f"{n}")) for n in range(5)] == [*"abcab"]
    desk.tell(ReplicaDraining("c"), ReplicaJoined("bb"))
    assert [desk.placed(ask(f"{n}")) for n in range(5, 9)] == ["bb", "a", "b", "bb"]
    desk.tell(ReplicaLeft("bb"))
    assert reason(desk, "9").why == "turn"
    assert desk.state.policy == "a"


def test_least_loaded_counts_sequences_then_tokens() -> None:
    desk = Desk("abc")
    desk.tell(
        LoadReport("a", 1, 2, 0), LoadReport("b", 0, 2, 9), LoadReport("c", 1, 1, 8)
    )
    found = reason(desk, "1")
    assert (found.replica, found.why, found.seconds) == ("c", "load", None)
    assert [desk.placed(ask(f"{n}")) for n in range(2, 5)] == ["b", "a", "c"]


# --- prefix -----------------------------------------------------------------------------


def test_prefix_takes_the_replica_with_the_least_left_to_do() -> None:
    desk = Desk("abcde", PLAIN)
    desk.tell(BlocksPublished("a", keys(1)), BlocksPublished("b", keys(1, 2)))
    found = reason(desk, "1", 1, 2, 3)
    assert (found.replica, found.hit, found.prefill) == ("b", 2, 15)
    assert (found.why, found.seconds) == ("cost", 15.0)
    assert found.alternatives == (
        Estimate("a", 1, 25.0),
        Estimate("c", 0, 35.0),
        Estimate("d", 0, 35.0),
    )
    # b: 15 wait + 15 of its own + 10 for a sequence = 40
    second = reason(desk, "2", 1, 2, 3)
    assert (second.replica, second.seconds) == ("a", 25.0)
    third = reason(desk, "3", 1, 2, 3)
    assert (third.replica, third.hit) == ("c", 0)


def test_prefix_counts_reported_loads_and_new_ones() -> None:
    desk = Desk("abc", PLAIN)
    desk.tell(
        LoadReport("a", 1, 1, 7), LoadReport("b", 0, 1, 25), LoadReport("c", 9, 9, 9)
    )
    desk.tell(Dispatched("b", ask("0", rest=2)))
    found = reason(desk, "1", output=10)
    assert (found.replica, found.seconds) == ("a", 7 + 5 + 2)
    assert found.alternatives == (
        Estimate("c", 0, 9 + 5 + 18),
        Estimate("b", 0, 25 + 2 + 5 + 2),
    )
    assert found.why == "cost"
    idle = reason(desk, "2", output=0)
    assert (idle.replica, idle.seconds) == ("c", 9 + 5)


def test_tokens_to_be_computed_count_more_than_those_that_wait() -> None:
    desk = Desk("ab", evolve(PLAIN, miss=3.0))
    desk.tell(BlocksPublished("a", keys(1)), LoadReport("a", 0, 0, 29))
    found = reason(desk, "1", 1)
    assert (found.replica, found.seconds) == ("a", 29 + 3 * 5)
    assert found.alternatives == (Estimate("b", 0, 45.0),)


@pytest.mark.parametrize("blocks", [1, 7, 40])
@pytest.mark.parametrize(("more", "chosen"), [(-1, "a"), (1, "b")])
def test_by_default_a_token_to_compute_counts_as_two_that_wait(
    blocks: int, more: int, chosen: str
) -> None:
    desk, cached = Desk("ab", Prefix()), range(blocks)
    desk.tell(BlocksPublished("a", keys(*cached)))
    desk.tell(LoadReport("a", 0, 0, 2 * 10 * blocks + more))
    assert desk.placed(ask("1", *cached)) == chosen


def test_equal_costs_go_to_fewer_requests_then_by_name() -> None:
    desk = Desk("abc", evolve(PLAIN, row=0.0))
    desk.tell(Dispatched("a", ask("0")), RequestStarted("0"))
    assert reason(desk, "1").replica == "b"


def test_a_session_stays_unless_its_replica_is_hot() -> None:
    policy = evolve(PLAIN, affinity=40.0)
    homes = {}
    for name in map(str, range(30)):
        desk = Desk("abcd", policy)
        found = reason(desk, "1", session=name)
        assert found.why == "session"
        home = homes[name] = found.replica
        desk.tell(RequestEnded("1"), LoadReport(home, 1, 0, 30))  # worth 40
        assert reason(desk, "2", session=name).replica == home
        desk.tell(LoadReport(home, 1, 0, 31))
        hot = reason(desk, "3", session=name)
        assert hot.replica != home
        assert hot.seconds == 5
        assert Estimate(home, 0, 46.0) in hot.alternatives
    assert set(homes.values()) == set("abcd")


def homes(policy: Any, replicas: str, asked: list[Any]) -> list[str | None]:
    """Where each request goes, to replicas without load."""
    desk, found = Desk(replicas, policy), []
    for request in asked:
        found.append(desk.placed(request))
        desk.tell(RequestEnded(request.id))
    return found


@pytest.mark.parametrize(
    ("policy", "asked"),
    [
        (Prefix(), [ask("r", session=f"{n}") for n in range(600)]),
        (PrefixHash(), [ask("r", n, 1, 2) for n in range(600)]),
        (PrefixHash(), [ask("r", session=f"{n}") for n in range(600)]),
    ],
)
def test_who_joins_or_leaves_moves_its_share_and_no_more(policy: Any, asked: Any) -> None:
    many, few = homes(policy, "abcdef", asked), homes(policy, "abcde", asked)
    moved = [(one, other) for one, other in zip(many, few, strict=True) if one != other]
    assert {one for one, _ in moved} == {"f"}
    assert {other for _, other in moved} == set("abcde")
    assert len(moved) < 1.3 * len(asked) / 6


def queued(desk: Desk, replica: str, tenant: str, tokens: int) -> None:
    name = f"{replica} {tenant} {tokens} {len(desk.state.requests)}"
    desk.tell(Dispatched(replica, ask(name, rest=tokens, tenant=tenant)))


def test_a_tenant_gets_no_more_than_its_share_of_what_waits() -> None:
    desk = Desk("ab", PLAIN)
    queued(desk, "a", "x", 100)
    queued(desk, "a", "y", 105)
    queued(desk, "b", "y", 900)
    # 105 of 210 of x are half; then 110 are more
    assert desk.placed(ask("1", rest=5, tenant="x")) == "a"
    assert desk.placed(ask("2", rest=5, tenant="x")) == "b", "where none of it waits"
    assert desk.placed(ask("3", rest=800, tenant="x")) == "b"
    assert desk.route(ask("4", rest=800, tenant="x")).reason == Deferred("4", "x", 910)
    assert desk.placed(ask("5", rest=9, tenant="z")) == "a", "a tenant that has nothing"
    desk.tell(RequestEnded("3"))
    assert desk.placed(ask("4", rest=800, tenant="x")) == "b"


def test_a_tenant_may_always_go_where_no_other_waits() -> None:
    desk = Desk("ab", PLAIN)
    queued(desk, "a", "x", 500)
    queued(desk, "b", "x", 500)
    assert desk.placed(ask("1", rest=500, tenant="x")) == "a"
    queued(desk, "b", "y", 1)
    assert desk.placed(ask("2", rest=500, tenant="x")) == "a"
    queued(desk, "a", "y", 1)
    assert desk.placed(ask("3", rest=500, tenant="x")) is None


def test_a_tenant_waits_for_a_share_rather_than_go_where_it_costs_far_more() -> None:
    for over in (0, 1):
        desk = Desk("abc", evolve(PLAIN, row=0.0, patience=40.0))
        for replica in "ab":
            queued(desk, replica, "x", 100)
            queued(desk, replica, "y", 1)
        desk.tell(LoadReport("b", 0, 0, 500), LoadReport("c", 0, 0, 141 + over))
        found = desk.route(ask("1", tenant="x"))
        assert isinstance(found.reason, Deferred if over else Placed)
        assert found.replica == (None if over else "c")
    assert desk.placed(ask("2", tenant="z")) == "a", "all replicas are fair to others"


def test_a_few_tokens_are_allowed_to_every_tenant() -> None:
    desk = Desk("a", evolve(PLAIN, least=60))
    queued(desk, "a", "y", 10)
    queued(desk, "a", "x", 10)
    assert desk.placed(ask("1", rest=50, tenant="x")) == "a"
    assert desk.placed(ask("2", rest=1, tenant="x")) is None


def test_the_share_of_one_among_three_is_a_third() -> None:
    desk = Desk("a", PLAIN)
    queued(desk, "a", "x", 10)
    queued(desk, "a", "y", 30)
    queued(desk, "a", "z", 30)
    assert desk.placed(ask("1", rest=20, tenant="x")) == "a"
    assert desk.placed(ask("2", rest=1, tenant="x")) is None


def test_hot_prefixes_are_spread_once_that_is_quicker() -> None:
    desk = Desk("abcd", PLAIN)
    desk.tell(BlocksPublished("a", keys(*range(10))))
    placed = Counter(desk.placed(ask(f"{n}", *range(10))) for n in range(40))
    assert set(placed) == set("abcd")
    assert placed["a"] == max(placed.values())


# --- prefix hash ------------------------------------------------------------------------


def test_equal_first_blocks_go_to_the_same_replica() -> None:
    policy = PrefixHash(blocks=2, load=100.0)
    desk, homes = Desk("abcdef", policy), set()
    for first in range(20):
        asked = [ask(f"{first} {n}", first, 1, n) for n in range(4)]
        asked.append(ask(f"{first}", first, 1, rest=0))
        (home,) = {desk.placed(one) for one in asked}
        homes.add(home)
    assert len(homes) > 3
    others = [desk.placed(ask(f"{n}", 0, n)) for n in range(20)]
    assert len(set(others)) > 3, "the second block counts"


def test_without_a_full_block_the_session_is_hashed_or_the_id() -> None:
    desk = Desk("abcdef", PrefixHash(load=100.0))
    assert len({desk.placed(ask(f"{n}", session="s")) for n in range(20)}) == 1
    assert len({desk.placed(ask(f"{n}")) for n in range(20)}) > 3


def test_loads_are_bounded() -> None:
    desk = Desk("abcd", PrefixHash(load=1.5))
    found = [reason(desk, f"{n}", 1, 2) for n in range(40)]
    counts = Counter[str]()
    for number, one in enumerate(found):
        counts[one.replica] += 1
        assert counts[one.replica] <= -(-3 * (number + 1) // 8)
    assert {one.why for one in found} == {"hash", "hash, load"}
    assert found[0].why == "hash"
    home = found[0].replica
    assert all((one.replica == home) == (one.why == "hash") for one in found)
    assert counts[home] == 15, "as many as it may have"


def test_a_bound_of_one_leaves_a_replica_for_everyone() -> None:
    desk = Desk("abc", PrefixHash(load=1.0))
    placed = Counter(desk.placed(ask(f"{n}", 1)) for n in range(12))
    assert placed == dict.fromkeys("abc", 4)


def test_choices_show_three_alternatives() -> None:
    desk = Desk("abcdef", PLAIN)
    assert len(reason(desk, "1").alternatives) == 3
    assert ReplicaChoice("a", "why").alternatives == ()


@pytest.mark.parametrize("load", [1.0, 1.25, 1.5, 2.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_prompt_goes_to_the_best_replica_below_the_bound(
    seed: int, load: float
) -> None:
    """Loads are random; the bound is computed in fractions."""
    rng, names = Random(seed), "abcd"
    for number in range(30):
        desk, counts = Desk(names, PrefixHash(load=load)), Counter[str]()
        for name in rng.choices(names, (1, 1, 2, 3), k=rng.randrange(12)):
            counts[name] += 1
            queued(desk, name, "", 100 + len(desk.state.requests))
        request = ask(f"r {number}", number, 2)
        most = Fraction(load) * (counts.total() + 1) / len(names)
        below = [name for name in names if counts[name] + 1 <= ceil(most)]
        key = request.keys[:4][-1]
        found = reason(desk, f"r {number}", number, 2)
        assert found.replica == best_replica(below, key)
        assert found.why == (
            "hash" if best_replica(names, key) in below else "hash, load"
        )


# --- adapters ---------------------------------------------------------------------------


def adapter_ask(name: str, adapter: str) -> Any:
    return evolve(ask(name), adapter=adapter)


def test_an_adapters_requests_go_where_it_is_while_that_costs_little() -> None:
    policy = evolve(PLAIN, adapter=25.0)  # worth two sequences and some tokens
    desk = Desk("abc", policy)
    desk.tell(LoadReport("b", 0, 0, 0, adapters=("x", "y")))
    found = desk.route(adapter_ask("1", "x")).reason
    assert isinstance(found, Placed)
    assert (found.replica, found.why) == ("b", "adapter")
    desk.tell(LoadReport("b", 2, 0, 4, adapters=("x", "y")))  # 24 more
    assert desk.placed(adapter_ask("2", "x")) == "b"
    desk.tell(LoadReport("b", 3, 0, 0, adapters=("x", "y")))
    home = desk.placed(adapter_ask("3", "y"))  # a load costs less
    assert home in ("a", "c")
    assert desk.placed(adapter_ask("4", "y")) == home  # and is made once


def test_adapters_are_spread_over_idle_replicas() -> None:
    desk = Desk("abc", Prefix())
    names = [f"{number}" for number in range(60)]
    homes = {name: best_replica("abc", text_key(name)) for name in names}
    for name in (*names, *names):
        assert desk.placed(adapter_ask(name, name)) == homes[name]
        desk.tell(RequestEnded(name))
    assert min(Counter(homes.values()).values()) > 10
    # One that lies elsewhere stays there, also for a session.
    desk.tell(LoadReport("b", 0, 0, 0, adapters=("x",)))
    for number in range(9):
        session = evolve(adapter_ask(f"s{number}", "x"), session=f"{number}")
        assert desk.placed(session) == "b"
        desk.tell(RequestEnded(f"s{number}"))


def test_a_report_says_which_adapters_are_there() -> None:
    desk = Desk("ab", evolve(PLAIN, adapter=1e6))
    home = desk.placed(adapter_ask("1", "x"))
    assert home is not None
    other = "b" if home == "a" else "a"
    desk.tell(LoadReport(home, 9, 0, 9))  # without a word about adapters
    assert desk.state.replicas[home].adapters == ("x",)
    assert desk.placed(adapter_ask("2", "x")) == home
    desk.tell(LoadReport(home, 9, 0, 9, adapters=()))
    assert desk.placed(adapter_ask("3", "x")) == other
    for number in range(MAX_ADAPTERS + 2):
        desk.tell(Dispatched("a", adapter_ask(f"more {number}", f"{number}")))
    names = desk.state.replicas["a"].adapters
    assert (len(names), names[-1]) == (MAX_ADAPTERS, f"{MAX_ADAPTERS + 1}")
