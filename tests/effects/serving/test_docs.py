"""The page shows all that is described, and needs nothing but itself."""

import json
import re
import shlex
from html import unescape
from html.parser import HTMLParser

import pytest

from minfer.effects.serving.description import description
from minfer.effects.serving.docs import page
from minfer.effects.serving.endpoints import ENDPOINTS, QUESTIONS
from minfer.effects.serving.examples import EXAMPLES
from minfer.effects.serving.page.icon import DATA_URL
from tests.effects.browser import Browser
from tests.effects.runs.page.test_looks import contrast
from tests.effects.served import Serving
from tests.effects.serving.page.conftest import chromium as chromium
from tests.effects.serving.page.visits import seen


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
    assert not found.tags & {"script", "img", "iframe"}
    assert {link.removeprefix("#") for link in found.links} <= {
        *found.ids,
        "openapi.json",
        DATA_URL,
    }
    assert "url(" not in text
    shown = re.sub(r"</?[^>]*>", "", text)
    assert "//" not in shown.replace("curl http://127.0.0.1:8000/", "")


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


def test_it_shows_how_to_ask_and_what_comes_back(bundled: Serving) -> None:
    text = page(description())
    shown = [unescape(one) for one in re.findall(r"<pre>(.*?)</pre>", text, re.S)]
    commands = [one for one in shown if one.startswith("curl ")]
    assert len(commands) == len(EXAMPLES)
    for path in [one.path for one in ENDPOINTS] + [one.path for one in QUESTIONS]:
        (command,) = [c for c in commands if c.split()[1].endswith(f":8000{path}")]
        _, url, _, header, _, data = shlex.split(command)
        kind, _, value = header.partition(": ")
        asked = url.replace("http://127.0.0.1:8000", bundled.url)
        found = bundled.http.post(asked, content=data, headers={kind: value})
        assert found.status_code == 200, command
    for example in EXAMPLES.values():
        assert json.dumps(example.answer, indent=1) in shown
        assert not example.events or example.stream in shown


@seen
@pytest.mark.parametrize("dark", [False, True])
def test_both_schemes_can_be_read(
    chromium: Browser, bundled: Serving, dark: bool
) -> None:
    chromium.dark(dark)
    chromium.complaints.clear()
    chromium.call("Page.navigate", url=f"{bundled.url}/docs")
    chromium.wait("document.readyState === 'complete' && document.querySelector('pre')")
    look = "getComputedStyle(document.{}).{}"

    def color(of: str, what: str) -> str:
        found = re.findall(r"\d+", chromium.value(look.format(of, what)))
        return "#" + "".join(f"{int(one):02x}" for one in found[:3])

    paper = color("body", "backgroundColor")
    assert (contrast(paper, "#ffffff") > 10) == dark
    for ink in ("body", "querySelector('a')", "querySelector('h3')"):
        assert contrast(color(ink, "color"), paper) > 4.5, ink
    sunken = color("querySelector('pre')", "backgroundColor")
    assert contrast(color("querySelector('pre')", "color"), sunken) > 4.5
    assert chromium.complaints == []  # such as a favicon that is not there
    chromium.dark(False)
