"""Which paths a router passes on, and how it finds their backend.

what                                                    goes to
POST of an endpoint that computes a prompt              where the policy says
what names a response or request by its id              where that was made
all else below /v1, and some others                     any backend
what changes or holds the state of one server           nowhere: ask that server
a path with an empty part, or a part .                  nowhere: a server may take it for
                                                        the path without that part
"""

import re
from enum import Enum
from typing import Final

from attrs import frozen

from minfer.effects.serving.client_errors import ApiError

NOT_FOUND: Final = 404
# All that are passed on: not TRACE and CONNECT, which are for proxies.
METHODS: Final = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
ROUTED_PATHS: Final = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/embeddings",
    }
)
_OTHER_PATHS: Final = frozenset(  # outside of /v1
    {
        "/tokenize",
        "/detokenize",
        "/version",
        "/openapi.json",
        "/pooling",
        "/classify",
        "/score",
        "/rerank",
        "/v2/rerank",
    }
)
_STATEFUL_PATHS: Final = (  # of one server
    "/v1/batches",
    "/v1/conversations",
    "/v1/files",
    "/v1/load_lora_adapter",
    "/v1/stream",
    "/v1/unload_lora_adapter",
)
_MAX_PATH_CHARS: Final = 128  # of a path in an error
_RESOURCE_PATH: Final = re.compile(r"/v1/(?:responses|requests)/([^/]+)(?:/.*)?")


class Way(Enum):
    """How the backend of a request is found."""

    POLICY = "policy"
    HOME = "home"
    ANY = "any"


@frozen
class ForwardTarget:
    """What a request is for; `id` is what it names, if anything."""

    way: Way
    id: str = ""


def target_of(method: str, path: str, raw_path: bytes) -> ForwardTarget:
    """How to find the backend of a request. Raises ApiError for what is not passed on."""
    # The raw path is put behind a backend's address: it must not be able to change that.
    if b"#" in raw_path:  # what follows it is not sent to the backend
        raise ApiError("the path must have no #; write it as %23")
    segments = path.split("/")
    if not raw_path.startswith(b"/") or ".." in segments:
        raise ApiError("the path must begin with / and have no part ..")
    if "." in segments or "" in segments[1:-1]:
        raise _not_passed_on(path)
    if path in ROUTED_PATHS:
        return ForwardTarget(Way.POLICY if method == "POST" else Way.ANY)
    match = _RESOURCE_PATH.fullmatch(path)
    if match is not None:
        return ForwardTarget(Way.HOME, match[1])
    if any(f"{path}/".startswith(f"{prefix}/") for prefix in _STATEFUL_PATHS):
        raise _not_passed_on(path)
    if path.startswith("/v1/") or path in _OTHER_PATHS:
        return ForwardTarget(Way.ANY)
    raise _not_passed_on(path)


def _not_passed_on(path: str) -> ApiError:
    shown = path[:_MAX_PATH_CHARS]
    message = f"the router does not pass on {shown}: ask one of the servers behind it"
    return ApiError(message, None, "not_routed", NOT_FOUND)
