"""The books of the specification: the state of each sample, and its moves.

Theory. What a turn must do with its events is a small function of the inputs before:
which samples are open, the tokens each knows, which plans are in flight. The books keep
that from turn to turn, apart from the engine and far simpler: no columns, no blocks, one
record at a time (`minfer.testing.accounts`). All writes move samples through the table of
`minfer.lifecycle.transitions`, and in no other way.
"""

from collections import Counter, deque
from collections.abc import Sequence
from typing import Final

from attrs import define, field, frozen

from minfer.blocks.keys import Key
from minfer.blocks.prefix import Pages
from minfer.lifecycle.committed import committed
from minfer.lifecycle.transitions import TRANSITIONS, Cause, Stage
from minfer.records.config import EngineConfig
from minfer.records.plan import Plan
from minfer.records.request import Request
from minfer.records.sequence import SampleId
from minfer.records.state import EngineState
from minfer.testing.accounts import (
    NOT_SEEN,
    PlanInFlight,
    SampleAccount,
    SavedState,
    Seat,
    SeatTables,
    new_account,
    state_key,
    tables_of,
    touched_pages,
)
from minfer.testing.invariants import InvariantError

NEVER: Final = -1  # among the steps that may open a fence: there may be none
_NO_REQUEST: Final = Request(id="", prompt=(), max_tokens=1)


@frozen(eq=False)
class FencedBlocks:
    """Blocks behind a fence: their sample, and the steps one of which opens the fence."""

    account: SampleAccount | None  # None: it was preempted, or is unknown
    steps: frozenset[int]


