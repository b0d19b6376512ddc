"""Answers that are JSON: calls of the tools that were offered, or what was asked for."""

import pytest

from tests.effects.text.tools.cuts import found

ADD = '{"name": "add", "arguments": {"a": 1}}'
NOW = '{"name": "now", "parameters": {}}'


@pytest.mark.parametrize(
    "text", [f"{ADD}\n{NOW}", f"[{ADD}, {NOW}]", f" [ {ADD},{NOW} ]\n"]
)
def test_calls(text: str) -> None:
    one = found(text, "json")
    assert one.parsed == [("add", {"a": 1}), ("now", {})]
    assert one.content == ""


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Yes.",
        f"So: {ADD}",
        "[]",
        '{"answer": 5, "of": ["x"]}',
        '{"name": "Bob", "arguments": {}}',
        '{"arguments": {"a": 1}, "name": "Bob"}',
        '[{"name": "Bob"}, {"name": "add"}]',
        '{"name": "add"}',
        '{"name": "add", "arguments": {}'[:-3],
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    one = found(text, "json")
    assert (one.content, one.calls) == (text, [])


def test_content_behind_calls() -> None:
    one = found(f"[{ADD}, 5]", "json")
    assert (one.content, len(one.calls)) == (", 5]", 1)
    one = found(f"{ADD}\nDone. {NOW}", "json")
    assert (one.content, len(one.calls)) == (f"Done. {NOW}", 1)
