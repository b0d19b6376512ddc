"""Time in which no request ran or waited is cut short, and the page says so."""

from pathlib import Path
from typing import Any

from minfer.records.config import EngineConfig
from minfer.records.state import Turn
from minfer.values.record import evolve
from tests.effects.browser import Browser
from tests.effects.runs.page.scenes import requested, scene, seen, shown, turns_of, words

MINUTE = 60.0


def paused(
    pauses: dict[int, float], busy: bool = False
) -> tuple[EngineConfig, list[Turn]]:
    """Three bursts of requests without requests for some turns before the second and the
    third; `pauses` makes turns begin later by so many seconds. With `busy`, one request
    runs all the time.
    """
    config = EngineConfig(num_blocks=64, block_size=4, depth=1)
    inbox: dict[int, list[Any]] = {
        n: [requested(f"r{n}-{i}", 8, 20, n + i) for i in range(3)] for n in (0, 40, 80)
    }
    if busy:
        inbox[0].append(requested("long", 8, 150, 999))
    late = 0.0
    shifted: list[Turn] = []
    for turn in turns_of(config, inbox):
        late += pauses.get(turn.number, 0.0)
        state = turn.transition.state
        moved = evolve(state, time=state.time + late)
        shifted.append(evolve(turn, transition=evolve(turn.transition, state=moved)))
    return config, shifted


PAUSES = {40: 3 * MINUTE + 20, 80: 62 * MINUTE}


@seen
def test_pauses_are_cut_to_marked_breaks(chromium: Browser, tmp_path: Path) -> None:
    shown(chromium, tmp_path, paused(PAUSES))
    pauses = chromium.value("pauses")
    assert [(pause["until"], round(pause["length"])) for pause in pauses] == [
        (40, 200),
        (80, 3720),
    ]
    # On the axis each is a small share of the time in which something ran.
    ends = chromium.value("pauses.map(({ from, until }) => [px(from), px(until)])")
    wide = chromium.value("wide")
    assert all(5 < right - left < 0.04 * wide for left, right in ends)
    # A second is as wide everywhere else.
    assert chromium.value("""Array.from({ length: turns - 1 }, (_, t) => t)
        .filter((t) => !pauses.some(({ from, until }) => from <= t && t < until))
        .every((t) => Math.abs(edge[t + 1] - edge[t] - (seconds[t + 1] - seconds[t]))
          < 1e-6)""")
    # Every panel is hatched there, from top to bottom.
    for panel in ("overview", "ruler", "timeline", "pool", "batch"):
        for left, _ in ends:
            line = f"""(() => {{ const one = $('{panel}');
                const {{ data }} = one.getContext('2d')
                  .getImageData({left} + 0.5, 0, 1, one.height);
                return data.filter((_, n) => n % 4 === 3).every((alpha) => alpha > 0);
                }})()"""
            assert chromium.value(line), panel
    assert "65 min 20 s of it idle" in words(chromium, "header")


def drawn_words(chromium: Browser) -> list[tuple[float, str]]:
    """What the ruler says, and where, from left to right."""
    drawn = chromium.value("""(() => {
        const found = [];
        const fillText = CanvasRenderingContext2D.prototype.fillText;
        CanvasRenderingContext2D.prototype.fillText = function (words, x, y) {
          found.push([x, words]);
          fillText.call(this, words, x, y);
        };
        drawRuler();
        CanvasRenderingContext2D.prototype.fillText = fillText;
        return found; })()""")
    return sorted((x, text) for x, text in drawn if text not in ("time", "turn"))


@seen
def test_the_ruler_shows_the_time_on_both_sides_and_what_is_left_out(
    chromium: Browser, tmp_path: Path
) -> None:
    shown(chromium, tmp_path, paused(PAUSES))
    drawn = [text for _, text in drawn_words(chromium)]
    assert "3 min cut" in drawn
    assert "62 min cut" in drawn
    assert drawn.index("3 min cut") < drawn.index("62 min cut")
    # Marks stand where the clock says what they say.
    chromium.value("look(edge[10], edge[52])")
    marks = chromium.value("""stretches().map(({ from, to }) =>
        [from, to, secondsAt(from), secondsAt(to)])""")
    assert len(marks) == 2
    for begin, end, first, last in marks:
        assert abs((end - begin) - (last - first)) < 1e-6
    assert marks[1][2] - marks[0][3] > 199
    after = [text for _, text in drawn_words(chromium) if text.startswith("3:2")]
    assert after, "after the pause the clock has gone on"
    chromium.value("go(40)")
    assert "at 3 min 20 s" in words(chromium, "#turn")


