"""The data of a run for its page: columns of numbers, folded from its turns.

Theory. Most turns change little, so a run is stored as a few numbers per turn and per
planned step, and a log of special events: arrivals, admissions, prefill chunks,
preemptions, ends. The page computes the rest: a sequence that decodes for a thousand
turns is an entry where that begins and one where it ends, whatever the batch; only drafts
have a row of their own for each step, as their results differ. All data are columns of
numbers, and a table of the texts, ids and errors, that they point into.
"""

from array import array
from math import inf, isfinite
from typing import Any, Final

import minfer.records.messages as messages
from minfer.analysis.drafts import sample_drafts
from minfer.effects.runs.page.entered import entered_requests
from minfer.effects.runs.recorded import wire_name
from minfer.records.plan import Plan
from minfer.records.request import MAX_SAMPLES, Request
from minfer.records.sequence import SampleId
from minfer.records.state import EngineState, Turn
from minfer.simulation.cost import drafts_of

_MAX_CELL: Final = 2**30 - 1  # of a cell; larger values are nonsense, and clipped
_NONE: Final = -1  # in place of a sample, or a step, that does not exist
_MICROSECONDS: Final = 1e6  # in a second

TABLES: Final = {
    "turn": ("free", "cached", "shareable", "running", "waiting", "tokens", "done"),
    "step": ("turn", "number", "decode", "chunks", "prefill", "drafts"),
    # The results of a sample's drafts, in the turn in which their step was done.
    "draft": ("turn", "sample", "proposed", "accepted"),
    "sample": ("id", "sample", "n", "prompt", "most", "about"),
    "log": ("turn", "kind", "sample", "a", "b", "c"),
}
# The log: the kinds of its entries, and the meaning of their cells a, b and c. A text is
# its place in the table of texts, a sample its number. Kinds are named as in journals.
KINDS: Final[dict[str, tuple[str, ...]]] = {
    # As the recording begins: 0 waits, 1 prefills, 2 decodes, 3 waits again.
    "Present": ("state",),
    "Submit": (),
    "Cancel": ("id",),
    "Finish": ("length", "reason"),
    "Pause": ("paused",),
    "Failed": ("step", "error"),
    "Admitted": ("hit", "known", "copied"),
    "Missed": ("block", "blocks"),
    "WindowMissed": ("group", "block", "cached"),
    "StateMissed": ("block", "cached"),
    "Loading": ("blocks", "hit", "kind"),
    "Recomputing": ("blocks", "hit", "kind"),
    "AdapterLoading": ("slot", "adapter", "evicted"),
    "SlotBlocked": ("loading", "used", "adapter"),
    "AdapterLost": ("slot", "error", "ended"),
    "DropAdapter": ("adapter",),
    "LostBlocks": ("blocks", "error"),
    "SavesSkipped": ("step", "saved", "skipped"),
    "QueueBlocked": ("cause", "needs", "available"),
    "Preempted": ("by", "known", "computed"),
    "Finished": ("reason", "length", "error"),
    "Discarded": ("step", "error", "rows"),
    "Ignored": ("event", "detail"),
    "PolicyOverride": ("question", "why"),
    # Planned prefill tokens; after the last chunk, a token.
    "Chunk": ("step", "tokens", "last"),
}
# Events without an entry: times and results of drafts are in other tables,
# `entered_requests` finds the arrivals, and lost blocks and adapters have a reason.
_NOT_LOGGED: Final = (
    messages.Tick
    | messages.Submit
    | messages.Propose
    | messages.Moved
    | messages.Lost
    | messages.AdapterLoaded
    | messages.AdapterFailed
)
_PLACES: Final = {kind: place for place, kind in enumerate(KINDS)}


