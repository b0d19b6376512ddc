"""What an API server keeps of one request, so that it outlives an engine: the request,
every token that came, and its history with the engines that served it.
"""

from collections.abc import Sequence
from enum import Enum

from attrs import define, field

from minfer.effects.cluster.link.crash_rule import (
    SUSPECT_DEATHS,
    SampleHistory,
    SoloDeaths,
)
from minfer.effects.live.request_registry import RequestRecord
from minfer.records.messages import Finish, Finished
from minfer.records.request import Request


class HandoverStage(Enum):
    """Where a request is that one replica prefills and another one decodes."""

    PREFILL = "prefill"  # on the replica that computes its prompt
    DECODE = "decode"  # on the other one, to which the KV of its prompt was sent
    OVER = "over"  # it goes on as any other request: the KV is used, or not needed


@define(eq=False)
class Handover:
    """From the replica that computes a request's prompt to the one that decodes it."""

    target: int  # the replica that is to decode it
    push_to: str  # how the replica that computes the prompt names that one
    # Leading blocks of its prompt that the target has, which are not sent.
    target_blocks: int
    stage: HandoverStage = HandoverStage.PREFILL
    cached: int | None = None  # prompt tokens that the replica which prefilled it had


@define(eq=False)
class ApiServerRequest:
    """A request, and its results so far."""

    request: Request
    record: RequestRecord
    tokens: list[list[int]]  # new ones, by sample
    histories: list[SampleHistory]  # likewise
    replica: int | None = None  # that has it
    sent: bool = False  # to an engine, at any time
    started: bool = False  # tokens of it came from the engine that has it
    # By its names on that engine's link, of which it has several if its samples were
    # resubmitted one by one: the sample, or None for all of them.
    names: dict[str, int | None] = field(factory=dict)
    ended: set[int] = field(factory=set)  # samples that have ended
    ends: dict[int, Finish] = field(factory=dict)  # ends that were sent to the engine
    cancelled: bool = False
    compiling: bool = False  # its grammar, perhaps, until it enters the queue
    solo: SoloDeaths = field(factory=SoloDeaths)
    isolated: bool = False  # it runs alone whatever its deaths are
    waits_alone: bool = False  # its engine holds it until it can run alone
    handover: Handover | None = None  # if its prompt is, or was, computed by another one

    @classmethod
    def of(cls, record: RequestRecord) -> "ApiServerRequest":
        """Returns a request without results."""
        request = record.request
        tokens: list[list[int]] = [[] for _ in range(request.n)]
        histories = [SampleHistory() for _ in range(request.n)]
        return cls(request, record, tokens, histories)

    def left(self) -> list[int]:
        """Returns the samples that have not ended."""
        return [i for i in range(self.request.n) if i not in self.ended]

    @property
    def suspect(self) -> bool:
        """Whether engines may have died because of it: then it runs alone."""
        return self.deaths >= SUSPECT_DEATHS

    @property
    def runs_alone(self) -> bool:
        """Whether it must run alone."""
        return self.suspect or self.isolated

    @property
    def deaths(self) -> int:
        """How many engines in a row served one of its samples, did not clear that, and
        died.
        """
        return max((self.histories[i].deaths for i in self.left()), default=0)

    def length(self, sample: int) -> int:
        """Returns a sample's output tokens so far, including those that it began with."""
        return len(self.request.output) + len(self.tokens[sample])

    def samples_named(self, name: str) -> list[int]:
        """Returns the samples that have a name on the link."""
        if name not in self.names:
            return []
        sample = self.names[name]
        return self.left() if sample is None else [sample]

    def note_death(self, solo: Sequence[int], *, probing: bool) -> None:
        """Note that its engine has died.

        `solo`: its samples that the engine served alone; `probing`: whether the engine
        served one request alone, this or another one.
        """
        for sample in self.left():
            history = self.histories[sample]
            if sample in solo or (not probing and (history.admitted or self.compiling)):
                history.end()
        if solo and self.replica is not None:
            self.solo.note(self.replica)
        elif not probing:
            self.solo = SoloDeaths()
        self.leave_engine()

    def clear(self) -> None:
        """Note which of its samples are cleared, when it leaves a live engine."""
        for history in self.histories:
            history.leave()
        if not self.suspect:
            self.solo = SoloDeaths()

    def leave_engine(self) -> None:
        """Note that no engine has it any more."""
        self.replica = None
        self.compiling = self.started = self.waits_alone = False
        if self.handover is not None:
            self.handover.stage = HandoverStage.OVER
        for history in self.histories:
            history.admitted, history.tokens_received = False, 0
        self.names.clear()

    def fail(self, error: str) -> list[Finished]:
        """Returns the ends of all its samples with an error."""
        name = self.request.id
        return [
            Finished(name, sample, "error", self.length(sample), error)
            for sample in self.left()
        ]

    def ends_without_engine(self) -> list[Finished]:
        """Returns the ends of its samples that have to end."""
        ends = []
        for sample in self.left():
            length, requested = self.length(sample), self.ends.get(sample)
            name = self.request.id
            if requested is not None:
                ends.append(
                    Finished(
                        name, sample, requested.reason, min(length, requested.length)
                    )
                )
            elif self.cancelled:
                ends.append(Finished(name, sample, "cancelled", length))
        return ends
