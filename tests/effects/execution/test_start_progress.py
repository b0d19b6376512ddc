"""What is logged of an executor's start."""

import logging

import pytest

from minfer.effects.execution.warming.start_progress import (
    GRAPHS,
    KERNELS,
    START,
    WEIGHTS,
    StartProgress,
    logged,
)


def test_the_begin_and_the_end_of_each_stage_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, START)
    reported: list[StartProgress] = []
    report = logged(reported.append)
    reports = [
        *(StartProgress(WEIGHTS, 0, 1), StartProgress(WEIGHTS, 1, 1)),
        *(StartProgress(KERNELS, 0, 0), StartProgress(KERNELS, 5, 0)),
        *(StartProgress(GRAPHS, i, 3) for i in range(4)),
    ]
    for record in reports:
        report(record)
    assert reported == reports
    message = [record.getMessage().partition(" in ")[0] for record in caplog.records]
    ends = f"{WEIGHTS}: done", f"{GRAPHS}: done"
    assert message == [WEIGHTS, ends[0], KERNELS, GRAPHS, ends[1]]
