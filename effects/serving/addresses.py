"""Wrong addresses: which address a request for an unknown one probably meant.

Theory. Most of them are right addresses behind a wrong base URL: OpenAI's clients want
one that ends in /v1, Anthropic's one that does not, and proxies put names of their own in
front. So the end of a path decides: the longest end that is an address here, as it is or
below /v1. Other wrong addresses may be typos of a few letters.
"""

from typing import Final

from attrs import frozen

from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.description import BODYLESS
from minfer.effects.serving.endpoints import ENDPOINTS, QUERY_ENDPOINTS
from minfer.effects.setup.nearest import nearest

ANTHROPIC: Final = "/v1/messages"  # the address of its endpoint, and of all below
NOT_FOUND: Final = 404
NOT_ALLOWED: Final = 405
_BASES: Final = ("/v1", "")  # below which addresses are
_ANY: Final = "{name}"  # what stands for any one part
_LONGEST: Final = 128  # characters of a path that is looked at, and shown
_ALIKE: Final = 0.85  # how similar two paths are if one is a typo of the other
_SHOWN: Final = "GET /openapi.json describes all endpoints"
_KNOWN: Final = frozenset(
    {one.path for one in ENDPOINTS}
    | {one.path for one in QUERY_ENDPOINTS}
    | {one.path for one in BODYLESS}
)
_WHOLE: Final = sorted(path for path in _KNOWN if "{" not in path)


@frozen
class Suggestion:
    """An address that exists, and why another was requested."""

    path: str
    rebased: bool  # the base URL was wrong; else there was a typo


def suggest_address(path: str) -> Suggestion | None:
    """The address that an unknown one probably meant, if it can be derived."""
    if len(path) > _LONGEST:
        return None
    parts = [part for part in path.split("/") if part]
    for i in range(len(parts)):
        for base in _BASES:
            likely = "/".join((base, *parts[i:]))
            if likely != path and _is_address(likely):
                return Suggestion(likely, rebased=bool(i or base))
    near = nearest(path, _WHOLE, _ALIKE)
    return None if near is None else Suggestion(near, rebased=False)


def _is_address(path: str) -> bool:
    above = path.rpartition("/")[0]
    return path in _KNOWN or f"{above}/{_ANY}" in _KNOWN


def wrong_address(method: str, path: str) -> ApiError:
    """The error for an unknown address."""
    why = f"there is nothing at {method} {path[:_LONGEST]}"
    found = suggest_address(path)
    if found is None:
        return ApiError(f"{why}; {_SHOWN}", None, "not_found", NOT_FOUND)
    why = f"{why}; did you mean {found.path}?"
    if found.rebased and found.path.startswith("/v1/"):
        ends = "does not end" if found.path.startswith(ANTHROPIC) else "ends"
        whose = "Anthropic" if found.path.startswith(ANTHROPIC) else "OpenAI"
        why += f" The base URL of clients of {whose}'s API {ends} in /v1"
    return ApiError(why, None, "not_found", NOT_FOUND)


def wrong_method(method: str, path: str, allowed: str) -> ApiError:
    """The error for a known address with another method than those `allowed`."""
    why = f"{path[:_LONGEST]} takes {allowed}, not {method}; {_SHOWN}"
    return ApiError(why, None, "method_not_allowed", NOT_ALLOWED)
