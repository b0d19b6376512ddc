"""A text that is read while it comes."""

from minfer.effects.text.tools.source import (
    Reading,
    StreamedText,
    peek_any,
    peek_char,
    take_until,
)


def step(reading: Reading[str]) -> str | None:
    """What is read, or None if there is not enough text."""
    try:
        next(reading)
    except StopIteration as stop:
        return str(stop.value)
    return None


def test_what_was_taken_is_kept_if_requested() -> None:
    source = StreamedText()
    source.push("abcd")
    source.take(1)
    source.keep("<")
    source.take(2)
    assert source.take_kept() == "<bc"
    source.take(1)
    assert source.take_kept() == ""


def test_words_ahead() -> None:
    source = StreamedText()
    reading = peek_any(source, ["<a>", "<bb>"])
    assert step(reading) is None
    source.push("<b")
    assert step(reading) is None
    source.push("b>x")
    assert step(reading) == "<bb>"
    assert step(peek_char(source)) == "<"
    assert step(peek_any(source, ["x"])) == ""


def test_words_ahead_of_an_end() -> None:
    source = StreamedText()
    source.push("<b", final=True)
    assert step(peek_any(source, ["<bb>"])) == ""
    source.take(2)
    assert step(peek_char(source)) == ""


def test_a_marker_within_another_and_one_that_begins_another() -> None:
    for markers, text, expected in (
        (["a:```", "```"], "xa:```", "a:```"),
        ([">", ">>a"], ">>a", ">>a"),
        ([">", ">>a"], ">>b", ">"),
    ):
        for pieces in ([text], [*text]):
            source = StreamedText()
            reading = take_until(source, markers, lambda _: None)
            results = []
            for piece in pieces:
                source.push(piece)
                results.append(step(reading))
                if results[-1] is not None:
                    break
            source.push("", final=True)
            last = results[-1] if results[-1] is not None else step(reading)
            assert last == expected


def test_until_a_marker() -> None:
    source = StreamedText()
    emitted: list[str] = []
    reading = take_until(source, ["<a>", "<ab>"], emitted.append)
    source.push("x<<a")
    assert step(reading) is None
    assert emitted == ["x<"]
    source.push("c<ab>rest")
    assert step(reading) == "<ab>"
    assert "".join(emitted) == "x<<ac"
    assert source.text[source.position :] == "rest"
