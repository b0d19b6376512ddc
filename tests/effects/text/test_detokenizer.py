"""Streaming against whole decoding: pieces join, and never end inside a character."""

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from minfer.effects.text.detokenizer import Detokenizer
from minfer.effects.text.tokenizer import _ALPHABET, Tokenizer
from tests.effects.text.trained import CORPUS, SPECIAL, TEXTS, save


def stream(
    tokenizer: Tokenizer, ids: list[int], draw: random.Random, *, skip: bool
) -> list[str]:
    decoder = Detokenizer(tokenizer, skip_special_tokens=skip)
    pieces, at = [], 0
    while at < len(ids):
        step = draw.choice([1, 1, 1, 2, 5])
        pieces.append(decoder.push(ids[at : at + step]))
        at += step
    return [*pieces, decoder.push([], final=True)]


@pytest.mark.parametrize("seed", range(60))
def test_pieces_join_to_the_whole(tokenizer: Tokenizer, seed: int) -> None:
    """Random tokens are mostly invalid UTF-8: broken characters everywhere."""
    draw = random.Random(seed)
    if seed % 3 == 0:  # single bytes of real text: every character split
        ids = in_bytes(tokenizer, "é日👩‍👩‍👧🇩🇪a🙂".encode())
        ids[draw.randrange(len(ids)) :] = ids[: draw.randrange(len(ids))]
    elif seed % 3 == 1:
        ids = [
            draw.randrange(tokenizer._backend.get_vocab_size() + 5)
            for _ in range(draw.randrange(80))
        ]
    else:
        ids = tokenizer.encode("".join(draw.choices(CORPUS + TEXTS, k=6)))
    for skip in (True, False):
        pieces = stream(tokenizer, ids, draw, skip=skip)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


def in_bytes(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Token ids that spell `data` byte by byte."""
    letters = {value: char for char, value in _ALPHABET.items()}
    ids = [tokenizer._backend.token_to_id(letters[byte]) for byte in data]
    assert None not in ids
    return [token for token in ids if token is not None]


def test_no_piece_ends_inside_a_character(tokenizer: Tokenizer) -> None:
    text = "日👩‍👩‍👧é"
    decoder = Detokenizer(tokenizer)
    ids = in_bytes(tokenizer, text.encode())
    pieces = [decoder.push([token]) for token in ids]
    assert [piece for piece in pieces if piece] == list(text)
    assert decoder.push([], final=True) == ""


def test_an_unfinished_character_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    decoder = Detokenizer(tokenizer)
    ids = in_bytes(tokenizer, "a日".encode()[:-1])
    assert decoder.push(ids) == "a"
    assert decoder.push([], final=True) == tokenizer.decode(ids)[1:] == "\ufffd"


def test_special_tokens_are_shown_where_they_are_asked_for(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|start|>b<|end|>")
    shown = tokenizer.special(["<|start|>", "a", "<|nobody|>"])
    assert len(shown) == 1
    assert Detokenizer(tokenizer).push(ids) == "ab"
    assert Detokenizer(tokenizer, shown=shown).push(ids) == "a<|start|>b"


def test_tokenizers_with_byte_fallback_stream_too(tmp_path: Path) -> None:
    """The kind that sentencepiece models have: spaces as ▁, unknown
    characters as <0x..>.
    """
    words = [
        "<|pad|>",
        "<|start|>",
        "<|end|>",
        "<unk>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "▁ab",
        "ab",
    ]
    backend = Backend(
        models.BPE(
            {word: i for i, word in enumerate(words)},
            [("▁", "a"), ("▁a", "b"), ("a", "b")],
            byte_fallback=True,
            unk_token="<unk>",  # noqa: S106 - a token of text
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(SPECIAL)
    save(tmp_path, backend)
    tokenizer = Tokenizer(tmp_path)
    assert not tokenizer.byte_level
    for text in ["ab a b", "a日ab 👩‍👩‍👧a", "  a  b", "é" * 40]:
        ids = tokenizer.encode(text)
        for seed in range(5):
            pieces = stream(tokenizer, ids, random.Random(seed), skip=True)
            assert "".join(pieces) == tokenizer.decode(ids)
            assert not any("\ufffd" in piece for piece in pieces)
