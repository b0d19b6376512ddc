"""The backends of the last answers are known, by ids in heads and bodies."""

import pytest

from minfer.effects.proxy import homes
from minfer.effects.proxy.homes import Homes


def test_an_answer_is_found_by_its_header_and_by_the_first_id_of_its_body() -> None:
    homes_by_id = Homes()
    homes_by_id.note(
        "a", [(b"x-request-id", b"r")], b'{"id": "chatcmpl-1", "x": {"id": "y"}}'
    )
    backends = [homes_by_id.find(key) for key in ("r", "chatcmpl-1", "y")]
    assert backends == ["a", "a", None]


def test_the_oldest_answers_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes, "MAX_REMEMBERED_IDS", 3)
    homes_by_id = Homes()
    for number in range(4):
        homes_by_id.note(f"backend {number}", [(b"x-request-id", b"%d" % number)], b"")
    homes_by_id.note("backend 1", [(b"x-request-id", b"1")], b"")  # it is the newest now
    homes_by_id.note("backend 4", [(b"x-request-id", b"4")], b"")
    backends = [homes_by_id.find(str(number)) for number in range(5)]
    assert backends == [None, "backend 1", None, "backend 3", "backend 4"]
