"""What every part of an answer is marked with: its id, its model, when it was begun."""

import time
import uuid

from attrs import frozen


@frozen
class Stamp:
    """An answer's id, the name by which its model was asked for, and the Unix time."""

    id: str
    model: str
    created: int


def new_stamp(prefix: str, model: str) -> Stamp:
    """A stamp that is like no other; its id begins with `prefix`."""
    return Stamp(f"{prefix}-{uuid.uuid4().hex}", model, int(time.time()))
