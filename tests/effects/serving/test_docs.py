"""The page shows all that is described, and needs nothing but itself."""

import re
from html.parser import HTMLParser

from minfer.effects.serving.description import description
from minfer.effects.serving.docs import page
from tests.effects.served import Serving


class Links(HTMLParser):
    """What a page loads or leads to, and the places in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: set[str] = set()
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name in ("src", "href"):
                self.links.add(value or "")
            if name == "id":
                self.ids.add(value or "")


def test_the_page_is_served(bundled: Serving) -> None:
    found = bundled.get("/docs")
    assert found.headers["content-type"].startswith("text/html")
    assert found.text == page(description())


def test_it_asks_no_network_for_anything() -> None:
    text = page(description())
    found = Links(text)
    assert not found.tags & {"script", "link", "img", "iframe"}
    assert {link.removeprefix("#") for link in found.links} <= {
        *found.ids,
        "openapi.json",
    }
    assert "url(" not in text
    assert "//" not in re.sub(r"</?[^>]*>", "", text)


def test_it_shows_every_path_and_every_object() -> None:
    text = page(description())
    made = description()
    for path in made["paths"]:
        assert f"<code>{path}</code>" in text
    assert Links(text).ids == made["components"]["schemas"].keys()


def test_what_is_described_is_no_markup() -> None:
    schemas = {"X": {"properties": {"<a>": {"type": "string", "description": "<b>"}}}}
    operation = {"summary": "<i>", "responses": {}}
    text = page(
        {
            "info": {"title": "<t>", "version": "1", "description": "&"},
            "paths": {"/<p>": {"get": operation}},
            "components": {"schemas": schemas},
        }
    )
    for markup in ("<a>", "<b><", "<i>", "<t>", "<p>1"):
        assert markup not in text
    assert "&lt;a&gt;" in text
