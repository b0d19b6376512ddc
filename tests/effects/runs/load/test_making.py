"""From options to a load, and which options and files do not go together."""

import json
from pathlib import Path
from typing import Any

import pytest

from minfer.effects.runs.arrivals import TraceError
from minfer.effects.runs.load.load import Load
from minfer.effects.runs.load.making import load_of
from minfer.effects.runs.load.record import LoadError
from tests.core.runs.test_simulate import asked, config_of
from tests.effects.runs.load.test_options import options
from tests.effects.runs.test_traces import azure, recorded


def made(*words: str) -> Load:
    return load_of(options(*words), "m")


def prompt(load: Load, number: int) -> Any:
    return body(load, number)["prompt"]


def body(load: Load, number: int) -> Any:
    return json.loads(load.request(number).partition(b"\r\n\r\n")[2])


def test_a_load_is_a_thousand_random_prompts_unless_told() -> None:
    load = made()
    assert (load.count, load.due, load.max_concurrency, load.duration) == (
        1000,
        (),
        None,
        None,
    )
    assert len(prompt(load, 0)) == 512
    assert body(load, 0)["temperature"] == 0
    assert "ignore_eos" not in body(load, 0)


def test_a_rate_makes_times_and_a_duration_says_how_many() -> None:
    assert made("--request-rate", "5", "--num-prompts", "11").due[-1] == pytest.approx(2)
    timed = made("--request-rate", "5", "--duration", "4")
    assert (timed.count, len(timed.due)) == (20, 20)
    endless = made("--max-concurrency", "3", "--duration", "4")
    assert (endless.count, endless.duration) == (None, 4)


def test_fields_of_requests() -> None:
    words = ("--ignore-eos", "--usage-per-event", "--extra-body", '{"top_p": 0.5}')
    told = body(made(*words, "--random-output-len", "9"), 0)
    assert (told["ignore_eos"], told["top_p"], told["max_tokens"]) == (True, 0.5, 9)
    assert told["stream_options"]["continuous_usage_stats"] is True
    chat = body(made("--endpoint", "chat", "--random-input-len", "7"), 0)
    assert len(chat["messages"][0]["content"].split()) == 7


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--trace", "t", "--prompts", "p"), "exclude each other"),
        (("--trace", "t", "--request-rate", "1"), "use --speed"),
        (("--duration", "3"), "--duration needs --max-concurrency or --request-rate"),
        (("--save-detailed",), "needs --json"),
        (("--no-stream", "--usage-per-event"), "needs --stream"),
        (("--no-stream", "--goodput", "ttft:5"), "nothing but e2el is known"),
        (("--extra-body", '{"model": "x"}'), "--extra-body must not have model"),
        (("--base-url", "ftp://x"), "--base-url"),
    ],
)
def test_options_that_do_not_go_together(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        made(*words)


def test_a_trace_has_arrivals_and_lengths(tmp_path: Path) -> None:
    load = made("--trace", azure(tmp_path), "--speed", "2")
    slow = made("--trace", azure(tmp_path))
    assert load.count == len(load.due)
    assert [2 * time for time in load.due] == pytest.approx(slow.due)
    assert prompt(load, 0) != prompt(load, 1)
    spelled = made(
        "--trace", "poisson:rate=4,requests=50,prompt=30", "--num-prompts", "5"
    )
    assert spelled.count == 5
    assert len(prompt(spelled, 0)) == 30
    with pytest.raises(TraceError, match="nowhere"):
        made("--trace", str(tmp_path / "nowhere"))


def test_a_journal_has_prompts_and_lengths(tmp_path: Path) -> None:
    one = asked("a", prompt=5, most=9, stop_ids=frozenset({3}))
    path = str(
        recorded(tmp_path, config_of(), [(0.0, one), (3.0, asked("b"))], {("a", 0): 2})
    )
    load = made("--trace", path)
    assert (load.count, load.due[0]) == (2, 0)
    assert prompt(load, 0) == list(one.prompt)
    assert body(load, 0)["max_tokens"] == 2
    with pytest.raises(LoadError, match="chat cannot send"):
        made("--trace", path, "--endpoint", "chat")


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "prompts"
    path.write_text(text, "utf-8")
    return str(path)


def test_a_file_has_a_prompt_a_line(tmp_path: Path) -> None:
    text = 'héllo\n\n{"prompt": [1, 2], "max_tokens": 3}\n{"prompt": "x"}\n'
    load = made("--prompts", written(tmp_path, text))
    assert load.count == 3
    assert [prompt(load, number) for number in range(4)] == [
        "héllo",
        [1, 2],
        "x",
        "héllo",
    ]
    assert [body(load, number)["max_tokens"] for number in range(2)] == [128, 3]
    chat = '{"messages": [{"role": "user", "content": "x"}]}\nhello\n'
    load = made("--prompts", written(tmp_path, chat), "--endpoint", "chat")
    assert [body(load, number)["messages"] for number in range(2)] == [
        [{"role": "user", "content": "x"}],
        [{"role": "user", "content": "hello"}],
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there are no prompts in it"),
        ("a\n{no", "line 2: "),
        ('{"text": "a"}', "line 1: its prompt must be text or token ids"),
        ('{"prompt": ""}', "line 1: its prompt must be"),
        ('{"prompt": [true]}', "line 1: its prompt must be"),
        ('{"messages": [{}]}', "line 1: its prompt must be text or token ids"),
        ('{"prompt": "a", "max_tokens": 0}', "line 1: max_tokens must be"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(LoadError, match=message):
        made("--prompts", written(tmp_path, text))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="nowhere: No such file"):
        made("--prompts", str(tmp_path / "nowhere"))
    (tmp_path / "bytes").write_bytes(b"\xff\xff")
    with pytest.raises(LoadError, match="it is not UTF-8"):
        made("--prompts", str(tmp_path / "bytes"))
