"""Which requests a run has: ids to explain, beside what became of them."""

import json
from collections import Counter
from pathlib import Path

import pytest

from minfer.analysis.explain import explain
from minfer.effects.cli.main import main
from minfer.effects.live.journal.journal_files import read_journal, write_journal
from minfer.effects.runs.explain_command import figures
from minfer.effects.runs.explain_list import MAX_LISTED, lines, list_requests
from minfer.policies.builtin import Priority
from minfer.records.messages import Emit, Submit
from tests.core.simulation.clocked import Run, config, request
from tests.effects.runs.test_explain_command import hostile as hostile
from tests.effects.runs.test_explain_command import saved


def test_every_request_is_listed_and_can_be_explained(
    hostile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(hostile), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    turns = [*read_journal(hostile).turns()]
    requests = [e.request for t in turns for e in t.events if isinstance(e, Submit)]
    assert {entry["id"] for entry in listed} == {request.id for request in requests}
    emits = [c for t in turns for c in t.transition.commands if isinstance(c, Emit)]
    if len({request.id for request in requests}) == len(requests):
        written = Counter[str]()
        for end in (end for emit in emits for end in emit.finished):
            written[end.id] += end.length
        assert {entry["id"]: entry["tokens"] for entry in listed} == {
            request.id: written[request.id] for request in requests
        }
    assert main(["explain", str(hostile), listed[-1]["id"]]) == 0


def test_the_list_as_people_see_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(config(max_num_seqs=1))
    run.turn(*(Submit(request(name, 3, tokens=3)) for name in ("a-0", "b\x1b[2J")))
    run.turn()
    path = saved(tmp_path, run)
    assert main(["explain", str(path)]) == 0
    out = capsys.readouterr().out
    verdict, remedy, first, head, first_row, second_row, *hints = out.splitlines()
    assert verdict.startswith("Verdict: requests waited 50% of their time: all rows ")
    assert remedy.startswith("  remedy: raise --max-num-seqs above 1")
    assert first == f"2 requests in {path}"
    assert head.split() == [
        *("id", "came", "at,", "s", "prompt", "written", "first,", "ms", "took,", "ms"),
        *("waited,", "ms", "preempted", "ended", "waited", "mostly", "for"),
    ]
    assert second_row.split() == [
        *("a-0", "0.000", "3", "0", "1,000.0", "-", "0.0", "0", "goes", "on"),
    ]
    assert first_row.startswith(r"'b\x1b[2J'")
    assert first_row.endswith("goes on   a free row of the batch")
    assert "\x1b" not in out
    assert hints[0] == f"minfer explain {path} ID says where the time of one of them went"
    assert hints[1:] == ["ID may also be that of an answer: 'a' for 'a-0'"]


def starved() -> Run:
    """A run in which urgent requests go before one and preempt it; later, two wait."""
    run = Run(config(max_num_seqs=1, policy=Priority()))
    run.turn(Submit(request("patient", 9, tokens=10, priority=1)))
    for number in range(4):
        run.turn(Submit(request(f"urgent-{number}", 3, tokens=3)))
        run.turn()
        run.turn()
    run.drain()
    run.turn(*(Submit(request(name, 3, tokens=9)) for name in ("first", "second")))
    run.drain()
    return run


def test_the_list_and_the_verdict_on_one_request_have_the_same_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = starved()
    entries = {entry.id: entry for entry in list_requests(run.config, run.turns)}
    patient = entries["patient"]
    explanation = explain(run.config, run.turns, "patient")
    (life,) = explanation.lives
    assert any(phase.kind == "recompute" for phase in life.parts)
    cause, *_ = figures(run.config, explanation)["verdict"]["causes"]
    assert cause["seconds"] == pytest.approx(patient.waited)
    assert f"{patient.later} of {patient.admitted} admissions" in cause["because"]
    assert cause["because"].endswith("was 0, its own 1 (lower goes first)")
    assert cause["remedy"].startswith("raise its priority")
    assert "or raise --max-num-seqs above 1" in cause["remedy"]
    assert main(["explain", str(saved(tmp_path, run))]) == 0
    overtaken, _, others, *_ = capsys.readouterr().out.splitlines()
    waited = sum(entry.waited for entry in entries.values()) - patient.waited
    took = sum(entry.lasted for entry in entries.values()) - patient.lasted
    assert f"waited up to {1000 * patient.waited:,.1f} ms ('patient')" in overtaken
    assert others.startswith(
        f"Also: the other {len(entries) - 1} requests waited {waited / took:.0%} of their"
    )


def test_the_requests_of_every_run_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["20260101T000000Z-1.0", "20260102T000000Z-1.0"]
    for number, name in enumerate(names):
        run = Run(config())
        run.turn(Submit(request(f"r{number}", 3, tokens=1)))
        run.drain()
        write_journal(tmp_path / f"{name}-000001.journal", run.config, run.turns)
    assert main(["explain", str(tmp_path)]) == 0
    _, first, _, *rows = capsys.readouterr().out.splitlines()
    assert first == f"2 requests in {tmp_path}, of 2 runs"
    began = [row.split()[:2] for row in rows[:4:2]]
    assert began == [["run", name] for name in names]
    assert [row.split()[0] for row in rows[1:4:2]] == ["r0", "r1"]
    assert main(["explain", str(tmp_path), "--json"]) == 0
    message = json.loads(capsys.readouterr().out)
    assert [(entry["run"], entry["id"]) for entry in message] == [
        (names[0], "r0"),
        (names[1], "r1"),
    ]


def test_of_many_those_that_waited_longest_are_shown() -> None:
    run = Run(config())
    names = [f"r{i}" for i in range(MAX_LISTED + 5)]
    run.turn(*(Submit(request(name, 3, tokens=1)) for name in names))
    run.drain()
    entries = list_requests(run.config, run.turns)
    assert [entry.id for entry in entries] == names
    assert all(entry.end == "length" and entry.tokens == 1 for entry in entries)
    assert all(entry.took == entry.first for entry in entries)
    first, _, *rows = lines(entries, "runs")
    assert first == (
        f"{MAX_LISTED + 5} requests in runs; the {MAX_LISTED} that waited longest "
        "(--json has all)"
    )
    assert rows[0].split()[0] == names[-3]  # first of the last batch
    shown = [entry for entry in entries if entry.waited >= entries[5].waited]
    assert {row.split()[0] for row in rows[:MAX_LISTED]} <= {e.id for e in shown}
