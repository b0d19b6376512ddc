"""A recorded session of Codex, sent again: its requests are taken, and its history is
found in the prefix cache.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.effects.scripted import TEMPLATE, hermes
from tests.effects.served import Serving
from tests.effects.serving.codex.recording import Recording, filled, without_prose
from tests.effects.serving.scripted_model import agent_server, script

SESSION = Path(__file__).parent / "session.json"
LEAST_SHARE = 0.95  # of the history, in the prefix cache
FIRST_REQUESTS = json.loads((SESSION.parent / "first_requests.json").read_text())
CUSTOM_TOOLS = {
    "gpt-5.5": "apply_patch",
    "gpt-5.6-sol": "functions__exec",
    "gpt-6.2-sol": "functions__exec",
}
_ANSWERED = ("reasoning", "function_call")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    template = TEMPLATE + "{% if false %}</think>{% endif %}"
    with agent_server(tmp_path_factory.mktemp("session") / "m", template) as server:
        yield server


def is_of_an_answer(item: dict[str, Any]) -> bool:
    return item["type"] in _ANSWERED or item.get("role") == "assistant"


def continued(
    items: list[Any], answer: Sequence[dict[str, Any]], later: Sequence[dict[str, Any]]
) -> list[Any]:
    """Items with an answer, as Codex sends it back, and with what was recorded then."""
    back = [
        {name: value for name, value in item.items() if name != "id"} for item in answer
    ]
    calls = [item["call_id"] for item in back if "call_id" in item]
    later_items = [dict(item) for item in later if not is_of_an_answer(item)]
    for item in later_items:
        if item["type"] == "function_call_output":
            item["call_id"] = calls.pop(0)
    assert not calls
    return [*items, *back, *later_items]


@pytest.mark.long
def test_the_history_is_in_the_prefix_cache(server: Serving) -> None:
    session = Recording.read(SESSION)
    bodies = list(session.bodies())
    items = bodies[0]["input"]
    known_tokens, shares = 0, []
    with script(server, session.texts):
        for number, body in enumerate(bodies):
            request = {**body, "input": items, "stream": False}
            response = server.post("responses", **request)
            assert response.status_code == 200, response.text
            answer = response.json()
            usage = answer["usage"]
            if known_tokens:
                shares.append(
                    usage["input_tokens_details"]["cached_tokens"] / known_tokens
                )
            known_tokens = usage["total_tokens"]
            if number + 1 < len(bodies):
                later = bodies[number + 1]["input"][session.counts[number] :]
                items = continued(items, answer["output"], later)
    assert len(shares) == len(bodies) - 1
    assert min(shares) >= LEAST_SHARE, shares


def test_the_first_request_names_its_hints(server: Serving) -> None:
    session = Recording.read(SESSION)
    with script(server, session.texts[:1]):
        response = server.post("responses", **next(session.bodies()))
    assert response.status_code == 200, response.text
    assert set(response.headers["x-minfer-ignored"].split(", ")) == {
        "prompt_cache_key",
        "reasoning.summary",
        "tools.web_search",
    }


@pytest.mark.parametrize("model", FIRST_REQUESTS)
def test_first_requests_for_other_models_are_taken(server: Serving, model: str) -> None:
    """They have custom tools, and tools in items."""
    request = {**filled(FIRST_REQUESTS[model]), "model": "tiny"}
    name = CUSTOM_TOOLS[model]
    with script(server, [hermes((name, {"input": "x\n"}))]):
        response = server.post("responses", **{**request, "stream": False})
    assert response.status_code == 200, response.text
    (call,) = response.json()["output"]
    space, _, own_name = name.rpartition("__")
    assert (call["type"], call["name"]) == ("custom_tool_call", own_name)
    assert call.get("namespace", "") == space


def test_prose_is_replaced_by_text_of_its_length() -> None:
    item = {"type": "message", "content": [{"text": "some prose", "n": 5}]}
    recorded_item = without_prose(item)
    assert recorded_item == {"type": "message", "content": [{"text": "~10", "n": 5}]}
    refilled = filled(recorded_item)
    assert len(refilled["content"][0]["text"]) == len("some prose")
    assert refilled["content"][0]["text"] != "some prose"
