"""Old reasoning and old results are left out of the prompt, and the answer says so."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic.types.beta import BetaContextManagementResponse

from minfer.effects.serving.anthropic.context_edits import CLEARED
from tests.effects.scripted import say, write_talker
from tests.effects.served import Serving, serving
from tests.effects.serving.anthropic.helpers import body, refused

TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("f", "g")]
CLEAR = {"type": "clear_tool_uses_20250919"}
FORGET = {"type": "clear_thinking_20251015"}


def conversation(uses: int) -> list[dict[str, Any]]:
    """A conversation with `uses` calls, each with reasoning and a result."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "begin"}]
    for number in range(uses):
        use = {"type": "tool_use", "id": f"t{number}", "input": {"a": "y" * 50}}
        result = {"type": "tool_result", "tool_use_id": f"t{number}"}
        thought = {"type": "thinking", "thinking": f"thought {number}", "signature": ""}
        content = [thought, {**use, "name": "fg"[number % 2]}]
        answered = {**result, "content": f"result {number} {'x' * 100}"}
        messages += [
            {"role": "assistant", "content": content},
            {"role": "user", "content": [answered]},
        ]
    return messages


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    path = write_talker(tmp_path_factory.mktemp("talker"))
    with contextlib.ExitStack() as stack:
        yield stack.enter_context(serving(path, executor="dry"))


def edited(talker: Serving, *edits: dict[str, Any], uses: int = 5) -> tuple[str, Any]:
    """The prompt after edits, and what they have done."""
    fields = {"messages": conversation(uses), "tools": TOOLS}
    request = body(**fields, context_management={"edits": list(edits)})
    prompt = request.render_edited(talker.llm)
    assert talker.llm.tokenizer is not None
    text = talker.llm.tokenizer.decode(prompt.ids, skip_special_tokens=False)
    removed = sum(edit["cleared_input_tokens"] for edit in prompt.applied)
    assert prompt.original_tokens - removed == len(prompt.ids)
    response = {"applied_edits": prompt.applied}
    BetaContextManagementResponse.model_validate(response, strict=True)
    return text, prompt.applied


def above(number: int, kind: str = "tool_uses") -> dict[str, Any]:
    return {"trigger": {"type": kind, "value": number}}


def results_in(text: str) -> list[int]:
    return [number for number in range(9) if f"result {number}" in text]


def test_old_results_are_replaced(talker: Serving) -> None:
    text, applied = edited(talker, {**CLEAR, **above(4)})
    assert results_in(text) == [2, 3, 4]
    assert text.count(CLEARED) == 2
    (edit,) = applied
    assert edit["type"] == CLEAR["type"]
    assert edit["cleared_tool_uses"] == 2
    assert edit["cleared_input_tokens"] > 0
    assert text.count("y" * 50) == 5


@pytest.mark.parametrize(
    "edit",
    [
        above(5),
        above(100_000, "input_tokens"),
        {},
        {**above(1), "keep": {"type": "tool_uses", "value": 5}},
        {**above(1), "clear_at_least": {"type": "input_tokens", "value": 100_000}},
        {**above(1), "exclude_tools": ["f", "g"]},
    ],
)
def test_nothing_is_cleared_before_its_time(
    talker: Serving, edit: dict[str, Any]
) -> None:
    text, applied = edited(talker, {**CLEAR, **edit})
    assert applied == []
    assert results_in(text) == [0, 1, 2, 3, 4]


def test_which_are_cleared(talker: Serving) -> None:
    keep_one = {"keep": {"type": "tool_uses", "value": 1}}
    text, _ = edited(talker, {**CLEAR, **above(1, "input_tokens"), **keep_one})
    assert results_in(text) == [4]
    text, _ = edited(talker, {**CLEAR, **above(1), **keep_one, "exclude_tools": ["f"]})
    assert results_in(text) == [0, 2, 4]
    text, _ = edited(talker, {**CLEAR, **above(1), **keep_one, "clear_tool_inputs": True})
    assert text.count("y" * 50) == 1
    text, _ = edited(
        talker, {**CLEAR, **above(1), **keep_one, "clear_tool_inputs": ["g"]}
    )
    assert text.count("y" * 50) == 3


