"""Attributes of tags that say what a value is."""

import pytest

from tests.effects.text.tools.cuts import found

BEGINS = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="add">\n'
ENDS = "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"


@pytest.mark.parametrize("attribute", ["w0wtrue", "w0w", "TRUE", ""])
def test_an_attribute_that_says_something_else_makes_no_parameter(attribute: str) -> None:
    tag = f'<｜DSML｜parameter name="a" string="{attribute}">w1w'
    parsed = found(f"{BEGINS}{tag}</｜DSML｜parameter>\n{ENDS}", "deepseek_v4")
    assert (parsed.parsed, parsed.content) == ([("add", {})], tag)


@pytest.mark.parametrize(("kind", "value"), [("string", "5"), ("number", 5)])
def test_kimi_k3_says_the_type(kind: str, value: str | int) -> None:
    begins = '<|open|>tools<|sep|><|open|>call tool="add" index="1"<|sep|>'
    ends = "<|close|>call<|sep|><|close|>tools<|sep|>"
    tag = '<|open|>argument key="c" type="{}"<|sep|>5<|close|>argument<|sep|>'
    parsed = found(f"{begins}{tag.format(kind)}{ends}", "kimi_k3")
    assert parsed.parsed == [("add", {"c": value})]
    parsed = found(f"{begins}{tag.format(kind + 'w0w')}{ends}", "kimi_k3")
    assert parsed.parsed == [("add", {})]
    assert "w0w" in parsed.content
