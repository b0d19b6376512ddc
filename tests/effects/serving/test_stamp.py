"""No two answers have one id, and an id says what it is of."""

import time

from minfer.effects.serving.wire.stamp import new_stamp


def test_no_two_stamps_are_alike() -> None:
    before = int(time.time())
    stamps = [new_stamp("cmpl", "m") for _ in range(100)]
    assert len({stamp.id for stamp in stamps}) == 100
    for stamp in stamps:
        prefix, _, random_part = stamp.id.partition("-")
        assert (prefix, stamp.model, len(random_part)) == ("cmpl", "m", 32)
        assert before <= stamp.created <= time.time()
