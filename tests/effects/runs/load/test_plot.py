"""The picture of a run."""

from pathlib import Path

import pytest

from minfer.effects.runs.load import plot
from minfer.effects.runs.load.plot import check_plot, draw
from minfer.effects.runs.load.record import LoadError, Record
from tests.effects.runs.load.test_figures import ANSWERED, FAILED


@pytest.mark.parametrize("records", [[*ANSWERED, *FAILED], FAILED, []])
def test_a_run_is_drawn_and_the_same_run_alike(
    tmp_path: Path, records: list[Record]
) -> None:
    pytest.importorskip(
        "matplotlib", reason="plots need matplotlib: pip install '.[bench]'"
    )
    for name in ("one.svg", "two.svg"):
        draw(tmp_path / name, records)
    text = (tmp_path / "one.svg").read_text("utf-8")
    assert text == (tmp_path / "two.svg").read_text("utf-8")
    for title in ("output tokens/s", "TTFT, ms", "ITL and TPOT, ms"):
        assert title in text


def test_what_cannot_be_drawn_is_told_before_the_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda _: None)
    with pytest.raises(LoadError, match=r"pip install '\.\[bench\]'"):
        check_plot(Path("x.svg"))
    monkeypatch.setattr(plot, "find_spec", lambda _: 1)
    check_plot(Path("x.svg"))
    with pytest.raises(LoadError, match=r"must end with \.svg"):
        check_plot(Path("x.png"))
