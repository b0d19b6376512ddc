"""What a client's id means among an engine's."""

import pytest

from minfer.effects.live.request_names import (
    answer_of,
    names_matching,
    prompt_name,
    request_of,
    resumed_name,
)

IDS = ["cmpl-42-0", "cmpl-42-1", "cmpl-4", "cmpl-42-1#7", "cmpl-42-1#8", "cmpl-42-0"]


def test_names_are_parsed_as_they_are_made() -> None:
    request = prompt_name("cmpl-42", 1)
    for name in (request, resumed_name(request, 7)):
        assert (request_of(name), answer_of(name)) == (request, "cmpl-42")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cmpl-42", ["cmpl-42-0", "cmpl-42-1", "cmpl-42-1#7", "cmpl-42-1#8"]),
        ("cmpl-42-1", ["cmpl-42-1", "cmpl-42-1#7", "cmpl-42-1#8"]),
        ("cmpl-42-1#7", ["cmpl-42-1#7"]),
        ("cmpl-4", ["cmpl-4"]),
        ("cmpl", ["cmpl-4"]),
        ("chatcmpl-42", []),
    ],
)
def test_a_name_means_all_parts_of_what_has_it(name: str, expected: list[str]) -> None:
    assert names_matching(name, IDS) == expected


def test_who_chose_a_request_s_id_gets_that_one_and_no_other() -> None:
    assert names_matching("a", ["a-1", "a", "a#2"]) == ["a", "a#2"]
