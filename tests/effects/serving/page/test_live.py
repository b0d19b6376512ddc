"""The live view moves while it is visible, and shows what the engine does."""

import json
import time
from typing import Any

import pytest
from attrs import evolve

from minfer.effects.live.client import ReplicaState
from tests.effects.browser import Browser
from tests.effects.served import Serving, serving
from tests.effects.serving.page.visits import DRY, go, press, seen, text, visit, write

pytestmark = seen


@pytest.mark.long
def test_the_view_moves_and_listens_only_while_it_is_seen(
    chromium: Browser, dry: Serving
) -> None:
    visit(chromium, dry)
    live = dry.service.live
    assert live.viewers == 0
    press(chromium, "[data-view=live]")
    chromium.wait("document.querySelector('#health').dataset.state === 'well'")
    assert live.viewers == 1
    for _ in range(3):
        dry.post("completions", prompt="x" * 400, max_tokens=50, ignore_eos=True)
    chromium.wait("!/^0/.test(document.querySelector('.card strong').textContent)")
    chromium.wait("document.querySelector('.card .line').getAttribute('d').length > 20")
    cards = dict(zip(text(chromium, ".card h2"), text(chromium, ".card"), strict=True))
    assert "of at most 256" in cards["Sequences"]
    assert "of 400 blocks" in cards["KV cache"]
    assert "median" in cards["Time between tokens"]
    assert "No sequence waits." in cards["Waiting queue"]
    assert "preemptions0" in cards["Since the start"]
    labels = "[...document.querySelectorAll('.card svg')].map((one) => one.ariaLabel)"
    assert all(chromium.value(labels))
    press(chromium, "[data-view=prompt]")
    dry.until(lambda: live.viewers == 0)
    assert chromium.complaints == []


@pytest.mark.long
def test_an_unhealthy_server_is_shown(chromium: Browser, dry: Serving) -> None:
    visit(chromium, dry, "live")
    chromium.wait("document.querySelector('#health').dataset.state === 'well'")
    dry.service.live._health_error = lambda: "requests wait, and no step for 61 s"
    try:
        chromium.wait("document.querySelector('#health').dataset.state === 'ill'")
        assert text(chromium, "#health span") == ["requests wait, and no step for 61 s"]
    finally:
        dry.service.live._health_error = dry.service.health.health_error


@pytest.mark.long
def test_replicas_are_shown_with_their_machines(
    chromium: Browser, dry: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = "[...document.querySelectorAll('.card')]"
    last = f"{cards}.at(-1)"
    visit(chromium, dry, "live")
    chromium.wait(f"{last}?.hidden")
    ready_replica = ReplicaState(
        name="0", machine="a", unready="", running=2, waiting=1, blocks=8, blocks_free=6
    )
    loading_replica = evolve(
        ready_replica, name="1", machine="", role="prefill", unready="loading"
    )
    live, figures = dry.service.live, dry.service.live.figures
    monkeypatch.setattr(
        live,
        "figures",
        lambda: evolve(figures(), replicas=(ready_replica, loading_replica)),
    )
    chromium.wait(f"!{last}.hidden")
    assert text(chromium, ".card:last-child li") == [
        "0 on a: 2 running, 1 waiting, KV 25%",
        "1, prefill: loading",
    ]
    assert chromium.complaints == []


@pytest.mark.long
def test_both_are_seen_side_by_side(chromium: Browser, dry: Serving) -> None:
    visit(chromium, dry, "both")
    chromium.wait("document.querySelector('#health').dataset.state === 'well'")
    wide = "['prompt', 'live'].map((id) => document.getElementById(id).clientWidth > 400)"
    assert chromium.value(wide) == [True, True]
    write(chromium, "Hello?")
    chromium.wait("document.querySelector('#answer').textContent")
    assert chromium.complaints == []
    visit(chromium, dry, "both", wide=390)
    assert chromium.value("document.body.dataset.view") == "live"


def frame(time: float, tokens: int, itl: tuple[int, ...] = (0, 0, 0)) -> dict[str, Any]:
    return {
        "time": time,
        "counts": {"generation_tokens": tokens},
        "itl": {"bounds": [0.1, 0.2], "counts": itl},
    }


def history_result(
    chromium: Browser, frames: list[dict[str, Any]], expression: str
) -> Any:
    """An expression's value, of the history of some frames."""
    return chromium.value(
        f"import('/page/script/history.js?{time.monotonic()}').then((history) => "
        f"{{ for (const one of {json.dumps(frames)}) history.keep(one);"
        f"return {expression}; }})"
    )


@pytest.mark.long
def test_a_histogram_has_ticks_between_its_bars(chromium: Browser, dry: Serving) -> None:
    go(chromium, dry.url)
    bounds = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2]
    counts = [0, 0, 3, 9, 1, 0, 0, 0, 0]
    found = {"bounds": bounds, "counts": counts, "many": 13}
    ticks, most = chromium.value(
        "import('/page/script/bars.js').then(({ bars }) => {"
        f"const drawn = bars('decode'); drawn.draw({json.dumps(found)}, 'times');"
        "return [[...drawn.element.querySelectorAll('.ticks span')].map((one) =>"
        "[one.textContent, parseFloat(one.style.left)]),"
        "drawn.element.querySelector('.top').textContent]; })"
    )
    assert most == "9"
    assert [words for words, _ in ticks] == ["0", "2 ms", "10 ms", "50 ms"]
    places = [place for _, place in ticks]
    apart = 100 * 2 / 7  # percent of seven bars
    assert all(abs(place - apart * i) < 0.01 for i, place in enumerate(places))


SPREAD = "history.spread('itl')"


