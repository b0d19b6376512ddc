"""Chat templates that requests bring: refused by default, else rendered within limits."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from minfer.effects.serving import request_receiver
from minfer.effects.serving.access.server_bounds import ServerBounds
from minfer.effects.serving.endpoints import ENDPOINTS, QUERY_ENDPOINTS
from minfer.effects.serving.input_workers.worker_limits import WorkerLimits
from minfer.effects.serving.protocol import Endpoint, QueryEndpoint
from minfer.effects.serving.request_receiver import TEMPLATE_FIELD
from tests.effects.scripted import write_talker
from tests.effects.served import Serving, serving

OWN: Final = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{{ mood }}{% if add_generation_prompt %}[A]{% endif %}"
)
CHAT: Final = [{"role": "user", "content": "hi"}]
LARGE: Final = [{"role": "user", "content": "hi " * 3000}]
STRING: Final = "{% set s = 'x' * 100000 %}"
# Each with a part of its error; None: its worker is killed, or runs out of memory.
HOSTILE: Final[dict[str, str | None]] = {
    "{% for i in range(10**9) %}x{% endfor %}": "its loops go round more than",
    "{{ 'a' * 10**10 }}": "it repeats something",
    "{{ 10**(10**10) }}": "too high a power",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "recurses without end",
    "{{ raise_exception('mine') }}": "mine",
    "\n{% for %}": "Expected an expression",
    "{{ messages[0].content.__class__.mro() }}": "the chat template failed",
    "{% include '/etc/passwd' %}": "the chat template failed",
    "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}": None,
    f"{STRING}{{% for a in s %}}{{% for b in s %}}{{% endfor %}}{{% endfor %}}": None,
    "{% set n = namespace(a='xy') %}{% for i in range(60) %}"
    "{% set n.a = n.a ~ n.a %}{% endfor %}": None,
    "{{ 'a' | center(10000000000) }}": None,
    "{{ lipsum(n=1000000000) }}": None,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_talker(tmp_path_factory.mktemp("talker") / "m", context=2**14)


@pytest.fixture(scope="module")
def closed(folder: str) -> Iterator[Serving]:
    with serving(folder, executor="dry", num_gpu_blocks_override=600) as server:
        yield server


@pytest.fixture(scope="module")
def trusting(folder: str) -> Iterator[Serving]:
    bounds = ServerBounds(trust_request_chat_template=True)
    settings: dict[str, Any] = {"executor": "dry", "service": {"bounds": bounds}}
    with pytest.MonkeyPatch.context() as patch:
        limits = WorkerLimits(memory=2**27, cpu=0.7, nice=0)
        patch.setattr(request_receiver, "TEMPLATE_LIMITS", limits)
        with serving(folder, num_gpu_blocks_override=600, **settings) as server:
            yield server


def chat(server: Serving, template: Any, messages: Any = CHAT, **fields: Any) -> Any:
    body = {"messages": messages, "max_tokens": 2, "chat_template": template, **fields}
    return server.post("chat/completions", **body)


@pytest.mark.parametrize("messages", [CHAT, LARGE], ids=["small", "large"])
def test_by_default_they_are_refused_by_an_error_that_names_the_option(
    closed: Serving, messages: Any
) -> None:
    fields = {"messages": messages, "chat_template": OWN}
    for answer in (
        closed.post("chat/completions", **fields),
        closed.http.post(f"{closed.url}/tokenize", json=fields),
    ):
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == "chat_template"
        assert "--trust-request-chat-template" in error["message"]
    assert chat(closed, None, messages).status_code == 200


def test_the_field_is_found_however_it_is_spelled() -> None:
    letters = "chat_template"
    for i, letter in enumerate(letters):
        for code in (f"{ord(letter):04x}", f"{ord(letter):04X}"):
            name = f"{letters[:i]}\\u{code}{letters[i + 1 :]}"
            body = f'{{"a": "é", "{name}" : 1}}'.encode()
            assert json.loads(body)["chat_template"] == 1
            assert TEMPLATE_FIELD.search(body)
    plain = {"messages": CHAT, "chat_template_kwargs": {"a": "\u00e9\n"}}
    assert TEMPLATE_FIELD.search(json.dumps(plain).encode()) is None
    quoted = {"messages": [{"role": "user", "content": 'the "chat_template" field'}]}
    assert TEMPLATE_FIELD.search(json.dumps(quoted).encode()) is None


@pytest.mark.long
def test_templates_of_requests_render_as_in_transformers(
    trusting: Serving, folder: str
) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(Path(folder) / "tokenizer.json")
    )
    for messages in (CHAT, LARGE):
        for prompt in (True, False):
            options = {"add_generation_prompt": prompt}
            expected = tokenizer.apply_chat_template(
                messages, chat_template=OWN, tokenize=False, mood="glad", **options
            )
            fields = {"messages": messages, "chat_template": OWN, **options}
            kwargs = {"chat_template_kwargs": {"mood": "glad"}}
            assert trusting.prompt_of(**fields, **kwargs) == expected
    assert trusting.prompt_of(messages=CHAT) == "<user>hi<assistant>"
    answer = chat(trusting, OWN)
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens"] == len("[user]hi[A]")


@pytest.mark.long
def test_only_what_has_the_field_goes_to_their_workers(trusting: Serving) -> None:
    receiver = trusting.service.receiver
    pool = receiver.template_pool
    assert pool is not None
    for slot in pool._slots:
        assert slot.input_worker is not None
        start: Any = slot.input_worker._start
        (facts,) = start.args
        assert facts.reasoning_key == b""  # which no template needs
        assert facts.names == ("tiny",)
    data = b'{"\\u0063hat_template": "x"}'
    endpoints: list[Endpoint | QueryEndpoint] = [*ENDPOINTS, *QUERY_ENDPOINTS]
    taking = {
        endpoint.path
        for endpoint in endpoints
        if receiver._template_pool(endpoint, data) is pool
    }
    assert taking == {"/v1/chat/completions", "/tokenize"}
    assert all(receiver._template_pool(endpoint, b"{}") is None for endpoint in endpoints)


@pytest.mark.long
def test_what_is_no_template_or_too_long(trusting: Serving) -> None:
    padding = "{#" + "x" * (2**16 - len(OWN) - 4) + "#}"
    assert chat(trusting, OWN + padding).status_code == 200
    for template in (OWN + padding + "x", 5, ["x"], {"a": 1}, True):
        answer = chat(trusting, template)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "chat_template"
    assert "at most 65536 bytes" in chat(trusting, "x" * 65_537).text
    for template, message in (
        *(("", "no text"), ("{# x #}", "no text"), ("{{ '' }}", "no text")),
        ("{{ 'x' * 2**15 }}", "context length is 16384"),
    ):
        error = chat(trusting, template).json()["error"]
        assert error["param"] == "chat_template"
        assert message in error["message"]
    assert trusting.prompt_of(messages=CHAT, chat_template="") == ""
    deep = '{"messages": [], "chat_template": ' + "[" * 10_000 + "]" * 10_000 + "}"
    url = f"{trusting.url}/v1/chat/completions"
    headers = {"content-type": "application/json"}
    assert trusting.http.post(url, content=deep, headers=headers).status_code == 400


@pytest.mark.long
def test_hostile_templates_end_alone(trusting: Serving) -> None:
    """All at once, while others are answered."""
    answers: dict[str, Any] = {}

    def send(template: str) -> None:
        answers[template] = chat(trusting, template)

    threads = [threading.Thread(target=send, args=(template,)) for template in HOSTILE]
    for thread in threads:
        thread.start()
    times = []
    while any(thread.is_alive() for thread in threads):
        start = time.monotonic()
        assert trusting.post("completions", prompt="x", max_tokens=2).status_code == 200
        times.append(time.monotonic() - start)
        time.sleep(0.02)
    for template, reason in HOSTILE.items():
        answer = answers[template]
        assert answer.status_code == 400, (template, answer.text)
        error = answer.json()["error"]
        assert error["param"] == "chat_template"
        assert (reason or "chat_template: ") in error["message"], template
    assert len(times) > len(HOSTILE)
    assert sorted(times)[len(times) // 2] < 0.5
    assert chat(trusting, OWN).status_code == 200  # a worker takes the place of another
