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


def calls(form: str, *each: str) -> str:
    return CALLS + ("\n" if form == "deepseek_v3" else "").join(each) + END


@both
def test_a_call(form: str) -> None:
    one = found(calls(form, call(form, "get_weather", WEATHER)), form)
    assert one.calls == [("get_weather", WEATHER)]
    assert (one.content, one.reasoning, one.whole) == ("", "", [True])


@both
def test_several_calls_and_text_around_them(form: str) -> None:
    each = call(form, "get_weather", WEATHER), call(form, "now", "{}")
    one = found(f"Let me look.\n\n{calls(form, *each)}\nThat is all.\n", form)
    assert [name for name, _ in one.calls] == ["get_weather", "now"]
    assert one.content == "Let me look.\n\nThat is all.\n"


@both
def test_markers_that_were_left_out(form: str) -> None:
    one = call(form, "now", "{}")
    for text in (one, CALLS + one, CALLS + one.removesuffix("<｜tool▁call▁end｜>")):
        got = found(text, form)
        assert (got.calls, got.whole, got.content) == ([("now", "{}")], [True], "")


@both
def test_reasoning_comes_first(form: str) -> None:
    text = f"Hm: {CALLS}.\n</think>\n\n{calls(form, call(form, 'now', '{}'))}"
    one = found(text, form, "think", opened=True)
    assert (one.reasoning, one.content, len(one.calls)) == (f"Hm: {CALLS}.", "", 1)


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
        one = found(text, form)
        assert (one.content, one.calls) == (text, [])


@pytest.mark.long
@both
def test_an_answer_that_breaks_off_within_arguments(form: str) -> None:
    text = calls(form, call(form, "get_weather", WEATHER))
    for at in range(text.index("{") + 1, text.index("}]}") + 2, 4):
        one = found(text[:at], form)
        assert (one.whole, one.content) == ([False], "")
        assert text[:at].endswith(one.calls[0][1])


@both
def test_a_call_that_goes_wrong_stays_text_where_nothing_is_streamed(form: str) -> None:
    for arguments in ('{"a": oops}', '{"a": 1'):
        bad = calls(form, call(form, "add", arguments))
        one = in_one_piece(bad, form)
        assert (one.content, one.calls) == (bad, [])


@both
def test_what_comes_behind_arguments_and_should_not(form: str) -> None:
    one = found(call(form, "now", "{} yes"), form)
    assert one.calls == [("now", "{}")]
    assert one.content.startswith("yes")
    good = calls(form, call(form, "now", "{}"))
    assert len(found(call(form, "now", "{} yes") + good, form).calls) == 2


@both
@pytest.mark.parametrize("odd", ["}", "\n}}", "]", " and so on"])
def test_no_markers_are_content_behind_a_whole_call(form: str, odd: str) -> None:
    wrong = call(form, "get_weather", WEATHER).replace(WEATHER, WEATHER + odd)
    one = found(f"{calls(form, wrong, call(form, 'now', '{}'))}Done.", form)
    assert [name for name, _ in one.calls] == ["get_weather", "now"]
    assert "▁" not in one.content
    assert one.content.endswith("Done.")
