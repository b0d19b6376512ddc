"""Many sequences: rows stay tall enough to be read, and scroll."""

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from math import ceil
from pathlib import Path

import pytest

from minfer.records.config import EngineConfig
from minfer.records.messages import Event
from minfer.records.state import Turn
from tests.effects.browser import Browser
from tests.effects.runs.page.scenes import (
    requested,
    scene,
    seen,
    shown,
    spot,
    turns_of,
    words,
)

ROWS = 400


@cache
def crowd() -> tuple[EngineConfig, list[Turn]]:
    """Four hundred requests that all run at once."""
    config = EngineConfig(
        num_blocks=8000, block_size=4, max_num_seqs=ROWS, max_num_batched_tokens=8192
    )
    names = (f"cmpl-{n:032x}" for n in range(ROWS))
    events: list[Event] = [requested(name, 8, 40, n) for n, name in enumerate(names)]
    return config, turns_of(config, {0: events})


@pytest.fixture
def crowded(chromium: Browser, tmp_path: Path) -> Iterator[Browser]:
    yield shown(chromium, tmp_path, crowd())
    assert chromium.complaints == []


def settle(chromium: Browser) -> None:
    """Wait until what has changed is drawn."""
    chromium.value(
        "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
    )


@seen
def test_rows_can_be_read_and_scroll(crowded: Browser) -> None:
    height = crowded.value("$('timeline').clientHeight")
    assert crowded.value("[lanes.length, rows]") == [ROWS, ROWS]
    assert crowded.value("view.row") >= 9
    shown_rows = ceil(height / crowded.value("view.row"))
    assert words(crowded, "#rows-shown") == f"1\u2013{shown_rows} of 400 rows"
    scroller = crowded.value("[$('scroller').hidden, $('scroller').scrollHeight]")
    assert scroller == [False, round(ROWS * crowded.value("view.row"))]
    # The bar scrolls the rows, keys and the wheel over their numbers too.
    crowded.value("$('scroller').scrollTop = 1000")
    crowded.wait("Math.abs(view.top - 1000) <= 1")
    crowded.key("PageDown")
    settle(crowded)
    assert abs(crowded.value("view.top") - 1000 - height) <= 1
    assert abs(crowded.value("$('scroller').scrollTop - view.top")) <= 1
    before = crowded.value("view.top")
    x, y = crowded.value(
        "(({ x, y }) => [x + 20, y + 20])($('timeline').getBoundingClientRect())"
    )
    crowded.mouse("mouseWheel", x, y, deltaX=0, deltaY=-90)
    crowded.wait(f"view.top < {before}")
    crowded.value("scrollRows(1e9)")
    settle(crowded)
    assert (
        abs(crowded.value("view.top + $('timeline').clientHeight - rows * view.row")) <= 1
    )
    assert words(crowded, "#rows-shown").endswith("\u2013400 of 400 rows")


@seen
@pytest.mark.parametrize("top", [0, 1234, 1e9])
def test_the_pointer_finds_the_right_row(crowded: Browser, top: float) -> None:
    crowded.value(f"scrollRows({top})")
    settle(crowded)
    box = crowded.value(
        "(({ y, height }) => [y, height])($('timeline').getBoundingClientRect())"
    )
    for down in (3, box[1] / 2, box[1] - 3):
        x, _ = spot(crowded, "timeline", 4, 0)
        crowded.mouse("mouseMoved", x, box[0] + down)
        row = int((down + crowded.value("view.top")) // crowded.value("view.row"))
        assert words(crowded, "#tip").startswith(f"request cmpl-{row:032x} ")
        crowded.click(x, box[0] + down)
        assert crowded.value("chosen") == row


@seen
def test_all_rows_can_be_seen_at_once(crowded: Browser) -> None:
    crowded.value("document.getElementById('all-rows').click()")
    settle(crowded)
    height = crowded.value("$('timeline').clientHeight")
    assert abs(crowded.value("rows * view.row") - height) < 1
    assert words(crowded, "#rows-shown") == "400 rows"
    assert crowded.value("[$('scroller').hidden, $('all-rows').ariaPressed]") == [
        True,
        "true",
    ]
    # Who is under the pointer is found among rows of less than a pixel too.
    x, _ = spot(crowded, "timeline", 4, 0)
    top = crowded.value("$('timeline').getBoundingClientRect().y")
    crowded.mouse("mouseMoved", x, top + 100)
    row = int(100 // crowded.value("view.row"))
    assert words(crowded, "#tip").startswith(f"request cmpl-{row:032x} ")
    crowded.value("document.getElementById('all-rows').click()")
    settle(crowded)
    assert crowded.value("view.row") >= 9


DRAWN = """(() => {
    const found = [];
    const fillText = CanvasRenderingContext2D.prototype.fillText;
    CanvasRenderingContext2D.prototype.fillText = function (words, x, y) {
      found.push({ words, x, y });
      fillText.call(this, words, x, y);
    };
    drawTimeline();
    CanvasRenderingContext2D.prototype.fillText = fillText;
    return found; })()"""


@seen
def test_labels_thin_out(crowded: Browser) -> None:
    heights = crowded.value("[$('timeline').clientHeight / rows, 5, 7, 9, 15, 22]")
    for height in heights:
        crowded.value(f"view.tall *= {height} / view.row; refresh()")
        settle(crowded)
        assert abs(crowded.value("view.row") - height) < 0.01
        labels = crowded.value(DRAWN)
        names = [label["y"] for label in labels if label["x"] >= 56]
        numbers = [label for label in labels if label["x"] < 56]
        assert (names == []) == (height < 5)
        for places, min_gap in ((names, 9), ([label["y"] for label in numbers], 20)):
            gaps = [after - y for y, after in pairwise(places)]
            assert all(gap >= min_gap for gap in gaps), height
        assert len(numbers) >= 4
        for label in numbers:  # a number stands in the middle of its row
            row = (label["y"] - 4 + crowded.value("view.top")) / height + 0.5
            assert abs(row - int(label["words"])) < 0.01


@seen
def test_a_chosen_row_is_scrolled_to(crowded: Browser) -> None:
    crowded.value(f"find('{333:032x}')")
    crowded.value("$('found').querySelector('button').click()")
    settle(crowded)
    y = crowded.value("lives[333].lane * view.row - view.top")
    assert 0 <= y < crowded.value("$('timeline').clientHeight")


@seen
def test_few_rows_need_no_scrolling(chromium: Browser, tmp_path: Path) -> None:
    shown(chromium, tmp_path, scene())
    assert chromium.value("[view.row, $('scroller').hidden, $('all-rows').hidden]") == [
        22,
        True,
        True,
    ]
    assert words(chromium, "#rows-shown") == "4 rows"
