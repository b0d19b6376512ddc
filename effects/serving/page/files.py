"""The files of the page: read once, tagged by a digest of their contents.

Theory. The page may load this server's files under /page and send requests to this
server, and do nothing else: its policy is a header, so that text which a model wrote
could not run even if a script of the page put it into the markup. No file is secret, so
none needs a key; requests that need a key are sent like any client's. A browser caches
the files, and checks each time whether they are unchanged.
"""

import hashlib
from pathlib import Path
from typing import Final

from attrs import frozen
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

PAGE_FOLDER: Final = Path(__file__).parent
INDEX: Final = "index.html"
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_KINDS: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_FOLDERS: Final = ("style", "script")
_DIGEST_CHARS: Final = 32  # of a digest that identifies a content
_NOT_MODIFIED: Final = 304
_NOT_FOUND: Final = 404


@frozen
class File:
    """One file of the page, at the path where it is served."""

    path: str
    data: bytes
    kind: str
    tag: str  # changes with the content

    @classmethod
    def read(cls, path: str, file: Path) -> "File":
        """The file for `path`."""
        data = file.read_bytes()
        digest = hashlib.sha256(data).hexdigest()[:_DIGEST_CHARS]
        return cls(path, data, f"{_KINDS[file.suffix]}; charset=utf-8", f'"{digest}"')

    async def serve(self, request: Request) -> Response:
        """The file, or 304 if the browser has it already."""
        headers = {
            "Cache-Control": "no-cache",
            "Content-Security-Policy": POLICY,
            "ETag": self.tag,
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        # A proxy that compresses the body weakens the tag.
        known_tags = request.headers.get("if-none-match", "").replace("W/", "").split(",")
        if self.tag in map(str.strip, known_tags):
            return Response(status_code=_NOT_MODIFIED, headers=headers)
        return Response(self.data, headers=headers, media_type=self.kind)


def _read() -> tuple[File, ...]:
    files = [
        File.read(f"/page/{folder}/{file.name}", file)
        for folder in _FOLDERS
        for file in sorted((PAGE_FOLDER / folder).iterdir())
        if file.suffix in _KINDS
    ]
    return (File.read("/", PAGE_FOLDER / INDEX), *files)


FILES: Final = _read()
PAGE_PATHS: Final = tuple(file.path for file in FILES)  # none of which needs a key


_BY_PATH: Final = {file.path: file for file in FILES}


async def _serve(request: Request) -> Response:
    """The file at a request's path."""
    file = _BY_PATH.get(request.scope["path"])
    if file is None:
        raise HTTPException(_NOT_FOUND)
    return await file.serve(request)


def page_routes() -> list[BaseRoute]:
    """The page, and the files that it loads."""
    return [Route("/", _serve), Route("/page/{folder}/{name}", _serve)]
