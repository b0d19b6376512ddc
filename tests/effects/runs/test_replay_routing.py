"""The journal of a router on the command line: what it decided, and whether it still
does.
"""

import json
from pathlib import Path

import pytest
from attrs import evolve

from minfer.effects.cli.main import main
from minfer.effects.cluster.engine_client.api_server_router import (
    ApiServerRouter,
    routing_request,
)
from minfer.effects.live.journal.routing_journal_file import RoutingJournalFile
from minfer.journal.codec import dump
from minfer.routing.messages import ReplicaJoined
from minfer.routing.policies import LeastLoaded, RoundRobin
from minfer.routing.state import RouterConfig
from tests.effects.cluster.ends import request


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Of a request before there is a replica, and three among two."""
    config = RouterConfig(RoundRobin(), 4)
    writer = RoutingJournalFile(tmp_path, config, 2**20)
    router = ApiServerRouter(config, writer)
    router.decide(routing_request(request("early")))
    router.apply(ReplicaJoined("0"), ReplicaJoined("1"))
    for name in "abc":
        router.decide(routing_request(request(name)))
    writer.close()
    (path,) = tmp_path.iterdir()
    return path


def test_what_was_decided_is_verified(
    journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(journal)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()) for line in lines[2:]] == [
        "requests 3 placed (3 by turn), 0 deferred, 1 without a replica",
        "verified every decision",
    ]
    assert main(["replay", str(journal), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["turns"], figures["policy"]) == (5, "RoundRobin")


def test_a_router_that_decides_otherwise_is_named(
    journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As another version of minfer would: here the policy is another one."""
    head, *turns = journal.read_text().splitlines(keepends=True)
    record = json.loads(head)
    record["config"] = dump(evolve(RouterConfig(RoundRobin(), 4), policy=LeastLoaded()))
    journal.write_text(json.dumps(record) + "\n" + "".join(turns))
    assert main(["replay", str(journal)]) == 1
    out = capsys.readouterr().out
    assert "in turn 2" in out
    assert "decision.why" in out


def test_what_is_no_journal_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("none.routing", "other.routing"):
        (tmp_path / "other.routing").write_text("{}")
        assert main(["replay", str(tmp_path / name)]) == 2
        assert capsys.readouterr().err.startswith("minfer: ")
    (tmp_path / "other.routing").unlink()
    (tmp_path / "replica-0").mkdir()
    (tmp_path / "replica-0" / "a-000001.journal").touch()
    assert main(["replay", str(tmp_path)]) == 2
    assert "a-000001.journal: this file is empty" in capsys.readouterr().err
