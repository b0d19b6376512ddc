"""Parameters of vLLM that minfer does not have, and records that take neutral ones."""

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import pytest

from minfer.sampling.vllm_names import SAMPLING, STRUCTURED, Absent
from minfer.sampling_params import (
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from minfer.values.checks import ParameterError

KINDS: tuple[tuple[Callable[..., Any], dict[str, Any], Mapping[str, Absent]], ...] = (
    (SamplingParams, {"top_k": 7}, SAMPLING),
    (StructuredOutputsParams, {"regex": "a"}, STRUCTURED),
)


@pytest.mark.parametrize(("make", "fields", "absent"), KINDS)
def test_neutral_values_are_taken_and_others_refused(
    make: Callable[..., Any], fields: dict[str, Any], absent: Mapping[str, Absent]
) -> None:
    plain = make(**fields)
    for name, parameter in absent.items():
        for value in (*parameter.neutral, None):
            assert make(**fields, **{name: value}) == plain
        with pytest.raises(ParameterError) as caught:
            make(**fields, **{name: "other"})
        assert caught.value.param == name
        assert str(caught.value).endswith(f"is not supported: {parameter.reason}")
    with pytest.raises(TypeError, match="has no parameter 'colour'"):
        make(**fields, colour=1)


def test_a_number_is_neutral_as_a_float_too_and_a_truth_value_is_not() -> None:
    assert SamplingParams(length_penalty=1.0) == SamplingParams()  # type: ignore[call-arg]  # one of vLLM's
    for name in ("length_penalty", "output_text_buffer_length"):
        wrong: dict[str, Any] = {name: name == "length_penalty"}
        with pytest.raises(ParameterError):
            SamplingParams(**wrong)


def test_a_wrong_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(TypeError, match="did you mean max_tokens"):
        SamplingParams(max_token=1)  # type: ignore[call-arg]  # the fault
    with pytest.raises(TypeError, match="did you mean regex"):
        StructuredOutputsParams(regexp="a")  # type: ignore[call-arg]  # the fault


def test_an_assignment_says_what_to_do_instead() -> None:
    params = SamplingParams(temperature=0.5)
    with pytest.raises(
        AttributeError, match=r"attrs\.evolve\(params, temperature=0\.7\)"
    ):
        params.temperature = 0.7  # type: ignore[misc]  # the fault
    assert attrs.evolve(params, temperature=0.7).temperature == 0.7
    assert params.clone() is params


def test_kinds_of_outputs_have_names() -> None:
    for kind in RequestOutputKind:
        assert SamplingParams(output_kind=kind).output_kind is kind
        assert SamplingParams(output_kind=kind.name).output_kind is kind
