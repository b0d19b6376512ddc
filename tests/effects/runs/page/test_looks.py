"""The page fits a laptop, in both schemes."""

from pathlib import Path

import pytest

from tests.effects.browser import Browser
from tests.effects.runs.page.scenes import scene, seen, shown


@seen
def test_the_page_fits_a_laptop_and_asks_for_nothing(
    chromium: Browser, tmp_path: Path
) -> None:
    for wide, tall in ((1280, 800), (1600, 1000)):
        shown(chromium, tmp_path, scene(), wide=wide, tall=tall)
        root = "document.documentElement"
        assert chromium.value(
            f"[{root}.scrollWidth <= {wide}, {root}.scrollHeight <= {tall}]"
        ) == [True, True]
        too_wide = f"""[...document.querySelectorAll('section *, aside *, nav *')].filter(
            (one) =>
            one.getBoundingClientRect().right > {wide}).map((one) => one.outerHTML)"""
        assert chromium.value(too_wide) == []
    assert chromium.complaints == []
    assert [url.partition(":")[0] for url in chromium.requested] == ["file"]
    # Nothing could be fetched either: the page's policy forbids it.
    assert (
        chromium.value("fetch('data:,x').then(() => 'fetched', () => 'refused')")
        == "refused"
    )


@seen
@pytest.mark.long
def test_the_page_fits_a_phone(chromium: Browser, tmp_path: Path) -> None:
    """Which shows a page as wide as a laptop's, and unreadably small, unless the page
    says that it fits.
    """
    shown(chromium, tmp_path, scene())
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    chromium.call("Emulation.setDeviceMetricsOverride", **phone)
    try:
        chromium.wait("innerWidth === 390")
        assert chromium.value("document.documentElement.scrollWidth") == 390
        too_wide = """[...document.querySelectorAll('section *, aside *, nav *')].filter(
            (one) => one.getBoundingClientRect().right > 390).map((one) => one.outerHTML)
        """
        assert chromium.value(too_wide) == []
        body = "parseFloat(getComputedStyle(document.body).fontSize)"
        assert chromium.value(body) >= 15
    finally:
        chromium.call("Emulation.clearDeviceMetricsOverride")


def contrast(first: str, second: str) -> float:
    """WCAG's contrast ratio of two colors."""

    def light(color: str) -> float:
        channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((light(first), light(second)))
    return (high + 0.05) / (low + 0.05)


@seen
@pytest.mark.parametrize("dark", [False, True])
def test_both_schemes_can_be_read(chromium: Browser, tmp_path: Path, dark: bool) -> None:
    chromium.dark(dark)
    try:
        shown(chromium, tmp_path, scene())
        color = chromium.value("color")
        accent = chromium.value(
            "getComputedStyle(root).getPropertyValue('--accent').trim()"
        )
        assert (contrast(color["panel"], "#ffffff") > 10) == dark
        for name in ("ink", "soft"):
            assert contrast(color[name], color["panel"]) > 4.5, name
        assert contrast(accent, color["panel"]) > 4.5
        marks = ("waiting", "fill", "hit", "decode", "again", "end", "cancelled", "wrong")
        for name in (*marks, "private"):
            assert contrast(color[name], color["panel"]) > 2.9, name
        assert contrast(color["shareable"], color["private"]) > 2
    finally:
        chromium.dark(False)
