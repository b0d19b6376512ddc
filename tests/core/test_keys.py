from minfer.keys import block_keys, extend_keys, root_key


def test_keys_chain_and_can_be_extended() -> None:
    root, tokens = root_key(b"model"), tuple(range(23))
    keys = block_keys(root, tokens, 5)
    assert len(keys) == 4
    assert extend_keys(keys[:2], root, tokens, 5) == keys
    assert block_keys(root, tokens[:10], 5) == keys[:2]
    changed = (9, *tokens[1:])
    assert not set(block_keys(root, changed, 5)) & set(keys), "every later key covers the first"


def test_fingerprint_and_salt_never_run_into_each_other() -> None:
    roots = {
        root_key(b"ab", b""),
        root_key(b"a", b"b"),
        root_key(b"", b"ab"),
        root_key(b"ab", b"b"),
    }
    assert len(roots) == 4
