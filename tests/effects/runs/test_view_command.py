"""`minfer view`: the page of a journal, written whole or not at all."""

import argparse
from pathlib import Path

import pytest

from minfer.effects.live.journal.journal_files import write_journal
from minfer.effects.runs.page.make import ViewError, write_page
from minfer.effects.runs.view_command import view, view_options
from tests.core.recorded import recorded
from tests.effects.runs.page.scenes import (
    unpacked,
)


def command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    view_options(parser)
    return view(parser.parse_args(arguments))


def test_the_command_writes_the_page_of_a_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, turns = recorded(1)
    write_journal(tmp_path / "run.journal", config, turns)
    monkeypatch.chdir(tmp_path)
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert command("run.journal") == 0
    size = (tmp_path / "run.html").stat().st_size
    assert (
        capsys.readouterr().out
        == f"run.html: {size / 1e6:.3g} MB; open it in a browser\n"
    )
    assert size > 10_000
    written = (tmp_path / "run.html").read_bytes()
    head, columns = unpacked(written)
    assert (head["name"], len(columns["turn.free"])) == ("run", len(turns))
    assert command("run.journal", "-o", "other.html", "--open") == 0
    assert (tmp_path / "other.html").read_bytes() == written
    assert opened == [(tmp_path / "other.html").as_uri()]
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "other.html",
        "run.html",
        "run.journal",
    ]


def test_a_torn_journal_is_shown_as_far_as_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, turns = recorded(1)
    path, out = tmp_path / "run.journal", tmp_path / "page.html"
    write_journal(path, config, turns)
    path.write_bytes(path.read_bytes()[:-200])
    assert command(str(path), "-o", str(out)) == 0
    assert "run.journal" in capsys.readouterr().err
    _, columns = unpacked(out.read_bytes())
    assert 0 < len(columns["turn.free"]) <= len(turns)


def test_what_cannot_be_shown_or_written_is_reported_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    config, turns = recorded(1, 5)
    write_journal(tmp_path / "empty.journal", config, [])
    with pytest.raises(ViewError, match="empty holds no turns yet"):
        command(str(tmp_path / "empty.journal"), "-o", str(tmp_path / "page.html"))
    for place in (
        tmp_path / "nowhere" / "page.html",
        tmp_path / "empty.journal" / "page.html",
    ):
        with pytest.raises(
            ViewError, match=r"page\.html: .*; name another place with -o"
        ):
            write_page(place, "run", config, turns)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ViewError, match="folder: "):
        write_page(tmp_path / "folder", "run", config, turns)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["empty.journal", "folder"]


def test_two_runs_are_shown_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / name for name in ("one.journal", "two.journal")]
    for path in paths:
        write_journal(path, *recorded(1))
    out = tmp_path / "both.html"
    assert command(*map(str, paths), "-o", str(out)) == 0
    text = out.read_text("utf-8")
    assert text.count("<iframe") == 2
    assert 'title="one"' in text
    assert 'title="two"' in text
    capsys.readouterr()
    with pytest.raises(ViewError, match="3 runs: at most 2 have room"):
        command(*map(str, [*paths, paths[0]]))


def test_a_page_does_not_take_a_journals_place(tmp_path: Path) -> None:
    config, turns = recorded(1)
    path = tmp_path / "run.journal"
    write_journal(path, config, turns)
    before = path.read_bytes()
    with pytest.raises(ViewError, match="the name of a journal; end it in"):
        command(str(path), "-o", str(path))
    assert path.read_bytes() == before
