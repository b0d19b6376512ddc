"""Whether a web page of somebody else's asks.

A browser lets any page open a WebSocket to any address, or send a POST without a body,
and says which page it was. What does not go through a preflight therefore asks here, so
that a page cannot use a server of the machine on which it is looked at.
"""

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope


def foreign(scope: Scope) -> bool:
    """Whether the request comes from a page of another address than this server's."""
    headers = Headers(scope=scope)
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != headers.get("host")
