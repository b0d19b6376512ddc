"""Numbers, times and ids as the page writes them."""

from pathlib import Path

from tests.effects.browser import Browser
from tests.effects.runs.page.scenes import scene, seen, shown

CLOCK = {
    0: "0 s",
    0.00004: "40 µs",
    0.0042: "4.2 ms",
    0.25: "250 ms",
    1: "1.00 s",
    119.994: "119.99 s",
    120: "2 min 0 s",
    179.9999: "2 min 59 s",
    3725.5: "62 min 5 s",
}
TICKS = {
    (0, 0.5): "0 s",
    (2.5, 0.5): "2.5 s",
    (0.004, 0.002): "4.0 ms",
    (1.002, 0.002): "1.002 s",
    (60, 5): "1:00",
    (119.9999999, 5): "2:00",
    (200.2, 0.2): "3:20.2",
    (30, 15): "0:30",
    (3600, 600): "1:00:00",
    (4205, 5): "1:10:05",
}
SHORT = {
    ("chatcmpl-0123456789abcdef", 18): "chatcmpl-…89abcdef",
    ("short", 5): "short",
    ("longer", 5): "lo…er",
    ("\U0001f600" * 9, 5): "\U0001f600\U0001f600…\U0001f600\U0001f600",
    ("\U0001f600" * 5, 5): "\U0001f600" * 5,  # ten units, but five characters
    ("a\u202eb\n", 9): "a\ufffdb\ufffd",
    ("", 5): "",
}


@seen
def test_times_and_ids_in_words(chromium: Browser, tmp_path: Path) -> None:
    config, turns = scene()
    shown(chromium, tmp_path, (config, turns[:1]))
    for seconds, words in CLOCK.items():
        assert chromium.value(f"clock({seconds})") == words, seconds
    for (seconds, tick), words in TICKS.items():
        assert chromium.value(f"tickLabel({seconds}, {tick})") == words, (seconds, tick)
    for (text, max_length), words in SHORT.items():
        assert chromium.value(f"shortened({text!r}, {max_length})") == words
        folded = chromium.value(f"folded({text!r}, {max_length})")
        assert folded["head"] + folded["middle"] + folded["tail"] == text


@seen
def test_numbers_in_words(chromium: Browser, tmp_path: Path) -> None:
    config, turns = scene()
    shown(chromium, tmp_path, (config, turns[:1]))
    assert chromium.value("[count(1234.4), count(0)]") == ["1,234", "0"]
    assert chromium.value("[many(1, 'row'), many(2, 'is', 'are')]") == ["1 row", "2 are"]
    assert chromium.value("[clamp(0, -1, 5), clamp(0, 9, 5)]") == [0, 5]
