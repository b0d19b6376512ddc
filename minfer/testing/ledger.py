"""The specification of whole runs: a ledger that reads along.

Theory. What a turn must do with its events is a small function of what the engine was
told before: which samples are open, the tokens each knows, which plans are in flight. The
ledger keeps that from turn to turn, beside the engine and far simpler than it (no
columns, no blocks, one record at a time), and says of every turn

- what comes out: tokens by sample, ends with their reason and length, what is ignored,
  what a failed step costs, in the order of the events (`_fold`);
- that each plan is one that may be made of what runs (`minfer.testing.plan_laws`), and
  each sample moves as the table of `minfer.testing.lifetime` says;
- that the line moved up as far as it could (`minfer.testing.line_laws`);
- that the state it ends in is the one that follows (`_settle`), and that what is findable
  under a key are the tokens that were computed into that block (`_publish`).

`Ledger.take` checks a turn, state and all; `check_turn` is a ledger opened for one turn.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any

from attrs import define, field

from minfer.committed import committed
from minfer.config import EngineConfig
from minfer.keys import block_keys
from minfer.messages import (
    Admitted,
    Cancel,
    Emit,
    Ended,
    Event,
    Execute,
    Executed,
    Failed,
    Finish,
    Finished,
    Ignored,
    Missed,
    Preempted,
    Submit,
    Tick,
    Voided,
)
from minfer.params import MAX_SAMPLES
from minfer.plan import Plan
from minfer.policy import Load, Policy
from minfer.request import Request
from minfer.sequence import SampleId
from minfer.state import EngineState, Transition
from minfer.testing.accounts import (
    NOT_SEEN,
    Account,
    Flight,
    Seat,
    Told,
    account,
    touched,
)
from minfer.testing.invariants import InvariantError, check, free_blocks, require
from minfer.testing.lifetime import MOVES, Cause, Stage
from minfer.testing.line_laws import check_evictions, check_line
from minfer.testing.plan_laws import Planning, check_plan, good
from minfer.testing.progress import Measure, check_progress, measure

Content = tuple[
    bytes, bytes, tuple[int, ...]
]  # key, root, and all tokens up to the block's end


class Watched:
    """A policy that remembers what it answered when it was asked for a step's budget."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.budgets = policy, list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    def budget(self, state: Any, load: Load) -> int:
        """The policy's own answer."""
        answer = self.policy.budget(state, load)
        self.budgets.append(answer)
        return answer


def check_turn(
    config: EngineConfig, before: EngineState, events: Iterable[Event], turn: Transition
) -> None:
    """Raise InvariantError unless the engine may go from `before` to `turn` on these
    events.
    """
    Ledger.at(config, before).take(tuple(events), turn)


