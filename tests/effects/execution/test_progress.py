"""What is logged of an executor's start."""

import logging

import pytest

from minfer.effects.execution.warming.progress import (
    GRAPHS,
    KERNELS,
    START,
    WEIGHTS,
    Progress,
    logged,
)


def test_the_begin_and_the_end_of_each_stage_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, START)
    seen: list[Progress] = []
    report = logged(seen.append)
    reports = [
        *(Progress(WEIGHTS, 0, 1), Progress(WEIGHTS, 1, 1)),
        *(Progress(KERNELS, 0, 0), Progress(KERNELS, 5, 0)),
        *(Progress(GRAPHS, i, 3) for i in range(4)),
    ]
    for one in reports:
        report(one)
    assert seen == reports
    said = [one.getMessage().partition(" in ")[0] for one in caplog.records]
    done = f"{WEIGHTS}: done", f"{GRAPHS}: done"
    assert said == [WEIGHTS, done[0], KERNELS, GRAPHS, done[1]]
