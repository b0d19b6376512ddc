"""The last form of a conversation has one call in each message, and loses no result."""

from typing import Any

from minfer.effects.text.template_messages import message_forms


def calls(*ids: str) -> dict[str, Any]:
    made_calls = [
        {"id": call_id, "function": {"name": "f", "arguments": {}}} for call_id in ids
    ]
    return {"role": "assistant", "content": "", "tool_calls": made_calls}


def result(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def separate(*chat: dict[str, Any]) -> list[str]:
    """Ids of calls, and results, of the form with one call in each message."""
    *_, last = message_forms(chat)
    return [
        " ".join([call["id"] for call in message.get("tool_calls", [])])
        or message["content"]
        for message in last
    ]


def test_results_follow_their_calls() -> None:
    chat = [calls("a", "b"), result("b", "B"), result("a", "A"), result("a", "A2")]
    assert separate(*chat) == ["a", "A", "A2", "b", "B"]


def test_an_id_is_used_again_in_a_later_answer() -> None:
    first = [calls("a", "b"), result("a", "A"), result("b", "B")]
    second = [calls("a", "b"), result("a", "C"), result("b", "D")]
    third = [calls("a"), result("a", "E")]
    expected = ["a", "A", "b", "B", "a", "C", "b", "D", "a", "E"]
    assert separate(*first, *second, *third) == expected


def test_an_id_is_used_twice_in_one_answer() -> None:
    chat = [calls("a", "a"), result("a", "A"), result("a", "B"), result("a", "C")]
    assert separate(*chat) == ["a", "A", "a", "B", "C"]
