"""What helps those that wait, by the settings of the engine."""

import pytest
from attrs import evolve

from minfer.effects.runs.explain_words import cause_of, config_words
from tests.core.test_engine import CONFIG


@pytest.mark.parametrize(
    ("target", "because", "remedy"),
    [
        (None, "16 each", "raise --max-num-batched-tokens above 16"),
        (0.0, "at most 16 each, and fewer beside", "set --itl-target to none, which"),
        (0.02, "at most 16 each, and fewer beside", "set --itl-target to more millisec"),
    ],
)
def test_what_bounds_the_tokens_of_a_step_is_named(
    target: float | None, because: str, remedy: str
) -> None:
    words = config_words(evolve(CONFIG, itl_target=target))
    cause = cause_of("budget")
    assert because in cause.because.format(**words)
    assert cause.remedy.format(**words).startswith(remedy)
