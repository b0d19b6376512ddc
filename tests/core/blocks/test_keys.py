import sys
from hashlib import sha256

from minfer.blocks.keys import block_key, block_keys, extend_keys, root_key


def test_keys_chain_and_can_be_extended() -> None:
    root, tokens = root_key(b"model"), tuple(range(23))
    keys = block_keys(root, tokens, 5)
    assert len(keys) == 4
    assert extend_keys(keys[:2], root, tokens, 5) == keys
    assert block_keys(root, tokens[:10], 5) == keys[:2]
    changed = (9, *tokens[1:])
    assert not set(block_keys(root, changed, 5)) & set(keys), (
        "every later key covers the first"
    )


def test_fingerprint_and_salt_never_run_into_each_other() -> None:
    roots = {
        root_key(b"ab", b""),
        root_key(b"a", b"b"),
        root_key(b"", b"ab"),
        root_key(b"ab", b"b"),
    }
    assert len(roots) == 4


def prefixed(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def test_a_root_covers_fingerprint_and_salt_whatever_their_lengths() -> None:
    whole = prefixed(b"minfer.kv.1", b"model", b"tenant")
    assert root_key(b"model", b"tenant") == sha256(whole).digest()
    roots = {
        root_key(one, other) for one in (b"ab", b"cd") for other in (b"", b"x", b"y")
    }
    assert len(roots) == 6


def test_a_key_covers_its_parent_and_all_bits_of_every_token_id() -> None:
    parent, tokens = b"parent", (1, 2**16 + 1, 2**32 - 1)
    ids = b"".join(token.to_bytes(4, sys.byteorder) for token in tokens)
    assert block_key(parent, tokens) == sha256(parent + ids).digest()
    same_low_bits = {block_key(parent, (1 + high,)) for high in (0, 2**8, 2**16, 2**24)}
    assert len(same_low_bits) == 4


def test_the_first_key_follows_the_root() -> None:
    root, tokens = root_key(b"model"), tuple(range(11))
    keys = block_keys(root, tokens, 5)
    assert keys == (block_key(root, tokens[:5]), block_key(keys[0], tokens[5:10]))
    assert extend_keys(keys, root, tokens, 5) is keys
    assert block_keys(root, tokens[:4], 5) == ()


def test_an_adapter_is_in_the_root_and_is_no_salt() -> None:
    roots = {
        root_key(b"model"),
        root_key(b"model", b"", "a1"),
        root_key(b"model", b"", "b2"),
        root_key(b"model", b"a1"),
        root_key(b"model", b"a1", "a1"),
    }
    assert len(roots) == 5
    assert root_key(b"model", b"x", "") == root_key(b"model", b"x")
