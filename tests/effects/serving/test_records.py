"""What is told of requests, while they are served and after."""

import json
from collections import Counter
from typing import Any

import pytest

from minfer.effects.serving.observability import records
from tests.effects.served import Serving, events, serving
from tests.effects.serving.raw_requests import NEIGHBOUR


def fetch(served: Serving, name: str) -> Any:
    response = served.get(f"/v1/requests/{name}")
    assert response.status_code == 200
    return response.json()


def ended(served: Serving, name: str, prompts: int = 1) -> Any:
    """The same, once nothing is missing: the client is told before all is noted."""

    def complete() -> bool:
        record = fetch(served, name)
        return record["state"] == "ended" and len(record["prompts"]) == prompts

    served.until(complete)
    return fetch(served, name)


def test_the_record_of_a_request_that_has_ended(bundled: Serving) -> None:
    body = {"prompt": ["def f(", "class A"], "n": 2, "max_tokens": 5, "timing": True}
    answer = bundled.post("completions", **body).json()
    record = ended(bundled, answer["id"], prompts=2)
    assert (record["object"], record["state"]) == ("request", "ended")
    assert (record["endpoint"], record["model"]) == ("/v1/completions", "bundled")
    assert (record["id"], record["request_id"]) == (answer["id"], answer["id"])
    assert record["created"] == answer["created"]
    assert len(record["prompts"]) == 2
    for prompt, timing in zip(record["prompts"], answer["timing"], strict=True):
        assert prompt.items() >= timing.items()
        assert len(prompt["finish_reasons"]) == 2
    usage = answer["usage"]
    sums = {
        name: sum(prompt[f"{name}_tokens"] for prompt in record["prompts"])
        for name in ("prompt", "output")
    }
    assert sums == {
        "prompt": usage["prompt_tokens"],
        "output": usage["completion_tokens"],
    }


def test_a_record_is_found_by_the_ids_of_its_prompts_in_engines(bundled: Serving) -> None:
    body = {"prompt": ["def f(", "class A"], "max_tokens": 5}
    name = bundled.post("completions", **body).json()["id"]
    record = ended(bundled, name, prompts=2)
    assert fetch(bundled, f"{name}-1") == record
    assert fetch(bundled, f"{name}-1#7") == record, "asked for again of another engine"
    assert bundled.get(f"/v1/requests/{name}0-1").status_code == 404


def test_a_record_is_found_by_the_id_that_the_client_chose(bundled: Serving) -> None:
    url = f"{bundled.url}/v1/chat/completions"
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    answer = bundled.http.post(url, json=body, headers={"x-request-id": "of/mine"}).json()
    record = ended(bundled, "of/mine")
    assert (record["id"], record["request_id"]) == (answer["id"], "of/mine")
    assert record == fetch(bundled, answer["id"])


def test_the_record_of_a_running_request(slow: Serving) -> None:
    url = f"{slow.url}/v1/completions"
    with slow.http.stream("POST", url, json=NEIGHBOUR) as answer:
        stream = events(answer.iter_lines())
        name = next(stream)["id"]
        with slow.http.stream("POST", url, json={**NEIGHBOUR, "max_tokens": 5}):
            record = fetch(slow, name)
        assert record["state"] == "running"
        (prompt,) = record["prompts"]
        assert prompt["finish_reasons"] == [None]
        assert prompt["cached_tokens"] is None
        assert 0 < prompt["output_tokens"] < 40
        assert prompt["ttft"] > 0
    slow.idle()
    (prompt,) = ended(slow, name)["prompts"]  # it was left
    assert prompt["finish_reasons"] == ["cancelled"]


def test_the_record_of_a_refused_request(bundled: Serving) -> None:
    refused = bundled.post("completions", prompt="x " * 5000)
    assert refused.status_code == 400
    name = refused.headers["x-request-id"]
    bundled.until(lambda: fetch(bundled, name)["state"] == "refused")
    record = fetch(bundled, name)
    assert (record["state"], record["prompts"]) == ("refused", [])


def test_an_unknown_request_has_no_record(bundled: Serving) -> None:
    response = bundled.get(f"/v1/requests/{'x' * 500}")
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["code"] == "request_not_found"
    assert len(error["message"]) < 250


def test_texts_are_not_kept(bundled: Serving) -> None:
    answer = bundled.post("completions", prompt="secret = ", max_tokens=2).json()
    record_text = json.dumps(ended(bundled, answer["id"]))
    assert "secret" not in record_text
    assert "text" not in record_text


def test_the_oldest_are_forgotten(
    bundled: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_ENDED_ANSWERS", 2)
    kept_records = bundled.service.records
    bundled.until(lambda: not kept_records.live)
    monkeypatch.setattr(kept_records, "_records", {})
    monkeypatch.setattr(kept_records, "_counts", Counter())
    monkeypatch.setattr(kept_records, "_ids", {})
    url = f"{bundled.url}/v1/completions"
    body = {"prompt": "x", "max_tokens": 1}
    for name in ("a", "b", "a", "c"):
        bundled.http.post(url, json=body, headers={"x-request-id": name})
    bundled.until(lambda: not kept_records.live)
    # The first "a" is gone, and the second one is found.
    statuses = [bundled.get(f"/v1/requests/{name}").status_code for name in "abc"]
    assert statuses == [200, 404, 200]
    assert len(kept_records._records) == len(kept_records._ids) == 2


def test_a_record_has_the_first_of_many_prompts(
    bundled: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_PROMPTS", 3)
    answer = bundled.post("completions", prompt=["x"] * 5, max_tokens=1).json()
    assert len(ended(bundled, answer["id"], prompts=3)["prompts"]) == 3


@pytest.mark.long
def test_the_record_of_a_request_with_drafts() -> None:
    """The second time what the first one was answered is looked up."""
    spec_config = {"method": "suffix", "num_speculative_tokens": 3, "adaptive": False}
    settings: dict[str, Any] = {
        "num_gpu_blocks_override": 400,
        "speculative_config": spec_config,
    }
    with serving(executor="oracle", **settings) as served:
        body = {"prompt": "def f(", "max_tokens": 16, "temperature": 0}
        names = [
            served.post("completions", ignore_eos=True, **body).json()["id"]
            for _ in range(2)
        ]
        first, second = (ended(served, name)["prompts"][0] for name in names)
        assert first["accepted_draft_tokens"] <= first["draft_tokens"]
        assert 8 <= second["accepted_draft_tokens"] <= second["draft_tokens"] <= 16
        assert second["output_tokens"] == 16
