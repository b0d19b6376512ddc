import math
from typing import Any

import pytest

from minfer import ConfigError, EngineConfig, ParameterError, Request, SamplingParams
from minfer.sampling.params import RowValues


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", 1000),
        ("n", True),
        ("n", 1.5),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -2),
        ("top_k", 0.5),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("min_p", math.nan),
        ("min_p", True),
        ("seed", 2**70),
        ("seed", "x"),
        ("max_tokens", -1),
        ("max_tokens", 2.5),
        ("stop", ("",)),
        ("stop", ("a",) * 65),
        ("stop", ("a" * 1025,)),
        ("stop", (3,)),
        ("stop", 5),
        ("stop_token_ids", 5),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", tuple(range(300))),
        ("ignore_eos", 1),
        ("include_stop_str_in_output", "yes"),
        ("skip_special_tokens", 0),
        ("typical_p", 0),
        ("typical_p", 1.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", 2.1),
        ("repetition_penalty", math.nan),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("presence_penalty", "x"),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("min_tokens", True),
        ("logit_bias", 5),
        ("logit_bias", {5: 101}),
        ("logit_bias", {5: math.nan}),
        ("logit_bias", {-1: 1}),
        ("logit_bias", {"5": 1}),
        ("logit_bias", {True: 1}),
        ("logit_bias", [5]),
        ("logit_bias", [(5, 1), (5, 2)]),
        ("logit_bias", dict.fromkeys(range(1025), 1)),
        ("allowed_token_ids", []),
        ("allowed_token_ids", 5),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", [5, 2**31 + 1]),
        ("allowed_token_ids", [True]),
        ("allowed_token_ids", range(70_000)),
        ("bad_words", 5),
        ("bad_words", [5]),
        ("bad_words", [""]),
        ("bad_words", ["x" * 129]),
        ("bad_words", ["x"] * 129),
        ("logprobs", -1),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", True),
        ("best_of", 0),
        ("best_of", 129),
        ("best_of", 1.0),
        ("logprobs", 21),
        ("logprobs", True),
        ("logprobs", 1.5),
    ],
)
def test_a_parameter_out_of_range_is_named(name: str, value: Any) -> None:
    with pytest.raises(ParameterError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("given", "param", "why"),
    [
        ({"n": 3, "best_of": 2}, "best_of", r"at least n \(3\), not 2"),
        ({"n": 2, "max_tokens": 0}, "n", "must be 1 where max_tokens is 0"),
        ({"best_of": 2, "max_tokens": 0}, "best_of", "must be 1 where max_tokens is 0"),
    ],
)
def test_parameters_that_contradict_each_other(
    given: dict[str, Any], param: str, why: str
) -> None:
    with pytest.raises(ParameterError, match=why) as caught:
        SamplingParams(**given)
    assert caught.value.param == param


def test_how_many_samples_are_made() -> None:
    for n, best_of, samples, chooses in (
        (1, None, 1, False),
        (3, None, 3, False),
        (3, 3, 3, False),
        (2, 5, 5, True),
    ):
        params = SamplingParams(n=n, best_of=best_of)
        assert (params.samples, params.chooses) == (samples, chooses)


def test_good_parameters() -> None:
    params = SamplingParams(stop="\n", temperature=0, max_tokens=None, seed=-5, top_k=-1)
    assert params.stop == ("\n",)
    assert SamplingParams(stop=None).stop == ()
    assert SamplingParams(logit_bias={7: 1, 2: -0.5}).logit_bias == ((2, -0.5), (7, 1.0))
    assert SamplingParams(logit_bias=None).logit_bias == ()
    assert SamplingParams(min_tokens=16).min_tokens == 16
    assert SamplingParams(min_tokens=99, max_tokens=None).max_tokens is None
    assert SamplingParams(allowed_token_ids=[5, 3]).allowed_token_ids == (5, 3)
    assert SamplingParams(bad_words="no").bad_words == ("no",)


@pytest.mark.parametrize("kind", [RowValues, SamplingParams])
def test_parameters_have_names(kind: Any) -> None:
    """Without a name a value would be that of whichever parameter stands first."""
    with pytest.raises(TypeError, match="positional"):
        kind(0.5)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_blocks": 0}, "num_blocks"),
        ({"num_blocks": 2.5}, "num_blocks"),
        ({"block_size": True}, "block_size"),
        ({"max_num_seqs": 512, "max_num_batched_tokens": 511}, "max_num_batched_tokens"),
        ({"watermark": 8}, "watermark"),
    ],
)
def test_a_setting_out_of_range_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        EngineConfig(**{"num_blocks": 8, **changes})


@pytest.mark.parametrize("prompt", [(1, -1), (1, 2**32), (1, 0.5), (1, "a")])
def test_token_ids_are_checked_when_a_request_is_made(prompt: Any) -> None:
    with pytest.raises(ParameterError, match="token ids must be whole numbers"):
        Request(id="a", prompt=prompt, max_tokens=1)
    assert Request(id="a", prompt=(3, 9), output=(7,), max_tokens=1).largest == 9


def test_numbers_beyond_all_bounds() -> None:
    for name in ("n", "seed", "max_tokens", "temperature"):
        with pytest.raises(ParameterError, match=name):
            # Each is a number.
            SamplingParams(**{name: 10**5000})  # type: ignore[arg-type]


def test_no_token_allowed_is_refused_by_how_many_there_may_be() -> None:
    with pytest.raises(ParameterError, match="from 1 to 65,536 token ids"):
        SamplingParams(allowed_token_ids=[])
