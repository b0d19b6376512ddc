"""Rendezvous hashing: equal shares, and what moves when replicas come and go."""

from collections import Counter

from minfer.routing.rendezvous import best_replica, text_key

NAMES = [f"replica-{number}" for number in range(8)]
KEYS = [b"%d" % number for number in range(2000)]


def test_every_replica_is_the_best_for_its_share_of_the_keys() -> None:
    found = Counter(best_replica(NAMES, key) for key in KEYS)
    assert set(found) == set(NAMES)
    share = len(KEYS) / len(NAMES)
    assert all(abs(count / share - 1) < 0.25 for count in found.values())


def test_only_the_keys_of_who_left_move_and_to_all_others() -> None:
    moved = Counter[tuple[str, str]]()
    for key in KEYS:
        home = best_replica(NAMES, key)
        for gone in NAMES:
            left = [name for name in reversed(NAMES) if name != gone]
            if gone == home:
                moved[home, best_replica(left, key)] += 1
            else:
                assert best_replica(left, key) == home
    assert len(moved) == 8 * 7
    share = len(KEYS) / len(moved)
    assert all(0.4 < count / share < 1.8 for count in moved.values())


def test_any_text_is_a_key() -> None:
    assert text_key("\u00e9\ud800") == b"\xc3\xa9\xed\xa0\x80"
    assert best_replica(["\ud800"], b"") == "\ud800"


def test_homes_never_change_as_journals_depend_on_them() -> None:
    homes = "".join(best_replica("abcdefgh", b"%d" % number) for number in range(20))
    assert homes == "decgcbcdbfgbgeagbhff"