@pytest.mark.long
def test_rates_and_percentiles_are_differences(chromium: Browser, dry: Serving) -> None:
    go(chromium, dry.url)
    frames = [frame(10 + i / 2, 5 * i) for i in range(5)]
    rates = history_result(chromium, frames, "history.rates('generation_tokens')")
    assert [round(rate["value"], 9) for rate in rates] == [10.0] * 4
    restarted = [*frames, frame(20, 0)]
    assert history_result(chromium, restarted, "history.frames().length") == 1
    old = [frame(0, 0, (50, 0, 0)), frame(100, 0, (50, 0, 0)), frame(101, 0, (50, 4, 0))]
    median = history_result(chromium, old, f"history.percentile({SPREAD}, 0.5)")
    assert abs(median - 0.15) < 1e-9
    quiet = [frame(0, 0, (8, 0, 0)), frame(100, 0, (8, 0, 0))]
    assert history_result(chromium, quiet, f"[{SPREAD}.over, {SPREAD}.many]") == [None, 8]
    nothing = [frame(0, 0)]
    assert history_result(chromium, nothing, f"history.percentile({SPREAD}, 0.5)") is None


@pytest.mark.long
def test_a_window_is_as_long_as_the_view_listened(
    chromium: Browser, dry: Serving
) -> None:
    go(chromium, dry.url)
    short = [frame(100 + i, 0, (i, 0, 0)) for i in range(8)]
    assert history_result(chromium, short, f"{SPREAD}.over") == 7
    long = [frame(100 + i, 0, (i, 0, 0)) for i in range(90)]
    assert history_result(chromium, long, f"[{SPREAD}.over, {SPREAD}.many]") == [60, 60]


@pytest.mark.long
def test_a_few_values_have_no_last_hundredth(chromium: Browser, dry: Serving) -> None:
    go(chromium, dry.url)
    shares = f"[0.5, 0.9, 0.99].map((one) => history.percentile({SPREAD}, one) !== null)"
    has_percentile = {
        num_values: history_result(chromium, [frame(0, 0, (num_values, 0, 0))], shares)
        for num_values in (0, 1, 9, 10, 99, 100)
    }
    assert has_percentile == {
        0: [False, False, False],
        1: [True, False, False],
        9: [True, False, False],
        10: [True, True, False],
        99: [True, True, False],
        100: [True, True, True],
    }


@pytest.mark.long
def test_an_idle_server_is_shown_without_scales(chromium: Browser) -> None:
    with serving(names=("bundled",), **DRY) as idle:
        visit(chromium, idle, "live")
        chromium.wait("document.querySelector('.line').getAttribute('d')?.length > 8")
        assert set(text(chromium, ".top")) == {""}
        assert text(chromium, ".card .note")[:2] == ["idle", "idle"]
        cards = dict(
            zip(text(chromium, ".card h2"), text(chromium, ".card"), strict=True)
        )
        assert "No answer has begun yet." in cards["Time to first token"]
        hidden = "[...document.querySelectorAll('.legend')].map((one) => one.hidden)"
        assert chromium.value(hidden) == [False, False, True, True]
        assert chromium.complaints == []


@pytest.mark.long
def test_pointing_at_an_earlier_moment_leaves_the_window_as_it_is(
    chromium: Browser, dry: Serving
) -> None:
    visit(chromium, dry, "live")
    chromium.wait("document.querySelector('.line').getAttribute('d')?.length > 8")
    dry.post("completions", prompt="x" * 40, max_tokens=20, ignore_eos=True)
    note = "document.querySelectorAll('.card .note')[5].textContent"
    chromium.wait(f"/^19 in the last [1-9] s$/.test({note})")
    place = "document.querySelector('.card svg').getBoundingClientRect()"
    x, y = chromium.value(
        f"(({{ left, top, width }}) => [left + width / 2, top + 9])({place})"
    )
    chromium.mouse("mouseMoved", x, y)
    chromium.wait("/^as it was/.test(document.querySelector('#moment').textContent)")
    assert text(chromium, ".card strong")[0] == "0"  # there, nothing had run yet
    assert chromium.value(f"/^19 in the last/.test({note})")
    # What is pointed at stays below the pointer while time goes by.
    place = "parseFloat(document.querySelector('.cross').getAttribute('d').slice(1))"
    listened = "import('/page/script/history.js').then((one) => one.frames().length)"
    before, times = chromium.value(place), chromium.value(listened)
    chromium.wait(f"{listened.removesuffix(')')} > {times + 2})")
    assert abs(chromium.value(place) - before) < 9  # 6 are half a second
    chromium.mouse("mouseMoved", 2, 2)
    chromium.wait("document.querySelector('#moment').textContent === ''")
    assert chromium.complaints == []


@pytest.mark.long
def test_drafts_are_shown_once_there_were_some(chromium: Browser) -> None:
    spec_config = {"method": "suffix", "num_speculative_tokens": 3, "adaptive": False}
    settings: dict[str, Any] = {
        "num_gpu_blocks_override": 400,
        "speculative_config": spec_config,
    }
    with serving(executor="oracle", **settings) as served:
        visit(chromium, served, "live")
        chromium.wait("document.querySelector('#health').dataset.state === 'well'")
        rows = "[...document.querySelectorAll('.card dl div')].filter((d) => !d.hidden)"
        before = chromium.value(f"{rows}.length")
        for _ in range(2):
            served.post(
                "completions", prompt="a", max_tokens=30, temperature=0, ignore_eos=True
            )
        chromium.wait(f"{rows}.length === {before + 2}")
        totals = chromium.value(f"{rows}.map((d) => d.textContent)")
        assert any(
            total.startswith("accepted drafts") and "%" in total for total in totals
        )
        assert any(total.startswith("tokens a step with drafts") for total in totals)
        assert chromium.complaints == []
