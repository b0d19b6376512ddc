"""Bad words as token ids, and what cannot be asked for."""

from typing import Any

import pytest

from minfer.effects.live.errors import RequestError
from minfer.effects.live.input_processing.logit_checks import check_shape, read_bad_words
from minfer.effects.setup.folders import bundled_folder
from minfer.effects.text.tokenizer import Tokenizer
from minfer.sampling.params import SamplingParams

VOCAB = 50


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(bundled_folder())


def test_words_are_read_with_and_without_a_space(tokenizer: Tokenizer) -> None:
    read = read_bad_words(["import", " import", "\n"], tokenizer)
    texts = [tokenizer.decode(word) for word in read]
    assert texts == ["import", " import", "\n", " \n"]
    assert read[0] == tuple(tokenizer.encode("import", add_special_tokens=False))


def test_words_that_cannot_be_read(tokenizer: Tokenizer) -> None:
    for words, reader, message in (
        (["x"], None, "no tokenizer"),
        (["\ud800"], tokenizer, "surrogate"),
    ):
        with pytest.raises(RequestError, match=message) as caught:
            read_bad_words(words, reader)
        assert caught.value.param == "bad_words"
    assert read_bad_words([], None) == ()


@pytest.mark.parametrize(
    ("options", "stops", "words", "param"),
    [
        ({"logit_bias": {VOCAB: 1}}, (), (), "logit_bias"),
        ({"allowed_token_ids": [1, VOCAB]}, (), (), "allowed_token_ids"),
        ({"allowed_token_ids": [1, 2]}, (), ((1,), (3, 2)), "allowed_token_ids"),
        (
            {"allowed_token_ids": [1, 2], "min_tokens": 1},
            (1, 2),
            (),
            "allowed_token_ids",
        ),
        ({}, (), tuple((t,) for t in range(VOCAB)), "bad_words"),
        ({}, (), ((1, 2),) * 513, "bad_words"),
        (
            {"logit_bias": {i % VOCAB: 1 for i in range(VOCAB)}},
            (),
            ((1, 2),) * 490,
            "bad_words",
        ),
        ({"min_tokens": 1}, range(100, 1200), (), "min_tokens"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(
    options: dict[str, Any], stops: Any, words: Any, param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        check_shape(VOCAB, SamplingParams(**options), frozenset(stops), words)
    assert caught.value.param == param
    assert str(caught.value).startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("options", "stops", "words"),
    [
        ({"logit_bias": {VOCAB - 1: 1}, "allowed_token_ids": [VOCAB - 1]}, (), ()),
        ({"allowed_token_ids": [1, 2]}, (1, 2), ()),
        ({"allowed_token_ids": [1, 2], "min_tokens": 1}, (1,), ((3,),)),
        ({}, (), tuple((t,) for t in range(VOCAB - 1))),
        ({"min_tokens": 5}, (3,), ((1, 2),) * 511),
    ],
)
def test_what_leaves_a_token_is_taken(
    options: dict[str, Any], stops: Any, words: Any
) -> None:
    check_shape(VOCAB, SamplingParams(**options), frozenset(stops), words)
