"""The transitions of a sample, as a table: its stages, and what moves it between them.

Theory. A sample is in one stage at a time, and only the causes in `TRANSITIONS` move it:
an event, or a decision that the engine reports as a reason. There are no phases for
prefill and decode: while a sample runs, every good step leaves it in its stage, with more
tokens.

    new        not submitted; an id whose samples have all ended is new again
    waiting    in the queue for the first time: it has no row and no block of its own
    running    it has a device row and blocks for all its known tokens
    preempted  it released its row and blocks, and is in the queue again with all its
               known tokens
    fenced     it has ended while plans in flight could still write to its blocks
    ended      its blocks are free or idle; nothing is reported about it any more

A sample that stops running while nothing is in flight passes through `fenced` at once.
The blocks of a preempted sample may be behind a fence too: that does not prevent its
admission.

The engine looks up each transition here (`move`): whether a sample that ends had blocks,
and so may have to stay behind a fence, is in the table and nowhere else. The
specification checks every sample of every run against it (`minfer.testing.ledger`), and
`diagram` draws the picture in README.md from it.
"""

from enum import StrEnum
from typing import Final

from minfer.records.sequence import Sequence


class Stage(StrEnum):
    """The stage of a sample."""

    NEW = "new"
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FENCED = "fenced"
    ENDED = "ended"


class Cause(StrEnum):
    """What moves a sample: an event, or a decision."""

    SUBMITTED = "Submit"
    REJECTED = "Submit (rejected)"
    ADMITTED = "Admitted"
    ADVANCED = "Executed"
    COMPLETED = "Executed (stop or length)"
    RESTARTED = "Failed"
    FAILED = "Failed too often"
    ADAPTER_FAILED = "AdapterFailed"
    PREEMPTED = "Preempted"
    CANCELLED = "Cancel"
    FINISHED = "Finish"
    RELEASED = "the fence opens"


TRANSITIONS: Final[dict[tuple[Stage, Cause], Stage]] = {
    (Stage.NEW, Cause.SUBMITTED): Stage.WAITING,
    (Stage.NEW, Cause.REJECTED): Stage.ENDED,
    (Stage.WAITING, Cause.ADMITTED): Stage.RUNNING,
    (Stage.WAITING, Cause.CANCELLED): Stage.ENDED,
    (Stage.WAITING, Cause.FINISHED): Stage.ENDED,
    (Stage.WAITING, Cause.ADAPTER_FAILED): Stage.ENDED,
    (Stage.RUNNING, Cause.ADVANCED): Stage.RUNNING,
    (Stage.RUNNING, Cause.RESTARTED): Stage.RUNNING,
    (Stage.RUNNING, Cause.PREEMPTED): Stage.PREEMPTED,
    (Stage.RUNNING, Cause.COMPLETED): Stage.FENCED,
    (Stage.RUNNING, Cause.CANCELLED): Stage.FENCED,
    (Stage.RUNNING, Cause.FINISHED): Stage.FENCED,
    (Stage.RUNNING, Cause.FAILED): Stage.FENCED,
    (Stage.PREEMPTED, Cause.ADMITTED): Stage.RUNNING,
    (Stage.PREEMPTED, Cause.CANCELLED): Stage.ENDED,
    (Stage.PREEMPTED, Cause.FINISHED): Stage.ENDED,
    (Stage.PREEMPTED, Cause.ADAPTER_FAILED): Stage.ENDED,
    (Stage.FENCED, Cause.RELEASED): Stage.ENDED,
}


def waiting_stage(seq: Sequence) -> Stage:
    """The stage of a sample in the queue."""
    return Stage.PREEMPTED if seq.preempted else Stage.WAITING


def move(stage: Stage, cause: Cause) -> Stage:
    """The stage after a transition. Raises KeyError if the table has no such one."""
    return TRANSITIONS[stage, cause]


def diagram() -> str:
    """The table as a Mermaid state diagram, for the documentation."""
    lines = ["stateDiagram-v2"]
    arrows: dict[tuple[Stage, Stage], list[str]] = {}
    for (source, cause), target in TRANSITIONS.items():
        arrows.setdefault((source, target), []).append(cause)
    for (source, target), causes in arrows.items():
        start = "[*]" if source is Stage.NEW else source
        lines.append(f"    {start} --> {target}: {', '.join(causes)}")
    lines.append(f"    {Stage.ENDED} --> [*]")
    return "\n".join(lines)
