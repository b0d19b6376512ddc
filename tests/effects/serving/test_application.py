"""The application as its clients see it: paths, many at once, bad input."""

import asyncio
import contextlib
from typing import Any

import pytest
from openai import AsyncOpenAI

from minfer.effects.live.errors import EngineDeadError
from tests.effects.served import Serving, events
from tests.effects.serving.raw_requests import NEIGHBOUR, raw


@pytest.mark.long
def test_many_at_once_through_the_async_sdk(bundled: Serving) -> None:
    async def all_of_them() -> tuple[list[str], list[str]]:
        async with AsyncOpenAI(
            base_url=f"{bundled.url}/v1", api_key="x", max_retries=0
        ) as client:

            async def one(i: int) -> str:
                fields: dict[str, Any] = {
                    "model": "bundled",
                    "prompt": f"def f{i}(",
                    "seed": i,
                    "max_tokens": 10,
                }
                if i % 2:
                    text: str = (
                        (await client.completions.create(**fields)).choices[0].text
                    )
                    return text
                stream = await client.completions.create(**fields, stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            together = list(await asyncio.gather(*map(one, range(12))))
            return together, [await one(i) for i in range(12)]

    together, solo = asyncio.run(all_of_them())
    assert together == solo


def test_health_metrics_and_version(bundled: Serving) -> None:
    assert bundled.get("/health").json() == {"status": "ok"}
    assert bundled.get("/healthz").status_code == 200
    assert bundled.get("/version").json() == {"version": "0.1.0"}
    response = bundled.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    assert 'minfer_generation_tokens_total{model_name="bundled"}' in response.text
    accept = {"accept": "application/openmetrics-text"}
    assert bundled.http.get(f"{bundled.url}/metrics", headers=accept).text.endswith(
        "# EOF\n"
    )


@pytest.mark.parametrize(
    ("method", "path", "status", "allowed"),
    [
        ("GET", "/v1/nothing", 404, None),
        ("POST", "/", 405, {"GET", "HEAD"}),
    ],
)
def test_a_wrong_address_has_openais_shape(
    slow: Serving, method: str, path: str, status: int, allowed: set[str] | None
) -> None:
    response = slow.http.request(method, slow.url + path)
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"
    allow = response.headers.get("allow")
    assert allowed == (None if allow is None else set(allow.split(", ")))


def test_a_wrong_address_below_messages_has_anthropics_shape(slow: Serving) -> None:
    response = slow.http.get(f"{slow.url}/v1/messages/")
    assert response.status_code == 404
    assert response.json()["type"] == "error"


def test_an_address_that_only_begins_like_messages_has_openais_shape(
    slow: Serving,
) -> None:
    response = slow.http.get(f"{slow.url}/v1/messagesque")
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_stream_is_not_delayed_by_others(bundled: Serving) -> None:
    response = bundled.post("completions", prompt="x", max_tokens=1, stream=True)
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"


@pytest.mark.long
def test_what_is_cached_is_forgotten_on_demand(bundled: Serving) -> None:
    body = {"prompt": "def f(x): return x\n" * 30, "max_tokens": 1}
    url = f"{bundled.url}/reset_prefix_cache"

    def cached() -> int:
        usage = bundled.post("completions", **body).json()["usage"]
        count: int = usage["prompt_tokens_details"]["cached_tokens"]
        return count

    cached()
    assert cached() > 0
    evil = {"origin": "https://evil.example"}
    assert bundled.http.post(url, headers=evil).status_code == 403
    assert cached() > 0
    assert bundled.http.post(url).json() == {"success": True}
    assert cached() == 0


def test_a_cache_is_reset_in_the_event_loop_to_which_links_belong(
    bundled: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops = []

    def reset() -> None:
        loops.append(asyncio.get_running_loop())

    monkeypatch.setattr(bundled.llm.client, "reset_cache", reset)
    response = bundled.http.post(f"{bundled.url}/reset_prefix_cache")
    assert response.json() == {"success": True}
    assert len(loops) == 1


def test_a_dead_engine_has_no_cache(
    bundled: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dead() -> None:
        raise EngineDeadError("it broke")

    monkeypatch.setattr(bundled.llm.client, "reset_cache", dead)
    response = bundled.http.post(f"{bundled.url}/reset_prefix_cache")
    assert (response.status_code, response.json()["error"]["code"]) == (
        503,
        "engine_dead",
    )


def test_a_query_that_breaks_reports_no_details(
    bundled: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundled.llm.tokenizer, "encode", None)
    response = bundled.http.post(f"{bundled.url}/tokenize", json={"prompt": "x"})
    assert (response.status_code, response.json()["error"]["message"]) == (
        500,
        "internal error",
    )


def test_no_redirect_follows_a_host_header(slow: Serving) -> None:
    response = slow.http.post(
        f"{slow.url}/v1/completions/", json={}, headers={"host": "evil.example"}
    )
    assert response.status_code == 404
    assert "evil.example" not in str(response.headers)


BAD: dict[str, tuple[int, dict[str, Any]]] = {
    "unknown field": (400, {"data": b'{"prompt": "x", "foo": 1}'}),
    "wrong type": (400, {"data": b'{"prompt": 5}'}),
    "out of range": (400, {"data": b'{"prompt": "x", "temperature": 1e6}'}),
    "NaN": (400, {"data": b'{"prompt": "x", "temperature": NaN}'}),
    "infinite": (400, {"data": b'{"prompt": "x", "temperature": 1e999}'}),
    "huge number": (400, {"data": b'{"prompt": "x", "max_tokens": ' + b"9" * 400 + b"}"}),
    "invalid UTF-8": (400, {"data": b'{"prompt": "\xff\xfe"}'}),
    "lone surrogate": (400, {"data": b'{"prompt": "\\udfff"}'}),
    "deep": (400, {"data": b'{"prompt": ' + b"[" * 200_000}),
    "deep in messages": (
        400,
        {"data": b'{"messages": ' + b'[{"a":' * 100_000, "path": "chat/completions"},
    ),
    "empty": (400, {"data": b""}),
    "cut off": (400, {"data": b'{"prompt": "x'}),
    "unknown model": (404, {"data": b'{"model": "gpt-4", "prompt": "x"}'}),
    "no JSON": (415, {"data": b"prompt=x", "media": "application/x-www-form-urlencoded"}),
    "too large, announced": (413, {"data": b"", "length": 100_000_000}),
    "too large, asked first": (
        413,
        {"data": b"", "length": 100_000_000, "headers": "Expect: 100-continue\r\n"},
    ),
    "empty prompt": (400, {"data": b'{"prompt": ""}'}),
    "prompt too long": (400, {"data": b'{"prompt": "' + b"a" * 100_500 + b'"}'}),
    "ids out of range": (400, {"data": b'{"prompt": [[1, 99999999999]]}'}),
    "too many prompts": (400, {"data": b'{"prompt": [' + b'"a",' * 9999 + b'"a"]}'}),
    "no template": (
        400,
        {
            "data": b'{"messages": [{"role": "user", "content": "x"}]}',
            "path": "chat/completions",
        },
    ),
}


@pytest.mark.long
@pytest.mark.parametrize(("status", "raw_request"), BAD.values(), ids=BAD)
def test_bad_input_affects_no_other_request(
    slow: Serving, quiet: list[str], status: int, raw_request: dict[str, Any]
) -> None:
    url = f"{slow.url}/v1/completions"
    with contextlib.ExitStack() as stack:
        with slow.after(steps=5):
            neighbour = stack.enter_context(slow.http.stream("POST", url, json=NEIGHBOUR))
            stream = events(neighbour.iter_lines())
            texts = [next(stream)["choices"][0]["text"]]
            code, reply = raw(slow, **raw_request)
            assert len(slow.llm.frontend.processors) == 1
        texts += [event["choices"][0]["text"] for event in stream]
    assert code == status
    error = reply["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert "".join(texts) == "".join(quiet)
