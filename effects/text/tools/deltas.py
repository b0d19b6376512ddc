"""What a parser finds in a text, in the order in which it finds it.

All `Arguments` of a call join to one JSON object, if the model wrote one to its end.
"""

from attrs import frozen


@frozen
class Content:
    """More of the answer."""

    text: str


@frozen
class Reasoning:
    """More of what the model thinks before it answers."""

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
    """A call is over; `whole` is false if its arguments broke off or are no JSON."""

    index: int
    whole: bool = True


Delta = Content | Reasoning | CallStart | Arguments | CallEnd


def merged(first: Delta, second: Delta) -> Delta | None:
    """Two deltas as one that says the same, if there is one."""
    match first, second:
        case Content(), Content():
            return Content(first.text + second.text)
        case Reasoning(), Reasoning():
            return Reasoning(first.text + second.text)
        case Arguments(index=i), Arguments(index=j) if i == j:
            return Arguments(i, first.text + second.text)
    return None
