"""Rendezvous hashing: equal shares, and what moves when replicas come and go."""

from collections import Counter

from minfer.routing.rendezvous import ranked, text_key

NAMES = [f"replica-{number}" for number in range(8)]
KEYS = [b"%d" % number for number in range(2000)]


def test_every_replica_is_the_best_for_its_share_of_the_keys() -> None:
    best = Counter(ranked(NAMES, key)[0] for key in KEYS)
    assert set(best) == set(NAMES)
    share = len(KEYS) / len(NAMES)
    assert all(abs(count / share - 1) < 0.25 for count in best.values())


def test_the_second_best_are_shares_too() -> None:
    pairs = Counter(tuple(ranked(NAMES, key)[:2]) for key in KEYS)
    assert len(pairs) == len(NAMES) * (len(NAMES) - 1)


def test_only_the_keys_of_who_left_move() -> None:
    for key in KEYS[:200]:
        order = ranked(NAMES, key)
        assert sorted(order) == NAMES
        for gone in NAMES:
            left = [name for name in order if name != gone]
            assert ranked([n for n in reversed(NAMES) if n != gone], key) == left


def test_any_text_is_a_key() -> None:
    assert text_key("é\ud800") == b"\xc3\xa9\xed\xa0\x80"
    assert ranked(["\ud800"], b"") == ["\ud800"]


def test_the_order_never_changes_as_journals_depend_on_it() -> None:
    assert "".join(ranked("abcdefgh", b"key")) == "bdagehcf"
