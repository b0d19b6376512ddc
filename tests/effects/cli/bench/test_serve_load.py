"""`minfer bench serve` against `minfer serve`: the two ends meet."""

from collections.abc import Iterator

import pytest

from minfer.effects.cli.main import main
from tests.effects.served import Serving, serving

SMALL = ("--num-prompts", "12", "--random-input-len", "40", "--random-output-len", "8")


@pytest.fixture(scope="module")
def dry() -> Iterator[Serving]:
    key = {"api_key": "secret"}
    with serving(
        names=("dry",), executor="dry", num_gpu_blocks_override=64, service=key
    ) as it:
        yield it


def benched(dry: Serving, *words: str) -> int:
    return main(["bench", "serve", "--base-url", f"{dry.url}/v1", *SMALL, *words])


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        ("--max-concurrency", "3", "--ignore-eos"),
        ("--backend", "openai-chat", "--request-rate", "200"),
        (),
    ],
)
def test_it_measures_minfer(
    dry: Serving,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert benched(dry, *words) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Successful requests: 12 Failed requests: 0" in out
    assert "Total generated tokens: 96" in out
    if "openai-chat" not in words:
        assert "Total input tokens: 480" in out
    assert "Mean TTFT (ms):" in out


@pytest.mark.parametrize(
    ("key", "words", "message"),
    [
        ("", (), "(HTTP 401): name one with --model; set OPENAI_API_KEY"),
        ("wrong", ("--model", "dry"), "; set OPENAI_API_KEY in the environment"),
        ("secret", ("--model", "other"), "(HTTP 404): "),
        (
            "secret",
            ("--random-input-len", "9999"),
            "(HTTP 400): the prompt is far",
        ),
        ("secret", ("--dataset-name", "custom"), "needs --dataset-path FILE"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(
    dry: Serving,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    words: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    monkeypatch.delenv("MINFER_API_KEY", raising=False)
    assert benched(dry, *words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("minfer: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    "words",
    [
        ["bench", "x"],
        ["bench", "serve", "--seed", "x"],
        ["bench", "serve", "--json", "x"],
    ],
)
def test_arguments_that_make_no_sense(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
