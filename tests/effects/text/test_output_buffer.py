"""One sample: tokens become text when they are flushed, and wait until they are taken."""

import random

import pytest

from minfer.effects.setup.folders import bundled_folder
from minfer.effects.text.detokenizer import Detokenizer
from minfer.effects.text.output_buffer import OutputBuffer
from minfer.effects.text.outputs import Logprob
from minfer.effects.text.stops import StopMatcher
from minfer.effects.text.tokenizer import Tokenizer
from minfer.records.messages import Finished
from minfer.records.token_logprobs import TokenLogprobs
from tests.effects.text.languages import LANGUAGES
from tests.effects.text.test_stops import begun, drawn, searched

NONE = frozenset[int]()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(bundled_folder())


def done(length: int, reason: str = "length") -> Finished:
    return Finished("a", 0, reason, length)


def test_without_a_tokenizer_tokens_are_news() -> None:
    one = OutputBuffer(None, None)
    one.new_tokens += [1, 2]
    assert not one.has_output
    one.flush(NONE)
    assert one.take(0, ()).token_ids == (1, 2)
    assert one.take(0, ()).token_ids == ()


def test_tokens_without_text_wait_for_it(tokenizer: Tokenizer) -> None:
    one = OutputBuffer(Detokenizer(tokenizer), None)
    smile = tokenizer.encode("🙂")
    assert len(smile) > 1
    one.new_tokens += smile[:1]
    one.flush(NONE)
    assert (one.num_flushed, one.has_output) == (1, False)
    one.new_tokens += smile[1:]
    one.flush(NONE)
    assert (one.num_flushed, one.has_output) == (len(smile), True)
    new = one.take(3, ())
    assert (new.index, new.text, new.token_ids) == (3, "🙂", tuple(smile))


def test_the_end_is_news_and_is_taken_once(tokenizer: Tokenizer) -> None:
    one = OutputBuffer(Detokenizer(tokenizer), None)
    seen = [one.has_output]
    one.finish(done(0))
    seen.append(one.has_output)
    one.flush(NONE)
    seen.append(one.has_output)
    assert one.take(0, ()).finish_reason == "length"
    assert [*seen, one.has_output] == [False, False, True, False]


def test_the_token_that_ends_has_no_text(tokenizer: Tokenizer) -> None:
    a, b = (tokenizer.encode(char)[0] for char in "ab")
    for reason, text in (("stop", "a"), ("length", "ab")):
        one = OutputBuffer(Detokenizer(tokenizer), None)
        one.new_tokens += [a, b]
        one.finish(done(2, reason))
        one.flush(frozenset([b]))
        new = one.take(0, (b,))
        assert (new.text, new.token_ids) == (text, (a, b))
        assert new.stop_reason == (b if reason == "stop" else None)
        assert new.finish_reason == reason


def test_the_token_that_ends_has_a_text_if_that_is_kept(tokenizer: Tokenizer) -> None:
    a, b = (tokenizer.encode(char)[0] for char in "ab")
    special = min(tokenizer.special_ids)
    for end, text in ((b, "ab"), (special, "a")):
        one = OutputBuffer(Detokenizer(tokenizer), None, keeps_stop=True)
        one.new_tokens += [a, end]
        one.finish(done(2, "stop"))
        one.flush(frozenset([end]))
        assert one.take(0, ()).text == text


def test_the_models_own_end_is_no_stop_reason(tokenizer: Tokenizer) -> None:
    a, b = (tokenizer.encode(char)[0] for char in "ab")
    one = OutputBuffer(Detokenizer(tokenizer), None)
    one.new_tokens += [a, b]
    one.finish(done(2, "stop"))
    one.flush(frozenset([b]))
    new = one.take(0, ())
    assert (new.finish_reason, new.stop_reason) == ("stop", None)


def test_what_begins_a_stop_string_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    one = OutputBuffer(Detokenizer(tokenizer), StopMatcher(["bc"]))
    one.new_tokens += [tokenizer.encode(char)[0] for char in "ab"]
    one.flush(NONE)
    assert one.text == "a"
    one.finish(done(2))
    one.flush(NONE)
    assert one.take(0, ()).text == "ab"