@seen
def test_all_time_can_be_shown_as_it_went(chromium: Browser, tmp_path: Path) -> None:
    run = paused(PAUSES)
    shown(chromium, tmp_path, run)
    button = "document.getElementById('cut-pauses')"
    assert chromium.value(f"[{button}.hidden, {button}.ariaPressed]") == [False, "true"]
    assert "2 pauses, 65 min 20 s in all" in chromium.value(f"{button}.title")
    chromium.value(f"{button}.click()")
    assert chromium.value(f"{button}.ariaPressed") == "false"
    assert chromium.value("edge === seconds")
    assert all("cut" not in text for _, text in drawn_words(chromium))
    chromium.value("go(3)")
    chromium.wait("location.hash.includes('axis=clock')")
    shown(chromium, tmp_path, run, chromium.value("location.hash.slice(1)"))
    assert chromium.value("edge === seconds")
    chromium.value(f"{button}.click()")
    assert chromium.value("edge !== seconds && cutPauses()")
    chromium.value("axis('turn')")
    assert chromium.value(f"{button}.hidden")
    assert chromium.value("edge[7]") == 7


@seen
def test_the_pointer_says_how_long_a_pause_is(chromium: Browser, tmp_path: Path) -> None:
    shown(chromium, tmp_path, paused(PAUSES))
    x, y, row = chromium.value("""(() => {
        const box = $('timeline').getBoundingClientRect();
        const { from, until } = pauses[0];
        return [box.x + (px(from) + px(until)) / 2, box.y, view.row]; })()""")
    for lane in range(9):  # in those of the sequences that ended as it began too
        chromium.mouse("mouseMoved", x, y + (lane + 0.5) * row)
        drawn = words(chromium, "#tip")
        assert drawn == "no request runs or waits for 3 min 20 s: cut short here"
        chromium.click(x, y + (lane + 0.5) * row)
        assert chromium.value("chosen") == -1


@seen
def test_a_time_in_which_a_sample_runs_is_never_cut(
    chromium: Browser, tmp_path: Path
) -> None:
    shown(chromium, tmp_path, paused(PAUSES, busy=True))
    assert chromium.value("pauses.length") == 0
    assert chromium.value("document.getElementById('cut-pauses').hidden")
    assert chromium.value("edge.every((value, t) => value === seconds[t])")
    assert "idle" not in words(chromium, "header")
    # Nor are moments without requests.
    shown(chromium, tmp_path, scene())
    assert chromium.value("pauses.length") == 0
    shown(chromium, tmp_path, paused({40: 0.5}))
    assert chromium.value("pauses.length") == 0


@seen
def test_no_panel_moves_as_one_goes_on(chromium: Browser, tmp_path: Path) -> None:
    """The words about a turn are longer after a pause, beside one more button."""
    _, turns = run = paused(PAUSES)
    shown(chromium, tmp_path, run)
    places = set()
    for t in range(len(turns)):
        chromium.value(f"go({t})")
        places.add(chromium.value("$('overview').getBoundingClientRect().y"))
    assert len(places) == 1


@seen
def test_many_pauses_leave_room_for_what_ran(chromium: Browser, tmp_path: Path) -> None:
    config = EngineConfig(num_blocks=64, block_size=4, depth=1)
    inbox: dict[int, list[Any]] = {
        6 * n: [requested(f"r{n}", 4, 3, n)] for n in range(60)
    }
    late = 0.0
    turns: list[Turn] = []
    for turn in turns_of(config, inbox):
        late += MINUTE * (turn.number % 6 == 0)
        state = turn.transition.state
        moved = evolve(state, time=state.time + late)
        turns.append(evolve(turn, transition=evolve(turn.transition, state=moved)))
    shown(chromium, tmp_path, (config, turns))
    assert chromium.value("pauses.length") == 59
    share = """pauses.reduce((sum, { from, until }) => sum + edge[until] - edge[from], 0)
        / edge[turns]"""
    assert chromium.value(share) < 0.25
    assert chromium.complaints == []
