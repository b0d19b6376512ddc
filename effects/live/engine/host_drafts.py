"""Drafts made by the host: a proposer gets every token, and proposes what may follow.

Theory. All that a proposer needs is in plans and their results: an new_row row has its
sample's known tokens, and each result has the tokens after them. So the proposer gets
them before the engine does, and its proposals enter the same turn as the result that they
follow: the engine can plan the next step with them at once. Samples with a grammar have
no drafts, as their masks would have to be made behind each draft.

No step is planned while the proposer works. So it reads a prompt in parts, one a turn,
and while the engine uses no proposals, as they are not expected to pay, they are made in
fewer and fewer turns.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any, Final, Protocol

from attrs import define, field
from typing_extensions import override

from minfer.planning.plan_drafts import may_draft
from minfer.records.config import EngineConfig
from minfer.records.messages import Emit, Event, Execute, Executed, Failed, Propose
from minfer.records.plan import NewRow
from minfer.records.sequence import SampleId
from minfer.records.speculation import HOST
from minfer.records.state import EngineState, Transition
from minfer.speculate.proposer import Proposer

MAX_TOKENS_READ: Final = 512  # in a turn
MAX_SKIPPED_TURNS: Final = 32  # without proposals, after unused ones


class HostDraftSource(Protocol):
    """Makes the host's drafts. In the driver's thread."""

    def read_results(
        self, results: Iterable[Executed | Failed], state: EngineState
    ) -> tuple[Event, ...]:
        """Read a step's results, before the engine does; returns proposals.

        `state` has the step in flight.
        """
        ...

    def observe(self, transition: Transition) -> None:
        """Note the engine's transition."""
        ...


class NoHostDrafts(HostDraftSource):
    """Makes no drafts."""

    @override
    def read_results(
        self,
        results: Iterable[Executed | Failed],
        state: EngineState,
    ) -> tuple[Event, ...]:
        """Nothing."""
        return ()

    @override
    def observe(self, transition: Transition) -> None:
        """It does not matter."""


@define(eq=False)
class DraftedSample:
    """What the proposer has read of a sample."""

    run_id: int  # of the run that it is read from
    last_index: int  # of the last token that the sample may have
    stops: frozenset[int]
    num_known: int = 0  # tokens of the sample so far
    is_finished: bool = False  # the last of them ends the sample
    # those that the proposer has not read
    unread: deque[tuple[int, ...]] = field(factory=deque)


