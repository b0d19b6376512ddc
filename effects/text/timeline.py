"""The times of one request, and the causes of its waiting."""

from collections.abc import Mapping

from attrs import define, field

from minfer.effects.text.outputs import RequestMetrics
from minfer.records.messages import Admitted, Preempted


@define
class Timeline:
    """The times of one request, in seconds on the engine's clock."""

    arrived: float = 0.0
    started: float | None = None  # when its first sample was admitted
    first: float | None = None  # when its first and last tokens came
    last: float | None = None
    preempted: int = 0  # times, all samples together
    drafts: int = 0  # of all samples, that were verified
    accepted: int = 0  # of these, as far as they became output
    # Total seconds for which the head of the queue was blocked, by cause: when this
    # request joined the queue. And during its own wait, once it was admitted.
    waits_before: Mapping[str, float] = field(factory=dict)
    queued: Mapping[str, float] = field(factory=dict)

    def record_scheduling(
        self, reason: Admitted | Preempted, now: float, waits: Mapping[str, float]
    ) -> None:
        """Record that a sample was admitted or preempted; `waits` are as
        `waits_before`.
        """
        self.preempted += isinstance(reason, Preempted)
        if self.started is not None:
            return
        spent = {
            cause: seconds - self.waits_before.get(cause, 0.0)
            for cause, seconds in waits.items()
        }
        # Time in which the queue was not blocked was spent on the step that ran.
        unblocked = now - self.arrived - sum(spent.values())
        spent["step"] = unblocked + spent.get("step", 0.0)
        self.started = now
        self.queued = {cause: seconds for cause, seconds in spent.items() if seconds > 0}

    def record_output(self, now: float) -> None:
        """Record the time of an output with tokens."""
        if self.first is None:
            self.first = now
        self.last = now

    def record_drafts(self, proposed: int, tokens: int) -> None:
        """Record that a step with `proposed` drafts yielded `tokens` tokens."""
        self.drafts += proposed
        self.accepted += max(0, min(proposed, tokens - 1))

    def metrics(self, output_tokens: int) -> RequestMetrics:
        """The times, as part of an output."""
        return RequestMetrics(
            arrival_time=self.arrived,
            first_token_time=self.first,
            last_token_time=self.last,
            output_tokens=output_tokens,
            first_scheduled_time=self.started,
            queue_times=self.queued,
            preemptions=self.preempted,
            draft_tokens=self.drafts,
            accepted_draft_tokens=self.accepted,
        )
