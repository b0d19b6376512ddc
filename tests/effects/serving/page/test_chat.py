"""The chat, as one uses it: answers stream, stop, and are asked for again."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from minfer.messages import Cancel
from tests.effects.browser import Browser
from tests.effects.served import Serving, serving
from tests.effects.serving.page.visits import (
    DRY,
    go,
    overhear,
    press,
    seen,
    settled,
    spoken,
    text,
    visit,
    write,
)
from tests.effects.tiny_model import write_checkpoint

pytestmark = seen


@pytest.fixture
def page(chromium: Browser, dry: Serving) -> Iterator[Browser]:
    """The page, which must not complain, and ask nobody but its server."""
    visit(chromium, dry)
    yield chromium
    assert chromium.complaints == []
    hosts = {url for url in chromium.requested if not url.startswith("data:")}
    assert all(url.startswith(dry.url) for url in hosts), hosts
    dry.idle()


def set_to(page: Browser, **values: object) -> None:
    """Settings, as if they had been typed in."""
    page.value(f"localStorage.setItem('minfer.settings', '{json.dumps(values)}')")


def fill_in(page: Browser, name: str, value: str) -> None:
    """Type into a field of the settings, instead of what is there."""
    page.value(f"document.querySelector('#set-{name}').select()")
    page.write(value)


def test_an_answer_streams_and_says_what_it_took(page: Browser, dry: Serving) -> None:
    write(page, "Hello?")
    page.wait("document.querySelector('.assistant.busy .text')?.textContent.length > 5")
    part = text(page, ".assistant .text")[0]
    settled(page)
    whole = text(page, ".assistant .text")[0]
    assert whole.startswith(part.strip())
    assert "start again with a model." in whole
    assert text(page, ".user .text") == ["Hello?"]
    about = text(page, ".about")[0]
    assert about.startswith(f"{spoken(dry)} tokens · ")
    assert " tokens/s · first after " in about
    assert page.value("document.activeElement.id") == "input"


def test_stop_ends_the_request_and_it_can_go_on(page: Browser, dry: Serving) -> None:
    write(page, "Hello?")
    page.wait("document.querySelector('.assistant.busy .about')?.textContent")
    before = len(dry.turns)
    press(page, "#send")
    settled(page)
    dry.idle()
    assert any(isinstance(e, Cancel) for events, _ in dry.turns[before:] for e in events)
    assert text(page, ".about")[0].endswith("stopped")
    part = text(page, ".assistant .text")[0]
    press(page, ".words:not([hidden])")  # Continue
    settled(page)
    whole = text(page, ".assistant .text")[0]
    assert whole.startswith(part)
    assert len(whole) > len(part)


def test_again_edit_and_what_is_kept(page: Browser, dry: Serving) -> None:
    set_to(page, temperature="0", max_tokens="9")
    write(page, "One")
    settled(page)
    assert text(page, ".about")[0].startswith("9 tokens")
    assert text(page, ".about")[0].endswith("cut off at max tokens")
    first = text(page, ".assistant .text")
    press(page, "[aria-label='Write it again']")
    settled(page)
    assert text(page, ".assistant .text") == first
    write(page, "Two")
    settled(page, 2)
    page.value("document.querySelector('[aria-label^=Edit]').click()")
    assert page.value("document.activeElement.value") == "One"
    page.value("document.activeElement.select()")
    page.write("Changed")
    page.key("Enter")
    settled(page)
    assert text(page, ".user .text") == ["Changed"]
    press(page, "#new")
    write(page, "Another")
    settled(page)
    go(page, dry.url)
    page.wait("document.querySelectorAll('#conversations li').length === 2")
    assert text(page, ".user .text") == ["Another"]
    press(page, "#conversations .name")
    assert text(page, ".user .text") == ["Changed"]
    press(page, "#conversations .bin")
    press(page, "#conversations .bin")
    assert text(page, "#conversations .name") == ["Another"]
    assert text(page, ".user .text") == []


def test_what_is_asked_for_is_what_was_set(page: Browser) -> None:
    page.value("document.querySelector('#open-settings').click()")
    wanted = {"system": "Be brief.", "temperature": "0.5", "top_p": "0.9", "seed": "7"}
    for name, value in wanted.items():
        page.value(f"document.querySelector('#set-{name}').focus()")
        page.write(value)
    press(page, "#close-settings")
    overhear(page)
    write(page, "Hello?")
    settled(page)
    body: dict[str, Any] = json.loads(page.value("asked[0]"))
    roles = [message["role"] for message in body["messages"]]
    assert roles == ["system", "user"]
    assert (body["temperature"], body["top_p"], body["seed"]) == (0.5, 0.9, 7)
    assert "max_tokens" not in body


BAD = {
    "temperature": ("7", "Must be at most 2."),
    "top_p": ("0", "Must be above 0."),
    "max_tokens": ("5000", "Must be at most 2,047."),
    "seed": ("1.5", "Must be a whole number."),
}


def test_settings_that_cannot_be_are_told_and_keep_the_dialog_open(page: Browser) -> None:
    set_to(page, temperature="0.5")
    press(page, "#open-settings")
    for name, (value, why) in BAD.items():
        fill_in(page, name, value)
        assert text(page, f"#set-{name}-wrong") == [why]
    is_open = "document.querySelector('#settings').open"
    press(page, "#close-settings")
    assert page.value(is_open)
    assert page.value("document.activeElement.id") == "set-temperature"
    # Nothing of it is kept, nor what the beginning of a number would have meant.
    fill_in(page, "temperature", "1")
    fill_in(page, "temperature", "12")
    kept = json.loads(page.value("localStorage.getItem('minfer.settings')"))
    assert [kept[name] for name in BAD] == ["0.5", "", "", ""]
    for name in BAD:
        fill_in(page, name, "1")
    assert set(text(page, "small.wrong")) == {""}
    press(page, "#close-settings")
    assert not page.value(is_open)


def test_what_was_refused_is_left_out_and_may_be_tried_again(page: Browser) -> None:
    write(page, "One")
    settled(page)
    write(page, "long " * 3000)
    settled(page, 2)
    page.complaints.clear()  # the browser notes the status
    overhear(page)
    write(page, "Three")
    settled(page, 3)
    said = json.loads(page.value("asked[0]"))["messages"]
    assert [one["content"][:5] for one in said if one["role"] == "user"] == [
        "One",
        "Three",
    ]
    assert [one["role"] for one in said] == ["user", "assistant", "user"]
    notes = text(page, ".unsent")
    assert notes == ["", "Not sent: later messages leave it out", ""]
    # Tried again, it comes last, and nothing that was answered is lost.
    edit = "document.querySelectorAll('.user [aria-label^=Edit]')[1].click()"
    page.value(f"{edit}; document.activeElement.select()")
    page.write("Two")
    page.key("Enter")
    settled(page, 3)
    assert text(page, ".user .text") == ["One", "Three", "Two"]
    assert text(page, ".unsent") == ["", "", ""]
    assert text(page, ".error") == ["", "", ""]


def test_the_reader_who_scrolls_up_stays_there(page: Browser) -> None:
    for i in range(4):
        write(page, f"Message {i}\n" * 6)
        page.wait(f"document.querySelectorAll('.assistant').length === {i + 1}")
        if i < 3:
            settled(page, i + 1)
    at_end = "(box => box.scrollHeight - box.scrollTop - box.clientHeight < 2)"
    assert page.value(f"{at_end}(document.querySelector('#scroll'))")
    # A reader's hand goes on until the page has noticed.
    up = "document.querySelector('#scroll').scrollTop = 10"
    page.wait(f"({up}, !document.querySelector('#latest').hidden)")
    settled(page, 4)
    assert page.value("document.querySelector('#scroll').scrollTop") == 10
    press(page, "#latest")
    assert page.value(f"{at_end}(document.querySelector('#scroll'))")
    assert page.value("document.querySelector('#latest').hidden")


def test_what_goes_wrong_is_said(page: Browser) -> None:
    set_to(page, temperature="9999")
    write(page, "Hello?")
    settled(page)
    assert "temperature" in text(page, ".error")[0]
    assert text(page, ".error")[0].startswith("The server refused this:")
    page.complaints.clear()  # the browser notes the status
    set_to(page)
    press(page, ".words:not([hidden])")  # Try again
    settled(page)
    assert text(page, ".error") == [""]
    write(page, "long " * 3000)
    settled(page, 2)
    assert text(page, ".error")[1].endswith(
        "Begin a new conversation, or edit an earlier message."
    )
    set_to(page, max_tokens="2047")
    press(page, "#new")
    write(page, "Hello?")
    settled(page)
    assert "Max tokens is one of the settings." in text(page, ".error")[0]
    page.complaints.clear()


def test_a_context_that_fills_is_told(page: Browser, dry: Serving) -> None:
    long = "hello " * 500
    write(page, long)
    settled(page)
    asked = [{"role": "user", "content": long.strip()}]
    told = dry.http.post(f"{dry.url}/tokenize", json={"messages": asked}).json()
    share = (told["count"] + spoken(dry)) / told["max_model_len"]
    assert 0.75 < share < 1
    assert f"context {round(100 * share)}% full" in text(page, ".about")[0]
    press(page, "#new")
    write(page, "hello " * 660)
    settled(page)
    assert text(page, ".about")[0].endswith("the context is full")
    assert text(page, ".words:not([hidden])") == []  # it cannot go on


def test_who_is_overloaded_says_so_and_who_is_gone_too(chromium: Browser) -> None:
    with serving(names=("bundled",), **DRY) as served:
        visit(chromium, served)
        served.service.close()
        write(chromium, "Hello?")
        settled(chromium)
        told = "The server cannot serve this now: the server is shutting down."
        assert text(chromium, ".error") == [told]
    press(chromium, ".words:not([hidden])")  # Try again
    chromium.wait("/reached/.test(document.querySelector('.error')?.textContent)")


def test_a_key_is_asked_for_once_and_kept(chromium: Browser) -> None:
    with serving(names=("bundled",), service={"api_key": "secret"}, **DRY) as served:
        visit(chromium, served)
        for key, title in (("wrong", "asks for a key"), ("secret", "is not right")):
            chromium.wait("document.querySelector('#key').open")
            assert title in text(chromium, "#key-title")[0]
            chromium.value("document.querySelector('#key-input').focus()")
            chromium.write(key)
            press(chromium, "#key-form .main")
        chromium.wait("'drawn' in document.documentElement.dataset")
        write(chromium, "Hello?")
        settled(chromium)
        assert text(chromium, ".error") == [""]
        go(chromium, served.url + "/#live")
        chromium.wait("document.querySelector('#health').dataset.state === 'well'")
        assert not chromium.value("document.querySelector('#key').open")


def test_a_model_without_a_template_goes_on_with_a_text(
    chromium: Browser, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny") / "model")
    with serving(str(folder), **DRY) as served:
        visit(chromium, served)
        assert chromium.value("document.querySelector('#input').placeholder") == (
            "The beginning of a text"
        )
        write(chromium, "Once upon")
        settled(chromium)
        assert text(chromium, ".given") == ["Once upon"]
        (whole,) = text(chromium, ".assistant .text")
        assert whole.startswith("Once upon")
        assert text(chromium, ".error") == [""]
        assert text(chromium, ".user") == []
        # A long text leaves less room than a completion asks for otherwise.
        context = served.llm.setup.config.max_model_len
        press(chromium, "#new")
        overhear(chromium)
        write(chromium, "a" * (context - 9))
        settled(chromium)
        assert text(chromium, ".error") == [""]
        count, body = map(json.loads, chromium.value("asked"))
        counted = served.http.post(f"{served.url}/tokenize", json=count).json()["count"]
        assert 0 < body["max_tokens"] <= context - counted
        assert chromium.complaints == []


@pytest.mark.parametrize("wide", [360, 768, 1280])
def test_nothing_is_wider_than_the_window(
    chromium: Browser, dry: Serving, wide: int
) -> None:
    visit(chromium, dry, wide=wide)
    write(chromium, "word" * 60 + " and " + "more " * 40)
    settled(chromium)
    outside = f"""[...document.querySelectorAll('#chat *, header *')].filter((one) =>
        one.getBoundingClientRect().right > {wide} + 1).map((one) => one.outerHTML)"""
    assert chromium.value(outside) == []
    assert chromium.complaints == []
