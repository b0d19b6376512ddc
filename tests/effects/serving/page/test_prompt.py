"""The prompt box: an answer streams in as text, stops, and says what went wrong."""

import json
from collections.abc import Iterator

import pytest

from minfer.effects.text.tools.formats import Parsers
from minfer.records.messages import Cancel
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
    """The page, which must not complain, and ask only its own server."""
    visit(chromium, dry)
    yield chromium
    assert chromium.complaints == []
    hosts = {url for url in chromium.requested if not url.startswith("data:")}
    assert all(url.startswith(dry.url) for url in hosts), hosts
    dry.idle()


def limit(page: Browser, tokens: str) -> None:
    """Set the most tokens of an answer."""
    page.value(f"document.querySelector('#max_tokens').value = '{tokens}'")


@pytest.mark.long
def test_an_answer_streams_and_says_what_it_took(page: Browser, dry: Serving) -> None:
    write(page, "Hello?")
    page.wait("document.querySelector('#answer').textContent.length > 5")
    assert page.value("document.querySelector('#send').hidden")
    first_text = text(page, "#answer")[0]
    settled(page)
    whole_text = text(page, "#answer")[0]
    assert whole_text.startswith(first_text)
    assert "start again with a model." in whole_text
    assert text(page, "#took")[0].startswith(f"{spoken(dry)} tokens in ")
    assert page.value("document.activeElement.id") == "input"


def test_stop_ends_the_request(page: Browser, dry: Serving) -> None:
    before = len(dry.turns)
    write(page, "Hello?")
    page.wait("document.querySelector('#answer').textContent")
    press(page, "#stop")
    settled(page)
    dry.idle()
    assert any(isinstance(e, Cancel) for events, _ in dry.turns[before:] for e in events)
    assert text(page, "#took") == ["stopped"]
    assert text(page, "#error") == [""]


@pytest.mark.long
def test_max_tokens_are_sent_if_they_are_set(page: Browser) -> None:
    overhear(page)
    write(page, "Hello?")
    settled(page)
    limit(page, "9")
    page.key("Enter")
    settled(page)
    assert text(page, "#took")[0].startswith("9 tokens in ")
    assert text(page, "#took")[0].endswith("cut off at max tokens")
    first, second = map(json.loads, page.value("asked"))
    assert "max_tokens" not in first
    assert second["max_tokens"] == 9
    assert second["messages"] == [{"role": "user", "content": "Hello?"}]


@pytest.mark.long
def test_a_temperature_and_a_system_prompt_are_sent_if_they_are_set(
    page: Browser,
) -> None:
    overhear(page)
    write(page, "Hello?")
    settled(page)
    for name, value in (("temperature", "0.25"), ("system", "Be brief.")):
        page.value(f"document.querySelector('#{name}').value = '{value}'")
    page.key("Enter")
    settled(page)
    first, second = map(json.loads, page.value("asked"))
    assert "temperature" not in first
    assert second["temperature"] == 0.25
    assert second["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello?"},
    ]
    page.value("document.querySelector('#temperature').value = '3'")
    press(page, "#send")
    assert page.value("document.querySelectorAll('#form :invalid').length") == 1
    assert len(page.value("asked")) == 2


@pytest.mark.long
def test_an_empty_prompt_or_a_number_out_of_range_is_not_sent(page: Browser) -> None:
    overhear(page)
    press(page, "#send")
    limit(page, "0")
    write(page, "Hello?")
    assert page.value("document.querySelectorAll('#form :invalid').length") == 1
    assert page.value("asked") == []
    limit(page, "1")
    press(page, "#send")
    settled(page)
    assert len(page.value("asked")) == 1


def test_markup_that_a_model_writes_is_shown_as_text(page: Browser) -> None:
    delta = {"reasoning_content": "<i>Hm</i>", "content": "<b>&amp; <script>x()"}
    event_data = [json.dumps({"choices": [{"index": 0, "delta": delta}]}), "[DONE]"]
    body = "".join(f"data: {event}\n\n" for event in event_data)
    page.value(f"window.fetch = async () => new Response({json.dumps(body)}); 0")
    write(page, "Hello?")
    settled(page)
    assert text(page, "#answer") == ["<b>&amp; <script>x()"]
    assert text(page, "#thought") == ["<i>Hm</i>"]
    assert page.value("document.querySelectorAll('.text *').length") == 0


