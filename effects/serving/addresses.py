"""Wrong addresses: which address a request for an unknown one probably meant.

Theory. Most of them are right addresses behind a wrong base URL: OpenAI's clients want
one that ends in /v1, Anthropic's one that does not, and proxies put names of their own in
API server. So the end of a path decides: the longest end that is an address here, as it
is or below /v1. Other wrong addresses may be typos of a few letters.
"""

from collections.abc import Mapping
from typing import Final

from attrs import frozen

from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.description import BODYLESS
from minfer.effects.serving.endpoints import ENDPOINTS, QUERY_ENDPOINTS
from minfer.effects.setup.nearest import nearest

ANTHROPIC_PATH: Final = "/v1/messages"  # the address of its endpoint, and of all below
NOT_FOUND: Final = 404
NOT_ALLOWED: Final = 405
_BASE_PATHS: Final = ("/v1", "")  # below which addresses are
_PLACEHOLDER: Final = "{name}"  # the placeholder of a path's part
_MAX_PATH_CHARS: Final = 128  # of a path that is compared, and of one in an error
_MIN_SIMILARITY: Final = 0.85  # how similar two paths are if one is a typo of the other
_SEE_DESCRIPTION: Final = "GET /openapi.json describes all endpoints"
# Endpoints of OpenAI's, Anthropic's and vLLM's APIs that are not supported, and all paths
# below them. The status is 404, as clients retry after 501.
_UNSUPPORTED: Final[Mapping[str, str]] = {
    "/v1/assistants": "assistants are",
    "/v1/audio": "audio is",
    "/v1/batches": "batches are",
    "/v1/classify": "classification is",
    "/v1/conversations": "stored conversations are",
    "/v1/files": "files are",
    "/v1/fine_tuning": "fine-tuning is",
    "/v1/images": "images are",
    "/v1/messages/batches": "batches are",
    "/v1/moderations": "moderation is",
    "/v1/pooling": "pooling other than /v1/embeddings is",
    "/v1/realtime": "realtime audio is",
    "/v1/rerank": "reranking is",
    "/v1/responses": "stored responses are",
    "/v1/score": "scoring pairs of texts is",
    "/v1/threads": "assistants are",
    "/v1/uploads": "files are",
    "/v1/vector_stores": "vector stores are",
    "/v1/videos": "videos are",
    "/v2/rerank": "reranking is",
    "/classify": "classification is",
    "/pooling": "pooling other than /v1/embeddings is",
    "/rerank": "reranking is",
    "/score": "scoring pairs of texts is",
}
_KNOWN_PATHS: Final = frozenset(
    {endpoint.path for endpoint in ENDPOINTS}
    | {endpoint.path for endpoint in QUERY_ENDPOINTS}
    | {endpoint.path for endpoint in BODYLESS}
)
_MAIN_PATHS: Final = ", ".join(endpoint.path for endpoint in ENDPOINTS)
_FIXED_PATHS: Final = sorted(path for path in _KNOWN_PATHS if "{" not in path)


@frozen
class Suggestion:
    """An address that exists, and why another was requested."""

    path: str
    rebased: bool  # the base URL was wrong; else there was a typo


def suggest_address(path: str) -> Suggestion | None:
    """The address that an unknown one probably meant, if it can be derived."""
    if len(path) > _MAX_PATH_CHARS:
        return None
    segments = [segment for segment in path.split("/") if segment]
    for i in range(len(segments)):
        for base in _BASE_PATHS:
            candidate = "/".join((base, *segments[i:]))
            if candidate != path and _is_address(candidate):
                return Suggestion(candidate, rebased=bool(i or base))
    nearest_path = nearest(path, _FIXED_PATHS, _MIN_SIMILARITY)
    return None if nearest_path is None else Suggestion(nearest_path, rebased=False)


def _is_address(path: str) -> bool:
    parent = path.rpartition("/")[0]
    return path in _KNOWN_PATHS or f"{parent}/{_PLACEHOLDER}" in _KNOWN_PATHS


def wrong_address(method: str, path: str) -> ApiError:
    """The error for an unknown address."""
    message = f"there is nothing at {method} {path[:_MAX_PATH_CHARS]}"
    if (unsupported := _unsupported(path)) is not None:
        supported = f"this server has {_MAIN_PATHS}; {_SEE_DESCRIPTION}"
        message = f"{message}: {unsupported} not supported; {supported}"
        return ApiError(message, None, "not_supported", NOT_FOUND)
    suggestion = suggest_address(path)
    if suggestion is None:
        return ApiError(f"{message}; {_SEE_DESCRIPTION}", None, "not_found", NOT_FOUND)
    message = f"{message}; did you mean {suggestion.path}?"
    if suggestion.rebased and suggestion.path.startswith("/v1/"):
        ends = "does not end" if suggestion.path.startswith(ANTHROPIC_PATH) else "ends"
        vendor = "Anthropic" if suggestion.path.startswith(ANTHROPIC_PATH) else "OpenAI"
        message += f" The base URL of clients of {vendor}'s API {ends} in /v1"
    return ApiError(message, None, "not_found", NOT_FOUND)


def _unsupported(path: str) -> str | None:
    """The name of the unsupported feature at an address, with its verb; None for other
    addresses.
    """
    if path in _KNOWN_PATHS:
        return None
    return next(
        (
            feature
            for base, feature in _UNSUPPORTED.items()
            if f"{path}/".startswith(f"{base}/")
        ),
        None,
    )


def wrong_method(method: str, path: str, allowed: str) -> ApiError:
    """The error for a known address with another method than those `allowed`."""
    message = (
        f"{path[:_MAX_PATH_CHARS]} takes {allowed}, not {method}; {_SEE_DESCRIPTION}"
    )
    return ApiError(message, None, "method_not_allowed", NOT_ALLOWED)
