"""A request is found by its id, and can be cancelled, at whichever API server
one asks.
"""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from minfer.effects.cluster.engine_client.request_queries import RequestQueries
from minfer.effects.cluster.link import link_messages as wire
from minfer.effects.cluster.link.link_messages import RequestQuery
from minfer.effects.serving.access.api_keys import ApiKey, ApiKeys, digest, read_keys
from minfer.effects.serving.access.server_bounds import ServerBounds
from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.observability import records
from minfer.effects.serving.observability import request_lookup as lookup
from minfer.effects.serving.observability.request_lookup import RequestLookup
from tests.circles import claimed, long
from tests.effects.served import Serving, events, serving
from tests.effects.serving.raw_requests import NEIGHBOUR, SLOW
from tests.effects.serving.test_server import process

BEAMS: dict[str, Any] = {"use_beam_search": True, "best_of": 3, "ignore_eos": True}


def cancelled(served: Serving, name: str, **headers: str) -> httpx.Response:
    return served.http.delete(f"{served.url}/v1/requests/{name}", headers=headers)


def test_a_request_is_cancelled_by_its_id(slow: Serving) -> None:
    url = f"{slow.url}/v1/completions"
    body = {**NEIGHBOUR, "max_tokens": 9000}
    chosen = {"x-request-id": "mine"}
    with slow.http.stream("POST", url, json=body, headers=chosen) as answer:
        lines = answer.iter_lines()
        name = next(events(lines))["id"]
        assert cancelled(slow, "mine", origin="http://elsewhere").status_code == 403
        record = cancelled(slow, "mine").json()
        assert (record["id"], record["cancelled"]) == (name, 1)
        last = [line for line in lines if line][-1]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["message"] == "the request was cancelled"
    assert error["code"] == "cancelled"
    slow.idle()
    slow.until(lambda: not slow.service.records.live)
    assert cancelled(slow, "mine").json()["cancelled"] == 0
    assert cancelled(slow, "nobody's").status_code == 404


def test_a_cancelled_whole_answer_has_a_status_that_is_not_retried(
    slow: Serving,
) -> None:
    responses: list[httpx.Response] = []
    body = {**NEIGHBOUR, "max_tokens": 9000, "stream": False}
    url = f"{slow.url}/v1/completions"

    def post() -> None:
        headers = {"x-request-id": "whole"}
        responses.append(httpx.post(url, json=body, headers=headers, timeout=30))

    thread = threading.Thread(target=post)
    thread.start()
    slow.until(lambda: cancelled(slow, "whole").json().get("cancelled") == 1)
    thread.join()
    assert responses[0].status_code == 499


def test_a_beam_search_is_one_request(slow: Serving) -> None:
    """It is looked up, and cancelled, by one id; nothing of its rounds is left."""
    responses: list[httpx.Response] = []
    body = {"prompt": "x", "max_tokens": 900, **BEAMS}
    url = f"{slow.url}/v1/completions"

    def post() -> None:
        headers = {"x-request-id": "search"}
        responses.append(httpx.post(url, json=body, headers=headers, timeout=30))

    thread = threading.Thread(target=post)
    thread.start()

    def running() -> bool:
        record = slow.get("/v1/requests/search").json()
        return record.get("state") == "running" and len(record["prompts"]) == 1

    slow.until(running)
    slow.until(lambda: slow.llm.worker.driver.state.next_step > 4)
    assert list(slow.llm.frontend.processors)
    assert cancelled(slow, "search").json()["cancelled"] == 1
    thread.join()
    assert responses[0].status_code == 499
    slow.until(lambda: not slow.llm.frontend.searches.live)
    slow.idle()


@pytest.mark.long
def test_a_client_that_leaves_ends_its_beam_search(slow: Serving) -> None:
    body = {"prompt": "x", "max_tokens": 900, **BEAMS}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{slow.url}/v1/completions", json=body, timeout=0.5)
    slow.until(lambda: not slow.llm.frontend.searches.live)
    slow.idle()


class FixedRecords:
    """As an API server's, with what it was asked."""

    def __init__(self, records: dict[str, Any] | None = None) -> None:
        self.known = records or {}

    def find(self, name: str, owner: str) -> Any:
        return self.known.get(name) if owner == "Ann" else None

    cancel = find


def test_other_fronts_are_queried_for_unknown_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lookup, "API_SERVER_REPLY_SECONDS", 0.05)
    sent: list[Any] = []
    api_server_queries = RequestQueries()
    own_records: Any = FixedRecords({"a": {"id": "a"}})
    request_lookup = RequestLookup(own_records)
    request_lookup.join(api_server_queries)

    async def ask() -> list[Any]:
        with pytest.raises(ApiError, match="cannot be reached now"):
            await request_lookup.find(RequestQuery("b", "Ann"))
        api_server_queries.connect(sent.append)
        known_record = await request_lookup.find(RequestQuery("a", "Ann"))
        waiting = asyncio.create_task(request_lookup.find(RequestQuery("b", "Ann", True)))
        await asyncio.sleep(0)
        api_server_queries.take_answer(
            wire.QueryAnswer(sent[0].number, 1, b'{"id": "b"}')
        )
        with pytest.raises(ApiError, match="did not answer in time"):
            await request_lookup.find(RequestQuery("c", "Ann"))
        # The last is no id that could be known.
        return [
            known_record,
            await waiting,
            await request_lookup.find(RequestQuery("x" * 500)),
        ]

    assert asyncio.run(ask()) == [{"id": "a"}, {"id": "b"}, None]
    queries = [sent_query.query for sent_query in sent]
    assert queries == [RequestQuery("b", "Ann", True), RequestQuery("c", "Ann")]
    assert not api_server_queries._pending
    for number, owner in ((7, "Ann"), (8, "Bob")):
        asked = wire.ReceivedQuery(1, number, 2, RequestQuery("a", owner))
        api_server_queries.answer_query(asked, sent.append)
    first, second = wire.QueryAnswer(7, 2, b'{"id": "a"}'), wire.QueryAnswer(8, 2)
    assert sent[2:] == [wire.SendAnswer(1, first), wire.SendAnswer(1, second)]


