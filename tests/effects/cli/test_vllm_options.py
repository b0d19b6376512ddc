"""Options that users of vLLM type: each is taken, noted or refused as the list says."""

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from minfer import ConfigError
from minfer.effects.cli.main import main, parser
from minfer.effects.cli.serve import add_options
from minfer.effects.cli.vllm_page import page_lines
from minfer.effects.setup.engine_args import engine_args
from minfer.effects.setup.vllm_options import (
    ALIASES,
    FORMER,
    Outcome,
    VllmOption,
    vllm_options,
)
from tests.effects.setup.vllm_usage import SPELLINGS

MUST_WORK = 85  # of the spellings
OPTIONS = list(dict.fromkeys(vllm_options().values()))


def parsed(*words: str) -> argparse.Namespace:
    """The options of `minfer serve`, with the settings that they make checked."""
    options: argparse.Namespace = parser().parse_args(["serve", *words])
    engine_args(options)
    return options


def as_words(spelling: str) -> list[str]:
    option, _, value = spelling.partition(" ")
    if value.startswith(("{", "[")):  # as a shell passes what is in quotes
        return [option, value]
    return shlex.split(spelling)


@pytest.mark.parametrize(("spelling", "outcome"), SPELLINGS)
def test_spellings_are_taken_or_refused_with_a_remedy(
    spelling: str, outcome: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if outcome == "refused":
        with pytest.raises((SystemExit, ConfigError)) as caught:
            parsed(*as_words(spelling))
        error = capsys.readouterr().err or str(caught.value)
        assert ("is not supported: " in error and "; " in error) or (
            "choose from" in error or "must be" in error
        )
        return
    parsed(*as_words(spelling))
    notes = capsys.readouterr().err
    noted = "has no effect: " in notes or "changes nothing: " in notes
    assert noted or outcome != "hint"
    assert not noted or outcome in ("hint", "always")


def test_most_spellings_work() -> None:
    works = [spelling for spelling, outcome in SPELLINGS if outcome != "refused"]
    assert len(SPELLINGS) == 109
    assert len(works) >= MUST_WORK


def test_other_names_mean_the_same() -> None:
    for words, name, value in (
        ("-tp 2", "tensor_parallel_size", 2),
        ("-pp 2", "pipeline_parallel_size", 2),
        ("-dp 3", "replicas", 3),
        ("-q fp8", "quantization", "fp8"),
        ("--quantization awq_marlin", "quantization", "awq"),
        ("--load-format safetensors", "load_format", "auto"),
        ("--max_model_len 4k", "max_model_len", 4000),
        ("--max-num-batched-tokens 8K", "max_num_batched_tokens", 8192),
        ("--api-server-count 2", "api_processes", 2),
        ("--max-num-queued-reqs 7", "max_waiting", 7),
        ("--kv-offloading-size 1.5", "kv_host_memory", 3 * 2**29),
        ("--no-async-scheduling", "steps_in_flight", 1),
        ("--enable-log-requests", "access_log", "text"),
        ("--disable-log-requests", "access_log", None),
        ("--disable-prefix-caching", "enable_prefix_caching", False),
        ("--no-enable-prefix-caching", "enable_prefix_caching", False),
        ("--enforce-eager --no-enforce-eager", "enforce_eager", False),
        ("--mamba-ssm-cache-dtype bfloat16", "state_dtype", "bfloat16"),
        ("--uvicorn-log-level info", "log_level", "info"),
        ("--log-level DEBUG", "log_level", "debug"),
        ("--device-memory-utilization 0.5", "gpu_memory_utilization", 0.5),
    ):
        if value is not None:
            assert getattr(parsed(*words.split()), name) == value
    expected = {"method": "ngram", "num_speculative_tokens": 4}
    options = parsed("--spec-method", "ngram", "--spec-tokens", "4")
    assert options.speculative_config == expected


def minimal(option: VllmOption) -> list[str]:
    return [option.name] if option.kind == "flag" else [option.name, "other"]


REFUSED = [
    option
    for option in OPTIONS
    if option.outcome is Outcome.REFUSED and option.default != "on"  # which asks nothing
]


@pytest.mark.parametrize("option", REFUSED)
def test_what_cannot_be_had_is_refused_by_name(
    option: VllmOption, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed(*minimal(option))
    error = capsys.readouterr().err
    assert error.startswith(f"minfer: {option.name}")
    assert option.text in error
    if option.default and option.kind != "flag":  # which asks for nothing
        parsed(option.name, option.default)
    assert not capsys.readouterr().err


def test_no_option_is_without_an_outcome() -> None:
    command = argparse.ArgumentParser()
    add_options(command)
    own = command._option_string_actions
    assert len(OPTIONS) == 320
    for option in OPTIONS:
        found = option.name in own or ALIASES.get(option.name) in own
        assert found or option.text, option.name
    assert not FORMER.keys() & vllm_options().keys() - {"--disable-log-requests"}
    lines = list(page_lines())
    assert sum(line.startswith("| `--") for line in lines) == 320 + len(FORMER)


def test_a_wrong_name_is_answered_with_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words, hint in (
        (["serv"], "did you mean serve?"),
        (["serve", "--max-modl-len", "5"], "did you mean --max-model-len?"),
        (["serve", "--max_modl_len=5"], "did you mean --max-model-len?"),
        (["complete"], "use generate"),
    ):
        with_exit = main(words) if words[0] != "serve" else exit_code(words)
        assert with_exit == 2
        assert hint in capsys.readouterr().err


def exit_code(words: list[str]) -> Any:
    with pytest.raises(SystemExit) as caught:
        main(words)
    return caught.value.code


def test_options_come_from_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "model: org/name\nport: 9000\nmax_model_len: 4k\nserved-model-name: [one, two]\n"
        "enforce-eager: true\nenable-prefix-caching: false\nspeculative-config: "
        '{"method": "ngram", "num_speculative_tokens": 2}\nseed: null\n'
    )
    options = parsed("--config", str(file), "--port", "9001")
    assert options.model == "org/name"
    assert options.port == 9001
    assert options.max_model_len == 4000
    assert options.served_model_name == ["one", "two"]
    assert options.enforce_eager is True
    assert options.enable_prefix_caching is False
    assert options.speculative_config["num_speculative_tokens"] == 2
    for content, message in (
        ("a: [", "not YAML"),
        ("- a", "not a mapping"),
        ("max-modl-len: 5", "did you mean --max-model-len?"),
    ):
        file.write_text(content)
        assert run_serve("--config", str(file)) == 2
        assert message in capsys.readouterr().err
    assert run_serve(f"--config={tmp_path / 'none'}") == 2
    assert "No such file" in capsys.readouterr().err


def run_serve(*words: str) -> Any:
    """The exit code of a command that must not get so far as to serve."""
    try:
        return main(["serve", *words])
    except SystemExit as error:
        return error.code


def test_vllms_defaults_ask_for_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    limit = json.dumps({"image": 0, "video": 0})
    parsed("--no-enable-lora", "--max-loras", "1", "--cpu-offload-gb", "0")
    parsed("--no-trust-remote-code", "--disable-sleep-mode")
    assert not capsys.readouterr().err
    parsed("--limit-mm-per-prompt", limit)
    assert "changes nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words", "expected"),
    [
        ("api-key: [a, b]", (), {"api_key": ["a", "b"]}),
        ("served-model-name: [a]", ("m",), {"served_model_name": ["a"], "model": "m"}),
        ("access-log: true", ("m",), {"access_log": "text", "model": "m"}),
        ("access-log: off", (), {"access_log": "off"}),
        ("vllm-metrics: false\nenforce-eager: false", (), {"vllm_metrics": False}),
        ("model: m", ("n",), {"model": "n"}),
        ("max-num-seqs: [1, 2]", (), "max-num-seqs: takes one value, not a list"),
        ("port: {a: 1}\nmodel: {a: 1}", (), "model: takes one value, not names"),
        ("config: b.yaml", (), "a file names no other"),
        ("port: 1", ("--conf", "b.yaml"), "write its name in full"),
    ],
)
def test_values_of_a_file(
    content: str,
    words: tuple[str, ...],
    expected: dict[str, Any] | str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(content)
    words = (f"--config={file}", *words)
    if isinstance(expected, str):
        with pytest.raises((SystemExit, ConfigError)) as caught:
            parsed(*words)
        assert expected in f"{caught.value} {capsys.readouterr().err}"
        return
    options = vars(parsed(*words))
    assert {name: options[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("m", "--model", "n"), "two models, 'n' and 'm'"),
        (("--model", "n", "--api-key", "a", "b"), "two models, 'n' and 'b'"),
        (("--enforce-eager", "False"), "a flag has no value"),
        (('--speculatve-config={"a": 1}',), "did you mean --speculative-config?"),
    ],
)
def test_a_word_is_no_model_by_accident(
    words: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed(*words)
    assert reason in capsys.readouterr().err
    assert parsed("m", "--model=m", "--port", "1").model == "m"


def test_options_of_the_server_alone_are_named_as_such(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in (("--port", "80"), ("--config", "a.yaml"), ("--uds", "/a")):
        with pytest.raises(SystemExit):
            parser().parse_args(["generate", *words])
        error = capsys.readouterr().err
        assert "not supported: it is an option of minfer serve; leave it out" in error
    with pytest.raises(SystemExit):
        parser().parse_args(["serve", "--hf-overrides.a"])
    assert "needs a value; see minfer serve --help" in capsys.readouterr().err
