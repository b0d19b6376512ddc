"""By which ids an engine knows what a client knows by one.

    cmpl-42      an answer, as its client was told
    cmpl-42-1    its second prompt: a request of its own
    cmpl-42-1#7  what had not ended of that when an engine died, as it is asked for again
                 of the next one; several of them, if its samples had begun

    cmpl-42-1/3/0  where it is a beam search: a beam of one of its rounds

So one answer is several requests in a journal, or in those of several runs.
"""

import re
from collections.abc import Iterable
from typing import Final

_AGAIN: Final = re.compile(r"#\d+$")
_ROUND: Final = re.compile(r"/\d+/\d+$")
_PROMPT: Final = re.compile(r"-\d+$")


def prompt_name(answer: str, prompt: int) -> str:
    """The id of an answer's request for one of its prompts."""
    return f"{answer}-{prompt}"


def again_name(request: str, number: int) -> str:
    """The id by which a request, or a part of it, is asked for again."""
    return f"{request}#{number}"


def request_of(name: str) -> str:
    """The id of the request that `name`, an engine's, is a part of, or all."""
    return _AGAIN.sub("", name)


def round_name(search: str, number: int, beam: int) -> str:
    """The id of the request for a beam in a round of a search."""
    return f"{search}/{number}/{beam}"


def search_of(name: str) -> str:
    """The id of the search that `name`, an engine's, is a beam of; or of its request."""
    return _ROUND.sub("", request_of(name))


def searches_named(name: str, ids: Iterable[str]) -> list[str]:
    """The searches of which `ids`, an engine's, are beams, and which `name` means: a
    search or an answer.
    """
    each = [search_of(one) for one in ids if _ROUND.search(request_of(one))]
    found = [one for one in each if name in (one, answer_of(one))]
    return [*dict.fromkeys(found)]


def answer_of(name: str) -> str:
    """The id of the answer that `name`, an engine's, is a part of."""
    return _PROMPT.sub("", search_of(name))


def named_by(name: str, ids: Iterable[str]) -> list[str]:
    """Those of an engine's ids that `name` means: that one; else the parts of the request
    with this id; else those of the answer.
    """
    every = [*dict.fromkeys(ids)]
    if _AGAIN.search(name) and name in every:
        return [name]
    parts = [one for one in every if name in (one, request_of(one))]
    return parts or [one for one in every if answer_of(one) == name]
