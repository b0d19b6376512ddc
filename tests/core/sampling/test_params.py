from typing import Any

import pytest

from minfer import ParameterError, SamplingParams
from minfer.sampling.params import RowValues


@pytest.mark.parametrize(
    ("given", "param", "why"),
    [
        ({"n": 3, "best_of": 2}, "best_of", r"at least n \(3\), not 2"),
        ({"best_of": 0}, "best_of", "from 1 to 128, not 0"),
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


def test_numbers_beyond_all_bounds() -> None:
    for name in ("n", "seed", "max_tokens", "temperature"):
        with pytest.raises(ParameterError, match=name):
            # Each is a number.
            SamplingParams(**{name: 10**5000})  # type: ignore[arg-type]


def test_no_token_allowed_is_refused_by_how_many_there_may_be() -> None:
    with pytest.raises(ParameterError, match="from 1 to 65,536 token ids"):
        SamplingParams(allowed_token_ids=[])
