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
    url = ("--base-url", f"{dry.url}/v1", "--processes", "1")
    return main(["bench", "serve", *url, *SMALL, *words])


@pytest.mark.parametrize(
    "words",
    [
        ("--max-concurrency", "3", "--ignore-eos"),
        ("--endpoint", "chat", "--request-rate", "200"),
        ("--no-stream", "--max-concurrency", "12"),
        ("--trace", "poisson:rate=9,requests=12,prompt=30,output=8", "--speed", "9"),
    ],
)
def test_it_measures_minfer(
    dry: Serving, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert benched(dry, "--api-key", "secret", *words) == 0
    out = capsys.readouterr().out
    assert "12 of 12 answered, 0 failed" in out
    assert "96 out" in out
    assert ("TTFT" in out) == ("--no-stream" not in words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "wants a key (HTTP 401); give it --api-key"),
        (("--api-key", "wrong"), "refuses this key"),
        (("--api-key", "secret", "--model", "other"), "there is dry"),
        (
            ("--api-key", "secret", "--random-input-len", "9999"),
            "(HTTP 400): the prompt has",
        ),
        (("--trace", "a", "--prompts", "b"), "exclude each other"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(
    dry: Serving,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    message: str,
) -> None:
    assert benched(dry, *words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("minfer: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize("words", [["bench", "x"], ["bench", "serve", "--seed", "x"]])
def test_arguments_that_make_no_sense(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
