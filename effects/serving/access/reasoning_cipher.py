"""Reasoning that a client keeps without reading it: encrypted and authenticated.

    version (1 byte), nonce (12 bytes), AES-256-GCM of the text, in URL-safe Base64

All API servers and replicas of a server have the same key. It is derived from the secret
of `--cache-secret`, and then it is the same after restarts; else it is random.
"""

import base64
import hashlib
import secrets
from importlib.util import find_spec
from typing import Final

from minfer.extras import how_to_install

KEY_BYTES: Final = 32
MAX_ENCRYPTED_CHARS: Final = 2**22
_VERSION: Final = b"\x01"
_NONCE_BYTES: Final = 12
_DIGEST_PERSON: Final = b"minfer reasoning"  # at most 16 bytes
IS_INSTALLED: Final = find_spec("cryptography") is not None
HOW_TO_INSTALL: Final = f"it needs cryptography: {how_to_install('responses')}"


class DecryptionError(ValueError):
    """A text was not encrypted with this key, or was changed."""


def reasoning_key(secret: str) -> bytes:
    """The key of a deployment's secret; without one, a random key."""
    if not secret:
        return secrets.token_bytes(KEY_BYTES)
    data = secret.encode("utf-8", "surrogateescape")
    return hashlib.blake2b(data, digest_size=KEY_BYTES, person=_DIGEST_PERSON).digest()


def encrypt(key: bytes, text: str) -> str:
    """Returns `text` encrypted; `decrypt` with the same key returns it."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    nonce = secrets.token_bytes(_NONCE_BYTES)
    data = text.encode("utf-8", "surrogatepass")
    ciphertext = AESGCM(key).encrypt(nonce, data, _VERSION)
    return base64.urlsafe_b64encode(_VERSION + nonce + ciphertext).decode("ascii")


def decrypt(key: bytes, text: str) -> str:
    """The text that `encrypt` was called with. Raises DecryptionError."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        data = base64.b64decode(text, altchars=b"-_", validate=True)
    except ValueError:
        raise DecryptionError from None
    version, nonce = data[:1], data[1 : 1 + _NONCE_BYTES]
    ciphertext = data[1 + _NONCE_BYTES :]
    if version != _VERSION:
        raise DecryptionError
    try:
        return (
            AESGCM(key)
            .decrypt(nonce, ciphertext, version)
            .decode("utf-8", "surrogatepass")
        )
    except (InvalidTag, ValueError):
        raise DecryptionError from None
