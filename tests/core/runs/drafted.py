"""Runs with drafts, of an engine on a clock of the test's own."""

from typing import Any

from minfer.config import EngineConfig
from minfer.messages import Submit
from minfer.speculate.settings import DEVICE, Speculation
from tests.core.runs.clocked import Run, config, request


def drafting(drafter: str = DEVICE, drafts: int = 3, **changes: Any) -> EngineConfig:
    how = Speculation(drafter=drafter, drafts=drafts, adaptive=False)
    return config(speculation=how, **changes)


def by_device(depth: int = 1) -> Run:
    """Two samples with drafts of a draft model, most of which are right."""
    run = Run(drafting(depth=depth))
    run.turn(Submit(request("a", 5, 24)), Submit(request("b", (9, 9, 9), 24)))
    run.drain()
    return run
