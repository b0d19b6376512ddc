"""What both ends of a link have to have in common."""

import hashlib

from minfer.effects.net.handshake import Terms
from minfer.version import __version__


def link_terms(model: bytes, device: str, block_size: int, secret: bytes) -> Terms:
    """Returns what an API server and an engine have to have in common, so that the API
    server's own engines can use KV blocks of this one.
    """
    description = repr((model, device, block_size)).encode()
    layout = hashlib.blake2b(description, digest_size=16).digest()
    return Terms(purpose="link", version=__version__, layout=layout, secret=secret)


def own_terms(secret: bytes = b"") -> Terms:
    """Returns what an engine and the API servers of its own server have in common: a
    secret that no other server has, or none on one machine, where the mode of the
    socket's folder and the check of the peer's user protect it. That they have read the
    same model is checked later, as an API server does not know it at first.
    """
    return Terms(purpose="own link", version=__version__, layout=b"", secret=secret)
