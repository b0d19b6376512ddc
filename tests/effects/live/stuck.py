"""Grammars that turn out too much work where an output may be over.

However busy the machine is: masks that take long are made elsewhere than those that are
made at once, so here nothing is said to take long.
"""

from typing import Any

import pytest

from minfer.effects.live.constraints import grammar_masks
from minfer.effects.text.grammars import parallel_masks as at_once
from minfer.effects.text.grammars import slow_masks as watching
from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.effects.text.grammars.parallel_masks import ParallelMasks

MADE = ParallelMasks._write_masks


def stick_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks fail from where an output may be over."""
    monkeypatch.setattr(grammar_masks, "MASK_WAIT_SECONDS", 60.0)
    monkeypatch.setattr(at_once, "MASK_WAIT_SECONDS", 60.0)
    monkeypatch.setattr(watching, "MASK_THREADS", 0)
    monkeypatch.setattr(ParallelMasks, "_write_masks", _failing)


def _failing(self: ParallelMasks, going: Any, lines: Any) -> dict[int, GrammarError]:
    """In place of a method: who may be at its end takes too long."""
    error = GrammarError("took too long")
    ended = {line: error for walk, line in going if walk.is_accepting()}
    return MADE(self, going, lines) | ended
