"""The dashboard: every metric and label that it names is what a server exports, and all
that is exported about requests is shown.
"""

import re
from typing import Any
from unittest.mock import Mock

import pytest
from attrs import evolve
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from minfer import LLM, SamplingParams
from minfer.effects.live.totals import ACCEPTED_PER_POSITION
from minfer.effects.serving.observability.metrics import Metrics
from tests.effects.deploy.room import read_json

BOARD: dict[str, Any] = read_json("grafana-dashboard.json")
PANELS: list[dict[str, Any]] = BOARD["panels"]
REQUESTED = {
    f"{panel['title']}: {target['legendFormat']}": target["expr"]
    for panel in PANELS
    for target in panel["targets"]
}
NAMED = re.compile(r"\b(minfer_\w+)")
# Labels: those that select, those that are summed by.
LABELS = re.compile(r"(\w+)=~?\"|by \((\w+)\)")
WIDTH = 24  # Grafana's


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """The names that a server exports, each with its labels, after a request."""
    with LLM(executor="dry") as llm:
        metrics = Metrics(llm, "tiny")
        llm.generate(["a"], SamplingParams(max_tokens=3), use_tqdm=False)
        # A request waits, has waited, and drafts: some labels have samples only then, and
        # on a fast machine a lone request may wait for nothing.
        metrics.waits["blocks"] = 0.25
        now = evolve(llm.client.snapshot(), waiting=1, waiting_for={"blocks": 1})
        totals = evolve(
            now.totals, counts={**now.totals.counts, f"{ACCEPTED_PER_POSITION}0": 1}
        )
        now = evolve(now, totals=totals)
        metrics.client = Mock(snapshot=lambda: now)
        text = generate_latest(metrics.registry).decode()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        labels: set[str] = set().union(*(sample.labels for sample in family.samples))
        named = {sample.name for sample in family.samples}
        found |= dict.fromkeys({family.name, *named}, labels)
    return found


@pytest.mark.parametrize("expression", REQUESTED.values(), ids=REQUESTED)
def test_what_it_names_is_exported(
    exported: dict[str, set[str]], expression: str
) -> None:
    names = set(NAMED.findall(expression))
    assert names
    assert names <= exported.keys()
    known = set().union(*(exported[name] for name in names)) | {"le"}
    assert {one or other for one, other in LABELS.findall(expression)} <= known


def test_nothing_is_shown_that_is_of_one_process_only() -> None:
    """Of several that speak HTTP, another one may answer each time."""
    assert not any("process_" in expression for expression in REQUESTED.values())


def test_brackets_are_closed() -> None:
    for expression in REQUESTED.values():
        for opens, closes in ("()", "[]", "{}"):
            assert expression.count(opens) == expression.count(closes), expression


@pytest.mark.parametrize(
    "name",
    [
        "num_requests_running",
        "num_requests_waiting",
        "num_requests_waiting_by_reason",
        "kv_cache_usage_perc",
        "prompt_tokens_total",
        "generation_tokens_total",
        "request_success_total",
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_bucket",
        "prefix_cache_hits_total",
        "num_preemptions_total",
        "failed_steps_total",
        "request_wait_seconds_total",
        "spec_decode_num_draft_tokens_total",
        "spec_decode_num_accepted_tokens_per_pos_total",
    ],
)
def test_it_shows(name: str) -> None:
    assert any(f"minfer_{name}{{" in expression for expression in REQUESTED.values())


def test_latencies_are_quantiles() -> None:
    shown = [panel for panel in PANELS if panel["title"] == "Time to the first token"]
    expressions = [target["expr"] for target in shown[0]["targets"]]
    shares = [re.match(r"histogram_quantile\(([\d.]+),", each) for each in expressions]
    assert [each and each[1] for each in shares] == ["0.5", "0.9", "0.99"]


def test_panels_have_their_own_place() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= WIDTH
        cells = {
            (place["x"] + x, place["y"] + y)
            for x in range(place["w"])
            for y in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_its_variables_are_there() -> None:
    names = {each["name"] for each in BOARD["templating"]["list"]}
    assert names == {"source", "model"}
    text = " ".join(REQUESTED.values())
    used = set(re.findall(r"\$(\w+)", text)) - {"__rate_interval"}
    assert used == {"model"}
    assert {panel["datasource"]["uid"] for panel in PANELS} == {"${source}"}
