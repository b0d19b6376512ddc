"""One span for each answer, which says what it took, under the client's own."""

import gzip
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest

from minfer.effects.serving.observability import spans as module
from minfer.effects.serving.observability.spans import Traces, check_endpoint, with_traces
from minfer.values.checks import ConfigError
from tests.effects.served import Serving
from tests.effects.serving.test_server import process
from tests.effects.test_imports import loaded_by

pytest.importorskip("opentelemetry.sdk", reason="pip install '.[otel]'")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Sent:
    """Where spans go."""

    def __init__(self) -> None:
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import (
            InMemorySpanExporter,
        )

        self.exporter = InMemorySpanExporter()
        self.traces = Traces(self.exporter)

    def spans(self) -> Any:
        """All so far."""
        self.traces._provider.force_flush()
        return self.exporter.get_finished_spans()


@pytest.fixture
def sent(bundled: Serving, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sent]:
    spans_sent = Sent()
    monkeypatch.setattr(
        bundled.service, "app", with_traces(bundled.service.app, spans_sent.traces)
    )
    yield spans_sent
    spans_sent.traces.close()


@pytest.mark.long
def test_a_span_says_what_an_answer_took(bundled: Serving, sent: Sent) -> None:
    url = f"{bundled.url}/v1/completions"
    body = {"prompt": ["def f(", "x"], "max_tokens": 3, "n": 2, "temperature": 0.5}
    answer = bundled.http.post(url, json=body, headers={"traceparent": PARENT}).json()
    bundled.until(lambda: bool(sent.spans()))
    (span,) = sent.spans()
    assert span.name == "text_completion bundled"
    assert f"{span.context.trace_id:032x}-{span.parent.span_id:016x}" in PARENT
    attributes = dict(span.attributes)
    usage = answer["usage"]
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "bundled",
        "gen_ai.response.id": answer["id"],
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.choice.count": 2,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
    }
    assert attributes.items() >= expected.items()
    seconds = (span.end_time - span.start_time) / 1e9
    first = attributes["gen_ai.latency.time_to_first_token"]
    assert 0 < first <= attributes["gen_ai.latency.e2e"] <= seconds
    assert 0 <= attributes["gen_ai.latency.time_in_queue"] <= first
    assert len(attributes["gen_ai.response.finish_reasons"]) == 4
    assert span.status.is_ok or span.status.is_unset
    assert "def f" not in span.to_json()


def test_what_was_refused_is_an_error(bundled: Serving, sent: Sent) -> None:
    bundled.post("completions", prompt="x", max_tokens=-1)
    bundled.post("completions", prompt="x " * 5000)
    bundled.until(lambda: len(sent.spans()) == 2)
    for span in sent.spans():
        assert not span.status.is_ok
        assert not span.status.is_unset
        assert span.attributes["error.type"]
        assert span.parent is None


@pytest.mark.long
def test_nothing_is_imported_where_nothing_is_wanted() -> None:
    code = "import minfer.effects.serving.processes.server"
    assert not {name for name in loaded_by(code) if name.startswith("opentelemetry")}


def test_an_endpoint_that_cannot_be_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    check_endpoint("")
    check_endpoint("http://localhost:4318/v1/traces")
    with pytest.raises(ConfigError, match="localhost:4317: give a URL"):
        check_endpoint("localhost:4317")
    monkeypatch.setattr(module, "_REQUIRED_MODULES", ("opentelemetry.no_such",))
    with pytest.raises(ConfigError, match=r"pip install '\.\[otel\]'"):
        check_endpoint("http://localhost:4318/v1/traces")
    monkeypatch.setattr(module, "_REQUIRED_MODULES", ("no_such.at_all",))
    with pytest.raises(ConfigError, match=r"pip install '\.\[otel\]'"):
        check_endpoint("http://localhost:4318/v1/traces")
    assert "no_such" not in sys.modules


class Collector(BaseHTTPRequestHandler):
    """Takes spans as a collector does."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        server: Any = self.server
        server.spans.append(
            (self.path, gzip.decompress(body) if body[:2] == GZIP else body)
        )
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


GZIP = b"\x1f\x8b"


@pytest.mark.long
def test_spans_come_to_a_collector_before_a_front_ends() -> None:
    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        received: list[tuple[str, bytes]] = []
        collector.spans = received  # type: ignore[attr-defined]  # for the handler
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        options = ("--dry-run", "--api-processes", "1", "--otlp-traces-endpoint", url)
        with process(*options) as (running, served):
            body = {"prompt": "x", "max_tokens": 2}
            answer = httpx.post(f"{served}/v1/completions", json=body).json()
            running.terminate()
            out, err = running.communicate(timeout=30)
            assert out == ""
            assert "WARNING" not in err
            assert "Traceback" not in err
        collector.shutdown()
    ((path, sent),) = received
    assert path == "/v1/traces"
    assert answer["id"].encode() in sent
    assert b"gen_ai.usage.output_tokens" in sent
