"""The example of the kit's README."""

import doctest
from pathlib import Path

import pytest

from minfer import testing

README = Path(testing.__file__).with_name("README.md")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::minfer.policies.mistakes.PolicyWarning")
def test_the_example_of_laws_finds_what_it_says() -> None:
    results = doctest.testfile(str(README), module_relative=False)
    assert results.attempted > 5
    assert results.failed == 0
