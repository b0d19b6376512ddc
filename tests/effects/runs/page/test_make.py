"""The page as a file: nothing is needed, and no request can change it."""

import re
from pathlib import Path

from minfer.effects.runs.page.make import page, template, write_page
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    Cancel,
    Event,
    Failed,
    Finish,
)
from tests.effects.browser import Browser
from tests.effects.runs.page.scenes import requested, scene, seen, spot, turns_of, words


def test_a_page_needs_nothing_and_no_request_can_change_it() -> None:
    hostile = '</script><script>alert(1)</script><img src="http://example.com/x">'
    config = EngineConfig(num_blocks=40, block_size=4)
    turns = turns_of(
        config, {0: [requested(hostile, 4, 4, client=hostile)], 1: [Failed(0, hostile)]}
    )
    data = page(hostile, config, turns)
    assert b"http" not in template().replace(b"http-equiv", b"")
    assert (data.count(b"<script"), data.count(b"<img")) == (2, 0)
    assert b"example.com" not in data
    policy = re.search(rb'Content-Security-Policy" content="([^"]*)"', data)
    assert policy
    assert policy[1].startswith(
        b"default-src 'none'; base-uri 'none'; form-action 'none'; script"
    )
    assert b"unsafe" not in policy[1]


def test_the_template_is_whole() -> None:
    """What is put into it neither ends its own element nor leaves a mark behind."""
    text = template().decode()
    assert re.findall(r"@[A-Z]+@", text) == ["@DATA@"]
    for tag, times in (("script", 2), ("style", 1), ("body", 1), ("html", 1)):
        assert len(re.findall(rf"<{tag}[ >]", text)) == times, tag
        assert text.count(f"</{tag}>") == times, tag
    assert page("run", *scene()).count(b"@DATA@") == 0


HOSTILE = (
    "constructor",
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "a&amp;b\"'`${1}",
    "\u202eevil",
    "\ud800",
    "__proto__",
    "@DATA@",
    "@POLICY@",
    "@SCRIPT@",
    "",
    "x" * 5000,
)


@seen
def test_what_a_run_says_is_never_markup(chromium: Browser, tmp_path: Path) -> None:
    config = EngineConfig(num_blocks=400, block_size=4, depth=1, max_failures=2)
    events: list[Event] = [requested(name, 4, 9, client=name) for name in HOSTILE]
    late: list[Event] = [
        Cancel(HOSTILE[1]),
        Cancel("<b>"),
        Finish(HOSTILE[0], 0, 1, HOSTILE[0]),
        Finish(HOSTILE[2], 0, 1, HOSTILE[2]),
    ]
    turns = turns_of(config, {0: events, 2: [Failed(1, HOSTILE[1])], 4: late})
    write_page(tmp_path / "page.html", HOSTILE[1], config, turns)
    chromium.open(tmp_path / "page.html")
    assert chromium.value("document.title").startswith("</script><script>alert(1)")
    for s, name in enumerate(HOSTILE):
        chromium.value(f"choose({s})")
        shown = chromium.value("document.querySelector('#story bdi').textContent")
        assert shown == name or name == "\ud800"  # which no protocol can carry
        paragraph = chromium.value("document.querySelector('#story p').textContent")
        assert f"client {name}." in paragraph or name in ("", "\ud800")
    for t in range(6):
        chromium.value(f"go({t})")
        chromium.mouse("mouseMoved", *spot(chromium, "timeline", t, 0.5))
    chromium.value("go(4)")
    assert "request constructor ends (constructor) after 1 token" in words(
        chromium, "#turn"
    )
    chromium.value("find('<')")
    assert (
        chromium.value("document.querySelectorAll('script, img, b, aside script').length")
        == 2
    )
    assert chromium.value("document.documentElement.scrollWidth") <= 1280
    assert chromium.complaints == []
    # Were anything to get in all the same, it could not run.
    chromium.value(
        "document.body.insertAdjacentHTML('beforeend', '<img src=x "
        'onerror="hacked=1">\')'
    )
    chromium.value("new Promise((done) => setTimeout(done, 100))")
    assert chromium.value("typeof hacked") == "undefined"
    chromium.complaints.clear()
