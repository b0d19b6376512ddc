"""Records of requests: those in progress, and the last ones that ended.

    begun ---> Record ---> over             by the task that answers
                 ^  what its prompts took
    Front.on_end +                          in the thread of the engine's messages

An answer is looked up by its own id, by the x-request-id that its client chose, or by the
id of one of its parts in the engine, as journals have them; only with the key of the
request. A record has times, counts and reasons, and never a text. Records of the last
`KEPT` answers are kept; of each, the first `PARTS` prompts. The oldest record of the key
that has most of them is dropped first, so that one key's requests do not remove those of
others.
"""

import threading
from collections import Counter, OrderedDict
from typing import Final

from attrs import define, field

from minfer.effects.live.request_names import answer_of, prompt_name
from minfer.effects.live.served_model import ServedModel
from minfer.effects.serving.wire.stamp import Stamp
from minfer.effects.text.output_processor import OutputProcessor

KEPT: Final = 1000  # answers that have ended
PARTS: Final = 64  # prompts of an answer

JsonObject = dict[str, object]


@define
class Record:
    """One answer: its request, and the figures of its prompts that have ended."""

    stamp: Stamp
    endpoint: str  # its path
    chosen: str  # the x-request-id that its client chose, or nothing
    owner: str = ""  # the name of its client's key
    over: bool = False  # nothing more is sent
    ended: dict[int, JsonObject] = field(factory=dict)  # by prompt


class Records:
    """The records of a model's answers. Methods may be called from any thread."""

    def __init__(self, llm: ServedModel) -> None:
        self._front = llm.front
        self._lock = threading.Lock()
        self._live: dict[str, Record] = {}  # by the answer's id
        self._over: OrderedDict[str, Record] = OrderedDict()  # the oldest is first
        self._counts: Counter[str] = Counter()  # of these, by the names of keys
        # Of answers, by the names of their clients' keys, and what these clients chose.
        self._ids: dict[tuple[str, str], str] = {}
        llm.front.on_end.append(self._end)

    @property
    def live(self) -> int:
        """How many answers are being written."""
        return len(self._live)

    def begin(self, stamp: Stamp, endpoint: str, chosen: str, owner: str = "") -> None:
        """Note that an answer has begun."""
        with self._lock:
            self._live[stamp.id] = Record(stamp, endpoint, chosen, owner)
            if chosen:
                self._ids[owner, chosen] = stamp.id

    def close(self, name: str) -> None:
        """Note that an answer has ended; an old record is dropped for it."""
        with self._lock:
            record = self._live.pop(name)
            record.over = True
            self._over[name] = record
            self._counts[record.owner] += 1
            if len(self._over) > KEPT:
                self._forget_one()

    def told(self, name: str, owner: str = "") -> JsonObject | None:
        """The record of an answer by its id, for one owner; None if there is none."""
        with self._lock:
            each = name, self._ids.get((owner, name), ""), answer_of(name)
            found = [one for one in map(self._found, each) if one is not None]
            record = next((one for one in found if one.owner == owner), None)
            if record is None:
                return None
            ended = dict(record.ended)
        live = self._serving(record.stamp.id, ended)
        prompts = sorted({**ended, **{i: _told(job) for i, job in live.items()}}.items())
        return {
            "id": record.stamp.id,
            "object": "request",
            "request_id": record.chosen or record.stamp.id,
            "endpoint": record.endpoint,
            "model": record.stamp.model,
            "created": record.stamp.created,
            "state": _state(record, live, bool(ended)),
            "prompts": [one for _, one in prompts],
        }

    def cancel(self, name: str, owner: str = "") -> JsonObject | None:
        """Cancel an answer's prompts in the engine. Returns the record before that, as
        `told`, with the number of these prompts as `cancelled`.
        """
        told = self.told(name, owner)
        if told is None:
            return None
        jobs = [
            one for one in list(self._front.processors) if answer_of(one) == told["id"]
        ]
        self._front.cancel(jobs)
        return {**told, "cancelled": len(jobs)}

    def _forget_one(self) -> None:
        """Drop the oldest record of the key that has most of them."""
        most = max(self._counts.values())
        each = self._over.items()
        oldest = next(name for name, one in each if self._counts[one.owner] == most)
        forgotten = self._over.pop(oldest)
        self._counts[forgotten.owner] -= 1
        if not self._counts[forgotten.owner]:
            del self._counts[forgotten.owner]
        chosen = forgotten.owner, forgotten.chosen
        if self._ids.get(chosen) == oldest:
            del self._ids[chosen]

    def _found(self, name: str) -> Record | None:
        return self._live.get(name) or self._over.get(name)

    def _serving(
        self, name: str, ended: dict[int, JsonObject]
    ) -> dict[int, OutputProcessor]:
        """The prompts of an answer in the engine, of the first `PARTS`."""
        found = {}
        for i in range(PARTS):
            job = self._front.processors.get(prompt_name(name, i))
            if job is not None and i not in ended:
                found[i] = job
        return found

    def _end(self, job: OutputProcessor) -> None:
        """Store the figures of a prompt whose samples have all ended."""
        name, _, number = job.request.id.rpartition("-")
        with self._lock:
            record = self._found(name)
            if record is not None and int(number) < PARTS:
                record.ended[int(number)] = _told(job)


def _state(record: Record, live: dict[int, OutputProcessor], any_ended: bool) -> str:
    """The state of an answer."""
    if any(job.times.started is not None for job in live.values()):
        return "running"
    if live:
        return "waiting"
    if not record.over:
        return "sending" if any_ended else "preparing"
    return "ended" if any_ended else "refused"


def _told(job: OutputProcessor) -> JsonObject:
    """The figures of one prompt so far; null where there is none."""
    made = sum(one.count + len(one.fresh) for one in job.samples)
    metrics = job.times.metrics(made)
    first = job.samples[0].done
    return {
        "prompt_tokens": len(job.request.prompt),
        "cached_tokens": None if first is None else first.cached,
        "output_tokens": made,
        "queue_times": dict(metrics.queue_times),
        "ttft": metrics.ttft,
        "tpot": metrics.tpot,
        "latency": metrics.latency,
        "preemptions": metrics.preemptions,
        "draft_tokens": metrics.draft_tokens,
        "accepted_draft_tokens": metrics.accepted_draft_tokens,
        "finish_reasons": [
            "stop" if one.stop else one.done.reason if one.done else None
            for one in job.samples
        ],
    }
