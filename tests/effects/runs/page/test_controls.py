"""What a person does to the page: keys, search, address."""

from pathlib import Path

from tests.effects.browser import Browser
from tests.effects.runs.page.scenes import scene, seen, shown, words


@seen
def test_keys_move_through_turns(chromium: Browser, tmp_path: Path) -> None:
    config, turns = scene()
    shown(chromium, tmp_path, (config, turns), "turn=3")
    now = "document.getElementById('now').textContent"
    assert chromium.value(now) == "Turn 3 \u00b7 30 ms"
    chromium.key("ArrowRight")
    assert chromium.value(now) == "Turn 4 \u00b7 40 ms"
    chromium.key("ArrowLeft")
    chromium.key("ArrowLeft")
    assert chromium.value("cursor") == 2
    decided = [
        t for t, turn in enumerate(turns) if turn.transition.reasons or t in (10, 12)
    ]
    chromium.key("Home")
    for t in decided[1:4]:
        chromium.key("ArrowRight", shift=True)
        assert chromium.value("cursor") == t
    chromium.key("ArrowLeft", shift=True)
    assert chromium.value("cursor") == decided[2]
    chromium.key("End")
    assert chromium.value("[cursor, $('ruler').getAttribute('aria-valuenow')]") == [
        len(turns) - 1,
        str(len(turns) - 1),
    ]
    chromium.key("ArrowRight")
    assert chromium.value("cursor") == len(turns) - 1
    chromium.key("Home")
    chromium.value("look(0, edge[8])")
    chromium.key(" ")
    assert chromium.value("$('play').getAttribute('aria-pressed')") == "true"
    chromium.wait("cursor > 0")
    chromium.key(" ")
    stopped = chromium.value("cursor")
    chromium.value("new Promise((done) => setTimeout(done, 300))")
    assert chromium.value("cursor") == stopped
    chromium.wait(f"location.hash.includes('turn={stopped}')")
    assert chromium.complaints == []


@seen
def test_requests_are_found_by_id(chromium: Browser, tmp_path: Path) -> None:
    shown(chromium, tmp_path, scene())
    chromium.key("/")
    chromium.write("UR")
    assert words(chromium, "#found") == "request urgent"
    chromium.call("Input.dispatchKeyEvent", type="keyDown", key="Enter")
    assert words(chromium, "#story").startswith("Request urgent")
    assert chromium.value("[cursor, $('found').children.length]") == [6, 0]
    chromium.value("$('query').select()")
    chromium.write("unknown")
    assert words(chromium, "#found") == "no request has this in its id"


@seen
def test_the_address_says_what_is_shown(chromium: Browser, tmp_path: Path) -> None:
    shown(chromium, tmp_path, scene(), "turn=9&request=gone&axis=turn&from=4&to=14")
    facts = "[cursor, text(sample.id[chosen]), edge === edges.turn, view.from, view.to]"
    expected = [9, "gone", True, 4, 14]
    assert chromium.value(facts) == expected
    chromium.key("ArrowRight")
    chromium.wait("location.hash.includes('turn=10')")
    state = chromium.value("location.hash.slice(1)")
    shown(chromium, tmp_path, scene(), state)
    assert chromium.value(facts) == [10, *expected[1:]]
    chromium.value("location.hash = '#turn=2'")
    chromium.wait("cursor === 2 && chosen === -1")
    for nonsense in (
        "turn=NaN&from=x&to=-1",
        "turn=1e99&axis=constructor",
        "request=&sample=9",
        "%",
    ):
        shown(chromium, tmp_path, scene(), nonsense)
        assert chromium.value("0 <= cursor && cursor < turns && view.from < view.to")
        assert chromium.complaints == []


@seen
def test_a_run_of_one_turn_is_a_page_too(chromium: Browser, tmp_path: Path) -> None:
    config, turns = scene()
    shown(chromium, tmp_path, (config, turns[:1]))
    assert "request first arrives" in words(chromium)
    for key in ("ArrowRight", "ArrowLeft", "End", "+", "-", "0", " "):
        chromium.key(key)
    chromium.value("choose(0, true)")
    assert chromium.value("[cursor, view.from < view.to]") == [0, True]
    assert "Not ended after 0 s" in words(chromium, "#story")
    assert chromium.complaints == []
