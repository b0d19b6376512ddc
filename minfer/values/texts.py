"""Texts of others, such as errors of libraries, on one line."""


def without_breaks(text: object) -> str:
    """Returns its text on one line: a space in place of each run of white space."""
    return " ".join(str(text).split())
