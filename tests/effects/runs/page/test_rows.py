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
def many(chromium: Browser, tmp_path: Path) -> Iterator[Browser]:
    yield shown(chromium, tmp_path, crowd())
    assert chromium.complaints == []


def settle(chromium: Browser) -> None:
    """Wait until what has changed is drawn."""
    chromium.value(
        "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
    )


@seen
def test_rows_can_be_read_and_scroll(many: Browser) -> None:
    height = many.value("$('timeline').clientHeight")
    assert many.value("[lanes.length, rows]") == [ROWS, ROWS]
    assert many.value("view.row") >= 9
    shown_rows = ceil(height / many.value("view.row"))
    assert words(many, "#rows-shown") == f"1\u2013{shown_rows} of 400 rows"
    scroller = many.value("[$('scroller').hidden, $('scroller').scrollHeight]")
    assert scroller == [False, round(ROWS * many.value("view.row"))]
    # The bar scrolls the rows, keys and the wheel over their numbers too.
    many.value("$('scroller').scrollTop = 1000")
    many.wait("Math.abs(view.top - 1000) <= 1")
    many.key("PageDown")
    settle(many)
    assert abs(many.value("view.top") - 1000 - height) <= 1
    assert abs(many.value("$('scroller').scrollTop - view.top")) <= 1
    before = many.value("view.top")
    x, y = many.value(
        "(({ x, y }) => [x + 20, y + 20])($('timeline').getBoundingClientRect())"
    )
    many.mouse("mouseWheel", x, y, deltaX=0, deltaY=-90)
    many.wait(f"view.top < {before}")
    many.value("scrollRows(1e9)")
    settle(many)
    assert abs(many.value("view.top + $('timeline').clientHeight - rows * view.row")) <= 1
    assert words(many, "#rows-shown").endswith("\u2013400 of 400 rows")


@seen
@pytest.mark.parametrize("top", [0, 1234, 1e9])
def test_the_pointer_finds_the_right_row(many: Browser, top: float) -> None:
    many.value(f"scrollRows({top})")
    settle(many)
    box = many.value(
        "(({ y, height }) => [y, height])($('timeline').getBoundingClientRect())"
    )
    for down in (3, box[1] / 2, box[1] - 3):
        x, _ = spot(many, "timeline", 4, 0)
        many.mouse("mouseMoved", x, box[0] + down)
        row = int((down + many.value("view.top")) // many.value("view.row"))
        assert words(many, "#tip").startswith(f"request cmpl-{row:032x} ")
        many.click(x, box[0] + down)
        assert many.value("chosen") == row


@seen
def test_all_rows_can_be_seen_at_once(many: Browser) -> None:
    many.value("document.getElementById('all-rows').click()")
    settle(many)
    height = many.value("$('timeline').clientHeight")
    assert abs(many.value("rows * view.row") - height) < 1
    assert words(many, "#rows-shown") == "400 rows"
    assert many.value("[$('scroller').hidden, $('all-rows').ariaPressed]") == [
        True,
        "true",
    ]
    # Who is under the pointer is found among rows of less than a pixel too.
    x, _ = spot(many, "timeline", 4, 0)
    top = many.value("$('timeline').getBoundingClientRect().y")
    many.mouse("mouseMoved", x, top + 100)
    row = int(100 // many.value("view.row"))
    assert words(many, "#tip").startswith(f"request cmpl-{row:032x} ")
    many.value("document.getElementById('all-rows').click()")
    settle(many)
    assert many.value("view.row") >= 9


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
def test_labels_thin_out(many: Browser) -> None:
    heights = many.value("[$('timeline').clientHeight / rows, 5, 7, 9, 15, 22]")
    for height in heights:
        many.value(f"view.tall *= {height} / view.row; refresh()")
        settle(many)
        assert abs(many.value("view.row") - height) < 0.01
        emitted = many.value(DRAWN)
        names = [one["y"] for one in emitted if one["x"] >= 56]
        numbers = [one for one in emitted if one["x"] < 56]
        assert (names == []) == (height < 5)
        for places, least in ((names, 9), ([one["y"] for one in numbers], 20)):
            gaps = [after - y for y, after in pairwise(places)]
            assert all(gap >= least for gap in gaps), height
        assert len(numbers) >= 4
        for one in numbers:  # a number stands in the middle of its row
            row = (one["y"] - 4 + many.value("view.top")) / height + 0.5
            assert abs(row - int(one["words"])) < 0.01


@seen
def test_a_chosen_row_is_scrolled_to(many: Browser) -> None:
    many.value(f"find('{333:032x}')")
    many.value("$('found').querySelector('button').click()")
    settle(many)
    y = many.value("lives[333].lane * view.row - view.top")
    assert 0 <= y < many.value("$('timeline').clientHeight")


@seen
def test_few_rows_need_no_scrolling(chromium: Browser, tmp_path: Path) -> None:
    shown(chromium, tmp_path, scene())
    assert chromium.value("[view.row, $('scroller').hidden, $('all-rows').hidden]") == [
        22,
        True,
        True,
    ]
    assert words(chromium, "#rows-shown") == "4 rows"