class Run:
    """The columns of a run: call `add_turn` with its turns in order."""

    def __init__(self) -> None:
        self.first = 0  # number of the first turn
        self.start = 0.0  # its time, in seconds
        self.time = array("d")  # whole microseconds since the first turn
        self.tables = {
            table: [array("i") for _ in names] for table, names in TABLES.items()
        }
        self.texts: dict[str, int] = {}
        self.serving: dict[SampleId, list[int]] = {}  # samples in the engine, by name
        self.ended: dict[SampleId, int] = {}  # those that ended in the turn
        self.run_samples: dict[int, int] = {}  # run id -> its sample
        # Tokens, whose ratio is the prefix-hit share.
        self.cached = 0
        self.prompt = 0

    def add_turn(self, turn: Turn) -> None:
        """Add a turn."""
        state = turn.transition.state
        if not self.time:
            self.first = turn.number
            self.start = state.time
            self._present(turn.before)
        self.time.append(self._microseconds(state.time))
        self.ended = {}
        completed_step = self._events(turn)
        tokens = self._emitted(turn)
        self._reasons(turn)
        self._add(
            "turn",
            state.blocks.free,
            state.blocks.idle,
            state.blocks.live,
            len(state.running),
            len(state.waiting),
            tokens,
            completed_step,
        )
        for command in turn.transition.commands:
            if isinstance(command, messages.Execute):
                self._plan(command.plan)

    def _microseconds(self, time: float) -> int:
        """A time since the first turn; it never decreases, even if the clock did."""
        since = (time - self.start) * _MICROSECONDS
        last = int(self.time[-1]) if self.time else 0
        return max(round(since), last) if isfinite(since) else last

    def _present(self, before: EngineState) -> None:
        """Enter the samples that are there: a recording may begin within a run."""
        run = before.running
        rows = zip(
            run.seqs, run.run_ids, run.scheduled, run.num_known_at_admission, strict=True
        )
        for seq, gen, scheduled, base in rows:
            number = self._sample(seq.request, seq.sample)
            self.run_samples[gen] = number
            self._note("Present", number, 1 + (scheduled >= base))
        for seq in before.waiting:
            number = self._sample(seq.request, seq.sample)
            self._note("Present", number, 3 * bool(seq.preempted))

    def _events(self, turn: Turn) -> int:
        """Log the events; returns the step whose results came, or -1."""
        completed_step = _NONE
        flying = {plan.step for plan in turn.before.inflight}
        for request in entered_requests(turn):
            for sample in range(max(1, min(request.n, MAX_SAMPLES))):
                self._note("Submit", self._sample(request, sample))
        for event in turn.events:
            if isinstance(event, messages.Executed):
                if type(event.step) is int and event.step in flying:
                    completed_step = event.step
            elif type(event) in messages.EVENTS and not isinstance(event, _NOT_LOGGED):
                self._log_message(event)
        for result in sample_drafts(turn.before, turn.events, turn.transition):
            number = self._sample_number((result.id, result.sample))
            self._add(
                "draft", len(self.time) - 1, number, result.proposed, result.accepted
            )
        return completed_step

    def _emitted(self, turn: Turn) -> int:
        """Log the ends; returns the number of output tokens."""
        emits = [
            command
            for command in turn.transition.commands
            if isinstance(command, messages.Emit)
        ]
        for emit in emits:
            for end in emit.finished:
                self._end(end)
        return sum(len(tokens) for emit in emits for tokens in emit.tokens)

    def _reasons(self, turn: Turn) -> None:
        """Log the decisions; ends are logged from `Finished`."""
        for reason in turn.transition.reasons:
            if isinstance(reason, messages.Ended):
                continue
            self._log_message(reason)
            if isinstance(reason, messages.Admitted):
                self.cached += reason.cached
                self.prompt += reason.prompt

    def _plan(self, plan: Plan) -> None:
        """Log the prefill chunks of a plan; decode rows are only counted."""
        for new_row in plan.opens:
            self.run_samples[plan.run_ids[new_row.index]] = self._sample_number(
                new_row.name
            )
        prefill = 0
        for fill in plan.fills:
            number = self.run_samples.get(plan.run_ids[fill.index], _NONE)
            last = int(plan.max_sampled_tokens[fill.index] > 0)
            self._note("Chunk", number, plan.step, len(fill.tokens), last)
            prefill += len(fill.tokens)
        chunks = len(plan.fills)
        self._add(
            "step",
            len(self.time) - 1,
            plan.step,
            len(plan.run_ids) - chunks,
            chunks,
            prefill,
            drafts_of(plan),
        )

    def _sample(self, request: Request, sample: int) -> int:
        """Enter a sample; returns its number."""
        number = len(self.tables["sample"][0])
        fields = (
            ("priority", request.priority, 0),
            ("client", request.client, ""),
            ("deadline", request.deadline, inf),
        )
        details = (f"{name} {value}" for name, value, usual in fields if value != usual)
        self._add(
            "sample",
            self._cell(request.id),
            sample,
            request.n,
            len(request.prompt),
            request.max_tokens,
            self._cell(", ".join(details)),
        )
        self.serving.setdefault((request.id, sample), []).append(number)
        return number

    def _end(self, end: messages.Finished) -> None:
        """Log an end. Several samples have one name in the turn in which one of them
        follows another.
        """
        name = (end.id, end.sample)
        numbers = self.serving.pop(name, [_NONE])
        self.ended[name] = numbers[0]
        self._log_message(end, numbers.pop(0))
        if numbers:
            self.serving[name] = numbers

    def _log_message(
        self,
        message: messages.Event | messages.Reason | messages.Finished,
        number: int = _NONE,
    ) -> None:
        """Log an event or a reason."""
        if number < 0 and hasattr(message, "id"):
            number = self._sample_number((message.id, getattr(message, "sample", 0)))
        kind = wire_name(message)
        self._note(
            kind, number, *(self._cell(getattr(message, name)) for name in KINDS[kind])
        )

    def _sample_number(self, name: SampleId) -> int:
        ended = self.ended.get(name, _NONE)  # a failed step preempts, and may end
        return self.serving.get(name, (ended,))[0]

    def _note(self, kind: str, number: int, a: int = 0, b: int = 0, c: int = 0) -> None:
        self._add("log", max(0, len(self.time) - 1), _PLACES[kind], number, a, b, c)

    def _add(self, table: str, *cells: int) -> None:
        for column, cell in zip(self.tables[table], cells, strict=True):
            column.append(max(-_MAX_CELL, min(cell, _MAX_CELL)))

    def _cell(self, value: Any) -> int:  # of any type among the fields of KINDS
        if isinstance(value, str):
            return self.texts.setdefault(value, len(self.texts))
        return self._sample_number(value) if isinstance(value, tuple) else int(value)