@pytest.mark.parametrize(
    ("keep", "num_kept"),
    [
        ({}, 1),
        ({"keep": "all"}, 5),
        ({"keep": {"type": "all"}}, 5),
        ({"keep": {"type": "thinking_turns", "value": 2}}, 2),
    ],
)
def test_old_reasoning_is_left_out(
    talker: Serving, keep: dict[str, Any], num_kept: int
) -> None:
    text, applied = edited(talker, {**FORGET, **keep})
    assert text.count("thought ") == num_kept
    assert [edit["cleared_thinking_turns"] for edit in applied] == [5 - num_kept] * (
        num_kept < 5
    )


def test_the_answer_reports_edits(talker: Serving) -> None:
    say(talker.llm, "done")
    request: dict[str, Any] = {
        "messages": conversation(5),
        "tools": TOOLS,
        "max_tokens": 20,
        "temperature": 0,
    }
    management = {"edits": [FORGET, {**CLEAR, **above(1)}]}
    answer_json = talker.post("messages", **request, context_management=management).json()
    applied = answer_json["context_management"]["applied_edits"]
    assert [edit["type"] for edit in applied] == [FORGET["type"], CLEAR["type"]]
    answer = talker.post(
        "messages", **request, context_management=management, stream=True
    )
    (last,) = (line for line in answer.text.split("\n") if '"message_delta"' in line)
    streamed = json.loads(last.removeprefix("data: "))["context_management"]
    assert streamed == {"applied_edits": applied}
    plain = talker.post("messages", **request).json()
    assert "context_management" not in plain


def test_counting_says_how_many_there_were(talker: Serving) -> None:
    fields = {"messages": conversation(5), "tools": TOOLS}
    all_tokens = talker.post("messages/count_tokens", **fields).json()
    management = {"edits": [FORGET]}
    counted = talker.post(
        "messages/count_tokens", **fields, context_management=management
    ).json()
    original = {"original_input_tokens": all_tokens["input_tokens"]}
    assert counted["context_management"] == original
    assert counted["input_tokens"] < all_tokens["input_tokens"]


@pytest.mark.parametrize(
    ("edit", "param"),
    [
        (5, ""),
        ({"type": "compact_20260112"}, ".type"),
        ({"type": 5}, ".type"),
        ({**CLEAR, "keep": 3}, ".keep"),
        ({**CLEAR, "keep": {"type": "turns", "value": 3}}, ".keep.type"),
        ({**CLEAR, "trigger": {"type": "tool_uses", "value": "3"}}, ".trigger.value"),
        ({**CLEAR, "exclude_tools": "f"}, ".exclude_tools"),
        ({**CLEAR, "colour": "f"}, ".colour"),
        ({**FORGET, "keep": {"type": "thinking_turns", "value": 0}}, ".keep.value"),
        ({**FORGET, "keep": "some"}, ".keep"),
    ],
)
def test_what_makes_no_sense(edit: Any, param: str) -> None:
    error = refused(context_management={"edits": [edit]})
    assert error.param == f"context_management.edits[0]{param}"


def test_two_edits_of_a_type_are_refused() -> None:
    error = refused(context_management={"edits": [CLEAR, FORGET, CLEAR]})
    assert error.param == "context_management.edits[2].type"


def test_results_of_tool_uses_with_one_id_are_kept_together(talker: Serving) -> None:
    messages = conversation(3)
    for message in messages[3:]:  # the second and the third
        block = message["content"][-1]
        block |= {name: "t1" for name in ("id", "tool_use_id") if name in block}
    edit = {**CLEAR, **above(1), "keep": {"type": "tool_uses", "value": 1}}
    request = body(messages=messages, tools=TOOLS, context_management={"edits": [edit]})
    prompt = request.render_edited(talker.llm)
    assert talker.llm.tokenizer is not None
    text = talker.llm.tokenizer.decode(prompt.ids, skip_special_tokens=False)
    assert [f"result {number}" in text for number in range(3)] == [False, True, True]
    assert prompt.applied[0]["cleared_tool_uses"] == 1
