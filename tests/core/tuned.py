"""The core's thresholds at other sizes, for as long as a test wants them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Final
from unittest.mock import patch

from minfer.values import thresholds

NAMES: Final = tuple(name for name in vars(thresholds) if name.isupper())


@contextmanager
def tuned(**sizes: int) -> Iterator[None]:
    """Thresholds of these sizes."""
    with ExitStack() as stack:
        for name, size in sizes.items():
            stack.enter_context(patch.object(thresholds, name, size))
        yield


def tiny(rng: Random) -> dict[str, int]:
    """Sizes at which every large path begins at once."""
    return {
        "QUEUE_BUCKET": rng.choice((2, 3, 4)),
        "RECENT_ENTRIES": rng.choice((1, 2, 3)),
        "ALIGNED_WINDOW": rng.choice((1, 2, 3)),
        "FRESH_STEPS": rng.choice((2, 3, 5)),
        "STOP_IDS": rng.choice((0, 2, 3)),
        "LONG_PREFIX": rng.choice((1, 2)),
        "NEIGHBOURS": rng.choice((1, 2, 3)),
        "SKIPPED_ROWS": rng.choice((0, 1, 16)),
    }


def sizes_now() -> tuple[int, ...]:
    """The sizes of all thresholds."""
    return tuple(getattr(thresholds, name) for name in NAMES)
