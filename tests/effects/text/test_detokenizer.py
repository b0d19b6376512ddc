"""Streaming against whole decoding: pieces join, and never end inside a character."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from tokenizers import Tokenizer as Backend

from minfer.effects.setup.folders import bundled_folder
from minfer.effects.text.detokenizer import (
    MAX_HELD_TOKENS,
    NUM_CONTEXT_TOKENS,
    Detokenizer,
)
from minfer.effects.text.tokenizer import _BYTE_OF_CHAR, Tokenizer
from tests.circles import seeds
from tests.effects.text.languages import LANGUAGES
from tests.effects.text.trained import (
    BYTES,
    CORPUS,
    TEXTS,
    falls_back,
    save,
    train,
    word_pieces,
)

BROKEN: Final = "\ufffd"
KINDS: Final[dict[str, Callable[[], Backend]]] = {
    "byte-level": train,
    "falling back to bytes": falls_back,
    "falling back, first blank kept": lambda: falls_back(strip=False),
}


def stream(
    tokenizer: Tokenizer, ids: list[int], draw: random.Random, *, skip: bool
) -> list[str]:
    decoder = Detokenizer(tokenizer, skip_special_tokens=skip)
    pieces, place = [], 0
    while place < len(ids):
        step = draw.choice([1, 1, 1, 2, 5])
        solo = step == 1 and draw.random() < 0.7
        push = (
            decoder.push(ids[place : place + step])
            if not solo
            else decoder.push_token(ids[place])
        )
        pieces.append(push)
        place += step
    return [*pieces, decoder.push([], final=True)]


def made(folder: Path, backend: Backend) -> Tokenizer:
    save(folder, backend)
    return Tokenizer(folder)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    return made(tmp_path, KINDS[request.param]())


def bytes_of(tokenizer: Tokenizer, token: int, *, skip: bool) -> bytes:
    """What one token of a sequence is, said by the vocabulary alone."""
    if skip and token in tokenizer.special_ids:
        return b""
    (name,) = tokenizer.token_names([token])
    if name in BYTES and not tokenizer.byte_level:
        return bytes([BYTES.index(name)])
    if not tokenizer.byte_level or any(char not in _BYTE_OF_CHAR for char in name):
        return name.replace("▁", " ").encode()
    return bytes(_BYTE_OF_CHAR[char] for char in name)


def random_ids(tokenizer: Tokenizer, draw: random.Random) -> list[int]:
    """Mostly invalid UTF-8, pieces of real characters, and ids without a token."""
    max_id = tokenizer._backend.get_vocab_size() + 3
    ids = [draw.randrange(max_id) for _ in range(draw.randrange(30))]
    text = draw.choice([*LANGUAGES.values()])
    real = tokenizer.encode(text[draw.randrange(len(text)) :][:12])
    place = draw.randrange(len(ids) + 1)
    return (
        ids[:place]
        + real[draw.randrange(3) : len(real) - draw.randrange(3)]
        + ids[place:]
    )


@pytest.mark.long
@seeds(4000, 10_000)
def test_random_tokens_stream_to_the_whole(kind: Tokenizer, seeds: range) -> None:
    """Broken characters everywhere: each is marked once, and harms none beside it."""
    for seed in seeds:
        draw = random.Random(seed)
        ids, skip = random_ids(kind, draw), seed % 2 == 0
        text = "".join(stream(kind, ids, draw, skip=skip))
        whole_text = b"".join(bytes_of(kind, token, skip=skip) for token in ids)
        reported = whole_text.decode(errors="replace")
        assert text == (reported.removeprefix(" ") if kind.strips else reported)
        decoded = kind.decode(ids, skip_special_tokens=skip)
        assert text == decoded or not kind.byte_level
        assert text.count(BROKEN) <= decoded.count(BROKEN)


@pytest.mark.parametrize("language", LANGUAGES)
def test_languages_stream_to_the_whole(kind: Tokenizer, language: str) -> None:
    text = LANGUAGES[language]
    for seed in range(10):
        draw = random.Random(seed)
        shuffled = "".join(draw.sample(text, len(text))) if seed else text
        ids = kind.encode(shuffled)
        pieces = stream(kind, ids, draw, skip=True)
        whole_text = kind.decode(ids)
        assert "".join(pieces) == whole_text
        assert whole_text in (shuffled, shuffled.removeprefix(" "), f" {shuffled}")
        assert sum(piece.count(BROKEN) for piece in pieces) == shuffled.count(BROKEN)


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_bundled_model_streams_languages(language: str) -> None:
    tokenizer = Tokenizer(bundled_folder())
    ids = tokenizer.encode(LANGUAGES[language])
    for seed in range(5):
        pieces = stream(tokenizer, ids, random.Random(seed), skip=True)
        assert "".join(pieces) == LANGUAGES[language]


@pytest.mark.parametrize("seed", range(60))
def test_real_texts_and_cut_ones_join_to_the_whole(
    tokenizer: Tokenizer, seed: int
) -> None:
    draw = random.Random(seed)
    if seed % 2:  # single bytes of real text: every character split
        ids = in_bytes(tokenizer, "é日👩‍👩‍👧🇩🇪a🙂".encode())
        ids[draw.randrange(len(ids)) :] = ids[: draw.randrange(len(ids))]
    else:
        ids = tokenizer.encode("".join(draw.choices(CORPUS + TEXTS, k=6)))
    for skip in (True, False):
        pieces = stream(tokenizer, ids, draw, skip=skip)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


def in_bytes(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Token ids that spell `data` byte by byte."""
    letters = {value: char for char, value in _BYTE_OF_CHAR.items()}
    names = [letters[byte] if tokenizer.byte_level else BYTES[byte] for byte in data]
    ids = [tokenizer._backend.token_to_id(name) for name in names]
    assert None not in ids
    return [token for token in ids if token is not None]