@pytest.mark.parametrize("seed", range(150))
def test_stop_strings_across_tokens_against_the_whole_text(
    tokenizer: Tokenizer, seed: int
) -> None:
    """Whatever comes together: what is given is what no stop string can take back."""
    draw = random.Random(seed)
    letters = "".join(draw.sample(LANGUAGES["everything"] + LANGUAGES["joined emoji"], 4))
    tokens = tokenizer.encode("".join(draw.choices(letters, k=50)))
    stops = drawn(draw, letters, draw.randrange(1, 20), 1 + seed % 8)
    one, given = OutputBuffer(Detokenizer(tokenizer), StopMatcher(stops)), ""
    while one.stop_string is None and one.num_flushed < len(tokens):
        one.new_tokens += tokens[one.num_flushed : one.num_flushed + draw.randrange(1, 5)]
        one.flush(NONE)
        text = tokenizer.decode(tokens[: one.num_flushed]).rstrip("\ufffd")
        given += one.take(0, ()).text
        if one.stop_string is None:
            assert given == text[: len(text) - len(begun(text, stops))]
    one.finish(done(one.num_flushed))
    one.flush(NONE)
    given += one.take(0, ()).text
    assert (given, one.stop_string) == searched(tokenizer.decode(tokens), stops)
    # It ends with the token that completed the stop string, and not later.
    before = tokenizer.decode(tokens[: one.num_flushed - 1])
    assert one.stop_string is None or searched(before, stops)[1] is None


def test_it_goes_on_after_history(tokenizer: Tokenizer) -> None:
    one = OutputBuffer(Detokenizer(tokenizer), StopMatcher(["bc"]))
    a, b, c = (tokenizer.encode(char)[0] for char in "abc")
    one.begin((a, b))
    assert (one.num_flushed, one.text, one.tokens) == (2, "", [])
    one.new_tokens += [c]
    one.flush(NONE)
    assert (one.stop_string, one.num_flushed) == ("bc", 3)
    assert one.take(0, ()).token_ids == (c,)


def test_scores_go_with_their_tokens(tokenizer: Tokenizer) -> None:
    one = OutputBuffer(Detokenizer(tokenizer), None, logprobs=[])
    a, b = (tokenizer.encode(char)[0] for char in "ab")
    assert one.logprobs is not None
    one.new_tokens += [a, b]
    # Of the drawn token and of the likeliest two; then of the drawn one alone.
    one.logprobs += [
        TokenLogprobs(a, -1.0, 2, (b, a), (-0.5, -1.0)),
        TokenLogprobs(b, -0.25, 1),
    ]
    one.flush(NONE)
    new = one.take(0, ())
    assert new.logprobs is not None
    first, second = new.logprobs
    assert first[b] == Logprob(-0.5, 1, "b")
    assert next(iter(first)) == a
    assert second == {b: Logprob(-0.25, 1, "b")}
    assert new.cumulative_logprob == -1.25
    assert one.logprobs == []


def test_stop_strings_do_not_count_before_there_are_enough_tokens(
    tokenizer: Tokenizer,
) -> None:
    tokens = tokenizer.encode("a b a b a b")
    text = "".join(map(tokenizer.decode, ([token] for token in tokens)))
    for enough in range(len(tokens)):
        for known in (0, min(2, enough), len(tokens) - 1):
            one = OutputBuffer(Detokenizer(tokenizer), StopMatcher(["b"]), None, enough)
            one.begin(tuple(tokens[:known]))
            one.new_tokens += tokens[known:]
            one.flush(NONE)
            early = tokenizer.decode(tokens[: max(enough, known)])
            wanted = text[: text.index("b", len(early))]
            given = tokenizer.decode(tokens[:known])
            assert given + one.take(0, ()).text == wanted
            assert one.stop_string == "b"


def test_a_stop_string_may_begin_before_there_are_enough_tokens(
    tokenizer: Tokenizer,
) -> None:
    tokens = [tokenizer.encode(one)[0] for one in "xabcy"]
    for known in (0, 1, 2):
        one = OutputBuffer(Detokenizer(tokenizer), StopMatcher(["abc"]), None, 2)
        one.begin(tuple(tokens[:known]))
        one.new_tokens += tokens[known:]
        one.flush(NONE)
        assert (one.stop_string, one.num_flushed) == ("abc", 4)
        assert one.text == "x"[known:]
