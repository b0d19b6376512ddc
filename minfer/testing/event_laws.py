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
    AdapterEvent,
    AdapterFailed,
    AdapterLoaded,
    Cancel,
    Discarded,
    DropAdapter,
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
from minfer.testing.accounts import SampleAccount, TurnReport, new_account
from minfer.testing.adapter_laws import close_lost, end_load
from minfer.testing.books import Books
from minfer.testing.invariants import InvariantError, require
from minfer.testing.needs import pages_at_once
from minfer.testing.result_laws import is_valid_result


def can_run(config: EngineConfig, request: Request, waiting: int) -> bool:
    """Whether a request may enter the waiting queue, behind `waiting` samples."""
    prompt, size = len(request.prompt), config.block_size
    max_length = min(prompt + request.max_tokens, config.max_model_len)
    fits_model = 1 <= prompt < config.max_model_len
    if request.prompt_only is not None:
        max_length = prompt + 1
        fits_model = 1 <= prompt <= config.max_model_len
    samples = 1 <= request.n <= MAX_SAMPLES and not (request.n > 1 and request.output)
    fits_cache = pages_at_once(config, -(-(max_length - 1) // size)) <= config.num_blocks
    has_room = prompt + len(request.output) < max_length
    tokens = (*request.prompt, *request.output)
    in_vocabulary = all(0 <= token < config.vocab_size for token in tokens)
    may_exceed = request.continues or request.taken
    has_slots = not request.adapter or config.adapter_slots > 0
    queue_has_room = waiting + request.n <= config.max_waiting or may_exceed
    return (
        fits_model
        and samples
        and fits_cache
        and has_room
        and in_vocabulary
        and has_slots
        and queue_has_room
    )


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
        case AdapterLoaded() | AdapterFailed() | DropAdapter():
            _adapter(books, event, report)
        case _:  # a turn may hold anything
            report.ignored.append("event")  # type: ignore[unreachable]


def _adapter(books: Books, event: AdapterEvent, report: TurnReport) -> None:
    """End a load, and the samples that waited for an adapter if it failed."""
    ended = end_load(books, event)
    if ended is None:
        report.ignored.append("adapter")
    elif isinstance(event, AdapterFailed):
        report.finished += [_ended(account, "error", account.output) for account in ended]
        report.lost_adapters.append(close_lost(books, event, ended))


def _transfer(books: Books, event: Moved | Lost, report: TurnReport) -> None:
    if type(event.number) is not int or event.number not in books.transfers:
        report.ignored.append("transfer")
        return
    books.transfers.remove(event.number)
    if isinstance(event, Lost):
        report.lost += 1


def _submit(books: Books, request: Request, report: TurnReport) -> None:
    if request.id in books.num_live:
        report.ignored.append("submit")
        return
    waiting = sum(
        account.stage is not Stage.RUNNING for account in books.accounts.values()
    )
    if not can_run(books.config, request, waiting):
        for sample in range(max(1, min(request.n, MAX_SAMPLES))):
            refused = new_account(books.config, request, sample, books.time)
            books.move(refused, Cause.REJECTED)
            report.finished.append(Finished(request.id, sample, "rejected", 0))
        return
    books.num_live[request.id] = request.n
    for sample in range(request.n):
        account = new_account(books.config, request, sample, books.time)
        books.move(account, Cause.SUBMITTED)
        books.accounts[account.id] = account


def _cancel(books: Books, name: str, report: TurnReport) -> None:
    accounts = [
        account for account in books.accounts.values() if account.request.id == name
    ]
    if not accounts:
        report.ignored.append("cancel")
    for account in accounts:
        report.finished.append(_ended(account, "cancelled", account.output))
        books.close(account, Cause.CANCELLED)


def _finish(books: Books, event: Finish, report: TurnReport) -> None:
    account = books.accounts.get((event.id, event.sample))
    if account is None:
        report.ignored.append("finish")
        return
    length = max(0, min(event.length, account.output))
    report.finished.append(_ended(account, event.reason, length))
    books.close(account, Cause.FINISHED)


def _pause(books: Books, event: Pause, report: TurnReport) -> None:
    account = books.accounts.get((event.id, event.sample))
    if account is None or not account.request.needs_host_mask:
        report.ignored.append("pause")  # its sampling needs no mask
        return
    account.paused = event.paused


def _propose(books: Books, event: Propose, report: TurnReport) -> None:
    account = books.accounts.get((event.id, event.sample))
    spec_config = books.config.speculation
    host_drafts = spec_config is not None and spec_config.drafter == HOST
    is_usable = event.tokens and all(t < books.config.vocab_size for t in event.tokens)
    if (
        account is None
        or account.stage is not Stage.RUNNING
        or not host_drafts
        or not is_usable
    ):
        report.ignored.append("propose")
        return
    account.proposed = Proposed(event.known, event.tokens)


def _ended(account: SampleAccount, reason: str, length: int) -> Finished:
    """The expected end of a sample, without the error."""
    return Finished(*account.id, reason, length, cached=account.cached)


# --- steps ------------------------------------------------------------------------------


def _step(books: Books, event: Executed | Failed, report: TurnReport) -> None:
    """End a step; with invalid results it counts as failed."""
    steps = [flight.plan.step for flight in books.flights]
    if type(event.step) is not int or event.step not in steps:
        report.ignored.append(type(event).__name__.lower())
    elif isinstance(event, Executed) and is_valid_result(
        books.config, books.flights[0].plan, event
    ):
        _commit(books, event, report)
    else:
        _discard(books, event.step, report)


def _commit(books: Books, event: Executed, report: TurnReport) -> None:
    """Commit the first plan in flight."""
    flight = books.flights.popleft()
    plan = flight.plan
    ends = list[tuple[SampleAccount, str]]()
    fills = {fill.index for fill in plan.fills}
    for index, (seat, tokens) in enumerate(zip(flight.seats, event.yields, strict=True)):
        account = seat.account
        if account.seat is not seat:
            continue  # it left before its results came
        report.progress = True
        account.faults = 0
        books.move(account, Cause.ADVANCED)
        if event.pooled and event.pooled[index]:
            report.pooled[account.id] = (
                report.pooled.get(account.id, b"") + event.pooled[index]
            )
        seat.scheduled -= plan.max_sampled_tokens[index] - len(tokens)
        new_tokens, reason = _until_end(account, tokens)
        account.tokens += new_tokens
        if new_tokens:
            report.tokens[account.id] = report.tokens.get(account.id, ()) + new_tokens
        filled = plan.starts[index] + plan.num_scheduled_tokens[index]
        seat.kv = filled if index in fills else len(account.tokens) - 1
        if index in fills:
            books.filled[seat.run_id] = filled
        if not account.request.max_tokens and filled == seat.num_known_at_admission:
            reason = "length"
        if reason:
            ends.append((account, reason))
    books.learn_saved(flight)
    for account, reason in ends:
        report.finished.append(_ended(account, reason, account.output))
        books.close(account, Cause.COMPLETED)
    books.open_fences(plan.step)


def _until_end(
    account: SampleAccount, tokens: tuple[int, ...]
) -> tuple[tuple[int, ...], str]:
    """The new tokens that count, and the reason if they end the sample."""
    room = account.last_index + 1 - len(account.tokens)
    for count, token in enumerate(tokens[:room], 1):
        if token in account.request.stop_ids:
            return tokens[:count], "stop"
    return tokens[:room], "length" if len(tokens) >= room else ""


def _discard(books: Books, step: int, report: TurnReport) -> None:
    """Discard a failed step and all in flight, and count a failure of its own rows."""
    restarted: dict[SampleId, SampleAccount] = {}
    for flight in books.flights:
        for seat in flight.seats:
            if seat.account.seat is seat:
                restarted[seat.account.id] = seat.account
                seat.account.faults += flight.plan.step == step
    report.discarded.append(
        Discarded(step, "", plans=len(books.flights), rows=len(restarted))
    )
    if books.config.state_group is None:
        for account in restarted.values():
            books.restart(account)
    books.flights.clear()
    books.open_fences(None)
    failed = [
        account
        for account in restarted.values()
        if account.faults >= books.config.max_failures
    ]
    for account in failed:
        report.finished.append(_ended(account, "error", account.output))
        books.close(account, Cause.FAILED)
        del restarted[account.id]
    if books.config.state_group is not None:  # their working states are lost
        for account in restarted.values():
            _requeue(books, account, report)


def _requeue(books: Books, account: SampleAccount, report: TurnReport) -> None:
    """Move a running sample back to the queue, whose working state is lost."""
    kv = account.seat.kv if account.seat is not None else 0
    report.requeued[account.id] = len(account.tokens), kv
    books.move(account, Cause.PREEMPTED)
    books.release_seat(account)


# --- outputs ----------------------------------------------------------------------------


def check_report(report: TurnReport, turn: Transition) -> None:
    """Raise InvariantError unless the outputs are those expected, in any order of
    samples.
    """
    finished = _check_emitted(report, turn)
    ends = [evolve(end, error="") for end in finished]
    is_expected = Counter(ends) == Counter(report.finished)
    require(is_expected, "lifetime", f"ended: {ends}, not {report.finished}")
    for end in finished:
        needs_error = end.reason in ("rejected", "error")
        require(not needs_error or end.error, "lifetime", f"{end} does not say why")
    _check_reasons(report, turn, finished)


def _check_emitted(report: TurnReport, turn: Transition) -> list[Finished]:
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
            for name, value in _pooled_of(command).items():
                pooled[name] = pooled.get(name, b"") + value
    if tokens != report.tokens:
        raise InvariantError("emit", f"{tokens}, not {report.tokens}")
    require(pooled == report.pooled, "emit", f"{pooled} pooled, not {report.pooled}")
    return finished


def _pooled_of(emit: Emit) -> dict[SampleId, bytes]:
    """The emitted results of prompts, by sample."""
    if not emit.pooled:
        return {}
    same = len(emit.ids) == len(emit.pooled)
    require(same, "emit", "columns differ in length")
    pairs = zip(emit.ids, emit.pooled, strict=True)
    return {name: value for name, value in pairs if value}


def _check_reasons(
    report: TurnReport, turn: Transition, finished: list[Finished]
) -> None:
    """Check that ends, failed steps and ignored events are also reported as reasons."""
    ended = [r for r in turn.reasons if isinstance(r, Ended)]
    expected = [Ended(end.id, end.sample, end.reason, end.error) for end in finished]
    require(Counter(ended) == Counter(expected), "reason", f"{ended}, not {expected}")
    discarded = [evolve(r, error="") for r in turn.reasons if isinstance(r, Discarded)]
    require(
        discarded == report.discarded,
        "reason",
        f"discarded {discarded}, not {report.discarded}",
    )
    ignored = Counter(r.event for r in turn.reasons if isinstance(r, Ignored))
    expected_ignored = Counter(report.ignored)
    require(
        ignored == expected_ignored, "reason", f"ignored {ignored}, not {report.ignored}"
    )
