"""A bound on a text's characters holds for every text, or there is none."""

import random
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from minfer.effects.setup.folders import model_folder
from minfer.effects.text.longest_token import max_token_chars
from minfer.effects.text.tokenizer import TextTooLongError
from minfer.effects.text.tokenizer import Tokenizer as Ours

UNK = "<unk>"
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(**components: Any) -> Tokenizer:
    """A byte-level BPE whose longest token has four bytes."""
    words = [*ALPHABET, "aa", "aaaa"]
    merges = [("a", "a"), ("aa", "aa")]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for name, component in components.items():
        setattr(tokenizer, name, component)
    return tokenizer


def fallback(*, bytes_missing: int = 0) -> Tokenizer:
    """A BPE that spells what it does not know in bytes, as Llama's does."""
    words = [UNK, *(f"<0x{byte:02X}>" for byte in range(256 - bytes_missing)), "ab"]
    vocabulary = {word: i for i, word in enumerate([*words, "a", "b"])}
    model = models.BPE(vocabulary, [("a", "b")], unk_token=UNK, byte_fallback=True)
    return Tokenizer(model)


def test_byte_level() -> None:
    tokenizer = byte_level()
    assert max_token_chars(tokenizer) == 4
    assert len(tokenizer.encode("a" * 400).ids) == 100
    tokenizer.add_tokens(["<a token>"])
    assert max_token_chars(tokenizer) == len("<a token>")


def test_bytes_as_fallback() -> None:
    assert max_token_chars(fallback()) == len(
        "<0x00>"
    )  # generous: it stands for one byte
    assert max_token_chars(fallback(bytes_missing=1)) is None


@pytest.mark.parametrize("name", ["NFC", "NFD", "NFKC", "NFKD"])
def test_a_text_that_is_composed_first(name: str) -> None:
    tokenizer = byte_level(normalizer=getattr(normalizers, name)())
    max_chars = max_token_chars(tokenizer)
    assert max_chars is not None
    # Four characters that become one, of three bytes: alpha with three marks.
    text = "ᾂ" * 50
    decomposed = normalizers.NFD().normalize_str(text)
    assert len(decomposed) == 200
    assert len(decomposed) <= max_chars * len(tokenizer.encode(decomposed).ids)


UNKNOWN: dict[str, dict[str, Any]] = {
    "blanks are stripped": {"normalizer": normalizers.Strip()},
    "several become one": {"normalizer": normalizers.Replace("ab", "c")},
    "one becomes nothing": {"normalizer": normalizers.Replace("a", "")},
    "in a sequence": {"normalizer": normalizers.Sequence([normalizers.Strip()])},
    "blanks are dropped": {"pre_tokenizer": pre_tokenizers.Whitespace()},
    "what is split off is dropped": {
        "pre_tokenizer": pre_tokenizers.Split(" ", "removed")
    },
    "dropped in a sequence": {
        "pre_tokenizer": pre_tokenizers.Sequence(
            [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]
        )
    },
    "words of any length are one unknown": {
        "model": models.WordLevel({UNK: 0}, unk_token=UNK)
    },
    "a byte has no token": {"model": models.BPE({"a": 0}, [])},
}


@pytest.mark.parametrize("components", UNKNOWN.values(), ids=UNKNOWN)
def test_nothing_is_known_where_characters_are_dropped(
    components: dict[str, Any],
) -> None:
    assert max_token_chars(byte_level(**components)) is None


def test_a_token_that_takes_the_blanks_beside_it() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<end>", rstrip=True)])
    assert max_token_chars(tokenizer) is None


def test_llamas_blanks() -> None:
    blanks = normalizers.Replace(" ", "▁")
    prepend_then_replace = normalizers.Sequence([normalizers.Prepend("▁"), blanks])
    assert max_token_chars(byte_level(normalizer=prepend_then_replace)) == 4


def test_no_text_of_the_bundled_model_breaks_its_bound() -> None:
    tokenizer = Ours(model_folder(None), context=2048)
    assert tokenizer.max_chars is not None
    longest = tokenizer.max_chars // 2048
    rng = random.Random(4)
    for _ in range(200):
        pool = rng.choice(["a", " ", "\n", "ab \n\t", "ä漢🙂\u0301", "def self.return "])
        text = "".join(rng.choices(pool, k=rng.randrange(1, 300)))
        assert len(text) <= longest * len(tokenizer.encode(text))


def test_what_cannot_fit_is_refused_unread() -> None:
    tokenizer = Ours(model_folder(None), context=10)
    assert tokenizer.max_chars is not None
    assert tokenizer.encode(" " * tokenizer.max_chars)
    with pytest.raises(TextTooLongError, match="shorten it"):
        tokenizer.encode(" " * (tokenizer.max_chars + 1))
    assert Ours(model_folder(None)).max_chars is None
