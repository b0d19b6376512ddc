"""A path before all addresses, as behind a proxy that passes it on: `--root-path`.

Addresses are served with it and without it, as vLLM does: some proxies take it off.
"""

from starlette.types import ASGIApp, Receive, Scope, Send

from minfer.values.checks import ConfigError


class RootPath:
    """Middleware that takes a path off the front of addresses."""

    def __init__(self, app: ASGIApp, path: str) -> None:
        self._app = app
        self._path = path
        self._raw_path = path.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request at the address behind the path."""
        if scope.get("path", "").startswith(f"{self._path}/"):
            scope["path"] = scope["path"].removeprefix(self._path)
            raw = scope.get("raw_path")
            if raw:
                scope["raw_path"] = raw.removeprefix(self._raw_path)
        await self._app(scope, receive, send)


def read_root_path(path: str) -> str:
    """Returns a root path without a slash at its end. Raises ConfigError."""
    stripped = path.rstrip("/")
    if stripped and not (stripped.startswith("/") and stripped.isascii()):
        raise ConfigError(
            f"--root-path must be a path that begins with a slash, such as /llm, not "
            f"{path!r}"
        )
    return stripped