def can_run(config: EngineConfig, request: Request, waiting: int) -> bool:
    """Whether a request may be let in line, behind `waiting` samples."""
    prompt, size = len(request.prompt), config.block_size
    most = min(prompt + request.max_tokens, config.max_model_len)
    whole = 1 <= prompt < config.max_model_len and request.max_tokens >= 1
    samples = 1 <= request.n <= MAX_SAMPLES and not (request.n > 1 and request.output)
    room = (
        -(-(most - 1) // size) <= config.num_blocks
        and prompt + len(request.output) < most
    )
    named = all(
        0 <= token < config.vocab_size for token in (*request.prompt, *request.output)
    )
    return (
        whole and samples and room and named and waiting + request.n <= config.max_waiting
    )


@define(eq=False)
class Ledger:
    """All that was said of each sample, and what follows from it for the next turn."""

    config: EngineConfig
    state: EngineState
    time: float = 0.0  # seconds
    accounts: dict[SampleId, Account] = field(
        factory=dict
    )  # of samples that have not ended
    lives: dict[str, int] = field(factory=dict)  # request -> samples that have not ended
    seats: dict[int, Seat] = field(factory=dict)  # by generation
    flights: deque[Flight] = field(factory=deque)  # in order
    leaving: list[tuple[Account | None, frozenset[int]]] = field(
        factory=list
    )  # behind fences,
    # each with the steps of which one opens it; no account: it was preempted, or is
    # unknown
    left: list[tuple[Account, Seat]] = field(
        factory=list
    )  # seats that were left in this turn
    contents: dict[int, Content] = field(factory=dict)  # of published blocks
    measure: Measure = field(factory=dict)  # what is left of all
    moves: Counter[tuple[Stage, Cause]] = field(
        factory=Counter
    )  # how often each was made
    whole: bool = field(init=False)  # it was opened before anything happened

    def __attrs_post_init__(self) -> None:
        self.whole = not self.state.next_step and not self.state.requests

    @classmethod
    def at(cls, config: EngineConfig, state: EngineState) -> "Ledger":
        """A ledger that is opened at `state`, which it believes."""
        self, run = cls(config, state, state.time), state.running
        faults = dict(state.faults)
        for seq in (*state.waiting, *run.seqs):
            one = account(config, seq.request, seq.sample, seq.arrived)
            one.known, one.cached, one.faults = (
                seq.history,
                seq.cached,
                faults.get(seq.id, 0),
            )
            one.stage = Stage.PREEMPTED if seq.preempted else Stage.WAITING
            self.accounts[seq.id] = one
            self.lives[seq.request.id] = self.lives.get(seq.request.id, 0) + 1
        for i, gen in enumerate(run.gens):
            one, kv = self.accounts[run.ids[i]], committed(config, state, i)
            one.known, one.stage = run.tokens(i, config.block_size), Stage.RUNNING
            table, opened = tuple(run.tables[i]), run.sched[i] > run.starts[i]
            one.seat = Seat(
                one, gen, run.rows[i], run.base[i], run.sched[i], kv, table, opened
            )
            self.seats[gen] = one.seat
        for plan in state.inflight:
            self.flights.append(self._flight(plan))
        self.leaving = [(None, frozenset((fence.until,))) for fence in state.fences]
        self.measure = measure(self.accounts, state)
        return self

    def take(
        self,
        events: Sequence[Event],
        turn: Transition,
        budgets: Sequence[int] | None = None,
    ) -> None:
        """Read one turn. Raises InvariantError, which names the law that broke.

        `budgets`, if they were recorded, are what the policy answered for each plan.
        """
        check(self.config, turn.state)
        told, before = Told(), self.state
        self.left.clear()
        for event in events:
            self._fold(event, told)
        _compare(told, turn)
        planning = self._plan(turn, budgets)
        self._settle(turn.state)
        check_line(self.config, before, turn, planning, self.accounts)
        less = measure(self.accounts, turn.state)
        usual = all(one in planning.gave_way for one, _ in planning.preempted)
        if told.progress and usual and not any(isinstance(e, _OUTSIDE) for e in events):
            check_progress(self.measure, less, planning.gave_way)
        self.measure = less
        if turn.state.blocks.prefix.nodes is not before.blocks.prefix.nodes:
            check_evictions(before.blocks.prefix, turn.state.blocks.prefix)
            self._publish(turn.state)
        self.state = turn.state

    # --- events -------------------------------------------------------------------------

    def _fold(self, event: Event, told: Told) -> None:
        match event:
            case Tick(time):
                self.time = max(self.time, time)
            case Submit(request):
                self._submit(request, told)
            case Cancel(name):
                ended = [one for key, one in self.accounts.items() if key[0] == name]
                for one in ended:
                    self._end(one, Cause.CANCELLED, "cancelled", one.output, told)
                told.ignored += [] if ended else ["cancel"]
            case Finish(name, sample, length, reason):
                found = self.accounts.get((name, sample))
                if found is None:
                    told.ignored.append("finish")
                else:
                    kept = max(0, min(length, found.output))
                    self._end(found, Cause.FINISHED, reason, kept, told)
            case Executed(step) | Failed(step):
                steps = [flight.plan.step for flight in self.flights]
                if type(step) is not int or step not in steps:
                    told.ignored.append(type(event).__name__.lower())
                elif isinstance(event, Executed) and good(
                    self.config, self.flights[0].plan, event
                ):
                    self._commit(event, told)
                else:
                    self._void(step, told)
            case _:  # a turn may hold anything
                told.ignored.append("event")  # type: ignore[unreachable]

    def _submit(self, request: Request, told: Told) -> None:
        if request.id in self.lives:
            told.ignored.append("submit")
            return
        waiting = sum(one.stage is not Stage.RUNNING for one in self.accounts.values())
        if not can_run(self.config, request, waiting):
            for sample in range(max(1, min(request.n, MAX_SAMPLES))):
                self._move(
                    account(self.config, request, sample, self.time), Cause.REJECTED
                )
                told.finished.append((request.id, sample, "rejected", 0, 0))
            return
        self.lives[request.id] = request.n
        for sample in range(request.n):
            one = account(self.config, request, sample, self.time)
            self._move(one, Cause.SUBMITTED)
            self.accounts[one.id] = one

    def _move(self, one: Account, cause: Cause) -> None:
        """Move a sample as the table of its lifetime says."""
        target = MOVES.get((one.stage, cause))
        if target is None:
            raise InvariantError("lifetime", f"{one.id} is {one.stage}; then {cause}?")
        self.moves[one.stage, cause] += 1
        one.stage = target

    def _end(
        self, one: Account, cause: Cause, reason: str, length: int, told: Told
    ) -> None:
        self._move(one, cause)
        told.finished.append((*one.id, reason, length, one.cached))
        self._leave(one)
        del self.accounts[one.id]
        self.lives[one.request.id] -= 1
        if not self.lives[one.request.id]:
            del self.lives[one.request.id]

    def _leave(self, one: Account, steps: Sequence[int] = ()) -> None:
        """Give a seat back; `steps` are others, one of which may be the fence's."""
        if one.seat is None:
            return
        self.seats.pop(one.seat.gen, None)
        self.left.append((one, one.seat))
        one.seat = None
        if self.flights or steps:
            last = self.flights[-1].plan.step if self.flights else _NEVER
            self.leaving.append((one, frozenset((last, *steps))))
        elif one.stage is Stage.FENCED:
            self._move(one, Cause.RELEASED)

    def _open_fences(self, step: int | None) -> None:
        """The plans up to `step` are over, or all."""
        kept = []
        for one, steps in self.leaving:
            if step is None or max(steps) <= step:
                if one is not None and one.stage is Stage.FENCED:
                    self._move(one, Cause.RELEASED)
            else:
                kept.append((one, steps))
        self.leaving = kept

    def _commit(self, event: Executed, told: Told) -> None:
        """The first plan in flight went well."""
        flight = self.flights.popleft()
        plan, ends = flight.plan, list[tuple[Account, str]]()
        fills = {fill.index for fill in plan.fills}
        for at, (seat, tokens) in enumerate(zip(flight.seats, event.yields, strict=True)):
            one = seat.account
            if one.seat is not seat:
                continue  # it left before its results came
            one.faults, told.progress = 0, True
            self._move(one, Cause.ADVANCED)
            seat.sched -= plan.most[at] - len(tokens)
            kept, why = _cut(one, tokens)
            one.known += kept
            if kept:
                told.tokens[one.id] = told.tokens.get(one.id, ()) + kept
            seat.kv = (
                plan.starts[at] + plan.counts[at] if at in fills else len(one.known) - 1
            )
            if why:
                ends.append((one, why))
        for one, why in ends:
            self._end(one, Cause.COMPLETED, why, one.output, told)
        self._open_fences(plan.step)

    def _void(self, step: int, told: Told) -> None:
        """A step failed: all in flight never happened, and its own rows are to blame."""
        hurt: dict[SampleId, Account] = {}
        for flight in self.flights:
            for seat in flight.seats:
                if seat.account.seat is seat:
                    hurt[seat.account.id] = seat.account
                    seat.account.faults += flight.plan.step == step
        told.voided.append((step, len(self.flights), len(hurt)))
        for one in hurt.values():
            self._move(one, Cause.RESTARTED)
            self._restart(one)
        self.flights.clear()
        self._open_fences(None)
        most = self.config.max_failures
        for one in [one for one in hurt.values() if one.faults >= most]:
            self._end(one, Cause.BLAMED, "error", one.output, told)

    def _restart(self, one: Account) -> None:
        """A running sample begins anew, in its row, from the KV that it has."""
        old = one.seat
        if old is None:
            raise InvariantError("lifetime", f"{one.id} runs without a seat")
        self.seats.pop(old.gen, None)
        one.seat = Seat(one, NOT_SEEN, old.row, len(one.known), old.kv, old.kv, old.table)

    # --- plans --------------------------------------------------------------------------

    def _plan(self, turn: Transition, budgets: Sequence[int] | None) -> Planning:
        """Read decisions and plans in the order in which they must have been made."""
        plans = deque(c.plan for c in turn.commands if isinstance(c, Execute))
        planning = Planning(
            len(self.flights), list(budgets) if budgets is not None else None
        )
        missed = {(r.id, r.sample): r for r in turn.reasons if isinstance(r, Missed)}
        for number, reason in enumerate(turn.reasons):
            if not isinstance(reason, Admitted | Preempted):
                continue
            name = (reason.id, reason.sample)
            one = self.accounts.get(name)
            if one is None:
                raise InvariantError("reason", f"{reason} of a sample that is not served")
            if isinstance(reason, Admitted):
                while plans and name not in _opened(plans[0]):
                    self._launch(plans.popleft(), turn.state, planning)
                require(plans, "reason", f"{reason}, but no plan opens its row")
                self._admit(one, reason, plans[0], missed.get(name), planning)
            else:
                later = [r for r in turn.reasons[number:] if isinstance(r, Admitted)]
                again = sum(
                    (r.id, r.sample) == name for r in later
                )  # its row is opened for these
                while one.seat is not None and _planned(plans, one.seat, again):
                    self._launch(plans.popleft(), turn.state, planning)
                self._preempt(one, reason, [plan.step for plan in plans], planning)
        while plans:
            self._launch(plans.popleft(), turn.state, planning)
        return planning

    def _admit(
        self,
        one: Account,
        got: Admitted,
        plan: Plan,
        missed: Missed | None,
        planning: Planning,
    ) -> None:
        size, full = (
            self.config.block_size,
            (len(one.known) - 1) // self.config.block_size,
        )
        require(got.waited == self.time - one.arrived, "reason", f"{got}: not its wait")
        require(
            got.known == len(one.known), "reason", f"{got}: {len(one.known)} are known"
        )
        prompt = len(one.request.prompt) if one.stage is Stage.WAITING else 0
        share = (min(got.hit, prompt), prompt)
        require((got.cached, got.prompt) == share, "hit share", f"{got}, not {share}")
        one.cached = max(one.cached, got.cached)
        right = got.hit % size == 0 and 0 <= got.hit <= full * size and got.copied >= 0
        require(right, "reason", f"{got} cannot be")
        less = None if got.hit == full * size else Missed(*one.id, got.hit // size, full)
        require(missed == less, "reason", f"{missed}, not {less}")
        self._move(one, Cause.ADMITTED)
        at = _opened(plan)[one.id]
        start, table = (
            got.hit + got.copied,
            next(o.tables[0] for o in plan.opens if o.index == at),
        )
        one.seat = Seat(
            one, plan.gens[at], plan.rows[at], len(one.known), start, got.hit, table
        )
        self.seats[plan.gens[at]] = one.seat
        planning.newcomers[one.id] = got
        planning.admitted.append(one.id)

    def _preempt(
        self, one: Account, why: Preempted, steps: list[int], planning: Planning
    ) -> None:
        seat, state = one.seat, self.state
        places = {seq.id: seq.place for seq in (*state.running.seqs, *state.waiting)}
        running = [
            name for name, other in self.accounts.items() if other.stage is Stage.RUNNING
        ]
        if one.id == max(running, key=lambda name: places.get(name, ())):
            planning.gave_way.add(one.id)
        self._move(one, Cause.DISPLACED)
        if seat is not None:
            right = (why.known, why.computed) == (len(one.known), seat.kv)
            require(
                right,
                "reason",
                f"{why}: it knows {len(one.known)}, and has KV of {seat.kv}",
            )
        by = self.accounts.get(why.by)
        require(by is not None, "reason", f"{why}: for nobody")
        planning.preempted.append((one.id, why.by))
        self._leave(one, steps)

    def _launch(self, plan: Plan, after: EngineState, planning: Planning) -> None:
        """One more plan goes to the device."""
        opened = _opened(plan)
        for name, at in opened.items():
            one = self.accounts.get(name)
            seat = one.seat if one is not None else None
            require(
                seat is not None and not seat.opened,
                "open",
                f"{name} is opened, and why?",
            )
            if seat is not None and seat.gen == NOT_SEEN:
                seat.gen = plan.gens[at]
                self.seats[seat.gen] = seat
        running = [one for one in self.accounts.values() if one.stage is Stage.RUNNING]
        check_plan(self.config, plan, running, self.seats, self.flights, after, planning)
        fills = {fill.index for fill in plan.fills}
        for at, gen in enumerate(plan.gens):
            self.seats[gen].sched += plan.counts[at] if at in fills else plan.most[at]
        self.flights.append(self._flight(plan))
        planning.launched(plan)

    def _flight(self, plan: Plan) -> Flight:
        known = [self.seats.get(gen) for gen in plan.gens]
        gone = Account(_NOBODY, 0, (), 0, 0.0)
        seats = tuple(
            seat or Seat(gone, gen, NOT_SEEN, 0, 0, 0, ())
            for gen, seat in zip(plan.gens, known, strict=True)
        )
        pairs = zip(seats, plan.starts, strict=True)
        return Flight(plan, seats, tuple(touched(self.config, *pair) for pair in pairs))

    # --- the state ----------------------------------------------------------------------

    def _settle(self, after: EngineState) -> None:
        """The state must be the one that follows from what was said."""
        run = after.running
        require(after.time == self.time, "time", f"{after.time}, not {self.time}")
        steps = [flight.plan for flight in self.flights]
        require(
            list(after.inflight) == steps, "in flight", "not the plans that were made"
        )
        waiting = {seq.id: seq for seq in after.waiting}
        for name, one in self.accounts.items():
            if one.stage is Stage.RUNNING:
                continue
            seq = waiting.get(name)
            if seq is None:
                raise InvariantError(
                    "lifetime", f"{name} is {one.stage}, but not in line"
                )
            stage = Stage.PREEMPTED if seq.preempted else Stage.WAITING
            require(stage is one.stage, "lifetime", f"{name} is {one.stage}, not {stage}")
            require(seq.history == one.known, "known", f"{name} knows {seq.history}")
            require(
                seq.arrived == one.arrived, "time", f"{name} arrived at {seq.arrived}"
            )
        require(
            len(waiting) + len(run) == len(self.accounts), "lifetime", "a sample too many"
        )
        for i, name in enumerate(run.ids):
            self._running(after, i, self.accounts.get(name))
        faults = {name: one.faults for name, one in self.accounts.items() if one.faults}
        require(dict(after.faults) == faults, "faults", f"{after.faults}, not {faults}")
        self.leaving = _fenced(self.leaving, [fence.until for fence in after.fences])
        self._flying(after)

    def _running(self, after: EngineState, i: int, one: Account | None) -> None:
        run, config = after.running, self.config
        if one is None or one.stage is not Stage.RUNNING or one.seat is None:
            raise InvariantError(
                "lifetime", f"{run.ids[i]} runs; it is {one and one.stage}"
            )
        seat, tokens = one.seat, run.tokens(i, config.block_size)
        require(tokens == one.known, "known", f"{one.id} knows {tokens}, not {one.known}")
        require(
            run.last[i] == one.last,
            "known",
            f"{one.id} may have {run.last[i]} + 1 tokens",
        )
        if seat.gen == NOT_SEEN:
            seat.gen = run.gens[i]
            self.seats[seat.gen] = seat
        require(
            run.gens[i] == seat.gen,
            "generations",
            f"{one.id}: {run.gens[i]}, not {seat.gen}",
        )
        require(run.rows[i] == seat.row, "rows", f"{one.id} is in row {run.rows[i]}")
        right = (run.base[i], run.sched[i]) == (seat.base, seat.sched)
        require(
            right,
            "coverage",
            f"{one.id} is scheduled to {run.sched[i]}, not {seat.sched}",
        )
        kv = committed(config, after, i)
        require(kv == seat.kv, "committed", f"{one.id} has KV of {seat.kv}, not of {kv}")
        table = tuple(run.tables[i])
        if seat.opened:
            require(
                table == seat.table,
                "device table",
                f"{one.id}: {seat.table}, not {table}",
            )
        else:
            require(
                table[: len(seat.table)] == seat.table,
                "device table",
                f"{one.id} lost blocks",
            )

    def _flying(self, after: EngineState) -> None:
        """Blocks of a plan in flight are nobody else's; what it is to write cannot be
        found yet.
        """
        run, size, free = after.running, self.config.block_size, set(free_blocks(after))
        owner: dict[int, int] = {}
        for i, gen in enumerate(run.gens):
            owner.update(dict.fromkeys(run.tables[i][run.chains[i].sealed :], gen))
        for flight in self.flights:
            plan = flight.plan
            for at, seat in enumerate(flight.seats):
                gen, blocks = plan.gens[at], flight.blocks[at]
                if not free.isdisjoint(blocks):
                    raise InvariantError(
                        "fence", f"{blocks & free} are free, and in flight"
                    )
                if not all(owner.get(block, gen) == gen for block in blocks):
                    raise InvariantError(
                        "fence", f"blocks of step {plan.step} changed hands"
                    )
                if seat.account.seat is seat:
                    start = plan.starts[at]
                    end = start + max(plan.counts[at], plan.most[at])
                    written = seat.table[start // size : -(-end // size)]
                    if not all(owner.get(block) == gen for block in written):
                        raise InvariantError(
                            "exclusive tail", f"others may read {written}"
                        )

    def _publish(self, after: EngineState) -> None:
        """Learn the tokens of what was published; compare those of what is stood on."""
        nodes, contents, size = (
            after.blocks.prefix.nodes,
            self.contents,
            self.config.block_size,
        )
        new = {
            block: node[0]
            for block, node in nodes.items()
            if block not in contents or contents[block][0] != node[0]
        }
        if len(contents) > 4 * self.config.num_blocks:
            raise InvariantError("cache truth", "more is published than there are blocks")
        for block in [block for block in contents if block not in nodes]:
            del contents[block]
        if new:
            seats = [
                (one, one.seat) for one in self.accounts.values() if one.seat is not None
            ]
            for one, seat in (*seats, *self.left):
                root, known = one.request.root, one.known
                for k, block in enumerate(seat.table[: seat.kv // size]):
                    if block in new:
                        tokens = known[: (k + 1) * size]
                        # Behind a window a table names blocks that may be others' by now.
                        if (
                            not self.config.window
                            or new[block] == block_keys(root, tokens, size)[-1]
                        ):
                            contents[block] = (new.pop(block), root, tokens)
            require(
                not new or not self.whole,
                "publish after write",
                f"{new} was not computed",
            )
        run = after.running
        for i, table in enumerate(run.tables):
            one, chain = self.accounts[run.ids[i]], run.chains[i]
            for k, block in enumerate(table[chain.low : chain.sealed], chain.low):
                found = contents.get(block)
                if found is not None and found[1:] != (
                    one.request.root,
                    one.known[: (k + 1) * size],
                ):
                    raise InvariantError(
                        "shared content", f"{one.id} reads {found} at block {k}"
                    )


_NOBODY = Request(id="", prompt=(), max_tokens=1)
_OUTSIDE = (Submit, Cancel, Finish, Failed)  # what changes from outside how much is left
_NEVER = -1  # among the steps that may open a fence: perhaps there is none


def _cut(one: Account, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
    """What counts of new tokens, and the reason if they end the sample."""
    room = one.last + 1 - len(one.known)
    for at, token in enumerate(tokens[:room], 1):
        if token in one.request.stop_ids:
            return tokens[:at], "stop"
    return tokens[:room], "length" if len(tokens) >= room else ""


def _opened(plan: Plan) -> dict[SampleId, int]:
    """Whose rows a plan opens, and where in its columns."""
    return {one.name: one.index for one in plan.opens}


def _planned(plans: Iterable[Plan], seat: Seat, again: int) -> bool:
    """Whether a seat is in any of these plans, of which `again` open its row for later
    ones.
    """
    if seat.gen == NOT_SEEN:
        return sum(seat.account.id in _opened(plan) for plan in plans) > again
    return any(seat.gen in plan.gens for plan in plans)


def _compare(told: Told, turn: Transition) -> None:
    """What was said about the events is what was to be said, in any order of samples."""
    tokens: dict[SampleId, tuple[int, ...]] = {}
    finished: list[Finished] = []
    for command in turn.commands:
        if isinstance(command, Emit):
            require(
                len(command.ids) == len(command.tokens),
                "emit",
                "columns differ in length",
            )
            for name, new in zip(command.ids, command.tokens, strict=True):
                if new:
                    tokens[name] = tokens.get(name, ()) + new
            finished += command.finished
    if tokens != told.tokens:
        raise InvariantError("emit", f"{tokens}, not {told.tokens}")
    ends = sorted((o.id, o.sample, o.reason, o.length, o.cached) for o in finished)
    require(
        ends == sorted(told.finished), "lifecycle", f"ended: {ends}, not {told.finished}"
    )
    for one in finished:
        blamed = one.reason in ("rejected", "error")
        require(not blamed or one.error, "lifecycle", f"{one} does not say why")
    ended = [r for r in turn.reasons if isinstance(r, Ended)]
    right = [Ended(one.id, one.sample, one.reason, one.error) for one in finished]
    require(Counter(ended) == Counter(right), "reason", f"{ended}, not {right}")
    voided = [(r.step, r.plans, r.rows) for r in turn.reasons if isinstance(r, Voided)]
    require(voided == told.voided, "reason", f"voided {voided}, not {told.voided}")
    ignored = Counter(r.event for r in turn.reasons if isinstance(r, Ignored))
    require(
        ignored == Counter(told.ignored),
        "reason",
        f"ignored {ignored}, not {told.ignored}",
    )


def _fenced(
    leaving: list[tuple[Account | None, frozenset[int]]], untils: list[int]
) -> list[tuple[Account | None, frozenset[int]]]:
    """There is a fence for each that left while plans were in flight, and no other."""
    rest, kept = Counter(untils), []
    for one, steps in sorted(leaving, key=lambda each: len(each[1])):
        found = next((step for step in sorted(steps) if rest[step]), None)
        if found is None:
            require(
                _NEVER in steps,
                "fence",
                f"none until {sorted(steps)}; there are {untils}",
            )
        else:
            rest[found] -= 1
            kept.append((one, frozenset((found,))))
    require(not any(rest.values()), "fence", f"for nobody: {untils}")
    return kept
