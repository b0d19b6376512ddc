"""The search for stories that break a law, by hypothesis, and for the shortest one."""

from contextlib import suppress
from typing import Any, Final

import hypothesis
import hypothesis.strategies as st
from attrs import define, frozen
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis.errors import FlakyFailure

from minfer.testing.hidden_state import HiddenState
from minfer.testing.policy_error import PolicyError
from minfer.testing.second_process import SecondProcess
from minfer.testing.stories import AnyStory, Bounds

# Turns run to shrink the first story that fails, at most: it takes less than a minute.
MAX_SHRINKING_TURNS: Final = 2_500


@frozen
class FailedStory:
    """A story that breaks a law."""

    story: AnyStory
    error: PolicyError

    @property
    def size(self) -> tuple[int, int]:
        """What is shrunk: the lines of the message, and its length."""
        text = str(self.error)
        return text.count("\n"), len(text)


@define
class Search:
    """The search for a story that breaks a law, and for the shortest that breaks it."""

    policy: Any
    bounds: Bounds
    second: SecondProcess
    hidden: HiddenState
    failed: FailedStory | None = None  # the shortest so far
    _shrinking_turns: int = 0  # turns since the first that failed

    def run(
        self, stories: st.SearchStrategy[AnyStory], count: int, seed: int | None
    ) -> None:
        """Try `count` stories, at random or from `seed`."""

        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            derandomize=False,
            report_multiple_bugs=False,
            verbosity=Verbosity.quiet,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @given(stories)
        def tried(story: AnyStory) -> None:
            self._try(story)

        # "Flaky" means that answers depend on more than arguments, or that shrinking
        # ended here: the shortest story is known either way.
        with suppress(PolicyError, FlakyFailure):
            (tried if seed is None else hypothesis.seed(seed)(tried))()

    def _try(self, story: AnyStory) -> None:
        """Run a story. Raises PolicyError if it breaks a law: after the first story that
        failed, only for the same law.
        """
        known = self.failed
        if known is not None and self._shrinking_turns > MAX_SHRINKING_TURNS:
            return
        self.hidden.restore()  # so that a story does not depend on those before it
        try:
            trial = story.run(self.policy, self.bounds, self.second)
            self._shrinking_turns += len(trial.turns) if known else 0
        except PolicyError as error:
            self._shrinking_turns += 1 + len(error.turns) if known else 0
            if known is None:
                self.failed = FailedStory(story, error)
            elif error.law != known.error.law:
                return
            elif (found := FailedStory(story, error)).size < known.size:
                self.failed = found
            if error.law == "never ends":  # each try would take as long
                self._shrinking_turns = MAX_SHRINKING_TURNS + 1
            raise
