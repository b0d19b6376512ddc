"""Drafts, as the page shows them: in words, and as marks where there is room."""

from pathlib import Path

from minfer.records.state import Turn
from tests.core.analysis.test_drafts import of
from tests.core.simulation.clocked import Run
from tests.core.simulation.drafted import by_device, by_host
from tests.effects.browser import Browser
from tests.effects.runs.page.scenes import PIXEL, scene, seen, shown, spot, words


def some_turn(run: Run, min_accepted: int = 1) -> Turn:
    """The first in which of the drafts of "a" some were accepted, and some rejected."""
    return next(
        turn
        for turn in run.turns
        for draft in of(turn)
        if draft.id == "a" and min_accepted <= draft.accepted < draft.proposed
    )


@seen
def test_they_are_reported_in_words(chromium: Browser, tmp_path: Path) -> None:
    run = by_host()
    shown(chromium, tmp_path, (run.config, run.turns), "axis=turn")
    turn = some_turn(run)
    reported = of(turn)
    proposed, accepted = (
        sum(o.proposed for o in reported),
        sum(o.accepted for o in reported),
    )
    chromium.value(f"go({turn.number})")
    drawn = words(chromium, "#turn")
    assert f"new tokens, {accepted} of {proposed} drafts accepted" in drawn
    chromium.value(f"go({turn.number - 1})")
    drawn = words(chromium, "#turn")
    assert f"3 sequences write a token, {proposed} drafts are verified" in drawn
    assert f"{3 + proposed} of at most 32 tokens" in drawn
    first_result = next(result for result in reported if result.id == "a")
    chromium.mouse("mouseMoved", *spot(chromium, "timeline", turn.number - 1, 0.5))
    counts = f"{first_result.accepted} of {first_result.proposed}"
    tip = f"writes \u00b7 {counts} drafts accepted \u00b7 turn"
    assert tip in words(chromium, "#tip")
    results = [result for turn in run.turns for result in of(turn) if result.id == "a"]
    chromium.value("choose(0)")
    steps = f"{sum(result.accepted for result in results)} of "
    steps += f"{sum(result.proposed for result in results)} drafts accepted, "
    steps += f"in {len(results)} steps"
    assert steps in words(chromium, "#story")
    chromium.value("choose(2)")
    assert "drafts accepted" not in words(chromium, "#story"), "it had no drafts"
    assert "of drafts accepted" in words(chromium, "#facts")
    assert "drafts accepted" in words(chromium, "main")


@seen
def test_each_has_a_mark_where_there_is_room(chromium: Browser, tmp_path: Path) -> None:
    run = by_device()
    shown(chromium, tmp_path, (run.config, run.turns), "axis=turn")
    colors = chromium.value("color")
    turn = some_turn(run)
    first_result = next(result for result in of(turn) if result.id == "a")
    marks = [
        chromium.value(
            f"({PIXEL})('timeline', px({turn.number - 1}) + 2 + 3 * {place}, "
            "view.row - view.top - 4)"
        )
        for place in range(first_result.proposed)
    ]
    accepted = [colors["end"]] * first_result.accepted
    assert marks == accepted + [colors["draft"]] * (
        first_result.proposed - first_result.accepted
    )
    # Where there is no room for all of a turn's, there are none.
    run = by_device(tokens=110)
    shown(chromium, tmp_path, (run.config, run.turns), "axis=turn", wide=320)
    assert chromium.value("px(1) - px(0)") < 3 * 3
    row = f"""Array.from({{length: wide}}, (_, x) =>
        ({PIXEL})('timeline', GUTTER + x, view.row - view.top - 4))"""
    assert colors["draft"] not in chromium.value(row)


@seen
def test_a_run_without_drafts_says_nothing_of_them(
    chromium: Browser, tmp_path: Path
) -> None:
    shown(chromium, tmp_path, scene())
    assert "draft" not in words(chromium, "body")
