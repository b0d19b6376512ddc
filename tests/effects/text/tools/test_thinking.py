"""Reasoning before answers, and before calls."""

import pytest

from minfer.effects.text.tools.thinking import BRACKETS, THINK
from tests.effects.text.tools.cuts import found

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_comes_before_the_answer(opened: bool) -> None:
    text = "\n<think>\nSo 1 < 2.\n\nYes.\n</think>\n\nIt is.\n"
    parsed = found(text, None, "think", opened=opened)
    assert (parsed.reasoning, parsed.content) == ("So 1 < 2.\n\nYes.", "It is.\n")


def test_reasoning_that_the_template_opened() -> None:
    parsed = found("Hm,\n</think>\n\nit is.", None, "think", opened=True)
    assert (parsed.reasoning, parsed.content) == ("Hm,", "it is.")


def test_reasoning_and_calls() -> None:
    parsed = found(f"<think>\nI </tool_call> add.\n</think>\n\n{CALL}", "hermes", "think")
    assert (parsed.reasoning, parsed.content) == ("I </tool_call> add.", "")
    assert parsed.parsed == [("add", {"a": 1})]


CODER = "<tool_call><function=add><parameter=a>1</parameter></function></tool_call>"
DEEP = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"
    '{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)


@pytest.mark.parametrize(
    ("form", "call"),
    [
        ("hermes", CALL),
        ("qwen3_coder", CODER),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]'),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}'),
        ("deepseek_v31", DEEP),
        ("llama3_json", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}'),
    ],
)
@pytest.mark.parametrize("opened", [False, True])
def test_a_call_within_reasoning_that_nothing_closes_is_one(
    form: str, call: str, opened: bool
) -> None:
    opens = "" if opened else "<think>"
    parsed = found(f"{opens}I add.\n{call}\n", form, "think", opened=opened)
    assert (parsed.reasoning, parsed.content) == ("I add.", "")
    assert (parsed.parsed, parsed.whole) == ([("add", {"a": 1})], [True])
    parsed = found(f"{opens}I add.\n{call}\n</think>No.", form, "think", opened=opened)
    assert (parsed.reasoning, parsed.content) == (f"I add.\n{call}", "No.")
    assert parsed.calls == []


def test_a_marker_that_reasoning_speaks_of_begins_no_call() -> None:
    thought = "I write <tool_call> and then JSON."
    assert found(f"<think>{thought}", "hermes", "think").reasoning == thought
    parsed = found(f"<think>{thought} {CALL} {CALL} So", "hermes", "think")
    assert (parsed.reasoning, parsed.content, len(parsed.calls)) == (thought, "So", 2)
    cut = found(f"<think>Hm. {CALL[:-15]}", "hermes", "think")
    assert (cut.reasoning, cut.calls, cut.whole) == ("Hm.", [("add", '{"a": 1')], [False])


def test_reasoning_that_is_empty_or_breaks_off() -> None:
    parsed = found("<think>\n\n</think>\n\nYes", None, "think")
    assert (parsed.reasoning, parsed.content) == ("", "Yes")
    parsed = found("<think>\nso </thi", None, "think")
    assert (parsed.reasoning, parsed.content) == ("so </thi", "")
    assert found(" \n", None, "think", opened=True).content == ""


@pytest.mark.parametrize(
    "text", ["", " \n", "No <think>x</think>", "x</think>y", " <thi"]
)
def test_an_answer_without_reasoning(text: str) -> None:
    parsed = found(text, None, "think")
    assert (parsed.content, parsed.reasoning) == (text, "")


def test_brackets() -> None:
    parsed = found("[THINK]so[/THINK]Yes [1]", None, "mistral")
    assert (parsed.reasoning, parsed.content) == ("so", "Yes [1]")


def test_json_behind_reasoning_is_at_the_beginning() -> None:
    parsed = found(
        'so</think>\n{"name": "now", "parameters": {}}', "json", "think", opened=True
    )
    assert (parsed.reasoning, parsed.calls, parsed.content) == ("so", [("now", "{}")], "")


def test_whether_a_prompt_opens_it() -> None:
    assert THINK.open_at_end("<|im_start|>assistant\n<think>\n")
    assert not THINK.open_at_end("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert BRACKETS.open_at_end("x[THINK]")
