"""Answers as DeepSeek's models write them, of both ages."""

import pytest

from tests.effects.text.tools.cuts import found, in_one_piece

CALLS, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
WEATHER = '{"city": "Zürich", "days": [1, {"a": "```"}]}'
FORMS = ("deepseek_v3", "deepseek_v31")
both = pytest.mark.parametrize("form", FORMS)


def call(form: str, name: str, arguments: str) -> str:
    if form == "deepseek_v3":
        emitted = f"function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"
    else:
        emitted = f"{name}<｜tool▁sep｜>{arguments}"
    return f"<｜tool▁call▁begin｜>{emitted}<｜tool▁call▁end｜>"


def calls(form: str, *each_call: str) -> str:
    return CALLS + ("\n" if form == "deepseek_v3" else "").join(each_call) + END


@both
def test_markers_that_were_left_out(form: str) -> None:
    bare_call = call(form, "now", "{}")
    for text in (
        bare_call,
        CALLS + bare_call,
        CALLS + bare_call.removesuffix("<｜tool▁call▁end｜>"),
    ):
        parsed = found(text, form)
        assert (parsed.calls, parsed.whole, parsed.content) == (
            [("now", "{}")],
            [True],
            "",
        )


@both
def test_reasoning_comes_first(form: str) -> None:
    text = f"Hm: {CALLS}.\n</think>\n\n{calls(form, call(form, 'now', '{}'))}"
    parsed = found(text, form, "think", opened=True)
    assert (parsed.reasoning, parsed.content, len(parsed.calls)) == (
        f"Hm: {CALLS}.",
        "",
        1,
    )


@pytest.mark.parametrize(
    "text",
    [
        "1 < 2, <｜tool, <｜tool▁calls▁begin",
        CALLS,
        CALLS + END,
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁begin｜>now",
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n",
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>[1]<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜><｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>a b<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    for form in FORMS:
        parsed = found(text, form)
        assert (parsed.content, parsed.calls) == (text, [])


@pytest.mark.long
@both
def test_an_answer_that_breaks_off_within_arguments(form: str) -> None:
    text = calls(form, call(form, "get_weather", WEATHER))
    for cut in range(text.index("{") + 1, text.index("}]}") + 2, 4):
        parsed = found(text[:cut], form)
        assert (parsed.whole, parsed.content) == ([False], "")
        assert text[:cut].endswith(parsed.calls[0][1])


@both
def test_a_call_that_goes_wrong_stays_text_where_nothing_is_streamed(form: str) -> None:
    for arguments in ('{"a": oops}', '{"a": 1'):
        bad = calls(form, call(form, "add", arguments))
        parsed = in_one_piece(bad, form)
        assert (parsed.content, parsed.calls) == (bad, [])


@both
def test_what_comes_behind_arguments_and_should_not(form: str) -> None:
    parsed = found(call(form, "now", "{} yes"), form)
    assert parsed.calls == [("now", "{}")]
    assert parsed.content.startswith("yes")
    good = calls(form, call(form, "now", "{}"))
    assert len(found(call(form, "now", "{} yes") + good, form).calls) == 2


@both
@pytest.mark.parametrize("odd", ["}", "\n}}", "]", " and so on"])
def test_no_markers_are_content_behind_a_whole_call(form: str, odd: str) -> None:
    wrong = call(form, "get_weather", WEATHER).replace(WEATHER, WEATHER + odd)
    parsed = found(f"{calls(form, wrong, call(form, 'now', '{}'))}Done.", form)
    assert [name for name, _ in parsed.calls] == ["get_weather", "now"]
    assert "▁" not in parsed.content
    assert parsed.content.endswith("Done.")
