"""A router before backends with different models."""

import json
from typing import Any

import pytest

from minfer.effects.live.adapters.registry import MAX_ADAPTERS, AdapterEntry
from minfer.effects.proxy.backend_models import (
    MAX_CONTEXT_TOKENS,
    MAX_LIST_BYTES,
    BackendModels,
    ModelList,
    read_models,
)
from minfer.effects.serving.request_parsing.model_names import Models
from minfer.effects.setup.lora_settings import MAX_NAME_CHARS
from tests.effects.proxy.fakes import ReceivedRequest, routing, run

MODELS = (["small", "s"], ["large"], ["large"])


def test_requests_go_where_their_model_is() -> None:
    @run
    async def _() -> None:
        async with routing(3, names=MODELS, policy="round_robin") as harness:
            for name in ("small", "s"):
                assert {
                    await harness.answered_by("hi", model=name) for _ in range(4)
                } == {"a"}
            assert {await harness.answered_by("hi", model="large") for _ in range(4)} == {
                "b",
                "c",
            }
            body = {"model": "small", "prompt": "x"}
            answers = [await harness.http.post("/tokenize", json=body) for _ in range(3)]
            assert {answer.json()["by"] for answer in answers} == {"a"}
            answer = await harness.http.get("/v1/models/large")
            assert answer.json()["by"] in ("b", "c")


def test_an_unknown_model_is_refused() -> None:
    @run
    async def _() -> None:
        async with routing(3, names=MODELS) as harness:
            for path in ("/v1/chat/completions", "/tokenize"):
                answer = await harness.http.post(path, json={"model": "other"})
                assert answer.status_code == 404
                error = answer.json()["error"]
                assert (error["code"], error["param"]) == ("model_not_found", "model")
                assert "there is large, s, small" in error["message"]
            assert (await harness.http.get("/v1/models/other")).status_code == 404
            assert not any(backend.seen for backend in harness.backends)


def test_the_list_has_the_models_of_all() -> None:
    @run
    async def _() -> None:
        async with routing(3, names=MODELS) as harness:
            models = (await harness.http.get("/v1/models")).json()
            assert [model["id"] for model in models["data"]] == ["small", "s", "large"]
            assert models["object"] == "list"


def test_a_request_is_not_moved_to_another_model() -> None:
    @run
    async def _() -> None:
        async with routing(3, names=MODELS) as harness:
            asked: list[ReceivedRequest] = []

            async def refuse(request: ReceivedRequest, writer: Any) -> None:
                asked.append(request)
                writer.transport.abort()

            harness.backends[1].answer = harness.backends[2].answer = refuse
            answer = await harness.chat("hi", model="large")
            assert answer.status_code == 502
            assert len(asked) == 2
            assert not harness.backends[0].seen
            await harness.backends[0].stop()
            await harness.health(harness.backends[0].url)
            answer = await harness.chat("hi", model="small")
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "no_backend"


def test_with_equal_models_the_backends_decide() -> None:
    @run
    async def _() -> None:
        async with routing(2, names=[["m"], ["m"]]) as harness:
            assert await harness.answered_by("hi", model="other") in ("a", "b")


def test_a_backend_that_names_no_model_may_have_any() -> None:
    models = BackendModels(["a", "b", "c", "d"])
    for backend, name in (("a", "x"), ("b", "y")):
        models.note(backend, ModelList(frozenset([name])))
    models.note("c", ModelList())
    assert models.backends_of("x") == ("a", "c", "d")
    assert models.backends_of("z") == ("c", "d")
    assert models.backends_of("") is None


@pytest.mark.parametrize(
    ("answer", "names", "context"),
    [
        ({"status": "ready", "models": ["a", "b", 5]}, {"a", "b"}, 0),
        ({"data": [{"id": "a"}, {"id": 5}, {}, "x"]}, {"a"}, 0),
        ({"data": [{"id": "a", "max_model_len": 9}, {"id": "b"}]}, {"a", "b"}, 9),
        ({"data": [{"id": "a", "max_model_len": "9"}]}, {"a"}, 0),
        ({"data": [{"id": "a", "max_model_len": -9}]}, {"a"}, 0),
        ({"data": [{"id": "a", "max_model_len": 2**62}]}, {"a"}, MAX_CONTEXT_TOKENS),
        (None, set(), 0),
        ([], set(), 0),
        ("a", set(), 0),
        ({"data": {}}, set(), 0),
        ({"error": "no key"}, set(), 0),
    ],
)
def test_models_are_in_answers_of_several_forms(
    answer: Any, names: set[str], context: int
) -> None:
    assert read_models(json.dumps(answer).encode()) == ModelList(
        frozenset(names), context
    )


@pytest.mark.parametrize("answer", [b"", b"{", b"[" * 100_000, b"\xff"])
def test_an_answer_that_is_no_json_names_none(answer: bytes) -> None:
    assert read_models(answer) == ModelList()


def test_a_backend_with_adapters_may_have_any_name() -> None:
    models = BackendModels(["a", "b"])
    own = frozenset(["base"])
    models.note("a", ModelList(own | {"sql"}, takes_adapters=True, own=own))
    models.note("b", ModelList(own, takes_adapters=True, own=own))
    assert models.backends_of("sql") == models.backends_of("chat") == ("a", "b")
    names = ["sql", "chat", "base", "", "x" * 201]
    assert [models.adapter(name) for name in names] == ["sql", "chat", "", "", ""]
    models.note("b", ModelList(frozenset(["other"])))
    assert models.backends_of("chat") == ("a",)
    ready = {"models": ["base"], "adapters": {"named": 1}}
    assert read_models(json.dumps(ready).encode()) == ModelList(own, takes_adapters=True)


def test_a_list_of_as_many_adapters_as_can_be_is_read() -> None:
    name = "x" * MAX_NAME_CHARS
    entry = AdapterEntry(name=name, digest="", folder="", origin=name, rank=1, size=1)
    listed = Models(["base"], 0, 2**20).list_json([entry] * MAX_ADAPTERS)
    assert len(json.dumps(listed)) < MAX_LIST_BYTES
