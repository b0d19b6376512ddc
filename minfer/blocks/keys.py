"""Content keys: a digest of everything that determines the KV of a full block.

A key covers the fingerprint of the model, the cache salt, the key of the block before,
and the block's tokens. So equal keys mean equal KV, whichever request computed it;
different salts never share (CVE-2025-46570), and SHA-256 keeps keys from being forged
(CVE-2025-25183).
"""

from array import array
from collections.abc import Sequence
from hashlib import sha256
from typing import Final

Key = bytes
Keys = tuple[Key, ...]  # of consecutive blocks
Tails = tuple[Key, Key]
DIGEST: Final = 32  # bytes
TAIL: Final = b"t"  # before a digest: the key of a partial block


def root_key(fingerprint: bytes, salt: bytes = b"", adapter: str = "") -> Key:
    """The key before the first block: every field has its length before it, so that two
    fields cannot be confused.

    `fingerprint` names model, weights, KV type and layout; `salt` separates tenants;
    `adapter` is the digest of the adapter that is added to the weights, if any.
    """
    fields = (b"minfer.kv.1", fingerprint, salt)
    # Keys without an adapter are those from before there were any.
    with_adapter = (*fields, adapter.encode()) if adapter else fields
    return sha256(
        b"".join(len(field).to_bytes(8, "little") + field for field in with_adapter)
    ).digest()


def block_key(parent: Key, tokens: Sequence[int]) -> Key:
    """The key of one full block of token ids that follows the block named `parent`."""
    return sha256(parent + array("I", tokens).tobytes()).digest()


def tail_key(parent: Key, tokens: Sequence[int]) -> Key:
    """The key of a partial block that follows the block named `parent`: no full block has
    the same. Without tokens it is empty.
    """
    return TAIL + block_key(parent, tokens) if tokens else b""


def group_key(key: Key, group: int) -> Key:
    """The key of a block in a group of layers; in the first group it is the content's."""
    return bytes((group,)) + key if group else key


def group_keys(keys: Keys, group: int) -> Keys:
    """The keys of blocks in a group of layers."""
    return tuple([bytes((group,)) + key for key in keys]) if group else keys


def is_state(key: Key, state_group: int) -> bool:
    """Whether this key is of a state of recurrent layers; `state_group` is 0 if there are
    none.
    """
    return len(key) > DIGEST and key[0] == state_group > 0


def is_tail(key: Key) -> bool:
    """Whether this key, of the first group, is of a partial block."""
    return len(key) > DIGEST


def tail_keys(root: Key, keys: Keys, tokens: Sequence[int], size: int) -> Tails:
    """The keys of the last block of `tokens`, whose full blocks have these `keys`:
    without the last token, and with it, unless that fills the block.
    """
    tails = [
        tail_key(keys[full - 1] if full else root, tokens[full * size : end])
        for end in (len(tokens) - 1, len(tokens))
        for full in (end // size,)
    ]
    return tails[0], tails[1]


def block_keys(root: Key, tokens: Sequence[int], block_size: int) -> Keys:
    """The keys of all full blocks of `tokens`, in order, each chained to the one
    before.
    """
    return extend_keys((), root, tokens, block_size)


def extend_keys(keys: Keys, root: Key, tokens: Sequence[int], block_size: int) -> Keys:
    """`keys`, which are those of a prefix of `tokens`, extended to all its full
    blocks.
    """
    if len(keys) == len(tokens) // block_size:
        return keys
    extended = list(keys)
    parent = extended[-1] if extended else root
    for end in range((len(extended) + 1) * block_size, len(tokens) + 1, block_size):
        parent = block_key(parent, tokens[end - block_size : end])
        extended.append(parent)
    return tuple(extended)
