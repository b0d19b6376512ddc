"""What is told of requests, while they are served and after."""

import json
from collections import Counter
from typing import Any

import pytest

from minfer.effects.serving.observability import records
from tests.effects.served import Serving, events, serving
from tests.effects.serving.raw_requests import NEIGHBOUR


def fetch(served: Serving, name: str) -> Any:
    found = served.get(f"/v1/requests/{name}")
    assert found.status_code == 200
    return found.json()


def ended(served: Serving, name: str, prompts: int = 1) -> Any:
    """The same, once nothing is missing: the client is told before all is noted."""

    def complete() -> bool:
        found = fetch(served, name)
        return found["state"] == "ended" and len(found["prompts"]) == prompts

    served.until(complete)
    return fetch(served, name)


def test_of_one_that_has_ended(bundled: Serving) -> None:
    body = {"prompt": ["def f(", "class A"], "n": 2, "max_tokens": 5, "timing": True}
    answer = bundled.post("completions", **body).json()
    found = ended(bundled, answer["id"], prompts=2)
    assert (found["object"], found["state"]) == ("request", "ended")
    assert (found["endpoint"], found["model"]) == ("/v1/completions", "bundled")
    assert (found["id"], found["request_id"]) == (answer["id"], answer["id"])
    assert found["created"] == answer["created"]
    assert len(found["prompts"]) == 2
    for one, timing in zip(found["prompts"], answer["timing"], strict=True):
        assert one.items() >= timing.items()
        assert len(one["finish_reasons"]) == 2
    usage = answer["usage"]
    sums = {
        name: sum(one[f"{name}_tokens"] for one in found["prompts"])
        for name in ("prompt", "output")
    }
    assert sums == {
        "prompt": usage["prompt_tokens"],
        "output": usage["completion_tokens"],
    }


def test_by_the_ids_that_engines_have_for_parts_of_it(bundled: Serving) -> None:
    body = {"prompt": ["def f(", "class A"], "max_tokens": 5}
    name = bundled.post("completions", **body).json()["id"]
    whole = ended(bundled, name, prompts=2)
    assert fetch(bundled, f"{name}-1") == whole
    assert fetch(bundled, f"{name}-1#7") == whole, "asked for again of another engine"
    assert bundled.get(f"/v1/requests/{name}0-1").status_code == 404


def test_by_the_id_that_the_client_chose(bundled: Serving) -> None:
    url = f"{bundled.url}/v1/chat/completions"
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    answer = bundled.http.post(url, json=body, headers={"x-request-id": "of/mine"}).json()
    found = ended(bundled, "of/mine")
    assert (found["id"], found["request_id"]) == (answer["id"], "of/mine")
    assert found == fetch(bundled, answer["id"])


def test_of_one_that_is_served(slow: Serving) -> None:
    url = f"{slow.url}/v1/completions"
    with slow.http.stream("POST", url, json=NEIGHBOUR) as answer:
        stream = events(answer.iter_lines())
        name = next(stream)["id"]
        with slow.http.stream("POST", url, json={**NEIGHBOUR, "max_tokens": 5}):
            found = fetch(slow, name)
        assert found["state"] == "running"
        (one,) = found["prompts"]
        assert one["finish_reasons"] == [None]
        assert one["cached_tokens"] is None
        assert 0 < one["output_tokens"] < 40
        assert one["ttft"] > 0
    slow.idle()
    (one,) = ended(slow, name)["prompts"]  # it was left
    assert one["finish_reasons"] == ["cancelled"]


def test_of_one_that_came_to_nothing(bundled: Serving) -> None:
    refused = bundled.post("completions", prompt="x " * 5000)
    assert refused.status_code == 400
    name = refused.headers["x-request-id"]
    bundled.until(lambda: fetch(bundled, name)["state"] == "refused")
    found = fetch(bundled, name)
    assert (found["state"], found["prompts"]) == ("refused", [])


def test_an_unknown_request_has_no_record(bundled: Serving) -> None:
    found = bundled.get(f"/v1/requests/{'x' * 500}")
    assert found.status_code == 404
    error = found.json()["error"]
    assert error["code"] == "request_not_found"
    assert len(error["message"]) < 250


def test_texts_are_not_kept(bundled: Serving) -> None:
    answer = bundled.post("completions", prompt="secret = ", max_tokens=2).json()
    emitted = json.dumps(ended(bundled, answer["id"]))
    assert "secret" not in emitted
    assert "text" not in emitted


def test_the_oldest_are_forgotten(
    bundled: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_ENDED_ANSWERS", 2)
    kept = bundled.service.records
    bundled.until(lambda: not kept.live)
    monkeypatch.setattr(kept, "_records", {})
    monkeypatch.setattr(kept, "_counts", Counter())
    monkeypatch.setattr(kept, "_ids", {})
    url = f"{bundled.url}/v1/completions"
    body = {"prompt": "x", "max_tokens": 1}
    for name in ("a", "b", "a", "c"):
        bundled.http.post(url, json=body, headers={"x-request-id": name})
    bundled.until(lambda: not kept.live)
    # The first "a" is gone, and the second one is found.
    found = [bundled.get(f"/v1/requests/{name}").status_code for name in "abc"]
    assert found == [200, 404, 200]
    assert len(kept._records) == len(kept._ids) == 2


def test_a_record_has_the_first_of_many_prompts(
    bundled: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_PROMPTS", 3)
    answer = bundled.post("completions", prompt=["x"] * 5, max_tokens=1).json()
    assert len(ended(bundled, answer["id"], prompts=3)["prompts"]) == 3


@pytest.mark.long
def test_of_one_that_had_drafts() -> None:
    """The second time what the first one was answered is looked up."""
    how = {"method": "suffix", "num_speculative_tokens": 3, "adaptive": False}
    settings: dict[str, Any] = {
        "num_gpu_blocks_override": 400,
        "speculative_config": how,
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