@define(eq=False)
class Books:
    """The records of every sample that has not ended."""

    config: EngineConfig
    time: float = 0.0  # seconds
    accounts: dict[SampleId, SampleAccount] = field(factory=dict)
    num_live: dict[str, int] = field(factory=dict)  # request -> its samples not ended
    seats: dict[int, Seat] = field(factory=dict)  # by generation
    flights: deque[PlanInFlight] = field(factory=deque)  # in order
    fenced: list[FencedBlocks] = field(factory=list)
    released_seats: list[Seat] = field(factory=list)  # in this turn
    # States of recurrent layers: saved by steps that ended in this turn; and the pages of
    # those, and of all that were kept before.
    saved: list[SavedState] = field(factory=list)
    states: dict[Key, set[Pages]] = field(factory=dict)
    # Step planned in this turn -> rows whose states are due, and were skipped.
    skipped_saves: Counter[int] = field(factory=Counter)
    # generation -> how far its prompt was computed by a step that ended in this turn
    filled: dict[int, int] = field(factory=dict)
    transfers: set[int] = field(factory=set)  # numbers of those in flight
    # Of the device: the adapter in each slot that has one; those on their way; slots that
    # are emptied once they are unused; and how many samples of a slot's adapter were
    # admitted in its stay before one that waits for a slot.
    slots: dict[int, str] = field(factory=dict)
    loading: dict[int, str] = field(factory=dict)
    dropped: set[int] = field(factory=set)
    passes: Counter[int] = field(factory=Counter)
    # how often each move was made
    moves: Counter[tuple[Stage, Cause]] = field(factory=Counter)

    @classmethod
    def at(cls, config: EngineConfig, state: EngineState) -> "Books":
        """Books opened at `state`, which they trust."""
        books, run = cls(config, state.time), state.running
        faults = dict(state.faults)
        for seq in (*state.waiting, *run.seqs):
            account = new_account(config, seq.request, seq.sample, seq.arrived)
            account.tokens = seq.history
            account.cached = seq.cached
            account.faults = faults.get(seq.id, 0)
            account.paused = seq.id in state.paused
            account.proposed = state.drafting.proposals.get(seq.id)
            account.stage = Stage.PREEMPTED if seq.preempted else Stage.WAITING
            books.accounts[seq.id] = account
            books.num_live[seq.request.id] = books.num_live.get(seq.request.id, 0) + 1
        for i, run_id in enumerate(run.run_ids):
            account = books.accounts[run.ids[i]]
            account.tokens = run.tokens(i, config.block_size)
            account.stage = Stage.RUNNING
            account.seat = Seat(
                account=account,
                run_id=run_id,
                row=run.rows[i],
                num_known_at_admission=run.num_known_at_admission[i],
                scheduled=run.scheduled[i],
                kv=committed(config, state, i),
                tables=tables_of(run, i),
                opened=run.scheduled[i] > run.starts[i],
                took_state=not run.chains[i].states.origin,
                last_state=run.chains[i].states.last,
                adapter_slot=state.adapters.slot_of(account.request.adapter),
            )
            books.seats[run_id] = account.seat
        for index, slot in enumerate(state.adapters.slots):
            if slot.adapter:
                there = books.loading if slot.loading else books.slots
                there[index] = slot.adapter
            if slot.dropped:
                books.dropped.add(index)
            books.passes[index] = slot.passes
        books.transfers = {transfer.number for transfer in state.tiers.transfers}
        for plan in state.inflight:
            books.flights.append(books.flight(plan))
        books.fenced = [
            FencedBlocks(None, frozenset((fence.until,))) for fence in state.fences
        ]
        return books

    @property
    def running(self) -> list[SampleAccount]:
        """The accounts of running samples."""
        return [
            account
            for account in self.accounts.values()
            if account.stage is Stage.RUNNING
        ]

    def move(self, account: SampleAccount, cause: Cause) -> None:
        """Move a sample by the table of its lifetime."""
        next_stage = TRANSITIONS.get((account.stage, cause))
        if next_stage is None:
            raise InvariantError(
                "lifetime", f"{account.id} is {account.stage}; then {cause}?"
            )
        self.moves[account.stage, cause] += 1
        account.stage = next_stage

    def close(self, account: SampleAccount, cause: Cause) -> None:
        """Close the account of a sample that has ended."""
        self.move(account, cause)
        self.release_seat(account)
        del self.accounts[account.id]
        self.num_live[account.request.id] -= 1
        if not self.num_live[account.request.id]:
            del self.num_live[account.request.id]

    def release_seat(self, account: SampleAccount, steps: Sequence[int] = ()) -> None:
        """Release a seat; `steps` are further ones, one of which may be the fence's."""
        if account.seat is None:
            return
        self.seats.pop(account.seat.run_id, None)
        self.released_seats.append(account.seat)
        account.seat = None
        self.empty_dropped(account.request.adapter)
        if self.flights or steps:
            last = self.flights[-1].plan.step if self.flights else NEVER
            self.fenced.append(FencedBlocks(account, frozenset((last, *steps))))
        elif account.stage is Stage.FENCED:
            self.move(account, Cause.RELEASED)

    def empty_dropped(self, adapter: str) -> None:
        """Empty the slot of an adapter that was dropped, unless a running sample has
        it.
        """
        used = any(account.request.adapter == adapter for account in self.running)
        if not used:
            for slot in [s for s in self.dropped if self.slots.get(s) == adapter]:
                del self.slots[slot]
                self.dropped.discard(slot)

    def open_fences(self, step: int | None) -> None:
        """Open the fences of the plans up to `step`, or all."""
        closed = []
        for fence in self.fenced:
            if step is not None and max(fence.steps) > step:
                closed.append(fence)
            elif fence.account is not None and fence.account.stage is Stage.FENCED:
                self.move(fence.account, Cause.RELEASED)
        self.fenced = closed

    def restart(self, account: SampleAccount) -> None:
        """Restart a running sample in its row, from the KV that it has."""
        old = account.seat
        if old is None:
            raise InvariantError("lifetime", f"{account.id} runs without a seat")
        self.move(account, Cause.RESTARTED)
        self.seats.pop(old.run_id, None)
        kv = 0 if account.request.recomputes_prompt else old.kv  # all of it is recomputed
        account.seat = Seat(
            account=account,
            run_id=NOT_SEEN,
            row=old.row,
            num_known_at_admission=len(account.tokens),
            scheduled=kv,
            kv=kv,
            tables=self._kept_tables(account, old),
        )

    def _kept_tables(self, account: SampleAccount, old: Seat) -> SeatTables:
        """The tables after a restart: blocks that were released behind a window would be
        missing if all is recomputed.
        """
        if not (account.request.recomputes_prompt and self.config.by_chunk):
            return old.tables
        pairs = zip(old.tables, self.config.groups, strict=True)
        return tuple(() if group.window else table for table, group in pairs)

    def learn_saved(self, flight: PlanInFlight) -> None:
        """Record the states that a plan has saved, which is over."""
        plan = flight.plan
        for save in plan.saves:
            seat = flight.seats[save.index]
            end = plan.saved_at(save)
            if end > len(seat.account.tokens) or not seat.tables:
                continue  # it has left
            key = state_key(self.config, seat, end)
            tokens = seat.account.tokens[:end]
            self.saved.append(SavedState(seat, key, save.pages, tokens))
            self.states.setdefault(key, set()).add(save.pages)

    def set_run_id(self, seat: Seat, run_id: int) -> None:
        """Record the new generation of a restarted seat."""
        if seat.run_id == NOT_SEEN:
            seat.run_id = run_id
            self.seats[run_id] = seat

    def flight(self, plan: Plan) -> PlanInFlight:
        """The record of a plan that was launched, with the seats of its rows."""
        unknown = SampleAccount(
            _NO_REQUEST, sample=0, tokens=(), last_index=0, arrived=0.0
        )
        seats = list[Seat]()
        for run_id in plan.run_ids:
            seat = self.seats.get(run_id)
            if seat is None:
                seat = Seat(
                    unknown,
                    run_id,
                    row=NOT_SEEN,
                    num_known_at_admission=0,
                    scheduled=0,
                    kv=0,
                    tables=(),
                )
            seats.append(seat)
        pages = [
            touched_pages(self.config, seat, start)
            for seat, start in zip(seats, plan.starts, strict=True)
        ]
        return PlanInFlight(plan, tuple(seats), tuple(pages))
