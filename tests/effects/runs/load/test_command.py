"""`minfer bench serve` from its options to its exit code, on a server that is a stub."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from minfer.effects.cli.bench import serve_load
from minfer.effects.runs.load import load_metrics as metrics
from minfer.effects.runs.load.command import bench_serve
from minfer.effects.runs.load.load_client import Client, Outcome
from minfer.effects.runs.load.request_record import LoadError
from minfer.values.checks import ConfigError
from tests.effects.runs.load.stub import NEVER, WHOLE, Stub, plain, stream, stub, token
from tests.effects.runs.load.test_load_options import options

FEW = ("--num-prompts", "6", "--max-concurrency", "2", "--random-input-len", "5")


def row(title: str, value: str) -> str:
    return f"{title:<40} {value}\n"


def test_a_load_is_sent_measured_and_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "found.json"
    with stub() as server:
        url = ("--base-url", f"{server.url}/v1", "--result-filename", str(path))
        assert bench_serve(options(*url, *FEW)) == 0
        prompts = [tuple(json.loads(body)["prompt"]) for body in server.requested]
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith(
        f"6 requests to one at {server.url}/v1/completions, at most 2 at once\n"
    )
    assert row("Successful requests:", "6") in out
    assert len(set(prompts)) == 7  # with the one that warmed up, and no prompt twice
    assert {len(one) for one in prompts} == {5}
    found = json.loads(path.read_text("utf-8"))
    assert (found["completed"], found["total_output_tokens"]) == (6, 24)


def test_a_file_of_prompts_at_a_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts"
    path.write_text('{"prompt": "a"}\n{"prompt": "b", "output_tokens": 2}', "utf-8")
    file = ("--dataset-name", "custom", "--dataset-path", str(path))
    rate = ("--request-rate", "100", "--backend", "openai-chat", "--model", "two")
    with stub() as server:
        assert bench_serve(options("--base-url", server.url, *file, *rate)) == 0
        bodies = [json.loads(body) for body in server.requested]
    assert [body["max_tokens"] for body in bodies[1:]] == [128, 2]
    assert bodies[1]["messages"] == [{"role": "user", "content": "a"}]
    assert {body["model"] for body in bodies} == {"two"}
    assert server.heads[0].startswith(b"POST /v1/chat/completions ")
    assert "2 requests to two at" in capsys.readouterr().out


def test_failures_are_shown_and_decide_the_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    full = plain(503, b'{"error": {"message": "full"}}')
    with stub(stream(*WHOLE), full, full, stream(*WHOLE)) as server:
        assert bench_serve(options("--base-url", server.url, *FEW)) == 1
    out, _ = capsys.readouterr()
    assert row("Failed requests:", "2") in out
    assert "2 failed (HTTP 503), first: full" in out


def kill_after(server: Stub, requests: int, number: int) -> threading.Thread:
    """Send a signal once the server has so many requests."""

    def wait() -> None:
        until = time.monotonic() + 20
        while len(server.requested) < requests and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.05)
        if len(server.requested) >= requests:
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_shows_and_saves_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    path = tmp_path / "found.json"
    before = signal.getsignal(number)
    answers = [stream(*WHOLE), stream(*WHOLE), stream(token("a"), NEVER)]
    with stub(*answers) as server:
        thread = kill_after(server, 4, number)
        url = ("--base-url", server.url, "--result-filename", str(path))
        assert bench_serve(options(*url, *FEW)) == 128 + number
        thread.join()
    assert signal.getsignal(number) is before
    assert row("Interrupted requests:", "2") in capsys.readouterr().out
    found = json.loads(path.read_text("utf-8"))
    assert (found["completed"], found["failed"], found["interrupted"]) == (1, 0, 2)
    assert found["total_output_tokens"] == 6


def test_a_signal_ends_a_run_without_traffic(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    with stub(stream(*WHOLE), stream(token("a"), 10.0, *WHOLE)) as server:
        thread = kill_after(server, 2, signal.SIGTERM)
        url = ("--base-url", server.url, "--result-filename", str(path))
        code = bench_serve(options(*url, "--num-prompts", "1"))
        thread.join()
    assert code == 128 + signal.SIGTERM
    found = json.loads(path.read_text("utf-8"))
    assert found["interrupted"] == 1
    assert found["duration"] < 5


def test_a_signal_before_the_first_request_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Client.run

    def late(client: Client) -> Outcome:
        os.kill(os.getpid(), signal.SIGTERM)
        return run(client)

    monkeypatch.setattr(Client, "run", late)
    with stub() as server:
        code = bench_serve(options("--base-url", server.url, *FEW))
        assert len(server.requested) == 1  # the one that warmed up
    assert code == 128 + signal.SIGTERM
    assert row("Successful requests:", "0") in capsys.readouterr().out


def test_what_cannot_be_saved_is_still_shown(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    path = folder / "found.json"
    run = Client.run

    def without_folder(client: Client) -> Outcome:
        folder.rmdir()
        return run(client)

    monkeypatch.setattr(Client, "run", without_folder)
    with stub() as server:
        url = ("--base-url", server.url, "--result-filename", str(path))
        assert bench_serve(options(*url, *FEW)) == 1
    out, err = capsys.readouterr()
    assert row("Successful requests:", "6") in out
    assert err == f"minfer: {path}: No such file or directory; the result is not saved\n"


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with stub(stream(0.05, *WHOLE)) as server:
            thread = kill_after(server, 2, signal.SIGHUP)
            assert bench_serve(options("--base-url", server.url, *FEW)) == 0
            thread.join()
            assert len(server.requested) == 7
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_cannot_be_measured_or_saved_is_reported_before_any_load(
    tmp_path: Path,
) -> None:
    with stub(plain(400, b'{"error": {"message": "no such field"}}')) as server:
        for words, message in (
            (("--result-filename", str(tmp_path / "no" / "x")), "name another place"),
            (("--dataset-name", "custom"), "needs --dataset-path"),
            (("--dataset-path", "x"), "needs --dataset-name custom"),
            (("--base-url", "ftp://x"), "no address"),
        ):
            with pytest.raises(LoadError, match=message):
                bench_serve(options("--base-url", server.url, *words))
        assert server.requested == []
        path = tmp_path / "found.json"
        url = ("--base-url", server.url, "--result-filename", str(path))
        with pytest.raises(ConfigError, match=r"\(HTTP 400\): no such field"):
            bench_serve(options(*url))
        assert not path.exists()
        assert len(server.requested) == 1


def test_doubts_are_printed_aside(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "BUSY", 0.0)
    monkeypatch.setattr(metrics, "SHORT", 0.0)
    with stub() as server:
        assert bench_serve(options("--base-url", server.url, *FEW)) == 0
    assert "minfer: the client used" in capsys.readouterr().err


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_load, "find_spec", lambda _: None)
    with pytest.raises(LoadError, match=r"needs aiohttp: pip install '\.\[load\]'"):
        serve_load.run(options())
