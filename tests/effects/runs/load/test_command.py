"""`minfer bench serve` from its options to its exit code, on a server that is a stub."""

import _thread
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from minfer.effects.runs.load import command, figures
from minfer.effects.runs.load.client import Counts
from minfer.effects.runs.load.command import bench_serve
from minfer.effects.runs.load.record import LoadError
from minfer.setting import ConfigError
from tests.effects.runs.load.stub import NEVER, WHOLE, plain, stream, stub, token
from tests.effects.runs.load.test_options import options

FEW = ("--num-prompts", "6", "--max-concurrency", "2", "--processes", "1")


def test_a_load_is_put_measured_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "found.json"
    with stub() as server:
        port = server.url.rpartition(":")[2]
        told = options("--port", port, "--json", str(path), *FEW, "--repeat", "2")
        assert bench_serve(told) == 0
        prompts = set(server.asked)
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith(
        f"6 requests to one at {server.url}/v1/completions, at most 2 at"
    )
    assert out.count("6 of 6 answered, 0 failed") == 2
    assert "over 2 runs" in out
    assert len(prompts) == 13  # with the one that warmed up, and no prompt twice
    found = json.loads(path.read_text("utf-8"))
    assert [run["completed"] for run in found["runs"]] == [6, 6]


def test_failures_are_shown_and_decide_the_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    full = plain(503, b'{"error": {"message": "full"}}')
    with stub(stream(*WHOLE), full, full, stream(*WHOLE)) as server:
        assert bench_serve(options("--base-url", server.url, *FEW)) == 1
    out, _ = capsys.readouterr()
    assert "4 of 6 answered, 2 failed" in out
    assert "2 HTTP 503; the first: full" in out


def test_an_interrupt_shows_and_writes_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    timers: list[threading.Timer] = []

    def show(_: Any, counts: Counts) -> None:
        if counts.ended and not timers:
            timers.append(threading.Timer(0.02, _thread.interrupt_main))
            timers[0].start()

    monkeypatch.setattr(command._Progress, "show", show)
    path = tmp_path / "found.json"
    with stub(stream(*WHOLE), stream(*WHOLE), stream(token("a"), NEVER)) as server:
        told = options("--base-url", server.url, *FEW, "--json", str(path))
        assert bench_serve(told) == 130
    assert "1 of 3 answered, 0 failed, 2 given up" in capsys.readouterr().out
    (run,) = json.loads(path.read_text("utf-8"))["runs"]
    assert (run["stopped"], run["interrupted"]) == (True, 2)


def test_what_cannot_be_measured_or_written_is_told_before_any_load(
    tmp_path: Path,
) -> None:
    with stub(plain(400, b'{"error": {"message": "no such field"}}')) as server:
        for words, message in (
            (("--goodput", "x:1"), "is no goal"),
            (("--json", str(tmp_path / "no" / "x.json")), "name another place"),
            (("--plot", str(tmp_path / "x.png")), "--plot"),
            (("--model", "three"), "there is one, two"),
        ):
            with pytest.raises(LoadError, match=message):
                bench_serve(options("--base-url", server.url, *words))
        assert server.asked == []
        path = tmp_path / "found.json"
        with pytest.raises(ConfigError, match=r"\(HTTP 400\): no such field"):
            bench_serve(options("--base-url", server.url, "--json", str(path)))
        assert not path.exists()
        assert len(server.asked) == 1


def test_a_clients_doubts_are_told_aside(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "BUSY", 0.0)
    monkeypatch.setattr(figures, "SHORT", 0.0)
    with stub() as server:
        assert bench_serve(options("--base-url", server.url, *FEW)) == 0
    assert "minfer: a client process used" in capsys.readouterr().err
