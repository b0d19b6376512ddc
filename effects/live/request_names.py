"""The engine's request ids for one id that a client has.

    cmpl-42      an answer, the id that its client has
    cmpl-42-1    its second prompt: a request of its own
    cmpl-42-1#7  the unfinished rest of that request, resubmitted to a new engine after
                 the old one died; several of them, if its samples had begun

    cmpl-42-1/3/0  a beam of a round, if the request is a beam search

So one answer is several requests in a journal, or in those of several runs.
"""

import re
from collections.abc import Iterable
from typing import Final

_RESUMPTION: Final = re.compile(r"#\d+$")
_ROUND: Final = re.compile(r"/\d+/\d+$")
_PROMPT: Final = re.compile(r"-\d+$")


def prompt_name(answer: str, prompt: int) -> str:
    """Returns the id of an answer's request for one of its prompts."""
    return f"{answer}-{prompt}"


def resumed_name(request: str, number: int) -> str:
    """Returns the id by which a request, or a part of it, is resubmitted."""
    return f"{request}#{number}"


def request_of(name: str) -> str:
    """Returns the id of the request that an engine's `name` is a part of, or all."""
    return _RESUMPTION.sub("", name)


def resumption_of(name: str) -> int:
    """Returns the number with which an engine's `name` was resubmitted; 0: it was not."""
    match = _RESUMPTION.search(name)
    return 0 if match is None else 1 + int(match[0][1:])


def round_name(search: str, number: int, beam: int) -> str:
    """Returns the id of the request for a beam in a round of a search."""
    return f"{search}/{number}/{beam}"


def search_of(name: str) -> str:
    """Returns the id of the search that an engine's `name` is a beam of; else of its
    request.
    """
    return _ROUND.sub("", request_of(name))


def searches_matching(name: str, ids: Iterable[str]) -> list[str]:
    """Returns the searches that have beams among an engine's `ids`, and that `name`
    means: a search or an answer.
    """
    searches = [
        search_of(request_id)
        for request_id in ids
        if _ROUND.search(request_of(request_id))
    ]
    matches = [search for search in searches if name in (search, answer_of(search))]
    return [*dict.fromkeys(matches)]


def answer_of(name: str) -> str:
    """Returns the id of the answer that an engine's `name` is a part of."""
    return _PROMPT.sub("", search_of(name))


def names_matching(name: str, ids: Iterable[str]) -> list[str]:
    """Returns those of an engine's ids that `name` means: that one; else the parts of the
    request with this id; else those of the answer.
    """
    unique_ids = [*dict.fromkeys(ids)]
    if _RESUMPTION.search(name) and name in unique_ids:
        return [name]
    parts_of_request = [
        request_id
        for request_id in unique_ids
        if name in (request_id, request_of(request_id))
    ]
    return parts_of_request or [
        request_id for request_id in unique_ids if answer_of(request_id) == name
    ]
