"""Writing a journal: turns as records (`minfer.journal.format` defines the format)."""

import zlib
from array import array
from collections.abc import Iterable, Mapping
from itertools import compress
from typing import Any

from attrs import evolve

from minfer.journal.codec import dump
from minfer.journal.decisions import chained, compact, facts
from minfer.journal.format import (
    FORMAT,
    MAGIC,
    MARK,
    NO_STEP,
    RESULT,
    START,
    TICK,
    TURN,
    Head,
    framed,
)
from minfer.journal.projection import state_digest
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    EVENTS,
    Event,
    Executed,
    Failed,
    Lost,
    Moved,
    Submit,
    Tick,
    clip,
)
from minfer.records.plan import Plan, flaw_beside, tokens_of
from minfer.records.state import EngineState, Turn
from minfer.records.token_logprobs import TokenLogprobs
from minfer.values.checks import MAX_INT64, is_number


def head_record(head: Head) -> bytes:
    """The first record of a segment. Raises CodecError for a policy that cannot be
    encoded.
    """
    record = {
        "format": FORMAT,
        "turn": head.turn,
        "digest": head.digest.hex(),
        "config": dump(head.config),
        "about": head.about,
        "state": None,
    }
    if head.state is not None:
        record["state"] = dump(head.state)
        record["state_digest"] = state_digest(head.state).hex()
    return framed(b"H" + zlib.compress(compact(record), 1))


def turn_record(turn: Turn, facts_json: bytes, digest: bytes) -> bytes:
    """The record of a turn with its facts, as JSON, and the digest after it."""
    events = turn.events
    time = 0.0
    flags = 0
    ids = array("I")  # all token ids of the turn
    rest: dict[str, Any] = {}
    if events and type(events[0]) is Tick:
        time = events[0].time
        events = events[1:]
        flags |= TICK
    first = turn.before.inflight[0] if turn.before.inflight else None
    if first and events and type(events[0]) is Executed:
        found = _yielded(turn.before, first, events[0], rest)
        if found is not None:
            ids = found
            events = events[1:]
            flags |= RESULT
    if events:
        rest["events"] = [_event(event, ids) for event in events]
    planes = _planes(ids)
    head = TURN.pack(b"T", flags, time, digest, len(planes), len(ids))
    tail = compact(rest)
    if facts_json:
        tail = (tail[:-1] + b"," if tail else b"{") + b'"facts":' + facts_json + b"}"
    return framed(b"".join([head, *planes, tail]))


def _planes(ids: "array[int]") -> list[bytes]:
    """Token ids as planes of their bytes, lowest first, without those that are all 0."""
    raw = ids.tobytes()
    planes = [raw[at::4] for at in range(4)]
    while planes and planes[-1].count(0) == len(ids):
        del planes[-1]
    return planes


def _packed_ids(yields: Any) -> "array[int] | None":
    """The token ids of results as packed numbers, if possible."""
    tokens = tokens_of(yields)
    try:
        return None if tokens is None else array("I", tokens)
    except OverflowError:
        return None


def _yielded(
    state: EngineState, plan: Plan, event: Executed, rest: dict[str, Any]
) -> "array[int] | None":
    """The token ids of the result of `plan`, if it is one and can be packed; adds their
    sizes to `rest` if needed, and the log-probabilities that a search needs.
    """
    if type(event.step) is not int or event.step != plan.step:
        return None
    ids = _packed_ids(event.yields)
    if ids is None or len(event.yields) != len(plan.max_sampled_tokens):
        return None
    sizes = tuple(map(len, event.yields))
    if _flaw(event, sizes):
        return None
    if sizes != plan.max_sampled_tokens:
        rest["sizes"] = sizes
    if event.logprobs and (beams := searched_rows(state, plan)):
        rest["logprobs"] = [
            [at, one.logprob, one.rank, one.likeliest, one.logprobs]
            for at in beams
            for one in event.logprobs[at]
            if _is_of_numbers(one)
        ]
    return ids


