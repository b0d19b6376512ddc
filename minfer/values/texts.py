"""Texts of others, such as errors of libraries, on one line."""


def without_breaks(text: object) -> str:
    """Its text, with a blank in place of each run of white space and line breaks."""
    return " ".join(str(text).split())
