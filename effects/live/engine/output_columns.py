"""A turn's outputs, as columns over all of its samples."""

from collections.abc import Sequence
from itertools import chain
from typing import TypeVar

from minfer.analysis.drafts import StepDrafts
from minfer.records.messages import Emit
from minfer.records.plan import Pooled
from minfer.records.sequence import SampleId, SampleIds
from minfer.records.token_logprobs import Logprobs

T = TypeVar("T")


def concat(columns: list[tuple[T, ...]]) -> tuple[T, ...]:
    """Returns the concatenated columns; a single one without a copy."""
    return columns[0] if len(columns) == 1 else tuple(chain.from_iterable(columns))


def logprobs_column(emits: list[Emit]) -> Logprobs:
    """Returns the column of log-probabilities, if any were requested."""
    if not any(emit.logprobs for emit in emits):
        return ()
    return concat([emit.logprobs or ((),) * len(emit.ids) for emit in emits])


def pooled_column(emits: list[Emit]) -> Pooled:
    """Returns the column of pooled vectors, if there are any."""
    if not any(emit.pooled for emit in emits):
        return ()
    return concat([emit.pooled or (b"",) * len(emit.ids) for emit in emits])


def drafts_column(steps: Sequence[StepDrafts], ids: SampleIds) -> tuple[int, ...]:
    """Returns how many drafts each sample had; empty if there were none."""
    if not steps:
        return ()
    counts = dict[SampleId, int]()
    for step in steps:
        for name, count in zip(step.ids, step.proposed, strict=True):
            counts[name] = counts.get(name, 0) + count
    return tuple([counts.pop(name, 0) for name in ids])
