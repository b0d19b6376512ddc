"""Rendezvous hashing: every replica has a random score for a key, and the highest wins.

Sources: Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998.
A replica that leaves moves the keys that it had and no others; one that joins takes an
equal share from each, as in consistent hashing (Karger et al. 1997), and needs no ring.
"""

from collections.abc import Iterable
from hashlib import blake2b
from typing import Final

_ANY: Final = "surrogatepass"  # any text is a key


def text_key(text: str) -> bytes:
    """A text as a key."""
    return text.encode("utf-8", _ANY)


def best(names: Iterable[str], key: bytes) -> str:
    """The replica with the highest score for a key; there is at least one."""
    after = b"\0" + key
    # As `text_key`, without its call: most of a decision's time would be here.
    return max(
        [
            (blake2b(name.encode("utf-8", _ANY) + after, digest_size=8).digest(), name)
            for name in names
        ]
    )[1]
