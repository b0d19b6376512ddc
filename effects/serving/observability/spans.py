"""OpenTelemetry: one span for each answer, with the attributes of its conventions for
generative models, under the span that the client names in `traceparent`.

    answer begins ---> StartedSpan ---> it has ended: a span, from its record
                                             |
                              a thread of the SDK ---> --otlp-traces-endpoint

Spans are made when answers have ended, and have times and counts, never prompts. Without
an endpoint, nothing of OpenTelemetry is imported: it is the extra `otel`.
"""

import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen
from starlette.types import ASGIApp, Receive, Scope, Send

import minfer
from minfer.effects.serving.observability.records import JsonObject
from minfer.effects.serving.protocol import Endpoint, GenerationRequest
from minfer.effects.serving.wire.stamp import Stamp
from minfer.extras import how_to_install
from minfer.values.checks import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

TRACES_FIELD: Final = "minfer.traces"  # of a scope: the `Traces`, if spans are enabled
_REQUIRED_MODULES: Final = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
_FLUSH_MILLISECONDS: Final = 3000  # that the last spans may take
_PARENT_HEADERS: Final = ("traceparent", "tracestate")
_OPERATIONS: Final = {"/v1/completions": "text_completion"}  # default: chat


def check_endpoint(endpoint: str) -> None:
    """Raise ConfigError if spans cannot be sent there."""
    if not endpoint:
        return
    option = f"--otlp-traces-endpoint {endpoint}"
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"{option}: give a URL, as http://localhost:4318/v1/traces")
    try:
        missing = [name for name in _REQUIRED_MODULES if find_spec(name) is None]
    except ModuleNotFoundError:  # not even what it is a part of
        missing = [*_REQUIRED_MODULES]
    if missing:
        raise ConfigError(f"{option} needs {missing[0]}: {how_to_install('otel')}")


@frozen
class StartedSpan:
    """An answer that has begun, if spans are enabled."""

    traces: "Traces"
    start_time: int  # nanoseconds since 1970
    parent: Any  # a context of OpenTelemetry's

    def end(
        self,
        endpoint: Endpoint,
        stamp: Stamp,
        request: GenerationRequest,
        record: JsonObject | None,
    ) -> None:
        """Make the span of an answer that has ended."""
        name = f"{_OPERATIONS.get(endpoint.path, 'chat')} {stamp.model}"
        attributes = dict(_request_attributes(endpoint, stamp, request))
        prompts: Any = record["prompts"] if record is not None else ()
        attributes |= _result_attributes(prompts)
        self._make(name, attributes, "" if prompts else "refused")

    def refuse(self, endpoint: Endpoint, code: str) -> None:
        """Make the span of a body that was refused, with the reason."""
        operation = _OPERATIONS.get(endpoint.path, "chat")
        self._make(operation, {"gen_ai.operation.name": operation}, code)

    def _make(self, name: str, attributes: dict[str, Any], error: str) -> None:
        from opentelemetry.trace import SpanKind, StatusCode

        if error:
            attributes["error.type"] = error
        span = self.traces.tracer.start_span(
            name, self.parent, SpanKind.SERVER, attributes, start_time=self.start_time
        )
        if error:
            span.set_status(StatusCode.ERROR)
        span.end()


class Traces:
    """Makes spans, and sends them in batches, through `exporter`."""

    def __init__(self, exporter: "SpanExporter") -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        service = {"service.name": "minfer", "service.version": minfer.__version__}
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES add to it, or replace it.
        resource = Resource.create()
        has_name = resource.attributes.get("service.name") != "unknown_service"
        service = {"service.version": minfer.__version__} if has_name else service
        self._provider = TracerProvider(resource=resource.merge(Resource(service)))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self.tracer = self._provider.get_tracer("minfer", minfer.__version__)

    def begin(self, scope: Scope) -> StartedSpan:
        """Note that an answer begins."""
        from opentelemetry.trace.propagation.tracecontext import (
            TraceContextTextMapPropagator,
        )

        headers = {
            name.decode(): value.decode("latin-1") for name, value in scope["headers"]
        }
        carrier = {name: headers[name] for name in _PARENT_HEADERS if name in headers}
        parent = TraceContextTextMapPropagator().extract(carrier)
        return StartedSpan(self, time.time_ns(), parent)

    def close(self) -> None:
        """Send the remaining spans, if that does not take long."""
        self._provider.force_flush(_FLUSH_MILLISECONDS)
        self._provider.shutdown()


def open_traces(endpoint: str) -> Traces:
    """Spans sent to a collector, as protobuf over HTTP."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return Traces(OTLPSpanExporter(endpoint=endpoint))


def with_traces(app: ASGIApp, traces: Traces) -> ASGIApp:
    """An application that makes a span of each answer."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        scope[TRACES_FIELD] = traces
        await app(scope, receive, send)

    return serve


def begin(scope: Scope) -> StartedSpan | None:
    """Note that an answer begins, if spans are enabled."""
    traces: Traces | None = scope.get(TRACES_FIELD)
    return None if traces is None else traces.begin(scope)


def _request_attributes(
    endpoint: Endpoint, stamp: Stamp, request: GenerationRequest
) -> Iterator[tuple[str, Any]]:
    """The attributes of a request, by the conventions."""
    params = request.params
    yield "gen_ai.operation.name", _OPERATIONS.get(endpoint.path, "chat")
    yield "gen_ai.provider.name", "minfer"
    yield "gen_ai.request.model", stamp.model
    yield "gen_ai.response.model", stamp.model
    yield "gen_ai.response.id", stamp.id
    yield "gen_ai.request.temperature", params.temperature
    yield "gen_ai.request.top_p", params.top_p
    if params.max_tokens is not None:
        yield "gen_ai.request.max_tokens", params.max_tokens
    if params.n != 1:
        yield "gen_ai.request.choice.count", params.n
    yield "gen_ai.request.stream", request.stream


def _result_attributes(prompts: list[Any]) -> dict[str, Any]:
    """The attributes of the prompts' results: tokens together, times of the slowest;
    named as in vLLM where there is no convention.
    """
    if not prompts:
        return {}

    def slowest(get_time: Callable[[Any], float | None]) -> float | None:
        return max(
            (seconds for prompt in prompts if (seconds := get_time(prompt)) is not None),
            default=None,
        )

    times = {
        "time_in_queue": slowest(lambda prompt: sum(prompt["queue_times"].values())),
        "time_to_first_token": slowest(lambda prompt: prompt["ttft"]),
        "e2e": slowest(lambda prompt: prompt["latency"]),
    }
    ends = [
        end for prompt in prompts for end in prompt["finish_reasons"] if end is not None
    ]
    return {
        "gen_ai.usage.input_tokens": sum(prompt["prompt_tokens"] for prompt in prompts),
        "gen_ai.usage.output_tokens": sum(prompt["output_tokens"] for prompt in prompts),
        "gen_ai.response.finish_reasons": ends,
        **{f"gen_ai.latency.{k}": v for k, v in times.items() if v is not None},
    }
