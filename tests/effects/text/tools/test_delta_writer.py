"""White space beside markers, and deltas that are put together."""

from minfer.effects.text.tools.delta_writer import DeltaWriter
from minfer.effects.text.tools.deltas import (
    Arguments,
    CallEnd,
    CallStart,
    ContentDelta,
    ReasoningDelta,
)


def outlet() -> DeltaWriter:
    ids = iter("abc")
    return DeltaWriter(lambda: next(ids))


def test_deltas_of_a_kind_are_one() -> None:
    out = outlet()
    for text in ("a", "b", " ", "c"):
        out.content(text)
    out.start("f")
    out.arguments("{")
    out.arguments("}")
    out.end(complete=True)
    call = [CallStart(0, "a", "f"), Arguments(0, "{}"), CallEnd(0)]
    assert out.take() == [ContentDelta("ab c"), *call]
    assert out.take() == []
    out.start("g")
    assert out.take() == [CallStart(1, "b", "g")]


def test_white_space_is_held() -> None:
    out = outlet()
    out.content(" a ")
    assert out.take() == [ContentDelta(" a")]
    out.content("\n")
    assert out.take() == []
    out.content("b\n")
    out.close()
    assert out.take() == [ContentDelta(" \nb\n")]


def test_no_white_space_is_left_around_calls() -> None:
    out = outlet()
    out.content("\n\n")
    out.start("f")
    out.end(complete=True)
    out.content("\n")
    out.content(" x")
    out.start("f")
    out.content("\n")
    out.close()
    kinds = [contents for contents in out.take() if isinstance(contents, ContentDelta)]
    assert kinds == [ContentDelta("x")]


def test_parts_of_reasoning_are_separate() -> None:
    out = outlet()
    out.mark()
    out.reasoning("\na\n")
    out.mark()
    out.reasoning("b")
    out.mark()
    out.close()
    assert out.take() == [ReasoningDelta("a\n\nb")]


def test_without_streaming_a_call_is_emitted_once_it_is_complete() -> None:
    out = DeltaWriter(lambda: "a", streaming=False)
    out.content("x\n")
    out.start("f")
    out.arguments('{"a": ')
    assert not out.end(complete=False)
    out.content('{"a": oops')
    out.start("g")
    out.arguments("{")
    out.arguments("}")
    assert out.take() == [ContentDelta('x\n{"a": oops')]
    assert out.end(complete=True)
    assert out.take() == [CallStart(0, "a", "g"), Arguments(0, "{}"), CallEnd(0)]
