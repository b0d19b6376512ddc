"""Where a request ran, and why it went there, as `minfer explain` says."""

import json
import re
from pathlib import Path

import pytest

from minfer.effects.cli.main import main
from minfer.effects.runs.explain_routing import routing_lines
from tests.effects.runs.server_folder import write_run, write_server


def test_a_request_that_two_replicas_served_is_explained_at_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    router = write_server(tmp_path).stem
    assert main(["explain", str(tmp_path), "cmpl-b"]) == 0
    out = capsys.readouterr().out
    first, *sections = out.split("\n\n")
    died = "; the replica died or was cut off while it ran there"
    assert first.splitlines() == [
        f"Routed by {router}:",
        f"  turn 3: 'cmpl-b-0' to replica 1 (node-1): turn{died}",
        "  turn 8: 'cmpl-b-0' to replica 0 (node-0): turn",
    ]
    heads = [section.splitlines()[:2] for section in sections]
    assert [(head.split(":")[0], place) for head, place in heads] == [
        ("Request 'cmpl-b-0'", "  at replica 1, on machine node-1"),
        ("Request 'cmpl-b-0#1'", "  at replica 0, on machine node-0"),
    ]
    assert main(["explain", str(tmp_path), "cmpl-b", "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    assert [(route["replica"], route["end"]) for route in explained["routing"]] == [
        ("1", "lost"),
        ("0", "ended"),
    ]
    assert (explained["replica"], explained["machine"]) == ("1", "node-1")


def test_requests_of_all_replicas_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_server(tmp_path)
    assert main(["explain", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Verdict: nothing held requests up\n5 requests in ")
    assert re.findall(r"^run (\S+) on (\S+)$", out, re.M) == [
        ("replica-0/20260101T000000Z-7.0", "node-0"),
        ("replica-1/20260101T000000Z-8.0", "node-1"),
        ("replica-1/20260101T000009Z-9.0", "node-1"),
    ]


def test_what_is_not_recorded_is_not_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a journal without a machine, which is that of the only engine."""
    write_run(tmp_path / "20260101T000000Z-7.0-000001.journal", "cmpl-a-0")
    assert main(["explain", str(tmp_path), "cmpl-a"]) == 0
    first, verdict, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("Request 'cmpl-a-0'")
    assert verdict.startswith("Verdict: ")
    assert second.startswith("In all ")


def test_a_damaged_journal_of_a_router_is_named_and_the_rest_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    router = write_server(tmp_path)
    lines = router.read_text().splitlines(keepends=True)
    router.write_text("".join(lines[:6]) + "damage\n")
    assert main(["explain", str(tmp_path), "cmpl-b"]) == 0
    out, err = capsys.readouterr()
    assert "turn 3: 'cmpl-b-0' to replica 1 (node-1): turn" in out
    assert f"minfer: {router}: turn 5 cannot be read" in err


def test_what_there_is_of_a_request_is_explained_and_the_rest_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_server(tmp_path)
    (died,) = tmp_path.glob("replica-1/*-8.0-*")
    data = bytearray(died.read_bytes())
    data[200] ^= 1
    died.write_bytes(data)
    assert main(["explain", str(tmp_path), "cmpl-b"]) == 2
    out, err = capsys.readouterr()
    assert re.findall("^Request '(.*?)'", out, re.M) == ["cmpl-b-0#1"]
    assert err.startswith(f"minfer: {died}: ")
    for file in tmp_path.glob("replica-1/*-9.0-*"):
        file.unlink()
    assert main(["explain", str(tmp_path), "cmpl-d"]) == 2
    out, err = capsys.readouterr()
    assert out.count("\n") == 2
    assert "'cmpl-d-0' to replica 1: turn" in out
    assert "has 'cmpl-d': that of replica 1 is missing or cut short" in err
    assert main(["explain", str(tmp_path), "cmpl-d", "--json"]) == 2
    (routed,) = json.loads(capsys.readouterr().out)["routing"]
    assert routed["id"] == "cmpl-d-0"


def test_what_a_decision_expected_is_said() -> None:
    placed = {
        "why": "cost",
        "override": "returned no ReplicaChoice",
        "seconds": 0.0125,
        "alternatives": [{"replica": "1", "hit": 0, "seconds": 0.5}],
        "blocks": 4,
        "hit": 3,
    }
    route = {"router": "r", "id": "a", "replica": "0", "turn": 7, "deferred": 2}
    sent = {**route, "placed": placed, "started": True, "end": "moved"}
    start = "  turn 7: 'a' to replica 0, after it was deferred 2 times: "
    end = "; it was taken from there while it ran"
    (_, prefilled) = routing_lines(
        [{**sent, "router": "r-prefill", "started": False, "end": "ended"}], []
    )
    assert prefilled.endswith("; its prompt was computed there, or it ended")
    _, decided, without = routing_lines([sent, {**sent, "placed": None}], [])
    assert decided == (
        f"{start}cost, as the policy returned no ReplicaChoice 12.5 ms (else replica 1 "
        f"500.0 ms), 3 of 4 blocks were expected there{end}"
    )
    assert without == f"{start}sent there without a decision{end}"
