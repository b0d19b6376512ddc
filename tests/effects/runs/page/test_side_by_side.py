"""Two runs side by side: both pages draw, in frames of one file."""

from pathlib import Path

from minfer.effects.runs.page.make import page
from minfer.effects.runs.page.side_by_side import side_by_side
from tests.core.recorded import recorded
from tests.effects.browser import Browser
from tests.effects.runs.page.scenes import seen

FRAMES = "[...document.querySelectorAll('iframe')].map((f) => f.contentDocument)"


@seen
def test_both_runs_are_drawn(chromium: Browser, tmp_path: Path) -> None:
    pages = []
    for number in (1, 2):
        config, turns = recorded(number)
        pages.append((f'<b>"run" & {number}', page(f"run {number}", config, turns)))
    path = tmp_path / "both.html"
    path.write_bytes(side_by_side(pages))
    chromium.complaints.clear()
    chromium.call("Page.navigate", url=path.as_uri())
    chromium.wait("document.querySelectorAll('iframe').length === 2")
    chromium.wait(
        f"{FRAMES}.every((d) => d && 'drawn' in (d.documentElement?.dataset ?? {{}}))"
    )
    names = chromium.value(f"{FRAMES}.map((d) => d.body.textContent.includes('run '))")
    assert names == [True, True]
    assert chromium.value("document.title") == '<b>"run" & 1 | <b>"run" & 2'
    assert chromium.value("document.querySelectorAll('b').length") == 0
    assert chromium.complaints == []
