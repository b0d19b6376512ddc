"""One constraint, as plain data that crosses every border."""

import json
from typing import Any

import pytest

from minfer.journal.codec import dump, load
from minfer.records.request import Request, SamplingParams
from minfer.sampling.structured import KINDS, MAX_CONSTRAINT, StructuredOutputs
from minfer.values.checks import ParameterError

EACH: dict[str, Any] = {
    "json": {"type": "object", "properties": {"b": {}, "a": {}}},
    "regex": "a+",
    "choice": ["a", "ß"],
    "grammar": 'start: "x"',
    "json_object": True,
    "structural_tag": {"type": "structural_tag"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_reported_and_kept(kind: str) -> None:
    constraint = StructuredOutputs(**{kind: EACH[kind]})
    assert constraint.kind == kind
    assert constraint.param == f"structured_outputs.{kind}"
    assert hash(constraint) == hash(StructuredOutputs(**{kind: EACH[kind]}))
    request = Request(
        id="a",
        prompt=(1,),
        max_tokens=1,
        needs_host_mask=True,
        sampling=SamplingParams(structured_outputs=constraint),
    )
    assert load(json.loads(json.dumps(dump(request)))) == request


def test_a_schema_keeps_the_order_of_its_properties() -> None:
    constraint = StructuredOutputs(json=EACH["json"])
    assert constraint.text == json.dumps(EACH["json"])
    assert constraint == StructuredOutputs(json=json.dumps(EACH["json"]))
    assert StructuredOutputs(json=False).text == "false"


def test_the_text_of_choices_has_a_line_for_each() -> None:
    assert StructuredOutputs(choice=EACH["choice"]).text == "a\nß"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, ""),
        ({"regex": "a", "choice": ["b"]}, ""),
        ({"json": {"a": {1, 2}}}, ""),
        ({"regex": ""}, ".regex"),
        ({"regex": 5}, ".regex"),
        ({"grammar": b"x"}, ".grammar"),
        ({"json": 5}, ".json"),
        ({"choice": []}, ".choice"),
        ({"choice": "ab"}, ".choice"),
        ({"choice": ["a", ""]}, ".choice"),
        ({"choice": ["a", 5]}, ".choice"),
        ({"choice": ["a", "\ud800"]}, ".choice"),
        ({"regex": "\ud800"}, ".regex"),
        ({"json": [1]}, ".json"),
        ({"json_object": 1}, ".json_object"),
        ({"json_object": True, "disable_any_whitespace": 1}, ".disable_any_whitespace"),
        ({"regex": "a" * (MAX_CONSTRAINT + 1)}, ".regex"),
        ({"choice": ["a" * MAX_CONSTRAINT, "b"]}, ".choice"),
    ],
)
def test_what_is_no_constraint_is_refused_by_its_name(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(ParameterError) as caught:
        StructuredOutputs(**fields)
    assert caught.value.param == f"structured_outputs{param}"
    assert len(str(caught.value)) < 200


def test_no_flag_is_a_flag_that_is_off() -> None:
    none: Any = None
    assert StructuredOutputs(regex="a", json_object=none) == StructuredOutputs(regex="a")


def test_sampling_takes_nothing_else() -> None:
    wrong: Any = {"json": {}}
    with pytest.raises(ParameterError, match="must be StructuredOutputs"):
        SamplingParams(structured_outputs=wrong)
