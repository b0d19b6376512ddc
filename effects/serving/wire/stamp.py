"""The marks of every part of an answer: its id, its model, its time."""

import time
import uuid

from attrs import frozen


@frozen
class Stamp:
    """An answer's id, the name under which its model was requested, and the Unix time."""

    id: str
    model: str
    created: int


def new_stamp(prefix: str, model: str) -> Stamp:
    """A unique stamp; its id begins with `prefix`."""
    return Stamp(f"{prefix}-{uuid.uuid4().hex}", model, int(time.time()))
