"""Writing a journal: turns as records (`minfer.journal.format` defines the format)."""

import zlib
from array import array
from collections.abc import Iterable, Mapping
from itertools import compress
from typing import Any

from attrs import evolve

from minfer.journal.codec import dump
from minfer.journal.decisions import compact, extend_digest, facts
from minfer.journal.format import (
    FORMAT,
    HAS_RESULT,
    HAS_TICK,
    MAGIC,
    MARK,
    NO_STEP,
    START_DIGEST,
    TURN,
    Head,
    framed,
)
from minfer.journal.projection import state_digest
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    EVENTS,
    AdapterEvent,
    AdapterFailed,
    AdapterLoaded,
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
        flags |= HAS_TICK
    first = turn.before.inflight[0] if turn.before.inflight else None
    if first and events and type(events[0]) is Executed:
        packed = _pack_result(turn.before, first, events[0], rest)
        if packed is not None:
            ids = packed
            events = events[1:]
            flags |= HAS_RESULT
    if events:
        rest["events"] = [_dump_event(event, ids) for event in events]
    planes = _planes(ids)
    head = TURN.pack(b"T", flags, time, digest, len(planes), len(ids))
    tail = compact(rest)
    if facts_json:
        tail = (tail[:-1] + b"," if tail else b"{") + b'"facts":' + facts_json + b"}"
    return framed(b"".join([head, *planes, tail]))


def _planes(ids: "array[int]") -> list[bytes]:
    """Token ids as planes of their bytes, lowest first, without those that are all 0."""
    raw = ids.tobytes()
    planes = [raw[byte::4] for byte in range(4)]
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


def _pack_result(
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
    if event.logprobs and (beams := beam_rows(state, plan)):
        rest["logprobs"] = [
            [index, entry.logprob, entry.rank, entry.likeliest, entry.logprobs]
            for index in beams
            for entry in event.logprobs[index]
            if _can_be_written(entry)
        ]
    return ids


def _can_be_written(entry: TokenLogprobs) -> bool:
    """Whether log-probabilities can be written: nothing depends on those that cannot."""
    if not type(entry.likeliest) is type(entry.logprobs) is tuple:
        return False
    integers, floats = (entry.rank, *entry.likeliest), (entry.logprob, *entry.logprobs)
    return all(
        is_number(value, whole=True) and -MAX_INT64 <= value <= MAX_INT64
        for value in integers
    ) and all(isinstance(value, float) for value in floats)


def beam_rows(state: EngineState, plan: Plan) -> list[int]:
    """The rows of a plan that are beams of searches, by their places in its columns."""
    run = state.running
    rounds = [seq.request.continuation.beam_round for seq in run.seqs]
    beams = compress(run.run_ids, [beam_round is not None for beam_round in rounds])
    beam_run_ids = frozenset(beams)
    if not beam_run_ids:
        return []
    return [index for index, run_id in enumerate(plan.run_ids) if run_id in beam_run_ids]


def _dump_event(event: Event, ids: "array[int]") -> Any:
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
    if isinstance(event, AdapterLoaded | AdapterFailed):
        return _as_written_load(event)
    if not isinstance(event, Executed | Failed):
        written: Event = event
        return written
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


def _as_written_load(event: AdapterLoaded | AdapterFailed) -> AdapterEvent:
    """The end of a load with a text and a number; a slot that there is not, if it names
    none.
    """
    name, index = event.adapter, event.slot
    adapter = clip(name) if type(name) is str else ""
    slot = index if type(index) is int and 0 <= index < NO_STEP else NO_STEP
    if isinstance(event, AdapterLoaded):
        return AdapterLoaded(adapter, slot)
    return AdapterFailed(adapter, slot, clip(event.error))


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
    records = [MAGIC]
    digest = START_DIGEST
    turn = None
    for turn in turns:
        if len(records) == 1:
            state = None if turn.before == head.begin else turn.before
            records.append(head_record(evolve(head, turn=turn.number, state=state)))
        facts_json = compact(facts(turn.before, turn.transition))
        digest = extend_digest(digest, turn.transition, facts_json)
        records.append(turn_record(turn, facts_json, digest))
    if turn is None:
        return b"".join([MAGIC, head_record(head), end_record(0)])
    count = turn.number + 1
    if states:
        records.append(state_record(count, turn.transition.state))
    return b"".join([*records, end_record(count)])