class HostDrafts(HostDraftSource):
    """Drafts by a proposer, for an engine that has `speculation` by the host."""

    def __init__(self, config: EngineConfig, proposer: Proposer) -> None:
        spec_config = config.speculation
        self.max_drafts = 0 if spec_config is None else spec_config.drafts  # per sample
        rows = 0 if spec_config is None else spec_config.rows
        self.rows = rows or config.max_num_seqs  # no drafts in steps of more rows
        self.proposer = proposer
        self.library: Any = proposer.start()
        self.samples: dict[SampleId, DraftedSample] = {}
        self.by_run_id: dict[int, SampleId] = {}  # by run id
        self.proposed = False  # in this turn
        self.skip = 0  # turns to skip
        # the last number; doubled, if the next proposals are unused, too
        self.skipped = 0

    @override
    def read_results(
        self, results: Iterable[Executed | Failed], state: EngineState
    ) -> tuple[Event, ...]:
        self.proposed = False
        continued = list[SampleId]()
        for result in results:
            if isinstance(result, Executed):
                continued += self._note_results(state, result)
        if self.skip or len(state.running) > self.rows:  # unread tokens are read later
            self.skip = max(0, self.skip - 1)
            return ()
        self._read(continued)
        proposals = [
            self._propose(name)
            for name in continued
            if not self.samples[name].is_finished
        ]
        nonempty = tuple(proposal for proposal in proposals if proposal.tokens)
        self.proposed = bool(nonempty)
        return nonempty

    @override
    def observe(self, transition: Transition) -> None:
        for command in transition.commands:
            if isinstance(command, Emit):
                self._forget((end.id, end.sample) for end in command.finished)
        plans = [
            command.plan
            for command in transition.commands
            if isinstance(command, Execute)
        ]
        for plan in plans:
            for new_row in plan.opens:
                self._open(plan.run_ids[new_row.index], new_row, transition.state)
        if not self.proposed:
            return
        if any(plan.drafts for plan in plans):
            self.skip = self.skipped = 0
        elif plans:  # the engine planned without the proposals
            self.skipped = min(MAX_SKIPPED_TURNS, 2 * self.skipped or 1)
            self.skip = self.skipped

    def _forget(self, samples: Iterable[SampleId]) -> None:
        """Drop the state of samples that ended."""
        for name in samples:
            sample = self.samples.pop(name, None)
            if sample is not None:
                self.by_run_id.pop(sample.run_id, None)
                self.library = self.proposer.ended(self.library, name)

    def _open(self, run_id: int, new_row: NewRow, state: EngineState) -> None:
        """Begin to read a sample that starts or is resumed, with all its known tokens."""
        name, run = new_row.name, state.running
        if name not in run.ids:
            return  # preempted within the turn, by a step planned later
        request = run.seqs[run.ids.index(name)].request
        if request.needs_host_mask or not may_draft(request, HOST):
            return
        sample = self.samples.get(name)
        if sample is not None:
            self.by_run_id.pop(sample.run_id, None)
        # Tokens of steps after its preemption do not count.
        if sample is None or sample.num_known > len(new_row.known):
            sample = DraftedSample(run_id, new_row.last_index, request.stop_ids)
            self.samples[name] = sample
            self.library = self.proposer.began(
                self.library, name, request.root, new_row.prompt
            )
        sample.run_id = run_id
        self.by_run_id[run_id] = name
        self._append(sample, new_row.known[sample.num_known :])

    def _note_results(self, state: EngineState, result: Executed) -> list[SampleId]:
        """Note the results of the earliest plan; returns the samples that have more
        tokens. Results of samples that were preempted since do not count.
        """
        plan, running = state.inflight[0], set(state.running.run_ids)
        continued = list[SampleId]()
        if type(result.yields) is not tuple or len(result.yields) != len(plan.run_ids):
            return continued  # malformed results
        for run_id, tokens in zip(plan.run_ids, result.yields, strict=True):
            name = self.by_run_id.get(run_id)
            if tokens and name is not None and run_id in running:
                self._append(self.samples[name], tokens)
                continued.append(name)
        return continued

    def _append(self, sample: DraftedSample, tokens: tuple[int, ...]) -> None:
        if tokens:
            sample.num_known += len(tokens)
            sample.unread.append(tokens)
            stopped = not sample.stops.isdisjoint(tokens)
            sample.is_finished = stopped or sample.num_known > sample.last_index

    def _read(self, first: list[SampleId]) -> None:
        """Pass new tokens to the proposer, as many as allowed in a turn: first those of
        samples with new results, so that no sample waits for another one's prompt.
        """
        num_left = MAX_TOKENS_READ
        for name in [*first, *self.samples]:
            if num_left <= 0:
                return
            sample = self.samples[name]
            while sample.unread and num_left > 0:
                tokens = sample.unread.popleft()
                if len(tokens) > num_left:
                    sample.unread.appendleft(tokens[num_left:])
                    tokens = tokens[:num_left]
                num_left -= len(tokens)
                self.library = self.proposer.grew(self.library, name, tokens)

    def _propose(self, name: SampleId) -> Propose:
        """Returns the proposal for a sample; empty while some of its tokens are
        unread.
        """
        sample, tokens = self.samples[name], tuple[int, ...]()
        if not sample.unread:
            tokens = self.proposer.propose(self.library, name, self.max_drafts).tokens
        return Propose(*name, sample.num_known, tokens)
