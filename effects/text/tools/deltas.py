"""The results of a parser, in the order of the text.

All `Arguments` of a call join to one JSON object, if the model completed it.
"""

from attrs import frozen


@frozen
class ContentDelta:
    """More of the answer."""

    text: str


@frozen
class ReasoningDelta:
    """More of the model's reasoning."""

    text: str


@frozen
class CallStart:
    """A call begins: calls of an answer are counted from 0, and none overlaps another."""

    index: int
    id: str
    name: str


@frozen
class Arguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


@frozen
class CallEnd:
    """The end of a call; `complete` is false if its arguments are cut off or no JSON."""

    index: int
    complete: bool = True


Delta = ContentDelta | ReasoningDelta | CallStart | Arguments | CallEnd


def merge(first: Delta, second: Delta) -> Delta | None:
    """Two deltas joined into one, if that is possible."""
    match first, second:
        case ContentDelta(), ContentDelta():
            return ContentDelta(first.text + second.text)
        case ReasoningDelta(), ReasoningDelta():
            return ReasoningDelta(first.text + second.text)
        case Arguments(index=i), Arguments(index=j) if i == j:
            return Arguments(i, first.text + second.text)
    return None