@pytest.mark.long
def test_what_a_model_thinks_is_shown_above_its_answer(chromium: Browser) -> None:
    with serving(names=("bundled",), **DRY) as served:
        tokenizer = served.llm.tokenizer
        assert tokenizer is not None
        assert tokenizer.chat_template is not None
        tokenizer.chat_template += "<think>"
        served.llm.set_parsers(Parsers(reasoning="think"))
        visit(chromium, served)
        write(chromium, "Hello?")
        settled(chromium)
        assert "start again with a model." in text(chromium, "#thought")[0]
        assert chromium.complaints == []


@pytest.mark.long
def test_errors_are_shown_and_cleared_by_the_next_answer(page: Browser) -> None:
    limit(page, "5000")
    write(page, "Hello?")
    settled(page)
    assert text(page, "#error")[0].startswith("The server refused this:")
    assert "max_tokens" in text(page, "#error")[0]
    page.complaints.clear()  # the browser notes the status
    limit(page, "")
    press(page, "#send")
    settled(page)
    assert text(page, "#error") == [""]
    assert "start again with a model." in text(page, "#answer")[0]


@pytest.mark.long
def test_a_server_that_stops_or_is_gone_is_reported(chromium: Browser) -> None:
    with serving(names=("bundled",), **DRY) as served:
        visit(chromium, served)
        served.service.close()
        write(chromium, "Hello?")
        settled(chromium)
        message = "The server cannot serve this now: the server is shutting down."
        assert text(chromium, "#error") == [message]
    press(chromium, "#send")
    chromium.wait("/reached/.test(document.querySelector('#error').textContent)")


@pytest.mark.long
def test_the_dialog_asks_for_a_key_once_and_keeps_it(chromium: Browser) -> None:
    with serving(names=("bundled",), service={"api_key": "secret"}, **DRY) as served:
        visit(chromium, served)
        for key, title in (("wrong", "needs an API key"), ("secret", "is wrong")):
            chromium.wait("document.querySelector('#key').open")
            assert title in text(chromium, "#key-title")[0]
            chromium.value("document.querySelector('#key-input').focus()")
            chromium.write(key)
            press(chromium, "#key-form .main")
        chromium.wait("'drawn' in document.documentElement.dataset")
        write(chromium, "Hello?")
        settled(chromium)
        assert text(chromium, "#error") == [""]
        go(chromium, served.url + "/#live")
        chromium.wait("document.querySelector('#health').dataset.state === 'well'")
        assert not chromium.value("document.querySelector('#key').open")


@pytest.mark.long
def test_a_model_without_a_template_goes_on_with_a_text(
    chromium: Browser, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny") / "model")
    with serving(str(folder), **DRY) as served:
        visit(chromium, served)
        placeholder = chromium.value("document.querySelector('#input').placeholder")
        assert placeholder.startswith("The beginning of a text")
        overhear(chromium)
        write(chromium, "Once upon")
        settled(chromium)
        body = json.loads(chromium.value("asked[0]"))
        assert body["prompt"] == "Once upon"
        assert 0 < body["max_tokens"] < served.llm.setup.config.max_model_len
        assert text(chromium, "#error") == [""]
        assert text(chromium, "#answer")[0]
        assert chromium.complaints == []


@pytest.mark.long
@pytest.mark.parametrize("wide", [360, 768, 1280])
def test_nothing_is_wider_than_the_window(
    chromium: Browser, dry: Serving, wide: int
) -> None:
    visit(chromium, dry, wide=wide)
    write(chromium, "word" * 60 + " and " + "more " * 40)
    settled(chromium)
    outside = f"""[...document.querySelectorAll('#prompt *, header *')].filter((one) =>
        one.getBoundingClientRect().right > {wide} + 1).map((one) => one.outerHTML)"""
    assert chromium.value(outside) == []
    assert chromium.complaints == []
