"""Reasoning that clients keep: only its server reads it, and only unchanged."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minfer.effects.serving.access.reasoning_cipher import (
    KEY_BYTES,
    DecryptionError,
    decrypt,
    encrypt,
    reasoning_key,
)

KEY = reasoning_key("a secret")


@given(st.text())
def test_a_text_comes_back(text: str) -> None:
    assert decrypt(KEY, encrypt(KEY, text)) == text


def test_equal_texts_are_encrypted_differently() -> None:
    assert encrypt(KEY, "a") != encrypt(KEY, "a")


def test_a_secret_has_one_key_and_no_secret_has_a_new_one() -> None:
    assert reasoning_key("a secret") == KEY != reasoning_key("another")
    assert reasoning_key("") != reasoning_key("")
    assert len(KEY) == len(reasoning_key("")) == KEY_BYTES


def test_a_changed_text_is_refused_at_each_byte() -> None:
    data = base64.urlsafe_b64decode(encrypt(KEY, "So it is."))
    for i in range(len(data)):
        changed = data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :]
        with pytest.raises(DecryptionError):
            decrypt(KEY, base64.urlsafe_b64encode(changed).decode())


@pytest.mark.parametrize("text", ["x", "", "é", "AQ==", "AQID" * 9, "not base64!"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(DecryptionError):
        decrypt(KEY, text)


def test_another_key_is_refused() -> None:
    with pytest.raises(DecryptionError):
        decrypt(reasoning_key(""), encrypt(KEY, "x"))