@pytest.mark.long
def test_each_key_finds_its_own_under_an_id_that_both_have_chosen(folder: str) -> None:
    keys = read_keys(["first", "second", "third"], None)
    with serving(folder, service={"bounds": ServerBounds(keys=keys)}, **SLOW) as served:
        first, second, third = (
            {"x-api-key": key} for key in ("first", "second", "third")
        )

        def send(key: dict[str, str], chosen: str) -> str:
            headers = {**key, "x-request-id": chosen}
            body = {"prompt": "x", "max_tokens": 1}
            url = f"{served.url}/v1/completions"
            answer = served.http.post(url, json=body, headers=headers)
            assert answer.status_code == 200
            return str(answer.json()["id"])

        def found(key: dict[str, str], name: str, method: str = "GET") -> Any:
            url = f"{served.url}/v1/requests/{name}"
            return served.http.request(method, url, headers=key).json().get("id")

        hers, his = send(first, "mine"), send(second, "mine")
        # One key's id is what another key's client has chosen.
        third_id = send(third, hers)
        for method in ("GET", "DELETE"):
            ids = [found(key, "mine", method) for key in (first, second, third)]
            assert ids == [hers, his, None]
            ids = [found(key, hers, method) for key in (first, second, third)]
            assert ids == [hers, None, third_id]


@pytest.mark.parametrize("count", [*long([20]), *claimed([1000])])
def test_every_key_finds_its_own_though_all_choose_one_id(
    folder: str, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(records, "MAX_ENDED_ANSWERS", count)
    key_names = [f"key-{i}" for i in range(count)]
    keys = ApiKeys(tuple(ApiKey(name, digest(name.encode())) for name in key_names))
    settings = {**SLOW, "step": 0}
    with serving(
        folder, service={"bounds": ServerBounds(keys=keys)}, **settings
    ) as served:

        def answer_of(key: str, method: str, path: str, **options: Any) -> Any:
            headers = {"x-api-key": key, "x-request-id": "same"}
            url = served.url + path
            answer = served.http.request(method, url, headers=headers, **options)
            return answer.json().get("id")

        body = {"prompt": "x", "max_tokens": 1}
        path = "/v1/completions"
        names = {key: answer_of(key, "POST", path, json=body) for key in key_names}
        # A key that asks for as many as are remembered takes none of others away.
        for _ in range(count):
            names["key-0"] = answer_of("key-0", "POST", path, json=body)
        for method in ("GET", "DELETE"):
            found_ids = {
                key: answer_of(key, method, "/v1/requests/same") for key in key_names
            }
            assert found_ids == names
        others_ids = {
            key: names[f"key-{count - 1 - i}"] for i, key in enumerate(key_names)
        }
        ids = [
            answer_of(key, "GET", f"/v1/requests/{request_id}")
            for key, request_id in others_ids.items()
        ]
        assert ids == [None] * count


@pytest.mark.long
def test_each_of_two_fronts_knows_what_the_other_has_served() -> None:
    with process("--dry-run", "--api-processes", "2") as (_, url):
        names = [uuid4().hex for _ in range(8)]
        for name in names:  # each on a connection of its own, which is any API server's
            body = {"prompt": "x", "max_tokens": 1}
            headers = {"x-request-id": name}
            answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200
        for name in names:
            for _ in range(3):
                response = httpx.get(f"{url}/v1/requests/{name}")
                assert response.json()["request_id"] == name
        assert httpx.get(f"{url}/v1/requests/nobodys").status_code == 404
        response = httpx.delete(f"{url}/v1/requests/{names[0]}")
        assert response.json()["cancelled"] == 0


@pytest.mark.long
def test_a_running_request_is_cancelled_at_any_front_with_its_own_key(
    tmp_path: Path,
) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps([{"name": name, "key": name} for name in ("ann", "bob")]))
    body = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with process("--api-processes", "2", "--api-keys-file", str(path)) as (_, url):

        def request(method: str, path: str, key: str, **options: Any) -> Any:
            headers = {"x-api-key": key, "x-request-id": "same"}
            return httpx.stream(
                method, url + path, headers=headers, timeout=60, **options
            )

        def answer_of(method: str, key: str) -> Any:
            with request(method, "/v1/requests/same", key) as response:
                return json.loads(response.read())

        with (
            request("POST", "/v1/completions", "ann", json=body) as hers,
            request("POST", "/v1/completions", "bob", json=body) as his,
        ):
            lines = {"ann": hers.iter_lines(), "bob": his.iter_lines()}
            ids = {
                key: next(events(events_of_key))["id"]
                for key, events_of_key in lines.items()
            }
            for key, name in ids.items():
                for _ in range(8):  # each on a connection of its own
                    record = answer_of("GET", key)
                    assert (record["id"], record["state"]) == (name, "running")
            for key, stream_lines in lines.items():
                assert answer_of("DELETE", key)["cancelled"] == 1
                last = [line for line in stream_lines if line][-1]
                error = json.loads(last.removeprefix("data: "))["error"]
                assert error["code"] == "cancelled"
