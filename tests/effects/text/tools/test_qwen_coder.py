"""Answers as Qwen's coders write them: tags, and values that schemas say the kind of."""

from typing import Any

import pytest

from tests.effects.text.tools.cuts import found, in_one_piece

FORM = "qwen3_coder"
CODE = "def f(a):\n    return \"<b>\" if a < 1 else '\\n'\n"


def call(name: str, *values: tuple[str, str]) -> str:
    tags = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values)
    return f"<tool_call>\n<function={name}>\n{tags}</function>\n</tool_call>"


@pytest.mark.long
def test_text_stays_as_it_is_but_for_the_breaks_around_it() -> None:
    for text in (
        "",
        "5",
        "null",
        " x ",
        "\n\nx\n",
        CODE,
        "🙂\t\\",
        "</parameter",
        "</p>",
    ):
        parsed = found(call("get_weather", ("city", text)), FORM)
        assert parsed.parsed == [("get_weather", {"city": text})]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        (" -2.5e3 ", -2500.0),
        ("true", True),
        ("False", False),
        ("None", None),
        ("NULL", None),
        ('{"a": [1, {"b": "x\ny"}]}', {"a": [1, {"b": "x\ny"}]}),
        ('"text"', "text"),
        ("some text", "some text"),
        ("['x', True, None]", ["x", True, None]),
        (
            "{'a': (1, -2.5), \"b\": {'c': \"it's\"}}",
            {"a": [1, -2.5], "b": {"c": "it's"}},
        ),
        ("['é\\n', true, null,]", ["é\n", True, None]),
        ("{'a': {1, 2}}", "{'a': {1, 2}}"),
        ("{1: 2}", "{1: 2}"),
        ("{**x}", "{**x}"),
        ("[f(1)]", "[f(1)]"),
        ("[b'x']", "[b'x']"),
        ("['\\ud800']", "['\\ud800']"),
        ("(1e999,)", "(1e999,)"),
        ("[" * 300 + "'", "[" * 300 + "'"),
        ("[1, 2", "[1, 2"),
        ("1 2", "1 2"),
        ("NaN", "NaN"),
        ("", ""),
    ],
)
def test_what_is_no_text_is_json_if_it_can_be(text: str, value: Any) -> None:
    assert found(call("add", ("a", text)), FORM).parsed == [("add", {"a": value})]


def test_tags_without_breaks() -> None:
    text = "<tool_call><function=add><parameter=a>1</parameter><parameter=c>x</parameter>"
    parsed = found(f"{text}</function></tool_call>", FORM)
    assert parsed.parsed == [("add", {"a": 1, "c": "x"})]


def test_tags_that_were_left_out() -> None:
    value = "<parameter=c>\nx\n</parameter>\n"
    for text in (
        f"<function=add>\n{value}</function>",
        f"<function=add>\n{value}</function>\n</tool_call>",
        f"<tool_call>\n<function=add>\n{value}</function>",
        f"<tool_call>\n<function=add>\n{value}</tool_call>",
        "<tool_call>\n<function=add>\n<parameter=c>\nx\n</function>\n</tool_call>",
    ):
        parsed = found(f"Hi.\n{text}\n", FORM)
        assert (parsed.parsed, parsed.whole) == ([("add", {"c": "x"})], [True])
        assert parsed.content == "Hi."
    text = "<function=add>\n<parameter=a>\n1\n<parameter=c>\nx\n</parameter></function>"
    assert found(text, FORM).parsed == [("add", {"a": 1, "c": "x"})]


@pytest.mark.parametrize(
    "text",
    [
        "1 < 2, <tool, <tool_cal, <function",
        "<tool_call>",
        "<tool_call></tool_call>",
        '<tool_call>{"name": "add", "arguments": {}}</tool_call>',
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        "<tool_call>\n<function=a b>\n</function>\n</tool_call>",
        "<tool_call>\n<function=add\n</function>\n</tool_call>",
        "<tool_call>\n<function=add",
        "In XML, <function=strange> is none.",  # of a name that was not offered
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    parsed = found(text, FORM)
    assert (parsed.content, parsed.calls) == (text, [])


@pytest.mark.parametrize("cut", range(len("<tool_call>\n<function=add>"), 80, 3))
def test_an_answer_that_breaks_off(cut: int) -> None:
    text = call("add", ("a", "12"), ("c", "long text"))[:cut]
    parsed = found(text, FORM)
    assert (parsed.whole, parsed.content) == ([False], "")
    assert '{"a": 12, "c": "long text"}'.startswith(parsed.calls[0][1])


@pytest.mark.parametrize(
    ("value", "beginning"),
    [("[1, 2", "[1, 2"), ("some text", '"some text'), ("1.", "1.")],
)
def test_a_value_that_breaks_off_is_a_beginning_of_json(
    value: str, beginning: str
) -> None:
    parsed = found(f"<tool_call><function=add><parameter=a>{value}", FORM)
    assert (parsed.calls, parsed.whole) == ([("add", f'{{"a": {beginning}')], [False])


def test_a_call_that_breaks_off_stays_text_where_nothing_is_streamed() -> None:
    bad = call("add", ("a", "12"), ("c", "long text"))[:60]
    parsed = in_one_piece(f"{call('now')} {bad}", FORM)
    assert (parsed.content, parsed.calls) == (bad, [("now", "{}")])


def test_what_stands_between_parameters_is_content_behind_the_call() -> None:
    text = call("add", ("a", "1"), ("c", "x")).replace(
        "<parameter=c", "Hm.\n<parameter=c"
    )
    parsed = found(text, FORM)
    assert (parsed.parsed, parsed.content) == ([("add", {"a": 1, "c": "x"})], "Hm.")


@pytest.mark.parametrize("odd", ["", "}", "\n]\n", "</tool_call>", "</tool_call>\n}"])
def test_what_should_not_be_behind_a_call_is_no_content(odd: str) -> None:
    text = call("add", ("a", "1")).removesuffix("\n</tool_call>")
    parsed = found(f"{text}{odd}</tool_call>\nDone.", FORM)
    assert (parsed.parsed, parsed.content) == ([("add", {"a": 1})], "Done.")


@pytest.mark.parametrize(
    "inner_call",
    [
        call("add", ("a", "1"), ("c", "x")),
        call("now"),
        call("get_weather", ("city", call("add", ("a", "1")))),
        f"{call('now')}\n{call('add', ('a', '1'))}",
        "<function=add> and <function=",
        "<function=add>\n<parameter=a>1</parameter></function>",
    ],
)
def test_a_call_within_a_value_is_its_text(inner_call: str) -> None:
    values = (("city", inner_call), ("note", "x"))
    parsed = found(call("get_weather", *values), FORM)
    assert parsed.parsed == [("get_weather", dict(values))]
    assert parsed.content == ""
