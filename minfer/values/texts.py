"""Words for people."""


def without_breaks(text: object) -> str:
    """Returns the text of an object, such as another library's error, on one line: a
    space in place of each run of white space.
    """
    return " ".join(str(text).split())


def counted(number: int, noun: str) -> str:
    """Returns a number of things: "1 step" or "1,204 steps"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
