"""`minfer replay` of a server's folder: all its journals, and whether they agree."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from minfer.effects.cli.main import main
from minfer.effects.runs import replay_run
from minfer.effects.runs.replay_run import Results
from minfer.journal.replay import Journal
from tests.effects.runs.server_folder import RUNS, write_run, write_server


def replayed(
    capsys: pytest.CaptureFixture[str], folder: Path, code: int = 0
) -> tuple[list[str], Any]:
    """What is printed, for people and as JSON."""
    assert main(["replay", str(folder)]) == code
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert main(["replay", str(folder), "--json"]) == code
    return lines, json.loads(capsys.readouterr().out)


def test_all_journals_are_verified_and_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    router = write_server(tmp_path)
    lines, figures = replayed(capsys, tmp_path)
    assert [line.split(" ")[0] for line in lines] == [
        *(name.removesuffix("-000001") for name in RUNS),
        router.name,
        "sum",
        "compared",
    ]
    assert lines[0].endswith("on node-0 7 turns, 3 samples verified")
    assert lines[3].endswith("placed verified")
    assert "runs of engines: 3 on 2 machines" in lines[4]
    assert lines[5].startswith("compared 5 of 5 requests")
    assert [run["samples"] for run in figures["runs"]] == [3, 1, 1]
    assert (figures["agreement"]["sent"], figures["agreement"]["holds"]) == (5, True)
    assert [journal["placed"] for journal in figures["routers"]] == [5]


def test_what_disagrees_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_server(tmp_path)
    last = tmp_path / f"{[*RUNS][-1]}.journal"
    last.unlink()
    write_run(last, "cmpl-x-0")
    lines, figures = replayed(capsys, tmp_path, 1)
    assert lines[-2:] == [
        "DISAGREE 'cmpl-d-0' got tokens from replica 1, and is not in its journal",
        "DISAGREE 'cmpl-x-0' is in a journal of replica 1, where no router sent it",
    ]
    assert figures["agreement"]["missing"][0]["id"] == "cmpl-d-0"
    shutil.rmtree(tmp_path / "replica-1")
    lines, figures = replayed(capsys, tmp_path, 1)
    assert lines[-1].endswith("which has no journal here: copy it to replica-1")
    assert figures["agreement"]["absent"] == {"1": 2}


def test_runs_that_were_cut_short_prove_less(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    router = write_server(tmp_path, closed=False)
    later = tmp_path / "replica-1" / "20260101T000010Z-9.0-000001.journal"
    write_run(later, "cmpl-x-0")
    later.write_bytes(later.read_bytes()[:-3])
    lines, _ = replayed(capsys, tmp_path)
    assert lines[-1] == "1 came after the end of a router's journal that was cut short"
    later.write_bytes(b"")  # it cannot be used; all others are replayed
    lines, figures = replayed(capsys, tmp_path, 2)
    assert len(figures["runs"]) == 3
    router.write_text(router.read_text().replace('"why":"turn"', '"why":"cost"'))
    lines, figures = replayed(capsys, tmp_path, 2)
    assert lines[-1].startswith("5 came after"), "a damaged one is as cut short"
    assert figures["routers"] == []


def test_a_folder_may_be_written_meanwhile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request comes while an engine's journal is read. That of its own engine is older,
    so it must not be expected there.
    """
    router = write_server(tmp_path)
    (tmp_path / f"{[*RUNS][-1]}.journal").unlink()
    content = router.read_bytes()
    verify = replay_run.verify_run

    def write_and_verify(journal: Journal, name: str, **options: Any) -> Results:
        router.write_bytes(content)
        return verify(journal, name, **options)

    router.write_bytes(content[: content.index(b'"cmpl-d-0"')])
    monkeypatch.setattr(replay_run, "verify_run", write_and_verify)
    assert main(["replay", str(tmp_path)]) == 0
    assert "compared   4 of 4 requests" in capsys.readouterr().out


def test_what_cannot_be_read_is_named_and_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    router = write_server(tmp_path)
    damaged = tmp_path / "9-api-1.routing"
    damaged.write_bytes(router.read_bytes().replace(b'"why":"turn"', b'"why":"cost"'))
    pipes = (
        tmp_path / "8-api-1.routing",
        tmp_path / "replica-0" / "9-1-000001.journal",
    )
    for pipe in pipes:
        os.mkfifo(pipe)
    assert main(["replay", str(tmp_path)]) == 2
    messages = capsys.readouterr().err.splitlines()
    assert [line for line in messages if "turn" not in line] == [
        f"minfer: {pipe}: this is no regular file" for pipe in pipes
    ]
    (failed,) = [line for line in messages if "turn" in line]
    assert f"minfer: {damaged}: turn 1 does not follow" in failed


def test_without_a_router_nothing_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_server(tmp_path).unlink()
    lines, figures = replayed(capsys, tmp_path)
    assert lines[-1] == "compared nothing: there is no journal of a router"
    assert figures["agreement"] is None
    assert main(["replay", str(tmp_path), "--until", "3"]) == 2
    message = capsys.readouterr().err
    assert f"--until is for one engine's journal, as in {tmp_path}/replica-0" in message


def test_a_router_that_decides_otherwise_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    router = write_server(tmp_path)
    head, *turns = router.read_text().splitlines(keepends=True)
    router.write_text(head.replace("RoundRobin", "LeastLoaded") + "".join(turns))
    lines, figures = replayed(capsys, tmp_path, 1)
    assert "DIVERGED in turn 1" in lines
    assert figures["routers"][0]["divergence"]["field"] == "decision.why"
