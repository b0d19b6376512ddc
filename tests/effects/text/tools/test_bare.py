"""Answers that are JSON: calls of the tools that were offered, or what was asked for."""

import pytest

from tests.effects.text.tools.cuts import found

ADD = '{"name": "add", "arguments": {"a": 1}}'
NOW = '{"name": "now", "parameters": {}}'


@pytest.mark.parametrize(
    "text", [f"{ADD}\n{NOW}", f"[{ADD}, {NOW}]", f" [ {ADD},{NOW} ]\n"]
)
def test_calls(text: str) -> None:
    parsed = found(text, "json")
    assert parsed.parsed == [("add", {"a": 1}), ("now", {})]
    assert parsed.content == ""


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
    parsed = found(text, "json")
    assert (parsed.content, parsed.calls) == (text, [])


def test_content_behind_calls() -> None:
    parsed = found(f"[{ADD}, 5]", "json")
    assert (parsed.content, len(parsed.calls)) == (", 5]", 1)
    parsed = found(f"{ADD}\nDone. {NOW}", "json")
    assert (parsed.content, len(parsed.calls)) == (f"Done. {NOW}", 1)
