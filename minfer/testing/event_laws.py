"""The specification of events: the outputs that follow from the inputs.

`fold` writes an event into the books and notes what must be reported (tokens by sample,
ends with their reason and length, ignored events, the cost of a failed step);
`check_report` compares that with the engine's outputs.
"""

from collections import Counter

from attrs import evolve

from minfer.lifecycle.transitions import Cause, Stage
from minfer.records.config import EngineConfig
from minfer.records.drafting import Proposed
from minfer.records.messages import (
    Cancel,
    Discarded,
    Emit,
    Ended,
    Event,
    Executed,
    Failed,
    Finish,
    Finished,
    Ignored,
    Lost,
    Moved,
    Pause,
    Propose,
    Submit,
    Tick,
)
from minfer.records.request import MAX_SAMPLES, Request
from minfer.records.sequence import SampleId
from minfer.records.speculation import HOST
from minfer.records.state import Transition
from minfer.testing.accounts import SampleAccount, TurnReport, account
from minfer.testing.books import Books
from minfer.testing.invariants import InvariantError, require
from minfer.testing.needs import pages_at_once
from minfer.testing.result_laws import good


def can_run(config: EngineConfig, request: Request, waiting: int) -> bool:
    """Whether a request may enter the waiting queue, behind `waiting` samples."""
    prompt, size = len(request.prompt), config.block_size
    most = min(prompt + request.max_tokens, config.max_model_len)
    whole = 1 <= prompt < config.max_model_len
    if request.prompt_only is not None:
        most = prompt + 1
        whole = 1 <= prompt <= config.max_model_len
    samples = 1 <= request.n <= MAX_SAMPLES and not (request.n > 1 and request.output)
    fits = pages_at_once(config, -(-(most - 1) // size)) <= config.num_blocks
    room = prompt + len(request.output) < most
    tokens = (*request.prompt, *request.output)
    named = all(0 <= token < config.vocab_size for token in tokens)
    taken = request.continues or request.taken
    short = waiting + request.n <= config.max_waiting or taken
    return whole and samples and fits and room and named and short


def fold(books: Books, event: Event, report: TurnReport) -> None:
    """Write an event into the books, and what must be reported about it into `report`."""
    match event:
        case Tick(time):
            books.time = max(books.time, time)
        case Submit(request):
            _submit(books, request, report)
        case Cancel(name):
            _cancel(books, name, report)
        case Finish():
            _finish(books, event, report)
        case Pause():
            _pause(books, event, report)
        case Executed() | Failed():
            _step(books, event, report)
        case Propose():
            _propose(books, event, report)
        case Moved() | Lost():
            _transfer(books, event, report)
        case _:  # a turn may hold anything
            report.ignored.append("event")  # type: ignore[unreachable]


def _transfer(books: Books, event: Moved | Lost, report: TurnReport) -> None:
    if type(event.number) is not int or event.number not in books.transfers:
        report.ignored.append("transfer")
        return
    books.transfers.remove(event.number)
    if isinstance(event, Lost):
        report.lost += 1


def _submit(books: Books, request: Request, report: TurnReport) -> None:
    if request.id in books.lives:
        report.ignored.append("submit")
        return
    waiting = sum(one.stage is not Stage.RUNNING for one in books.accounts.values())
    if not can_run(books.config, request, waiting):
        for sample in range(max(1, min(request.n, MAX_SAMPLES))):
            refused = account(books.config, request, sample, books.time)
            books.move(refused, Cause.REJECTED)
            report.finished.append(Finished(request.id, sample, "rejected", 0))
        return
    books.lives[request.id] = request.n
    for sample in range(request.n):
        one = account(books.config, request, sample, books.time)
        books.move(one, Cause.SUBMITTED)
        books.accounts[one.id] = one


def _cancel(books: Books, name: str, report: TurnReport) -> None:
    its = [one for one in books.accounts.values() if one.request.id == name]
    if not its:
        report.ignored.append("cancel")
    for one in its:
        report.finished.append(_ended(one, "cancelled", one.output))
        books.close(one, Cause.CANCELLED)


def _finish(books: Books, event: Finish, report: TurnReport) -> None:
    one = books.accounts.get((event.id, event.sample))
    if one is None:
        report.ignored.append("finish")
        return
    kept = max(0, min(event.length, one.output))
    report.finished.append(_ended(one, event.reason, kept))
    books.close(one, Cause.FINISHED)


def _pause(books: Books, event: Pause, report: TurnReport) -> None:
    one = books.accounts.get((event.id, event.sample))
    if one is None or not one.request.needs_host_mask:
        report.ignored.append("pause")  # its sampling needs no mask
        return
    one.paused = event.paused


def _propose(books: Books, event: Propose, report: TurnReport) -> None:
    one, how = books.accounts.get((event.id, event.sample)), books.config.speculation
    by_host = how is not None and how.drafter == HOST
    said = event.tokens and all(t < books.config.vocab_size for t in event.tokens)
    if one is None or one.stage is not Stage.RUNNING or not by_host or not said:
        report.ignored.append("propose")
        return
    one.proposed = Proposed(event.known, event.tokens)


def _ended(one: SampleAccount, reason: str, length: int) -> Finished:
    """The expected end of a sample, without the error."""
    return Finished(*one.id, reason, length, cached=one.cached)


# --- steps ------------------------------------------------------------------------------


def _step(books: Books, event: Executed | Failed, report: TurnReport) -> None:
    """End a step; with invalid results it counts as failed."""
    steps = [flight.plan.step for flight in books.flights]
    if type(event.step) is not int or event.step not in steps:
        report.ignored.append(type(event).__name__.lower())
    elif isinstance(event, Executed) and good(books.config, books.flights[0].plan, event):
        _commit(books, event, report)
    else:
        _void(books, event.step, report)


def _commit(books: Books, event: Executed, report: TurnReport) -> None:
    """Commit the first plan in flight."""
    flight = books.flights.popleft()
    plan = flight.plan
    ends = list[tuple[SampleAccount, str]]()
    fills = {fill.index for fill in plan.fills}
    for at, (seat, tokens) in enumerate(zip(flight.seats, event.yields, strict=True)):
        one = seat.account
        if one.seat is not seat:
            continue  # it left before its results came
        report.progress = True
        one.faults = 0
        books.move(one, Cause.ADVANCED)
        if event.pooled and event.pooled[at]:
            report.pooled[one.id] = report.pooled.get(one.id, b"") + event.pooled[at]
        seat.scheduled -= plan.max_sampled_tokens[at] - len(tokens)
        kept, why = _cut(one, tokens)
        one.known += kept
        if kept:
            report.tokens[one.id] = report.tokens.get(one.id, ()) + kept
        filled = plan.starts[at] + plan.num_scheduled_tokens[at]
        seat.kv = filled if at in fills else len(one.known) - 1
        if at in fills:
            books.filled[seat.gen] = filled
        if not one.request.max_tokens and filled == seat.base:
            why = "length"
        if why:
            ends.append((one, why))
    for one, why in ends:
        report.finished.append(_ended(one, why, one.output))
        books.close(one, Cause.COMPLETED)
    books.open_fences(plan.step)


def _cut(one: SampleAccount, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
    """The new tokens that count, and the reason if they end the sample."""
    room = one.last + 1 - len(one.known)
    for at, token in enumerate(tokens[:room], 1):
        if token in one.request.stop_ids:
            return tokens[:at], "stop"
    return tokens[:room], "length" if len(tokens) >= room else ""


def _void(books: Books, step: int, report: TurnReport) -> None:
    """Discard a failed step and all in flight, and count a failure of its own rows."""
    hurt: dict[SampleId, SampleAccount] = {}
    for flight in books.flights:
        for seat in flight.seats:
            if seat.account.seat is seat:
                hurt[seat.account.id] = seat.account
                seat.account.faults += flight.plan.step == step
    report.discarded.append(Discarded(step, "", plans=len(books.flights), rows=len(hurt)))
    for one in hurt.values():
        books.restart(one)
    books.flights.clear()
    books.open_fences(None)
    lost = [one for one in hurt.values() if one.faults >= books.config.max_failures]
    for one in lost:
        report.finished.append(_ended(one, "error", one.output))
        books.close(one, Cause.FAILED)


# --- outputs ----------------------------------------------------------------------------


def check_report(report: TurnReport, turn: Transition) -> None:
    """Raise InvariantError unless the outputs are those expected, in any order of
    samples.
    """
    finished = _emitted(report, turn)
    ends = [evolve(one, error="") for one in finished]
    right = Counter(ends) == Counter(report.finished)
    require(right, "lifetime", f"ended: {ends}, not {report.finished}")
    for one in finished:
        blamed = one.reason in ("rejected", "error")
        require(not blamed or one.error, "lifetime", f"{one} does not say why")
    _reasons(report, turn, finished)


def _emitted(report: TurnReport, turn: Transition) -> list[Finished]:
    """Check the emitted tokens; returns the emitted ends."""
    tokens: dict[SampleId, tuple[int, ...]] = {}
    pooled: dict[SampleId, bytes] = {}
    finished: list[Finished] = []
    for command in turn.commands:
        if isinstance(command, Emit):
            same = len(command.ids) == len(command.tokens)
            require(same, "emit", "columns differ in length")
            for name, new in zip(command.ids, command.tokens, strict=True):
                if new:
                    tokens[name] = tokens.get(name, ()) + new
            finished += command.finished
            for name, said in _of_prompts(command).items():
                pooled[name] = pooled.get(name, b"") + said
    if tokens != report.tokens:
        raise InvariantError("emit", f"{tokens}, not {report.tokens}")
    require(pooled == report.pooled, "emit", f"{pooled} pooled, not {report.pooled}")
    return finished


def _of_prompts(emit: Emit) -> dict[SampleId, bytes]:
    """The emitted results of prompts, by sample."""
    if not emit.pooled:
        return {}
    same = len(emit.ids) == len(emit.pooled)
    require(same, "emit", "columns differ in length")
    each = zip(emit.ids, emit.pooled, strict=True)
    return {name: said for name, said in each if said}


def _reasons(report: TurnReport, turn: Transition, finished: list[Finished]) -> None:
    """Check that ends, failed steps and ignored events are also reported as reasons."""
    ended = [r for r in turn.reasons if isinstance(r, Ended)]
    right = [Ended(one.id, one.sample, one.reason, one.error) for one in finished]
    require(Counter(ended) == Counter(right), "reason", f"{ended}, not {right}")
    discarded = [evolve(r, error="") for r in turn.reasons if isinstance(r, Discarded)]
    require(
        discarded == report.discarded,
        "reason",
        f"discarded {discarded}, not {report.discarded}",
    )
    ignored = Counter(r.event for r in turn.reasons if isinstance(r, Ignored))
    due = Counter(report.ignored)
    require(ignored == due, "reason", f"ignored {ignored}, not {report.ignored}")
