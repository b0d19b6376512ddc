"""Recorded runs take the paths of large states, and are replayed in them."""

from collections.abc import Iterator
from random import Random

import pytest

from tests.core.tuned import tiny, tuned


@pytest.fixture(autouse=True)
def tiny_thresholds() -> Iterator[None]:
    with tuned(**tiny(Random(1))):
        yield
