"""Tenants: whose requests may find each other's prompts in the prefix cache.

    key --> tenant --> salt = BLAKE2b(secret; tenant, epoch, the client's cache_salt)

How many tokens of a prompt were cached reveals whether it was sent before, so cached
blocks of one tenant's requests are found by that tenant alone. The salt never depends on
a key: keys may be replaced, and servers restarted, without losing hits. Engines with the
same secret give a tenant the same salt.

A tenant's epoch changes when that tenant resets its cache: earlier blocks are not found
any more, and are evicted in their turn. Epochs are in memory that all API servers share;
or, if blocks are kept on disk, in their folder, which all engines of it share.
"""

import hashlib
import secrets
from typing import Final

from minfer.effects.execution.tiers.folder_epochs import FolderEpochs
from minfer.effects.serving.access.api_keys import ApiKey, ApiKeys
from minfer.effects.serving.wire.shared_counts import shared_memory

_EPOCH_BITS: Final = 63  # of a random number, so that none is used twice
_INTEGER_BYTES: Final = 8  # of a length, or of an epoch


class Tenants:
    """The tenants of a server's keys. Must be made before its API servers are forked."""

    def __init__(
        self, keys: ApiKeys, secret: str = "", folder: FolderEpochs | None = None
    ) -> None:
        """`secret` is the deployment's; an empty one is replaced by a random one.
        `folder` has the epochs of blocks on disk.
        """
        data = secret.encode("utf-8", "surrogateescape") or secrets.token_bytes()
        self._secret = hashlib.sha256(data).digest()
        self._random = not secret
        names = sorted({key.tenant for key in keys.known})
        self._indices = {name: index for index, name in enumerate(names)}
        self._epochs = shared_memory(len(names)).cast("q")  # 0: never reset
        self._shared = keys.share_all
        self._folder = folder

    @property
    def separate(self) -> bool:
        """Whether tenants have separate caches: there are keys that do not share all."""
        return bool(self._indices) and not self._shared

    def salt(self, key: ApiKey | None, own_salt: bytes) -> bytes:
        """The salt of a request with this key, which requested a salt of its own."""
        if key is None or not self.separate:
            return own_salt
        name = key.tenant.encode()
        hasher = hashlib.blake2b(key=self._secret, digest_size=32)
        hasher.update(len(name).to_bytes(_INTEGER_BYTES) + name)
        hasher.update(self._epoch(key.tenant).to_bytes(_INTEGER_BYTES))
        hasher.update(own_salt)
        return hasher.digest()

    def _epoch(self, tenant: str) -> int:
        if self._folder is not None:
            return self._folder.of_tenant(tenant)
        return self._epochs[self._indices[tenant]]

    def reset(self, key: ApiKey) -> None:
        """Change the epoch of the key's tenant: its cached blocks are found no more.
        Raises OSError if that cannot be noted in the folder.
        """
        if self._folder is not None:
            self._folder.raise_tenant(key.tenant)
            return
        self._epochs[self._indices[key.tenant]] = 1 + secrets.randbits(_EPOCH_BITS - 1)

    def describe(self) -> str:
        """A line for people: which tenants share the prefix cache."""
        if not self._indices:
            return "the prefix cache is shared by all: there are no API keys"
        if self._shared:
            return 'the prefix cache is shared by all tenants: [cache] share = "all"'
        separate_text = (
            f"the prefix cache is separate for each tenant ({len(self._indices)})"
        )
        secret = "a random secret" if self._random else "the secret of --cache-secret"
        lost = self._folder is not None and self._random
        warning = ": blocks on disk are not found after a restart" if lost else ""
        return f"{separate_text}, with {secret}{warning}"
