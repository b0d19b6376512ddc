"""Rendezvous hashing: every replica has a random score for a key, and the highest wins.

Sources: Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998.
A replica that leaves moves the keys that it had and no others; one that joins takes an
equal share from each, as in consistent hashing (Karger et al. 1997), and needs no ring.
"""

from collections.abc import Iterable
from hashlib import blake2b


def text_key(text: str) -> bytes:
    """A text as a key; any text is one."""
    return text.encode("utf-8", "surrogatepass")


def ranked(names: Iterable[str], key: bytes) -> list[str]:
    """Names of replicas, the best for a key first."""
    scores = [
        (blake2b(text_key(name) + b"\0" + key, digest_size=8).digest(), name)
        for name in names
    ]
    scores.sort(reverse=True)
    return [name for _, name in scores]
