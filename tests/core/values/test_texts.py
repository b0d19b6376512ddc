"""Words for people."""

from minfer.values.texts import counted, without_breaks


def test_a_number_of_things_is_a_singular_for_one_alone() -> None:
    numbers = (0, 1, 2, 1204)
    texts = [counted(number, "sink token") for number in numbers]
    assert texts == [
        "0 sink tokens",
        "1 sink token",
        "2 sink tokens",
        "1,204 sink tokens",
    ]


def test_a_text_of_several_lines_is_on_one() -> None:
    assert without_breaks(ValueError(" a\n\tb ")) == "a b"
