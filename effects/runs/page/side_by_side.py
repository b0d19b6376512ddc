"""Two runs side by side: a page with the page of each in a frame of its own.

A frame is a document of its own, with its own policy, so the scripts of the pages do not
see each other. Both are in the one file, and need no network.
"""

from collections.abc import Sequence
from html import escape
from typing import Final

_STYLE: Final = (
    "html,body{height:100%;margin:0}"
    "body{display:flex;gap:4px;background:#888}"
    "iframe{flex:1;min-width:0;height:100%;border:0;background:#fff}"
)


def side_by_side(pages: Sequence[tuple[str, bytes]]) -> bytes:
    """The page with these pages, each with its name, from left to right."""
    frames = "".join(
        f'<iframe title="{escape(name)}" srcdoc="{escape(page.decode())}"></iframe>\n'
        for name, page in pages
    )
    title = escape(" | ".join(name for name, _ in pages))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{title}</title><style>{_STYLE}</style></head>\n"
        f"<body>\n{frames}</body></html>\n"
    ).encode()
