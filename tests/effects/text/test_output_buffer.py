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
    buffer = OutputBuffer(None, None)
    buffer.new_tokens += [1, 2]
    assert not buffer.has_output
    buffer.flush(NONE)
    assert buffer.take(0, ()).token_ids == [1, 2]
    assert buffer.take(0, ()).token_ids == []


def test_tokens_without_text_wait_for_it(tokenizer: Tokenizer) -> None:
    buffer = OutputBuffer(Detokenizer(tokenizer), None)
    smile = tokenizer.encode("🙂")
    assert len(smile) > 1
    buffer.new_tokens += smile[:1]
    buffer.flush(NONE)
    assert (buffer.num_flushed, buffer.has_output) == (1, False)
    buffer.new_tokens += smile[1:]
    buffer.flush(NONE)
    assert (buffer.num_flushed, buffer.has_output) == (len(smile), True)
    new = buffer.take(3, ())
    assert (new.index, new.text, new.token_ids) == (3, "🙂", list(smile))


def test_the_end_is_news_and_is_taken_once(tokenizer: Tokenizer) -> None:
    buffer = OutputBuffer(Detokenizer(tokenizer), None)
    had_output = [buffer.has_output]
    buffer.finish(done(0))
    had_output.append(buffer.has_output)
    buffer.flush(NONE)
    had_output.append(buffer.has_output)
    assert buffer.take(0, ()).finish_reason == "length"
    assert [*had_output, buffer.has_output] == [False, False, True, False]


def test_the_token_that_ends_has_no_text(tokenizer: Tokenizer) -> None:
    a, b = (tokenizer.encode(char)[0] for char in "ab")
    for reason, text in (("stop", "a"), ("length", "ab")):
        buffer = OutputBuffer(Detokenizer(tokenizer), None)
        buffer.new_tokens += [a, b]
        buffer.finish(done(2, reason))
        buffer.flush(frozenset([b]))
        new = buffer.take(0, (b,))
        assert (new.text, new.token_ids) == (text, [a, b])
        assert new.stop_reason == (b if reason == "stop" else None)
        assert new.finish_reason == reason


def test_the_token_that_ends_has_a_text_if_that_is_kept(tokenizer: Tokenizer) -> None:
    a, b = (tokenizer.encode(char)[0] for char in "ab")
    special = min(tokenizer.special_ids)
    for end, text in ((b, "ab"), (special, "a")):
        buffer = OutputBuffer(Detokenizer(tokenizer), None, keeps_stop=True)
        buffer.new_tokens += [a, end]
        buffer.finish(done(2, "stop"))
        buffer.flush(frozenset([end]))
        assert buffer.take(0, ()).text == text


def test_the_models_own_end_is_no_stop_reason(tokenizer: Tokenizer) -> None:
    a, b = (tokenizer.encode(char)[0] for char in "ab")
    buffer = OutputBuffer(Detokenizer(tokenizer), None)
    buffer.new_tokens += [a, b]
    buffer.finish(done(2, "stop"))
    buffer.flush(frozenset([b]))
    new = buffer.take(0, ())
    assert (new.finish_reason, new.stop_reason) == ("stop", None)


def test_what_begins_a_stop_string_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    buffer = OutputBuffer(Detokenizer(tokenizer), StopMatcher(["bc"]))
    buffer.new_tokens += [tokenizer.encode(char)[0] for char in "ab"]
    buffer.flush(NONE)
    assert buffer.text == "a"
    buffer.finish(done(2))
    buffer.flush(NONE)
    assert buffer.take(0, ()).text == "ab"


