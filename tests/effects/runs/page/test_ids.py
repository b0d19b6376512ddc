"""Request ids as clients and servers make them: long, alike, and of any characters."""

from pathlib import Path

import pytest

from minfer.effects.runs.recorded import wire_name
from minfer.records.config import EngineConfig
from minfer.records.messages import Cancel, Event
from minfer.records.state import Turn
from tests.effects.browser import Browser
from tests.effects.runs.page.scenes import requested, seen, shown, spot, turns_of, words

LETTERS = "3f2a9b0c4d5e6f708192a3b4c5d6e7f8"
IDS = (
    f"cmpl-{LETTERS}",
    f"chatcmpl-{LETTERS[::-1]}{LETTERS}",
    "x" * 200,
    f"<b onclick=\"alert('&amp;')\">{LETTERS * 5}",
    "\U0001f600\U0001f469\u200d\U0001f467" * 30,
    "\u0645\u0631\u062d\u0628\u0627 " * 20,
    f"\u202e\u2067{LETTERS}\u200f",
    "chatcmpl-" + "line\n\ttab " * 12,
)


def run_of(ids: tuple[str, ...] = IDS) -> tuple[EngineConfig, list[Turn]]:
    """Requests with these ids; later ones wait for earlier ones, the first is preempted
    and the second cancelled.
    """
    config = EngineConfig(num_blocks=24, block_size=4, max_num_seqs=6, depth=1)
    events: list[Event] = [requested(name, 12, 40, 50 * n) for n, name in enumerate(ids)]
    return config, turns_of(config, {0: events, 6: [Cancel(ids[1])]})


@pytest.mark.long
@seen
@pytest.mark.parametrize("wide", [1280, 800])
def test_they_break_no_panel(chromium: Browser, tmp_path: Path, wide: int) -> None:
    config, turns = run_of()
    reasons = {wire_name(reason) for t in turns for reason in t.transition.reasons}
    assert {"Admitted", "QueueBlocked", "Preempted"} <= reasons
    shown(chromium, tmp_path, (config, turns), wide=wide)
    outside = """[...document.querySelectorAll('aside *, header *, #found, #found *')]
        .filter((one) => one.getClientRects().length)
        .filter((one) => {
          const { left, right } = one.getBoundingClientRect();
          const box = one.closest('aside')?.getBoundingClientRect();
          return right > innerWidth || (box && (left < box.left || right > box.right));
        }).map((one) => one.outerHTML)"""
    for s in range(len(IDS)):
        chromium.value(f"choose({s})")
        assert chromium.value(outside) == [], IDS[s]
    for t in range(len(turns)):
        chromium.value(f"go({t})")
        assert chromium.value(outside) == [], t
    chromium.value("find('e')")
    assert chromium.value(outside) == []
    assert chromium.value("document.documentElement.scrollWidth") <= wide
    assert chromium.complaints == []


@seen
def test_they_are_folded_in_the_middle_and_whole_to_copy_and_on_hover(
    chromium: Browser, tmp_path: Path
) -> None:
    shown(chromium, tmp_path, run_of())
    for s, name in enumerate(IDS):
        chromium.value(f"choose({s})")
        reported = chromium.value("""(() => {
            const one = document.querySelector('#story bdi');
            getSelection().selectAllChildren(one);
            const copied = getSelection().toString();
            return { title: one.title, text: one.textContent, copied,
              height: one.getBoundingClientRect().height }; })()""")
        assert (reported["title"], reported["text"]) == (name, name)
        if "\n" not in name:
            assert reported["copied"].strip() == name.strip()
        assert reported["height"] < 45, "an id takes two lines at most"
        # Elsewhere it is short, and whole on hover.
        link = chromium.value(
            f"(({{ title, innerText }}) => [title, innerText])(link({s}))"
        )
        assert link[0] == name
        assert len(link[1]) <= len("request ") + 2 * 30
    assert chromium.value("brief(1, 20)") == f"chatcmpl-8…{LETTERS[-9:]}"
    assert chromium.value("brief(0)") == IDS[0]
    # What cannot be seen, or turns the words beside it, is shown as such.
    assert chromium.value("brief(6)") == f"\ufffd\ufffd{LETTERS}\ufffd"
    assert chromium.value("brief(4, 9)").count("\ufffd") == 0


@seen
def test_the_tip_shows_the_whole_id_and_stays_in_the_window(
    chromium: Browser, tmp_path: Path
) -> None:
    shown(chromium, tmp_path, run_of())
    for s, name in enumerate(IDS):
        x, y = spot(chromium, "timeline", 0, s + 0.5)
        chromium.mouse("mouseMoved", x, y)
        if s < 3:
            assert words(chromium, "#tip").startswith(f"request {name} ")
        box = chromium.value(
            "(({ x, y, right, bottom }) => [x, y, right, bottom])"
            "($('tip').getBoundingClientRect())"
        )
        assert box[0] >= 0
        assert box[1] >= 0
        assert box[2] <= 1280
        assert box[3] <= 800
        assert chromium.value("$('tip').scrollWidth <= $('tip').clientWidth")


@seen
def test_a_label_is_as_short_as_its_bar(chromium: Browser, tmp_path: Path) -> None:
    """The beginnings of ids are alike: a label keeps the end."""
    shown(chromium, tmp_path, run_of())
    drawn = """(() => {
        const found = [];
        const fillText = CanvasRenderingContext2D.prototype.fillText;
        CanvasRenderingContext2D.prototype.fillText = function (words, x, y) {
          found.push({ words, left: x, right: x + this.measureText(words).width });
          fillText.call(this, words, x, y);
        };
        drawTimeline();
        CanvasRenderingContext2D.prototype.fillText = fillText;
        return found.filter(({ left }) => left >= GUTTER); })()"""
    labels = [label["words"] for label in chromium.value(drawn)]
    assert any("…" in label and label.endswith(LETTERS[-6:]) for label in labels)
    assert all(len(label) <= 2 * 18 for label in labels)
    chromium.value("look(0, edge[turns] * 0.2)")
    assert all(label["right"] < 1280 for label in chromium.value(drawn))
