"""Rendezvous hashing: every replica has a random score for a key, and the highest wins.

Sources: Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998.
A replica that leaves moves the keys that it had and no others; one that joins takes an
equal share from each, as in consistent hashing (Karger et al. 1997), and needs no ring.
"""

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from typing import Final

_ODD: Final = 0x9E3779B97F4A7C15  # 2^64 / golden ratio (Knuth, volume 3, section 6.4)
_MASK: Final = 2**64 - 1


def text_key(text: str) -> bytes:
    """A text as a key: any text is one."""
    return text.encode("utf-8", "surrogatepass")


def best_replica(names: Iterable[str], key: bytes) -> str:
    """The replica with the highest score for a key; there is at least one.

    A score multiplies the difference of two digests, so that a decision digests the key
    once and no name.
    """
    key_digest = _digest(key)
    return max([((_seed(name) ^ key_digest) * _ODD & _MASK, name) for name in names])[1]


@lru_cache(maxsize=4096)
def _seed(name: str) -> int:
    return _digest(text_key(name))


def _digest(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