@pytest.mark.parametrize("seed", range(150))
def test_stop_strings_across_tokens_against_the_whole_text(
    tokenizer: Tokenizer, seed: int
) -> None:
    """Whatever comes together: what is given is what no stop string can take back."""
    draw = random.Random(seed)
    letters = "".join(draw.sample(LANGUAGES["everything"] + LANGUAGES["joined emoji"], 4))
    tokens = tokenizer.encode("".join(draw.choices(letters, k=50)))
    stops = drawn(draw, letters, draw.randrange(1, 20), 1 + seed % 8)
    buffer, text_out = OutputBuffer(Detokenizer(tokenizer), StopMatcher(stops)), ""
    while buffer.stop_string is None and buffer.num_flushed < len(tokens):
        buffer.new_tokens += tokens[
            buffer.num_flushed : buffer.num_flushed + draw.randrange(1, 5)
        ]
        buffer.flush(NONE)
        text = tokenizer.decode(tokens[: buffer.num_flushed]).rstrip("\ufffd")
        text_out += buffer.take(0, ()).text
        if buffer.stop_string is None:
            assert text_out == text[: len(text) - len(begun(text, stops))]
    buffer.finish(done(buffer.num_flushed))
    buffer.flush(NONE)
    text_out += buffer.take(0, ()).text
    assert (text_out, buffer.stop_string) == searched(tokenizer.decode(tokens), stops)
    # It ends with the token that completed the stop string, and not later.
    before = tokenizer.decode(tokens[: buffer.num_flushed - 1])
    assert buffer.stop_string is None or searched(before, stops)[1] is None


def test_it_goes_on_after_history(tokenizer: Tokenizer) -> None:
    buffer = OutputBuffer(Detokenizer(tokenizer), StopMatcher(["bc"]))
    a, b, c = (tokenizer.encode(char)[0] for char in "abc")
    buffer.begin((a, b))
    assert (buffer.num_flushed, buffer.text, buffer.tokens) == (2, "", [])
    buffer.new_tokens += [c]
    buffer.flush(NONE)
    assert (buffer.stop_string, buffer.num_flushed) == ("bc", 3)
    assert buffer.take(0, ()).token_ids == [c]


def test_scores_go_with_their_tokens(tokenizer: Tokenizer) -> None:
    buffer = OutputBuffer(Detokenizer(tokenizer), None, logprobs=[])
    a, b = (tokenizer.encode(char)[0] for char in "ab")
    assert buffer.logprobs is not None
    buffer.new_tokens += [a, b]
    # Of the drawn token and of the likeliest two; then of the drawn one alone.
    buffer.logprobs += [
        TokenLogprobs(a, -1.0, 2, (b, a), (-0.5, -1.0)),
        TokenLogprobs(b, -0.25, 1),
    ]
    buffer.flush(NONE)
    new = buffer.take(0, ())
    assert new.logprobs is not None
    first, second = new.logprobs
    assert first[b] == Logprob(-0.5, 1, "b")
    assert next(iter(first)) == a
    assert second == {b: Logprob(-0.25, 1, "b")}
    assert new.cumulative_logprob == -1.25
    assert buffer.logprobs == []


def test_stop_strings_do_not_count_before_there_are_enough_tokens(
    tokenizer: Tokenizer,
) -> None:
    tokens = tokenizer.encode("a b a b a b")
    text = "".join(map(tokenizer.decode, ([token] for token in tokens)))
    for enough in range(len(tokens)):
        for num_known in (0, min(2, enough), len(tokens) - 1):
            buffer = OutputBuffer(
                Detokenizer(tokenizer), StopMatcher(["b"]), None, enough
            )
            buffer.begin(tuple(tokens[:num_known]))
            buffer.new_tokens += tokens[num_known:]
            buffer.flush(NONE)
            early = tokenizer.decode(tokens[: max(enough, num_known)])
            expected = text[: text.index("b", len(early))]
            text_out = tokenizer.decode(tokens[:num_known])
            assert text_out + buffer.take(0, ()).text == expected
            assert buffer.stop_string == "b"


def test_a_stop_string_may_begin_before_there_are_enough_tokens(
    tokenizer: Tokenizer,
) -> None:
    tokens = [tokenizer.encode(buffer)[0] for buffer in "xabcy"]
    for num_known in (0, 1, 2):
        buffer = OutputBuffer(Detokenizer(tokenizer), StopMatcher(["abc"]), None, 2)
        buffer.begin(tuple(tokens[:num_known]))
        buffer.new_tokens += tokens[num_known:]
        buffer.flush(NONE)
        assert (buffer.stop_string, buffer.num_flushed) == ("abc", 4)
        assert buffer.text == "x"[num_known:]
