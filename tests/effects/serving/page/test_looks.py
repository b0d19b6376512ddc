"""Both schemes can be read, and everything that can be pressed has a name."""

import pytest

from tests.effects.browser import Browser
from tests.effects.runs.page.test_looks import contrast
from tests.effects.served import Serving
from tests.effects.serving.page.visits import seen, settled, visit, write

pytestmark = seen


@pytest.mark.long
@pytest.mark.parametrize("dark", [False, True])
def test_both_schemes_can_be_read(chromium: Browser, dry: Serving, dark: bool) -> None:
    chromium.dark(dark)
    try:
        visit(chromium, dry)
        names: tuple[str, ...] = (
            "page",
            "panel",
            "sunken",
            "ink",
            "soft",
            "accent",
            "wrong",
        )
        names += ("on-accent", "well", "decode", "fill", "waiting", "used", "cached")
        color = chromium.value(
            f"Object.fromEntries({[*names]}.map((name) => [name, "
            "getComputedStyle(document.documentElement).getPropertyValue('--' + name)]))"
        )
        assert (contrast(color["page"], "#ffffff") > 10) == dark
        for paper in ("page", "panel", "sunken"):
            for ink in ("ink", "soft", "accent", "wrong"):
                assert contrast(color[ink], color[paper]) > 4.5, (ink, paper)
        assert contrast(color["on-accent"], color["accent"]) > 4.5
        for mark in ("well", "decode", "fill", "used"):
            assert contrast(color[mark], color["panel"]) > 2.9, mark
        for mark in ("waiting", "cached"):  # beside one of the others, and a number
            assert contrast(color[mark], color["panel"]) > 2, mark
    finally:
        chromium.dark(False)


@pytest.mark.long
def test_everything_has_a_name(chromium: Browser, dry: Serving) -> None:
    visit(chromium, dry, "both")
    write(chromium, "Hello?")
    settled(chromium)
    nodes = chromium.call("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "link", "textbox", "spinbutton", "log"}
    met = set()
    for node in nodes:
        role = node.get("role", {}).get("value")
        if role in roles and not node["ignored"]:
            met.add(role)
            assert node["name"]["value"].strip(), node
    assert met == roles
    named = {
        (node["role"]["value"], node["name"]["value"])
        for node in nodes
        if not node["ignored"] and "name" in node
    }
    assert {("button", "Send"), ("link", "Live"), ("textbox", "Prompt")} <= named


@pytest.mark.long
@pytest.mark.parametrize("view", ["live", "both"])
@pytest.mark.parametrize("wide", [390, 860, 1300, 1900])
def test_no_figure_of_a_card_is_cut_off(
    chromium: Browser, dry: Serving, view: str, wide: int
) -> None:
    visit(chromium, dry, view, wide=wide)
    chromium.wait("document.querySelector('#health').dataset.state === 'well'")
    cut = chromium.value(
        """[...document.querySelectorAll('.figure')].filter((figure) => {
          const [strong, unit, note] = figure.children;
          strong.textContent = '123.4 ms';
          unit.textContent = 'median';
          note.textContent = '12.3k in the last 60 s';
          const outer = figure.getBoundingClientRect();
          return [strong, unit, note].some((one) => {
            const { left, right } = one.getBoundingClientRect();
            const whole = one.scrollWidth <= Math.ceil(right - left);
            return !whole || left < outer.left - 1 || right > outer.right + 1;
          });
        }).length"""
    )
    assert cut == 0


@pytest.mark.long
@pytest.mark.parametrize("view", ["prompt", "live"])
def test_the_page_fits_a_phone(chromium: Browser, dry: Serving, view: str) -> None:
    visit(chromium, dry, view, wide=390)
    assert chromium.value("document.documentElement.scrollWidth") == 390
    too_wide = """[...document.querySelectorAll('main *, header *')].filter((one) =>
        one.getBoundingClientRect().right > 390).map((one) => one.outerHTML)"""
    assert chromium.value(too_wide) == []
    fields = "[...document.querySelectorAll('input, textarea')]"
    sizes = f"{fields}.map((one) => parseFloat(getComputedStyle(one).fontSize))"
    assert min(chromium.value(sizes)) >= 16, "phones enlarge the page around others"