def test_no_piece_ends_inside_a_character(kind: Tokenizer) -> None:
    text = "日👩‍👩‍👧é"
    decoder = Detokenizer(kind)
    ids = in_bytes(kind, text.encode())
    pieces = [decoder.push_token(token) for token in ids]
    assert [piece for piece in pieces if piece] == list(text)
    assert decoder.push([], final=True) == ""


def test_an_unfinished_character_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    decoder = Detokenizer(tokenizer)
    ids = in_bytes(tokenizer, "a日".encode()[:-1])
    assert decoder.push(ids) == "a"
    assert decoder.push([], final=True) == tokenizer.decode(ids)[1:] == BROKEN


def test_special_tokens_are_shown_where_they_are_requested(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|start|>b<|end|>")
    shown = tokenizer.find_special_ids(["<|start|>", "a", "<|nobody|>"])
    assert len(shown) == 1
    assert Detokenizer(tokenizer).push(ids) == "ab"
    assert Detokenizer(tokenizer, shown=shown).push(ids) == "a<|start|>b"


def test_what_stands_beside_a_broken_byte_is_kept(tmp_path: Path) -> None:
    """The backend gives a whole run of bytes up for one that is broken."""
    tokenizer = made(tmp_path, falls_back())
    ids = in_bytes(tokenizer, "🙂.".encode() + b"\xff" + "日".encode()[:2])
    assert tokenizer.decode(ids) == BROKEN * 8
    decoder = Detokenizer(tokenizer)
    assert [decoder.push_token(token) for token in ids] == [
        "",
        "",
        "",
        "🙂",
        ".",
        BROKEN,
        "",
        "",
    ]
    assert decoder.push((), final=True) == BROKEN


def test_only_the_first_blank_of_a_text_is_lost(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, falls_back())
    blank, word = tokenizer.encode(" ab", add_special_tokens=False)[0], "▁ab"
    ab = tokenizer._backend.token_to_id(word)
    assert ab is not None
    padded = tokenizer._backend.get_vocab_size() + 1  # without a token
    for ids in ([ab, ab], [blank, blank, ab], [padded, ab, ab], [0, ab, blank]):
        decoder = Detokenizer(tokenizer)
        assert "".join(map(decoder.push_token, ids)) == tokenizer.decode(ids)


def test_tokens_that_are_more_than_their_bytes_stream_too(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, word_pieces())
    assert not tokenizer.in_bytes
    for seed in range(300):
        draw = random.Random(seed)
        ids = [draw.randrange(14) for _ in range(draw.randrange(40))]
        for skip in (True, False):
            pieces = stream(tokenizer, ids, draw, skip=skip)
            assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", ["byte-level", "falling back to bytes"])
def test_what_is_kept_of_a_sequence_does_not_grow(name: str, tmp_path: Path) -> None:
    tokenizer = made(tmp_path, KINDS[name]())
    decoder = Detokenizer(tokenizer)
    ids = tokenizer.encode(LANGUAGES["everything"]) * 20
    for token in ids:
        decoder.push_token(token)
        assert len(decoder._utf8.getstate()[0]) < 4
    assert decoder._context == decoder._pending == []


def test_a_window_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = made(tmp_path, word_pieces())
    decode, lengths = tokenizer.decode, list[int]()

    def counted(ids: list[int], *, skip_special_tokens: bool = True) -> str:
        lengths.append(len(ids))
        return decode(ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(tokenizer, "decode", counted)
    decoder = Detokenizer(tokenizer, skip_special_tokens=False)
    draw = random.Random(1)
    for _ in range(2000):
        decoder.push([draw.randrange(14)])
    assert max(lengths) <= NUM_CONTEXT_TOKENS + MAX_HELD_TOKENS
    assert len(lengths) == 4000
