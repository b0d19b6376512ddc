"""The server as its clients see it: OpenAI's own SDK over real sockets, bad input,
departures.
"""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from minfer import LLM, SamplingParams
from minfer.effects.live.async_llm import AsyncLLM
from minfer.effects.serving.server import LONG, Service
from minfer.runs.oracle import Oracle
from tests.effects.crowd import compared
from tests.effects.served import Serving, events, serving
from tests.effects.tiny_model import write_checkpoint

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def bundled() -> Iterator[Serving]:
    names = ("bundled", "alias/of-it")
    # In bfloat16, who else is in a batch would decide more than the last bits of a draw.
    with serving(names=names, num_gpu_blocks_override=128, dtype="float32") as made:
        yield made


@pytest.fixture(scope="module")
def client(bundled: Serving) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{bundled.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with so long a context that it could write for minutes."""
    path = tmp_path_factory.mktemp("tiny")
    return str(write_checkpoint(path, max_position_embeddings=100_000))


SLOW: dict[str, Any] = {
    "executor": "oracle",
    "num_gpu_blocks_override": 4000,
    "step": 0.002,
}


@pytest.fixture(scope="module")
def slow(folder: str) -> Iterator[Serving]:
    with serving(folder, **SLOW) as made:
        yield made


# --- OpenAI's SDK -----------------------------------------------------------------------


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["bundled", "alias/of-it"]
    for name in ("bundled", "alias/of-it"):
        model = client.models.retrieve(name)
        assert (model.id, model.object, model.owned_by) == (name, "model", "minfer")
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_completions_are_those_of_the_library(client: OpenAI) -> None:
    with LLM(num_gpu_blocks_override=64) as llm:
        assert llm.tokenizer is not None
        tokens = llm.tokenizer.encode("def add(a")
        params = SamplingParams(temperature=0, max_tokens=12)
        wanted = [
            o.outputs[0].text for o in llm.generate(["def add(a", "import "], params)
        ]
    prompts: list[Any] = ["def add(a", tokens, ["def add(a"], [tokens]]
    for prompt in prompts:
        done = client.completions.create(model="bundled", prompt=prompt, **GREEDY)
        assert [c.text for c in done.choices] == wanted[:1]
        assert done.object == "text_completion"
        assert done.model == "bundled"
    both = client.completions.create(
        model="alias/of-it", prompt=["def add(a", "import "], **GREEDY
    )
    assert [(c.index, c.text) for c in both.choices] == list(enumerate(wanted))
    assert both.usage is not None
    assert both.usage.completion_tokens <= 24
    assert (
        both.usage.total_tokens == both.usage.prompt_tokens + both.usage.completion_tokens
    )


def test_what_min_p_leaves_is_greedy_if_only_the_likeliest_may_come(
    client: OpenAI,
) -> None:
    asked: Any = {"model": "bundled", "prompt": "def add(a", "max_tokens": 12, "seed": 3}
    greedy, one, all_of_it = (
        client.completions.create(temperature=heat, extra_body={"min_p": least}, **asked)
        for heat, least in ((0, 0), (3, 1), (3, 0))
    )
    assert one.choices[0].text == greedy.choices[0].text != all_of_it.choices[0].text


def test_cached_tokens_are_counted(client: OpenAI) -> None:
    prompt = "x = 1\n" * 200
    for salt, cached in (("a", False), ("a", True), ("b", False)):
        done = client.completions.create(
            model="bundled", prompt=prompt, extra_body={"cache_salt": salt}, **GREEDY
        )
        assert done.usage is not None
        assert done.usage.prompt_tokens_details is not None
        assert bool(done.usage.prompt_tokens_details.cached_tokens) == cached


def test_samples_and_seeds(client: OpenAI) -> None:
    def sampled(seed: int) -> list[str]:
        done = client.completions.create(
            model="bundled", prompt="def ", n=3, seed=seed, temperature=1, max_tokens=10
        )
        return [c.text for c in done.choices]

    first = sampled(7)
    assert len(set(first)) == 3
    assert sampled(7) == first
    assert sampled(8) != first


def test_stop_strings_echo_and_lengths(client: OpenAI) -> None:
    text = (
        client.completions.create(model="bundled", prompt="def add(a", **GREEDY)
        .choices[0]
        .text
    )
    stop = text[4:7]
    done = client.completions.create(
        model="bundled", prompt="def add(a", stop=stop, **GREEDY
    )
    assert done.choices[0].text == text[: text.index(stop)]
    assert done.choices[0].finish_reason == "stop"
    done = client.completions.create(
        model="bundled", prompt="def add(a", echo=True, temperature=0, max_tokens=1
    )
    assert done.choices[0].text.startswith("def add(a")
    assert done.choices[0].finish_reason == "length"
    assert done.usage is not None
    assert done.usage.completion_tokens == 1
    ids = client.completions.create(
        model="bundled", prompt=[[300, 301]], echo=True, temperature=0, max_tokens=1, n=2
    )
    assert len({c.text for c in ids.choices}) == 1


def test_a_streamed_completion_joins_to_the_whole(client: OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "bundled",
        "prompt": ["def ", "class "],
        "n": 2,
        "seed": 1,
        "max_tokens": 15,
        "echo": True,
    }
    whole = client.completions.create(**asked)
    texts, ends, usage = [""] * 4, [""] * 4, None
    with client.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ) as stream:
        for chunk in stream:
            assert usage is None
            usage = chunk.usage
            assert bool(chunk.choices) == (usage is None)
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                ends[choice.index] += choice.finish_reason or ""
    assert texts == [c.text for c in whole.choices]
    assert ends == [c.finish_reason for c in whole.choices]
    assert usage is not None
    assert whole.usage is not None
    assert usage.total_tokens == whole.usage.total_tokens
    with client.completions.create(**asked, stream=True) as stream:
        assert all(chunk.usage is None and chunk.choices for chunk in stream)


def test_log_probabilities_of_completions(client: OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "bundled",
        "prompt": "def add(a",
        "logprobs": 2,
        "temperature": 1.5,
        "seed": 2,
        "max_tokens": 15,
    }
    one = client.completions.create(**asked).choices[0]
    found = one.logprobs
    assert found is not None
    assert found.tokens
    assert found.token_logprobs
    assert found.top_logprobs
    assert found.text_offset
    for token, own, top in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, strict=True
    ):
        assert top[token] == own <= 0
        assert len(top) in (2, 3)
    for at, token in zip(found.text_offset, found.tokens, strict=True):
        assert one.text.startswith(token, at) or at == len(one.text)
    parts: list[Any] = []
    with client.completions.create(**asked, stream=True) as stream:
        parts += [
            chunk.choices[0].logprobs for chunk in stream if chunk.choices[0].logprobs
        ]
    assert len(parts) > 2
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [item for part in parts for item in getattr(part, name)] == getattr(
            found, name
        )
    plain = client.completions.create(**{**asked, "logprobs": None}).choices[0]
    assert (plain.text, plain.logprobs) == (one.text, None)
    least = client.completions.create(**{**asked, "logprobs": 0}).choices[0].logprobs
    assert least is not None
    assert least.token_logprobs == found.token_logprobs
    assert [len(top) for top in least.top_logprobs or ()] == [1] * len(found.tokens)


def test_log_probabilities_of_conversations(client: OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "bundled",
        "logprobs": True,
        "top_logprobs": 4,
        "seed": 8,
        "messages": [{"role": "user", "content": "def f("}],
        "max_tokens": 15,
        "n": 2,
    }
    whole = client.chat.completions.create(**asked)
    contents: list[list[Any]] = [[], []]
    for choice in whole.choices:
        assert choice.logprobs is not None
        contents[choice.index] = choice.logprobs.content or []
        text = b"".join(bytes(one.bytes or ()) for one in contents[choice.index]).decode()
        assert choice.message.content
        assert text.startswith(choice.message.content)
        for one in contents[choice.index]:
            assert one.bytes == [*one.token.encode()]
            values = [top.logprob for top in one.top_logprobs]
            assert len(values) == 4
            assert values == sorted(values, reverse=True)
            assert one.logprob in values or one.logprob <= values[-1]
    streamed: list[list[Any]] = [[], []]
    with client.chat.completions.create(**asked, stream=True) as stream:
        for chunk in stream:
            for news in chunk.choices:
                streamed[news.index] += (news.logprobs and news.logprobs.content) or []
    assert streamed == contents
    plain = client.chat.completions.create(
        **{**asked, "logprobs": False, "top_logprobs": 0}
    )
    assert [c.message.content for c in plain.choices] == [
        c.message.content for c in whole.choices
    ]
    assert all(choice.logprobs is None for choice in plain.choices)


def test_log_probabilities_need_a_model(slow: Serving) -> None:
    answer = slow.post("completions", prompt="x", logprobs=0)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "logprobs"
    assert "the oracle executor has no model" in error["message"]


def said(client: OpenAI, messages: list[Any], **more: Any) -> list[str | None]:
    done = client.chat.completions.create(
        model="bundled", messages=messages, **{"seed": 5, "max_tokens": 12, **more}
    )
    assert done.object == "chat.completion"
    assert all(c.message.role == "assistant" for c in done.choices)
    return [c.message.content for c in done.choices]


def test_conversations(client: OpenAI) -> None:
    system, hello = "You write Python.", {"role": "user", "content": "def add(a, b):"}
    messages: list[Any] = [{"role": "system", "content": system}, hello]
    wanted = said(client, messages)
    assert wanted == said(client, messages)
    assert wanted == said(client, [{"role": "developer", "content": system}, hello])
    parts = [{"type": "text", "text": "def add(a, b):"}]
    assert wanted == said(client, [messages[0], {"role": "user", "content": parts}])
    two = said(client, messages, n=2, temperature=1)
    assert len(set(two)) == 2
    answer = client.chat.completions.create(
        model="bundled", messages=messages, max_tokens=5
    )
    turns = [
        *messages,
        answer.choices[0].message.model_dump(),
        {"role": "user", "content": "more"},
    ]
    assert said(client, turns) != wanted
    assert answer._request_id == answer.id
    text = said(client, messages, temperature=0)[0]
    assert text
    assert said(client, messages, temperature=0, stop=[text[3:6]]) == [
        text[: text.index(text[3:6])]
    ]


def test_a_streamed_answer_joins_to_the_whole(client: OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "bundled",
        "seed": 3,
        "max_completion_tokens": 15,
        "n": 2,
        "messages": [{"role": "user", "content": "def f("}],
    }
    whole = client.chat.completions.create(**asked)
    texts, ends, roles, usage = ["", ""], ["", ""], ["", ""], None
    with client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ) as stream:
        for chunk in stream:
            usage = chunk.usage
            for choice in chunk.choices:
                assert not ends[choice.index]
                assert roles[choice.index] or choice.delta.role
                roles[choice.index] += choice.delta.role or ""
                texts[choice.index] += choice.delta.content or ""
                ends[choice.index] += choice.finish_reason or ""
    assert texts == [c.message.content for c in whole.choices]
    assert ends == [c.finish_reason for c in whole.choices]
    assert roles == ["assistant"] * 2
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.total_tokens == whole.usage.total_tokens


def test_an_answer_may_be_begun_for_the_model(bundled: Serving) -> None:
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "def add(a"},
    ]
    body = {"messages": messages, "continue_final_message": True, **GREEDY}
    first = bundled.post("chat/completions", **body).json()
    assert first["choices"][0]["message"]["content"]
    ids = bundled.llm.render(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert first["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"n": 0}, "n", None),
        ({"temperature": -1}, "temperature", None),
        ({"top_p": 2}, "top_p", None),
        ({"max_tokens": 0}, "max_tokens", None),
        ({"prompt": ""}, "prompt", None),
        ({"prompt": [[99_999]]}, "prompt", None),
        ({"prompt": "a " * 3000}, "prompt", "context_length_exceeded"),
        ({"prompt": ["ok", "a " * 3000]}, "prompt", "context_length_exceeded"),
        ({"stop": [""]}, "stop", None),
        ({"stop": ["a"] * 17}, "stop", None),
        ({"logprobs": 21}, "logprobs", None),
        ({"logprobs": 1, "echo": True}, "logprobs", None),
        ({"best_of": 3}, "best_of", None),
        ({"suffix": "x"}, "suffix", None),
        ({"presence_penalty": 1}, "presence_penalty", None),
        ({"extra_body": {"stop_token_ids": [99_999]}}, "stop_token_ids", None),
        ({"extra_body": {"top_k": -5}}, "top_k", None),
        ({"extra_body": {"foo": 1}}, "foo", None),
        ({"extra_body": {"min_p": 2}}, "min_p", None),
    ],
)
def test_errors_of_completions(
    client: OpenAI, fields: dict[str, Any], param: str, code: str | None
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(
                **{"model": "bundled", "prompt": "x", "stream": stream, **fields}
            )
        assert (caught.value.param, caught.value.code) == (param, code)
        assert caught.value.type == "invalid_request_error"


def test_errors_of_conversations(client: OpenAI) -> None:
    image = {"type": "image_url", "image_url": {"url": "http://x"}}
    for messages, param, code in (
        ([{"role": "user", "content": [image]}], "messages[0].content.type", None),
        (
            [{"role": "user", "content": "a " * 3000}],
            "messages",
            "context_length_exceeded",
        ),
        ([], "messages", None),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            said(client, messages)
        assert (caught.value.param, caught.value.code) == (param, code)
    hello: Any = [{"role": "user", "content": "x"}]
    with pytest.raises(openai.BadRequestError, match="tools: is not supported"):
        said(client, hello, tools=[{"type": "function", "function": {"name": "f"}}])
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=hello)
    assert missing.value.code == "model_not_found"


def test_many_at_once_through_the_async_sdk(bundled: Serving) -> None:
    async def all_of_them() -> tuple[list[str], list[str]]:
        async with AsyncOpenAI(
            base_url=f"{bundled.url}/v1", api_key="x", max_retries=0
        ) as client:

            async def one(i: int) -> str:
                asked: dict[str, Any] = {
                    "model": "bundled",
                    "prompt": f"def f{i}(",
                    "seed": i,
                    "max_tokens": 10,
                }
                if i % 2:
                    text: str = (await client.completions.create(**asked)).choices[0].text
                    return text
                stream = await client.completions.create(**asked, stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            together = list(await asyncio.gather(*map(one, range(12))))
            return together, [await one(i) for i in range(12)]

    together, alone = asyncio.run(all_of_them())
    assert together == alone


def test_an_api_key(folder: str) -> None:
    with serving(folder, service={"api_key": "secret"}, **{**SLOW, "step": 0}) as served:
        url = f"{served.url}/v1"
        with OpenAI(base_url=url, api_key="secret", max_retries=0) as right:
            assert right.completions.create(
                model="tiny", prompt="x", max_tokens=1
            ).choices
        with OpenAI(base_url=url, api_key="Secret", max_retries=0) as wrong:
            with pytest.raises(openai.AuthenticationError) as caught:
                wrong.models.list()
            assert caught.value.code == "invalid_api_key"
        assert served.get("/v1/models").status_code == 401
        assert served.get("/v1/nonsense").status_code == 401
        odd = {"authorization": b"Bearer \xff"}
        # Httpx takes bytes too.
        assert served.http.get(f"{url}/models", headers=odd).status_code == 401  # type: ignore[arg-type]
        assert served.get("/health").status_code == 200
        assert served.get("/metrics").status_code == 200


# --- the rest of the interface ----------------------------------------------------------


def test_health_metrics_and_version(bundled: Serving) -> None:
    assert bundled.get("/health").json() == {"status": "ok"}
    assert bundled.get("/healthz").status_code == 200
    assert bundled.get("/version").json() == {"version": "0.1.0"}
    found = bundled.get("/metrics")
    assert found.headers["content-type"].startswith("text/plain")
    assert 'minfer_generation_tokens_total{model_name="bundled"}' in found.text
    accept = {"accept": "application/openmetrics-text"}
    assert bundled.http.get(f"{bundled.url}/metrics", headers=accept).text.endswith(
        "# EOF\n"
    )


def test_an_answer_does_not_wait_for_the_receipt_of_its_first_packet(
    slow: Serving,
) -> None:
    times = []
    for _ in range(15):
        started = time.monotonic()
        assert slow.get("/version").status_code == 200
        times.append(time.monotonic() - started)
    assert min(times) < 0.03  # 3 ms on an idle machine; each 44 without TCP_NODELAY


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/", 404),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/completions", 405),
        ("POST", "/health", 405),
    ],
)
def test_a_wrong_address_has_openais_shape(
    slow: Serving, method: str, path: str, status: int
) -> None:
    found = slow.http.request(method, slow.url + path)
    assert found.status_code == status
    assert found.json()["error"]["type"] == "invalid_request_error"


def test_a_broken_engine_is_told_and_unhealthy(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(folder, **SLOW) as served:
        stream = served.http.stream(
            "POST",
            f"{served.url}/v1/completions",
            json={"prompt": "x", "max_tokens": 500, "stream": True, "ignore_eos": True},
        )
        with stream as answer:
            lines = answer.iter_lines()
            next(events(lines))
            monkeypatch.setattr(served.llm.worker.driver, "turn", lambda: 1 / 0)
            rest = [line for line in lines if line]
        error = json.loads(rest[-1].removeprefix("data: "))["error"]
        assert (error["type"], error["code"]) == ("server_error", "engine_dead")
        health = served.get("/healthz")
        assert health.status_code == 503
        assert "ZeroDivisionError" in health.json()["status"]
        refused = served.post("completions", prompt="x")
        assert (refused.status_code, refused.json()["error"]["code"]) == (
            503,
            "engine_dead",
        )


def test_an_engine_that_makes_no_progress_is_unhealthy(folder: str) -> None:
    with serving(folder, service={"stall": 0.2}, **SLOW) as served:
        executor: Any = served.llm.worker.driver.executor
        assert served.post("completions", prompt="x", max_tokens=3).status_code == 200
        executor.seconds = 0.5
        thread = threading.Thread(
            target=served.post,
            args=("completions",),
            kwargs={"prompt": "x", "max_tokens": 2},
        )
        thread.start()
        seen = set()
        while thread.is_alive():
            seen.add(served.get("/health").status_code)
        thread.join()
        assert seen == {200, 503}
        assert served.get("/health").status_code == 200


def test_steps_that_fail_are_a_server_error(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(
        folder, executor="oracle", num_gpu_blocks_override=64, max_model_len=99
    ) as served:
        broken = served.llm.worker.driver.executor
        assert isinstance(broken, Oracle)
        monkeypatch.setattr(
            broken, "collect", lambda: broken.fail("device error", halfway=False)
        )
        for stream in (False, True):
            found = served.post("completions", prompt="x", stream=stream)
            assert found.status_code == 500
            error = found.json()["error"]
            assert (error["type"], error["code"]) == ("server_error", "engine_error")
            assert "device error" in error["message"]
        monkeypatch.undo()
        assert served.post("completions", prompt="x").status_code == 200


def test_a_server_that_stops_tells_its_clients_during_a_step(folder: str) -> None:
    with serving(folder, **{**SLOW, "step": 1.0}) as served:
        answers: list[httpx.Response] = []
        thread = threading.Thread(
            target=lambda: answers.append(
                served.post("completions", prompt="x", max_tokens=99)
            )
        )
        thread.start()
        served.until(lambda: bool(served.turns))
        served.service.close()
        thread.join()
        assert len(served.turns) <= 2  # of 100
        assert answers[0].status_code == 503
        assert answers[0].json()["error"]["message"] == "the server is shutting down"
        assert served.get("/health").json() == {"status": "the server is shutting down"}
        assert served.post("completions", prompt="x").status_code == 503
        served.idle()


def test_a_full_line_is_503_with_retry_after(folder: str) -> None:
    with serving(folder, max_num_seqs=1, max_waiting=2, **SLOW) as served:
        body = {"prompt": "x", "max_tokens": 5000, "ignore_eos": True}

        def one_runs(line: int) -> bool:
            state = served.llm.worker.driver.state
            return (len(state.running), len(state.waiting)) == (1, line)

        links = []
        for count in range(3):
            links.append(asking(served, json.dumps(body).encode()))
            served.until(partial(one_runs, count))
        found = served.post("completions", **body)
        assert (found.status_code, found.headers["retry-after"]) == (503, "1")
        assert found.json()["error"]["code"] == "overloaded"
        for link in links:
            link.close()
        served.idle()
        assert served.post("completions", prompt="x", max_tokens=1).status_code == 200


# --- bad input, beside a neighbour ------------------------------------------------------


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def asking(served: Serving, data: bytes, *, sent: int | None = None) -> socket.socket:
    """A connection on which a completion was asked for, or so many bytes of
    it were sent.
    """
    link = socket.create_connection(("127.0.0.1", served.port))
    link.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(data) + data[:sent])
    return link


def raw(
    served: Serving,
    data: bytes,
    *,
    path: str = "completions",
    length: int | None = None,
    media: str = "application/json",
    more: str = "",
) -> tuple[int, Any]:
    """Send a body as it is; returns status and parsed answer."""
    head = (
        f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\nContent-Type: {media}\r\n{more}"
        f"Content-Length: {len(data) if length is None else length}\r\n\r\n"
    )
    return exchange(served, head.encode() + data)


def exchange(served: Serving, data: bytes) -> tuple[int, Any]:
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as link:
        link.sendall(data)
        got = b""
        while b"\r\n\r\n" not in got:
            got += link.recv(65536)
        head, _, body = got.partition(b"\r\n\r\n")
        size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        while len(body) < size:
            body += link.recv(65536)
    return int(head.split()[1]), json.loads(body)


NEIGHBOUR = {
    "prompt": "neighbour",
    "max_tokens": 40,
    "ignore_eos": True,
    "seed": 1,
    "stream": True,
}


@pytest.fixture(scope="module")
def quiet(slow: Serving) -> list[str]:
    """What the neighbour gets when it is alone."""
    answer = slow.post("completions", **NEIGHBOUR)
    return [e["choices"][0]["text"] for e in events(iter(answer.text.split("\n")))]


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
        {"data": b"", "length": 100_000_000, "more": "Expect: 100-continue\r\n"},
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


@pytest.mark.parametrize(("status", "asked"), BAD.values(), ids=BAD)
def test_bad_input_harms_nobody_else(
    slow: Serving, quiet: list[str], status: int, asked: dict[str, Any]
) -> None:
    url = f"{slow.url}/v1/completions"
    with contextlib.ExitStack() as stack:
        with slow.after(steps=5):
            neighbour = stack.enter_context(slow.http.stream("POST", url, json=NEIGHBOUR))
            stream = events(neighbour.iter_lines())
            got = [next(stream)["choices"][0]["text"]]
            found, said = raw(slow, **asked)
            assert len(slow.llm.worker.jobs) == 1
        got += [event["choices"][0]["text"] for event in stream]
    assert found == status
    error = said["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert "".join(got) == "".join(quiet)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_100_megabytes(slow: Serving, quiet: list[str], chunked: bool) -> None:
    size = 100_000_000
    piece = b"a" * 1_000_000
    if chunked:
        parts = [HEAD + b"Transfer-Encoding: chunked\r\n\r\n"]
        parts += [b"%x\r\n%b\r\n" % (len(piece), piece)] * 100 + [b"0\r\n\r\n"]
    else:
        parts = [HEAD + b"Content-Length: %d\r\n\r\n" % size, *[piece] * 100]
    with slow.http.stream("POST", f"{slow.url}/v1/completions", json=NEIGHBOUR) as beside:
        stream = events(beside.iter_lines())
        got = [next(stream)["choices"][0]["text"]]
        found, said = exchange(slow, b"".join(parts))
        got += [event["choices"][0]["text"] for event in stream]
    assert found == 413
    assert "more than 4194304 bytes" in said["error"]["message"]
    assert "".join(got) == "".join(quiet)


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no') }}", "{% for", "{{ 1 / 0 }}", "{{ x.y.z }}"]
)
def test_a_chat_template_that_fails(
    bundled: Serving, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundled.llm.tokenizer, "chat_template", template)
    found = bundled.post("chat/completions", messages=[{"role": "user", "content": "x"}])
    assert found.status_code == 400
    assert found.json()["error"]["param"] == "messages"
    assert "template" in found.json()["error"]["message"]


def test_template_arguments_cannot_take_the_place_of_ours(bundled: Serving) -> None:
    for name in (
        "messages",
        "template",
        "tools",
        "special_tokens",
        "add_generation_prompt",
    ):
        found = bundled.post(
            "chat/completions",
            messages=[{"role": "user", "content": "x"}],
            max_tokens=1,
            chat_template_kwargs={name: "x"},
        )
        assert found.status_code in (200, 400)


# --- clients that go away ---------------------------------------------------------------


def test_a_client_that_goes_away_is_cancelled(folder: str) -> None:
    with serving(folder, **SLOW) as served:
        whole = served.available()
        body = json.dumps(
            {"prompt": "x" * 50, "max_tokens": 50_000, "ignore_eos": True}
        ).encode()
        streamed = body[:-1] + b', "stream": true, "n": 3}'

        def ran(turns: int) -> bool:
            return len(served.turns) > turns

        for data in (body, streamed, body, streamed):
            link = asking(served, data)
            before = len(served.turns)
            served.until(partial(ran, before + 10))
            assert served.available() < whole
            link.close()
            left = len(served.turns)
            served.idle()
            # Noticed at once, and gone from the engine at the turn after that.
            assert len(served.turns) - left < 1000
            assert served.turns[-1][1].state.blocks.available == whole
        assert served.cancelled() == [True] * 4


def test_a_client_that_goes_away_while_its_prompts_are_prepared(folder: str) -> None:
    with serving(folder, **SLOW) as served:
        data = json.dumps({"prompt": "x" * (LONG + 1000), "max_tokens": 50_000}).encode()
        for sent in (None, 100, 0):
            asking(served, data, sent=sent).close()
        assert served.post("completions", prompt="x", max_tokens=2).status_code == 200
        served.idle()
        assert served.available() == 4000


def test_half_of_a_crowd_leaves_and_the_others_do_not_notice(folder: str) -> None:
    found = compared(folder, clients=32, seed=4)
    assert found.differing == []
    assert found.leaving == 16
    assert (
        found.cancelled == found.taken
    )  # each gave all back within two turns of its Cancel
    assert found.cancelled >= 5  # turns; several may leave in one
    assert found.left_over == 0


def test_prompts_of_one_answer_do_not_overtake_each_other_at_a_slow_client() -> None:
    sent: list[Any] = []
    body = json.dumps({"prompt": [[5], [6]], "stream": True, "max_tokens": 1}).encode()
    head = [(b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": head,
        "query_string": b"",
        "root_path": "",
    }
    inbox = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return inbox.pop() if inbox else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            await asyncio.sleep(
                0.3
            )  # the last answer on the connection is still to be read
        sent.append(message)

    with contextlib.closing(AsyncLLM(executor="dry", max_num_seqs=4)) as llm:
        asyncio.run(Service(llm, ["dry"])(scope, receive, send))
    assert [message["type"][14:] for message in sent] == ["start", "body", "body"]
    assert [message["more_body"] for message in sent[1:]] == [True, False]
    said = b"".join([message["body"] for message in sent[1:]])
    assert said.count(b'"finish_reason": "length"') == 2
