"""The kit's names are there when they are asked for, and say what they need."""

import subprocess
import sys

import pytest

import minfer.testing


def test_names_that_are_not_there_are_refused() -> None:
    with pytest.raises(AttributeError, match=r"'minfer.testing' has no attribute 'wish'"):
        _ = minfer.testing.wish


@pytest.mark.long
def test_without_hypothesis_it_says_what_to_type() -> None:
    code = (
        "import sys; sys.modules['hypothesis'] = None\n"
        "import minfer.testing.invariants\n"  # needs none
        "try:\n    from minfer.testing import check_policy\n"
        "except ModuleNotFoundError as error:\n    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == (
        "minfer.testing.check_policy needs hypothesis: "
        "pip install '.[testing]' in a clone of minfer\n"
    )
