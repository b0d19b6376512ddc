"""What is reported of several engines: each of them, and why a request went there."""

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from prometheus_client import CollectorRegistry, generate_latest

from minfer.effects.cluster.processes.engine_address import (
    EngineAddress,
    read_address,
    write_address,
)
from minfer.effects.live.client import ReplicaState
from minfer.effects.serving.observability.health import Health
from minfer.effects.serving.observability.metric_help import REPLICA_HELP
from minfer.effects.serving.observability.replica_metrics import replica_metrics
from tests.effects.cluster.ends import IDLE
from tests.effects.serving.test_access_log import HEAD, logged

UP = ReplicaState(
    name="0",
    machine="node-a (10.0.0.1)",
    unready="",
    running=2,
    waiting=1,
    blocks=10,
    blocks_free=4,
)
DOWN = evolve(
    UP,
    name="1",
    machine="",
    role="prefill",
    unready="loading",
    running=0,
    blocks=0,
    blocks_free=0,
)


def test_each_has_metrics_of_its_own() -> None:
    class Collector:
        def collect(self) -> Any:
            return replica_metrics("m", (UP, DOWN), {"0 cost": 3.0, "1 hash, load": 1.0})

    registry = CollectorRegistry()
    registry.register(Collector())
    text = generate_latest(registry).decode()
    for line in (
        'minfer_replica_up{model_name="m",replica="1"} 0.0',
        'minfer_replica_requests_running{model_name="m",replica="0"} 2.0',
        'minfer_replica_requests_waiting{model_name="m",replica="0"} 1.0',
        'minfer_replica_kv_cache_usage_perc{model_name="m",replica="0"} 0.6',
        (
            'minfer_replica_info{machine="node-a (10.0.0.1)",model_name="m",replica="0",'
            'role="both"} 1.0'
        ),
        'minfer_replica_info{machine="",model_name="m",replica="1",role="prefill"} 1.0',
        'minfer_routed_total{model_name="m",replica="1",why="hash, load"} 1.0',
    ):
        assert line in text.splitlines()
    helped = {line.split()[2] for line in text.splitlines() if line.startswith("# HELP")}
    names = {name.removeprefix("minfer_").removesuffix("_total") for name in helped}
    assert names == REPLICA_HELP.keys()


@pytest.mark.parametrize(
    ("replicas", "ready"), [((UP, DOWN), "1 of 2 replicas"), ((), None)]
)
def test_health_has_each_of_several(replicas: Any, ready: str | None) -> None:
    class State:
        """Of a server."""

        closing = False

        def __init__(self) -> None:
            self.llm = self.client = self
            self.adapters = None
            self.unready = ""
            self.machine = "node-b (10.0.0.2)"

        def snapshot(self) -> Any:
            return evolve(IDLE, replicas=replicas)

    state: Any = State()
    health = Health(state, 9.0)
    assert (health.health_error(), health.unready_reason()) == ("", "")
    reported: Any = health.replicas()
    assert reported.get("ready") == ready
    replicas_shown = reported.get("replicas", ())
    assert [
        (replica["status"], replica["machine"], replica["role"])
        for replica in replicas_shown
    ] == [
        ("ready", "node-a (10.0.0.1)", "both"),
        ("loading", "", "prefill"),
    ][: len(replicas)]
    shown: Any = health.figures()["replicas"]
    usage = [(replica["replica"], replica["kv_cache_usage"]) for replica in shown]
    assert usage == ([("0", 0.6), ("1", 0.0)] if replicas else [("0", 0.0)])
    assert replicas or shown[0]["machine"] == "node-b (10.0.0.2)"


def test_a_line_of_the_log_says_where_a_request_went_and_why() -> None:
    prompt = {"prompt_tokens": 3, "output_tokens": 4}
    hops = [
        {"replica": "0", "machine": "a", "why": "cost"},
        {"replica": "1", "machine": "b", "why": "session"},
    ]
    head = {**HEAD, "headers": [(b"x-request-id", b"cmpl-1")]}
    for placed, is_placed in (({"replicas": hops}, True), ({}, False)):
        record = {"endpoint": "/x", "model": "m", "prompts": [{**prompt, **placed}]}
        (line,) = logged(head, path="/x", record=record)
        entry = json.loads(line)
        assert [entry.get(name) for name in ("replica", "machine", "why")] == (
            ["1", "b", "session"] if is_placed else [None, None, None]
        )
        (text,) = logged(head, form="text", path="/x", record=record)
        assert text.endswith(
            "tokens=3+4 replica=1 machine=b why=session" if is_placed else "=3+4"
        )


def test_a_replica_that_moves_has_another_machine(tmp_path: Path) -> None:
    path = tmp_path / "engine"
    assert read_address(path) is None
    write_address(path, None)
    write_address(path, EngineAddress(("10.0.0.1", 4000), machine="a (10.0.0.1)"))
    moved = EngineAddress(("fd00::2", 4001), machine="b (fd00::2)")
    write_address(path, moved)
    assert read_address(path) == moved
    write_address(path, None)
    assert read_address(path) is None
    assert [*tmp_path.iterdir()] == []
