"""Answers in Harmony, as gpt-oss writes them."""

import re

import pytest

from tests.effects.text.tools.cuts import fed, found, in_one_piece, parser, reported

THOUGHT = "<|channel|>analysis<|message|>User asks.\nCall it.<|end|>"
CALL = (
    "<|start|>assistant<|channel|>commentary to=functions.get_weather "
    '<|constrain|>json<|message|>{"city": "Zürich", "days": [1]}<|call|>'
)
FINAL = "<|start|>assistant<|channel|>final<|message|>It rains.<|return|>"


def test_channels() -> None:
    parsed = found(THOUGHT + FINAL, "openai")
    assert (parsed.reasoning, parsed.content) == ("User asks.\nCall it.", "It rains.")
    assert parsed.calls == []


@pytest.mark.parametrize("end", ["", "<|call|>"])
def test_a_call(end: str) -> None:
    parsed = found(THOUGHT + CALL.removesuffix("<|call|>") + end, "openai")
    assert parsed.parsed == [("get_weather", {"city": "Zürich", "days": [1]})]
    assert (parsed.reasoning, parsed.content) == ("User asks.\nCall it.", "")


@pytest.mark.parametrize(
    "header",
    [
        " to=functions.add<|channel|>commentary<|message|>",
        " to=functions.add<|channel|>commentary json<|message|>",
        "<|channel|>commentary to=functions.add<|message|>",
        "<|channel|>analysis to=functions.add code<|message|>",
        (
            "<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json"
            "<|message|>"
        ),
    ],
)
def test_where_a_recipient_may_be(header: str) -> None:
    parsed = found(header + ' {"a": "<|end|>"} ', "openai")
    assert parsed.calls == [("add", '{"a": "<|end|>"}')]
    assert (parsed.reasoning, parsed.content) == ("", "")


@pytest.mark.long
def test_parts_are_separate() -> None:
    preamble = "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    next_message = "<|start|>assistant" + THOUGHT
    parsed = found(THOUGHT + preamble + next_message + CALL + CALL + FINAL, "openai")
    assert parsed.reasoning == "User asks.\nCall it.\n\nUser asks.\nCall it."
    assert parsed.content == "I look.\n\nIt rains."
    assert len(parsed.calls) == 2


def test_a_call_without_arguments() -> None:
    parsed = found("<|channel|>commentary to=functions.now<|message|><|call|>", "openai")
    assert parsed.calls == [("now", "{}")]


def test_an_answer_that_breaks_off() -> None:
    tokens = re.split(r"(<\|\w+\|>| )", THOUGHT + CALL + FINAL)
    for count in range(len(tokens)):
        parsed = reported(fed(parser("openai"), tokens[:count]))
        header = "<|start|>assistant<|channel|>commentary to=functions.get_weather"
        named = "".join(tokens[:count]).rpartition("<|end|>")[2].startswith(header)
        cut = named and "<|message|>" not in "".join(tokens[:count]).rpartition(header)[2]
        assert parsed.content.startswith(header) if cut else parsed.content in "It rains."
    parsed = found(THOUGHT + CALL[:-12], "openai")
    assert (parsed.whole, parsed.content) == ([False], "")


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        ("<|channel|>commentary to=functiocall|>w2w", None, ""),
        ("<|channel|>commentary to=functions.add <|constr", None, ""),
        ("<|channel|>anal", "", ""),
        ("<|start|>assistant<|channel|>commentary to=func", "", ""),
        ("<|channel|>w0w", None, ""),
        ("<|channel|>w0w<|message|>w1w", "w0w w1w", ""),
        ("<|channel|>analysis to=python code<|message|>1", "", "to=python 1"),
        ("<|start|>w0w<|channel|>final w1w<|message|>x", "w0w w1w x", ""),
        (
            "<|channel|>commentary to=functions..add<|message|>{}",
            "to=functions..add {}",
            "",
        ),
    ],
)
def test_words_of_a_header_that_are_not_its_own_are_text(
    text: str, content: str | None, reasoning: str
) -> None:
    parsed = found(text, "openai")
    assert parsed.content == (text if content is None else content)
    assert (parsed.calls, parsed.reasoning) == ([], reasoning)


@pytest.mark.parametrize("arguments", ["{}", "oops"])
def test_words_beside_a_recipient_come_once(arguments: str) -> None:
    text = "<|channel|>commentary w0w to=functions.add w1w<|message|>" + arguments
    for parsed in (found(text, "openai"), in_one_piece(text, "openai")):
        is_whole = arguments == "{}"
        assert parsed.content == ("w0w w1w" if is_whole else text)
        assert parsed.calls == ([("add", "{}")] if is_whole else [])


def test_a_call_that_goes_wrong_stays_text_where_nothing_is_streamed() -> None:
    bad = CALL.replace("[1]", "[1, oops]").removesuffix("<|call|>")
    parsed = in_one_piece(THOUGHT + bad, "openai")
    assert (parsed.content, parsed.calls, parsed.reasoning) == (
        bad,
        [],
        "User asks.\nCall it.",
    )


def test_end_marks_that_were_left_out() -> None:
    parsed = found(
        "<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Hi", "openai"
    )
    assert (parsed.reasoning, parsed.content) == ("Hm.", "Hi")


@pytest.mark.parametrize(
    "text",
    ["", "Hello\n\n", " to be", " to=me {x}", " to=me", "a < b <|end", "{}", "a to=b"],
)
def test_text_without_channels_is_content(text: str) -> None:
    parsed = found(text, "openai")
    assert (parsed.content, parsed.calls, parsed.reasoning) == (text, [], "")


@pytest.mark.parametrize(
    "text",
    [
        "<|channel|>final {oops}",
        "<|channel|>" + "long " * 60,
        "<|channel|>commentary to=functions.add<|message|>no object",
    ],
)
def test_headers_and_calls_that_are_none(text: str) -> None:
    parsed = found(text, "openai")
    assert (parsed.content, parsed.calls) == (text, [])


@pytest.mark.long
@pytest.mark.parametrize("header", ["", " <|constrain|>json"])
@pytest.mark.parametrize(
    "answer",
    [
        '{"s": "a <|end|> b"}',
        '{"s": "to <|channel|>commentary to=functions.add<|message|>{}"}',
        '[{"s": ["\\"<|return|>"]}, 1.5]',
        '{"two\nlines\t": "<|start|>"}',
        "{",
        "[1] Zürich\n[2] Bern",
        "{oops} [",
    ],
)
def test_an_answer_in_json_may_say_in_a_string_what_marks_are(
    answer: str, header: str
) -> None:
    for end in ("", "<|return|>"):
        text = f"<|channel|>final{header}<|message|>{answer}"
        parsed = found(THOUGHT + "<|start|>assistant" + text + end, "openai")
        assert (parsed.content, parsed.calls) == (answer, [])
    parsed = found(f"{text}<|end|>" + CALL, "openai")
    assert (parsed.content, len(parsed.calls)) == (answer, 1)


@pytest.mark.long
def test_marks_that_are_in_no_string_end_an_answer() -> None:
    for answer in ("{<|end|>", "[1, <|end|>", '"a <|end|>', "a {<|end|>"):
        parsed = found(f"<|channel|>final<|message|>{answer}" + CALL, "openai")
        assert parsed.content == answer.removesuffix("<|end|>").rstrip()
        assert len(parsed.calls) == 1