def _is_of_numbers(one: TokenLogprobs) -> bool:
    """Whether log-probabilities can be written: nothing depends on those that cannot."""
    if not type(one.likeliest) is type(one.logprobs) is tuple:
        return False
    whole, others = (one.rank, *one.likeliest), (one.logprob, *one.logprobs)
    return all(
        is_number(part, whole=True) and -MAX_INT64 <= part <= MAX_INT64 for part in whole
    ) and all(isinstance(part, float) for part in others)


def searched_rows(state: EngineState, plan: Plan) -> list[int]:
    """The rows of a plan that are beams of searches, by their places in its columns."""
    run = state.running
    beams = compress(
        run.run_ids, [seq.request.continuation.beam_round is not None for seq in run.seqs]
    )
    found = frozenset(beams)
    return [at for at, gen in enumerate(plan.run_ids) if gen in found] if found else []


def _event(event: Event, ids: "array[int]") -> Any:
    """An event as JSON; token ids of prompts go to `ids`."""
    if type(event) is Submit:
        request = event.request
        ids.extend(request.prompt)
        record = dump(request, without=("prompt", "keys"))
        record["prompt"], record["keys"] = len(request.prompt), len(request.keys)
        return {"is": "Submit", "request": record}
    return dump(as_written(event), without=("logprobs",))


def as_written(event: Any) -> Event | None:
    """An event as it can be written: None for a value that is not an event, and no
    results for invalid ones.

    Events that cannot be written are rejected or ignored, and so are their replacements.
    """
    if type(event) not in EVENTS:
        return None
    if isinstance(event, Moved | Lost):
        return _as_written_transfer(event)
    if not isinstance(event, Executed | Failed):
        kept: Event = event
        return kept
    fits = type(event.step) is int and 0 <= event.step < NO_STEP
    step = event.step if fits else NO_STEP
    if isinstance(event, Failed):
        return Failed(step, event.error if isinstance(event.error, str) else "")
    if _packed_ids(event.yields) is None:
        return Executed(step, ())
    sizes = tuple(map(len, event.yields))
    if _flaw(event, sizes):
        return Executed(step, ())
    return Executed(step, event.yields, event.logprobs)


def _as_written_transfer(event: Moved | Lost) -> Moved | Lost:
    """The end of a transfer with a number and a text; a number that no transfer has, if
    it is none.
    """
    fits = type(event.number) is int and 0 <= event.number < NO_STEP
    number = event.number if fits else NO_STEP
    return Moved(number) if isinstance(event, Moved) else Lost(number, clip(event.error))


def _flaw(event: Executed, sizes: tuple[int, ...]) -> str:
    """What is wrong with the columns beside the tokens, or nothing."""
    return flaw_beside(event.logprobs, event.pooled, sizes)


def state_record(turns: int, state: EngineState) -> bytes:
    """The record of a state's digest, after `turns` turns."""
    return framed(MARK.pack(b"S", turns) + state_digest(state))


def end_record(turns: int) -> bytes:
    """The record of an orderly end, after `turns` turns."""
    return framed(MARK.pack(b"E", turns))


def encode_journal(
    config: EngineConfig,
    turns: Iterable[Turn],
    about: Mapping[str, Any] | None = None,
    *,
    states: bool = True,
) -> bytes:
    """A whole journal of one segment, for simulations and tests.

    `states`: with a digest of the last state, to which `turns` must lead.
    """
    head = Head(config=config, about=about or {})
    parts = [MAGIC]
    digest = START
    last = None
    for last in turns:
        if len(parts) == 1:
            state = None if last.before == head.begin else last.before
            parts.append(head_record(evolve(head, turn=last.number, state=state)))
        facts_json = compact(facts(last.before, last.transition))
        digest = chained(digest, last.transition, facts_json)
        parts.append(turn_record(last, facts_json, digest))
    if last is None:
        return b"".join([MAGIC, head_record(head), end_record(0)])
    count = last.number + 1
    if states:
        parts.append(state_record(count, last.transition.state))
    return b"".join([*parts, end_record(count)])
