"""What a person does to the page with a mouse."""

from pathlib import Path

from tests.effects.browser import Browser
from tests.effects.runs.page.scenes import scene, seen, shown, spot, words


@seen
def test_clicks_wheel_and_drags(chromium: Browser, tmp_path: Path) -> None:
    shown(chromium, tmp_path, scene(), "axis=turn")
    chromium.click(*spot(chromium, "timeline", 7, 1.5))
    assert chromium.value("[cursor, chosen]") == [7, 1]
    assert words(chromium, "#story").startswith("Request urgent")
    chromium.mouse("mouseMoved", *spot(chromium, "timeline", 7, 0.5))
    assert words(chromium, "#tip") == "request first waits again \u00b7 turn 7, 70 ms"
    story = "[...document.querySelectorAll('#story .link')].at(-1)"
    chromium.value(f"{story}.click()")
    assert chromium.value("cursor") == chromium.value("lives[1].died")
    chromium.key("Escape")
    assert words(chromium, "#story") == ""
    chromium.click(*spot(chromium, "pool", 3, 1))
    assert chromium.value("[cursor, chosen]") == [3, -1]
    # The wheel zooms, and what is under the pointer stays there.
    x, y = spot(chromium, "batch", 8, 1)
    chromium.mouse("mouseWheel", x, y, deltaX=0, deltaY=-400)
    chromium.wait("view.to - view.from < 0.6 * turns")
    assert chromium.value("Math.abs(valueAt((px(8) + px(9)) / 2) - 8.5) < 0.01")
    assert abs(spot(chromium, "batch", 8, 1)[0] - x) < 1
    before = chromium.value("view.from")
    for kind, drag_x in (
        ("mousePressed", x),
        ("mouseMoved", x + 40),
        ("mouseMoved", x + 80),
    ):
        chromium.mouse(kind, drag_x, y, button="left", buttons=1, clickCount=1)
    chromium.mouse("mouseReleased", x + 80, y, button="left", clickCount=1)
    assert chromium.value("view.from") < before
    assert chromium.value("cursor") == 3  # a drag is no click
    chromium.key("0")
    assert chromium.value("[view.from, view.to === edge[turns]]") == [0, True]
    # The ruler scrubs, the overview moves the frame.
    for kind, turn in (("mousePressed", 5), ("mouseMoved", 9), ("mouseReleased", 9)):
        x, _ = spot(chromium, "ruler", turn, 0)
        y = chromium.value("$('ruler').getBoundingClientRect().y") + 8
        chromium.mouse(kind, x, y, button="left", buttons=1, clickCount=1)
    assert chromium.value("cursor") == 9
    chromium.value("look(0, edge[8])")
    x, _ = spot(chromium, "overview", 7, 0)
    chromium.click(x, chromium.value("$('overview').getBoundingClientRect().y") + 20)
    assert chromium.value("view.from") > 0
