"""Options that commands share: what they say wins, and what they may not say."""

import argparse

import pytest

from minfer.effects.cli.main import parser
from minfer.effects.cli.options import sampling_params
from minfer.effects.setup.engine_args import REMOVED
from minfer.records.request import ParameterError
from minfer.sampling.params import ADVISED


def test_options_win_over_the_models_advice_and_that_over_defaults() -> None:
    bare = parser().parse_args(["chat"])
    assert sampling_params(bare, {}).temperature == 0.7
    assert sampling_params(bare, {}).max_tokens == 512
    advice = {"temperature": 0.3, "top_k": 20}
    advised = sampling_params(bare, advice)
    assert (advised.temperature, advised.top_k, advised.top_p) == (0.3, 20, 0.9)
    options = parser().parse_args(["chat", "--temperature", "0", "--top-k", "5"])
    combined = sampling_params(options, advice)
    assert (combined.temperature, combined.top_k) == (0, 5)


@pytest.mark.parametrize("name", ADVISED)
def test_what_the_table_of_parameters_offers_is_an_option(name: str) -> None:
    options = parser().parse_args(["generate", f"--{name.replace('_', '-')}", "1"])
    assert getattr(sampling_params(options, {}), name) == 1


def test_single_tokens_and_words() -> None:
    words = "--min-tokens 3 --logit-bias 7=-2 --logit-bias 5=1.5 --allowed-token-ids 5"
    options = parser().parse_args(["generate", *words.split(), "--bad-words", "a b"])
    params = sampling_params(options, {})
    assert params.min_tokens == 3
    assert params.logit_bias == ((5, 1.5), (7, -2.0))
    assert params.allowed_token_ids == (5,)
    assert params.bad_words == ("a b",)
    bare = sampling_params(parser().parse_args(["generate"]), {})
    assert (bare.logit_bias, bare.allowed_token_ids, bare.bad_words) == ((), None, ())


def test_a_bias_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["generate", "--logit-bias", "7"])
    assert "'7' is not like 13=-5" in capsys.readouterr().err


@pytest.mark.parametrize("name", REMOVED)
def test_an_option_that_was_removed_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    option = f"--{name.replace('_', '-')}"
    with pytest.raises(SystemExit):
        parser().parse_args(["generate", option, "2"])
    assert f"argument {option}: was removed: {REMOVED[name]}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parser().parse_args(["generate", "--help"])
    assert option not in capsys.readouterr().out


COMMANDS = ("generate", "chat", "serve", "plan", "verify", "simulate", "replay")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_scheduling_policy_has_one_name(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    place = ["x"] if command in ("simulate", "replay") else []
    options = parser().parse_args([command, *place, "--scheduling-policy", "fair"])
    assert options.scheduling_policy in ("fair", ["fair"])
    with pytest.raises(SystemExit):
        parser().parse_args([command, *place, "--policy", "fair"])
    message = capsys.readouterr().err
    assert "argument --policy: was renamed: use --scheduling-policy" in message


def test_max_tokens_is_a_number_of_tokens_or_all_that_fit() -> None:
    def parsed(tokens: str) -> argparse.Namespace:
        return parser().parse_args(["generate", "--max-tokens", tokens])

    assert sampling_params(parsed("1"), {}).max_tokens == 1
    assert sampling_params(parsed("0"), {}).max_tokens is None
    with pytest.raises(ParameterError, match="from 1, or 0 for as many as fit, not -1"):
        sampling_params(parsed("-1"), {})
