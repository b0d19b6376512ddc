"""How the engine is, reported once or for as long as it is watched."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from minfer.effects.live.client import ReplicaState, Snapshot
from minfer.effects.live.totals import (
    ACCEPTED_PER_POSITION,
    ITL,
    TTFT,
    Histogram,
    Totals,
)
from minfer.effects.serving.observability import live_view
from minfer.effects.serving.observability.live_view import LiveFigures
from minfer.effects.serving.wire.shared_counts import SharedCounts
from minfer.records.config import EngineConfig
from tests.effects.served import Serving, events, serving

DRY: dict[str, Any] = {"executor": "dry", "num_gpu_blocks_override": 400}


def snapshot(**changes: Any) -> Snapshot:
    histograms = {
        TTFT: Histogram((0.1, 1.0), (3, 2, 1), 4.5),
        ITL: Histogram((0.1, 1.0), (9, 0, 0), 0.5),
    }
    usual: dict[str, Any] = {
        "time": 50.0,
        "dead": "",
        "draining": False,
        "requests": 4,
        "running": 2,
        "waiting": 3,
        "waiting_for": {"turn": 2, "rows": 1},
        "blocks": 100,
        "blocks_free": 70,
        "blocks_cached": 25,
        "resets": 0,
        "stalled": 0.0,
        "failing": 0,
        "totals": Totals({"generation_tokens": 7}, histograms),
    }
    return Snapshot(**{**usual, **changes})


def test_figures_of_a_snapshot() -> None:
    config = EngineConfig(num_blocks=100, block_size=16, max_num_seqs=8)
    view = LiveFigures.of(snapshot(), config, started=20.0, health_error="")
    assert (view.uptime, view.health, view.rows) == (30.0, "ok", 8)
    assert (view.blocks_used, view.blocks_cached, view.blocks_free) == (30, 25, 45)
    assert (view.ttft.counts, view.itl.total) == ((3, 2, 1), 0.5)
    bare = snapshot(totals=Totals({}, {}), time=10.0)
    ill = LiveFigures.of(bare, config, started=20.0, health_error="it broke")
    assert (ill.uptime, ill.health, sum(ill.ttft.counts)) == (0.0, "it broke", 0)
    assert len(ill.ttft.counts) == len(ill.ttft.bounds) + 1
    assert ill.counts["generation_tokens"] == 0
    assert ill.accepted == ()
    replica = ReplicaState(
        name="0", unready="", running=1, waiting=0, blocks=9, blocks_free=8
    )
    two = LiveFigures.of(
        snapshot(replicas=(replica, replica)), config, started=20.0, health_error=""
    )
    assert (two.rows, two.replicas) == (16, (replica, replica))


def test_drafts_of_a_snapshot() -> None:
    config = EngineConfig(num_blocks=100, block_size=16, max_num_seqs=8)
    name = "spec_decode_num_accepted_tokens"
    counts = {
        f"{ACCEPTED_PER_POSITION}0": 9,
        f"{ACCEPTED_PER_POSITION}1": 0,
        f"{ACCEPTED_PER_POSITION}2": 3,
        name: 12,
    }
    drafted = snapshot(totals=Totals(counts, {}))
    view = LiveFigures.of(drafted, config, started=20.0, health_error="")
    assert (view.accepted, view.counts[name]) == ((9, 0, 3), 12)


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    with serving(**DRY) as server:
        yield server


def test_the_figures_are_reported_once(served: Serving) -> None:
    served.post("completions", prompt="x" * 200, max_tokens=5)
    tokens = "generation_tokens"
    served.until(lambda: served.get("/live?once=1").json()["counts"][tokens] >= 5)
    served.idle()
    response = served.get("/live?once=1")
    assert response.headers["cache-control"] == "no-store"
    record = response.json()
    assert record["health"] == "ok"
    assert (record["running"], record["waiting"], record["waiting_for"]) == (0, 0, {})
    counts = [record[f"blocks_{kind}"] for kind in ("used", "cached", "free")]
    assert sum(counts) == record["blocks"] == 400
    assert counts[0] == 0
    assert sum(record["ttft"]["counts"]) >= 1
    assert len(record["ttft"]["counts"]) == len(record["ttft"]["bounds"]) + 1


def test_bad_questions(served: Serving) -> None:
    response = served.get("/live?once=maybe")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "once"
    assert served.http.head(served.url + "/live").status_code == 200
    assert served.http.post(served.url + "/live").status_code == 405


def test_a_stream_goes_on_and_viewers_are_counted(
    served: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_view, "PERIOD_SECONDS", 0.02)
    monkeypatch.setattr(live_view, "MAX_VIEWERS", 1)
    live = served.service.live
    with served.http.stream("GET", served.url + "/live") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        stream = events(answer.iter_lines())
        times = [next(stream)["time"] for _ in range(4)]
        assert times == sorted(times)
        assert times[0] < times[-1]
        assert live.viewers == 1
        refused = served.get("/live")
        assert refused.status_code == 503
        assert "1 viewers look already" in refused.json()["error"]["message"]
        assert served.get("/live?once=1").status_code == 200
    served.until(lambda: live.viewers == 0)


@pytest.mark.long
def test_viewers_of_other_processes_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_view, "MAX_VIEWERS", 2)
    api_servers = SharedCounts.of(2)
    others = api_servers.at(1).viewers
    others.set(2)
    with serving(service={"shared": api_servers.at(0)}, **DRY) as served:
        assert served.get("/live").status_code == 503
        assert served.service.live.viewers == 0, "who is refused is none"
        others.set(1)
        with served.http.stream("GET", served.url + "/live") as answer:
            assert answer.status_code == 200
            assert api_servers.viewers.total == 2


def test_viewers_share_a_snapshot_and_without_viewers_none_is_taken(
    served: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, looks = served.service.live, list[float]()
    take_figures = live.figures

    def figures() -> LiveFigures:
        taken = take_figures()
        looks.append(taken.time)
        return taken

    monkeypatch.setattr(live, "figures", figures)
    monkeypatch.setattr(live, "_frame", "")
    with served.http.stream("GET", served.url + "/live") as first_view:
        first = next(events(first_view.iter_lines()))
        with served.http.stream("GET", served.url + "/live") as second_view:
            assert next(events(second_view.iter_lines())) == first
        assert len(looks) == 1
    served.until(lambda: live.viewers == 0)
    num_looks = len(looks)
    served.post("completions", prompt="x", max_tokens=3)
    assert len(looks) == num_looks


@pytest.mark.long
def test_a_server_that_stops_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_view, "PERIOD_SECONDS", 0.02)
    with serving(**DRY) as served:
        with served.http.stream("GET", served.url + "/live") as answer:
            lines = answer.iter_lines()
            next(events(lines))
            served.service.close()
            lines_left = [line for line in lines if line]
        last = json.loads(lines_left[-1].removeprefix("data: "))
        assert last["health"] == "the server is shutting down"
