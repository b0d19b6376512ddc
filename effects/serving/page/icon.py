"""The icon of all pages: in their markup, and at the path where browsers look else.

It is one small picture in SVG, which needs no file of its own: a page has it as a data
URL, and `/favicon.ico` serves it for other answers (`/metrics`, JSON).
"""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

PATH: Final = "/favicon.ico"  # where browsers look, whatever the kind is
KIND: Final = "image/svg+xml"
ICON: Final = (
    "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'>"
    "<rect width='16' height='16' rx='4' fill='#2f5bd7'/>"
    "<path d='M4 11V6.5m4 4.5V4m4 7V8' stroke='white' stroke-width='2' "
    "stroke-linecap='round'/></svg>"
)
_CACHE_HEADERS: Final = {"Cache-Control": "max-age=86400"}  # for a day


async def _serve(_: Request) -> Response:
    return Response(ICON, headers=_CACHE_HEADERS, media_type=KIND)


def icon_route() -> Route:
    """The route of the icon."""
    return Route(PATH, _serve)
