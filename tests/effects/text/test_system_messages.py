"""System messages are all in the prompt, late ones at their place."""

import itertools
import logging
from typing import Any

import pytest

from minfer.effects.text.system_messages import place_system_messages
from minfer.effects.text.template_probe import TemplateProbe
from tests.effects.text.system_templates import SHORT

FRONT = {"role": "system", "content": "front"}
SECOND = {"role": "developer", "content": "second"}
LATE = {"role": "system", "content": "late"}
ASK = {"role": "user", "content": "ask"}
ANSWER = {"role": "assistant", "content": "answer"}
MORE = {"role": "user", "content": "more"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
CALLED: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "c", "content": "result"}
MARKED = "<system-message>\nlate\n</system-message>"
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [FRONT, ASK],
    "two": [FRONT, SECOND, ASK],
    "three": [FRONT, SECOND, {**SECOND, "content": "third"}, ASK],
    "late": [FRONT, ASK, LATE],
    "late, and answered": [FRONT, ASK, LATE, ANSWER, MORE],
    "before a question": [FRONT, ASK, ANSWER, LATE, MORE],
    "two late ones": [FRONT, ASK, ANSWER, LATE, {**LATE, "content": "later"}, MORE],
    "without a first": [ASK, LATE, ANSWER, MORE],
    "in parts": [
        FRONT,
        {"role": "user", "content": [{"type": "text", "text": "ask"}]},
        LATE,
    ],
    "at the end": [FRONT, ASK, ANSWER, LATE],
}


def placed(template: str, chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return place_system_messages(chat, TemplateProbe(SHORT[template], ()))


def texts_of(chat: list[dict[str, Any]]) -> list[str]:
    contents = [message["content"] for message in chat]
    return [
        content if isinstance(content, str) else content[0]["text"]
        for content in contents
    ]


@pytest.mark.parametrize("chat", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("template", SHORT)
def test_every_text_is_shown_at_its_place(
    template: str, chat: list[dict[str, Any]]
) -> None:
    probe = TemplateProbe(SHORT[template], ())
    text = probe.text(placed(template, chat)) or ""
    places = [text.find(shown) for shown in texts_of(chat)]
    assert -1 not in places
    assert places == sorted(places)


@pytest.mark.parametrize("template", SHORT)
def test_a_later_message_leaves_what_was_before_it(template: str) -> None:
    probe = TemplateProbe(SHORT[template], ())
    turns = [FRONT, ASK, ANSWER, MORE, LATE, ANSWER, {**ASK, "content": "last"}]
    for number in range(2, len(turns)):
        before, after = (
            probe.text(placed(template, turns[:n]), {"add_generation_prompt": False})
            for n in (number, number + 1)
        )
        assert (after or "").startswith(before or "-")


def test_what_a_template_shows_is_unchanged() -> None:
    for name, chat in itertools.product(["shows all"], CONVERSATIONS.values()):
        assert texts_of(placed(name, chat)) == texts_of(chat)


def test_a_later_message_is_a_marked_user_turn() -> None:
    later_turn = placed("keeps the first", [FRONT, ASK, ANSWER, LATE, ANSWER])
    assert later_turn == [FRONT, ASK, ANSWER, {"role": "user", "content": MARKED}, ANSWER]
    behind = placed("keeps the first", [FRONT, ASK, LATE])
    assert behind == [FRONT, {"role": "user", "content": f"ask\n\n{MARKED}"}]
    ahead = placed("keeps the first", [FRONT, ASK, ANSWER, LATE, MORE])
    assert ahead[-1] == {"role": "user", "content": f"{MARKED}\n\nmore"}


def test_a_later_message_joins_a_result_where_no_user_may_follow() -> None:
    chat = [FRONT, ASK, CALLED, RESULT, LATE]
    joined = placed("wants turns to alternate", chat)
    assert joined[-1] == {**RESULT, "content": f"result\n\n{MARKED}"}
    assert placed("keeps the first", chat)[-1] == {"role": "user", "content": MARKED}


def test_a_question_joins_a_result_where_no_user_may_follow() -> None:
    chat = [ASK, CALLED, RESULT, MORE]
    joined = {**RESULT, "content": "result\n\nmore"}
    assert placed("wants turns to alternate", chat) == [ASK, CALLED, joined]
    assert placed("keeps the first", chat) == chat


def test_texts_of_leading_messages_join_the_first() -> None:
    chat = [FRONT, SECOND, ASK]
    assert placed("keeps the last", chat)[0]["content"] == "front\n\nsecond"
    assert placed("shows all", chat)[1] == {"role": "system", "content": "second"}


def test_the_log_says_it_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    template = SHORT["keeps the first"] + "{# another one #}"
    for _ in range(2):
        chat = [FRONT, SECOND, ASK, LATE]
        place_system_messages(chat, TemplateProbe(template, ()))
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == 2
    assert "only one leading system message" in logged[0]
    assert "no system messages behind others" in logged[1]
