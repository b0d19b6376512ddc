"""Records of requests: those in progress, and the last ones that ended.

    begin ---> AnswerRecord ---> finished   by the task that answers
                  ^  figures of its prompts
    Frontend.on_end -+                      in the thread of the engine's messages

An answer is looked up by its own id, by the x-request-id that its client chose, or by the
id of one of its parts in the engine, as journals have them; only with the key of the
request. A record has times, counts and reasons, and never a text. Records of the last
`MAX_ENDED_ANSWERS` answers are kept; of each, the first `MAX_PROMPTS` prompts. The oldest
record of the key that has most of them is dropped first, so that one key's requests do
not remove those of others.
"""

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Final

from attrs import define, field

from minfer.effects.live.request_names import answer_of, prompt_name
from minfer.effects.live.request_registry import Sending
from minfer.effects.live.served_model import ServedModel
from minfer.effects.serving.wire.stamp import Stamp
from minfer.effects.text.output_processor import OutputProcessor

MAX_ENDED_ANSWERS: Final = 1000  # answers that have ended
MAX_PROMPTS: Final = 64  # prompts of an answer

JsonObject = dict[str, object]


@define
class AnswerRecord:
    """One answer: its request, and the figures of its prompts that have ended."""

    stamp: Stamp
    endpoint: str  # its path
    chosen_id: str  # the x-request-id that its client chose, or nothing
    owner: str = ""  # the name of its client's key
    finished: bool = False  # nothing more is sent
    ended_prompts: dict[int, JsonObject] = field(factory=dict)  # by prompt


class AnswerRecords:
    """The records of a model's answers. Methods may be called from any thread."""

    def __init__(self, llm: ServedModel) -> None:
        self._api_server = llm.frontend
        self._lock = threading.Lock()
        # By the answer's id; of those that have ended, the oldest is first.
        self._records: dict[str, AnswerRecord] = {}
        self._counts: Counter[str] = Counter()  # of ended ones, by the names of keys
        # Of answers, by the names of their clients' keys, and what these clients chose.
        self._ids: dict[tuple[str, str], str] = {}
        llm.frontend.on_end.append(self._end)

    @property
    def live(self) -> int:
        """How many answers are being written."""
        with self._lock:
            return len(self._records) - self._counts.total()

    def begin(self, stamp: Stamp, endpoint: str, chosen_id: str, owner: str = "") -> None:
        """Note that an answer has begun."""
        with self._lock:
            self._records[stamp.id] = AnswerRecord(stamp, endpoint, chosen_id, owner)
            if chosen_id:
                self._ids[owner, chosen_id] = stamp.id

    def close(self, name: str) -> None:
        """Note that an answer has ended; an old record is dropped for it."""
        with self._lock:
            record = self._records[name] = self._records.pop(name)
            record.finished = True
            self._counts[record.owner] += 1
            if self._counts.total() > MAX_ENDED_ANSWERS:
                self._drop_oldest()

    def find(self, name: str, owner: str = "") -> JsonObject | None:
        """The record of an answer by its id, for one owner; None if there is none."""
        with self._lock:
            candidates = name, self._ids.get((owner, name), ""), answer_of(name)
            records = [
                record
                for record in map(self._records.get, candidates)
                if record is not None
            ]
            record = next((record for record in records if record.owner == owner), None)
            if record is None:
                return None
            ended_prompts = dict(record.ended_prompts)
        live = self._running_prompts(record.stamp.id, ended_prompts)
        prompts = sorted(
            {
                **ended_prompts,
                **{i: self._figures(job) for i, job in live.items()},
            }.items()
        )
        return {
            "id": record.stamp.id,
            "object": "request",
            "request_id": record.chosen_id or record.stamp.id,
            "endpoint": record.endpoint,
            "model": record.stamp.model,
            "created": record.stamp.created,
            "state": _state(record, live, bool(ended_prompts)),
            "prompts": [figures for _, figures in prompts],
        }

    def cancel(self, name: str, owner: str = "") -> JsonObject | None:
        """Cancel an answer's prompts in the engine. Returns the record before that, as
        `find`, with the number of these prompts as `cancelled`.
        """
        record = self.find(name, owner)
        if record is None:
            return None
        jobs = [
            request_id
            for request_id in self._api_server.processors
            if answer_of(request_id) == record["id"]
        ]
        self._api_server.cancel(jobs)
        return {**record, "cancelled": len(jobs)}

    def _drop_oldest(self) -> None:
        """Drop the oldest record of the key that has most of them."""
        max_count = max(self._counts.values())
        ended = (
            (name, record) for name, record in self._records.items() if record.finished
        )
        oldest = next(
            name for name, record in ended if self._counts[record.owner] == max_count
        )
        forgotten = self._records.pop(oldest)
        self._counts[forgotten.owner] -= 1
        if not self._counts[forgotten.owner]:
            del self._counts[forgotten.owner]
        chosen_id = forgotten.owner, forgotten.chosen_id
        if self._ids.get(chosen_id) == oldest:
            del self._ids[chosen_id]

    def _running_prompts(
        self, name: str, ended_prompts: dict[int, JsonObject]
    ) -> dict[int, OutputProcessor]:
        """The prompts of an answer in the engine, of the first `MAX_PROMPTS`."""
        running = {}
        for i in range(MAX_PROMPTS):
            job = self._api_server.processor(prompt_name(name, i))
            if job is not None and i not in ended_prompts:
                running[i] = job
        return running

    def _figures(self, job: OutputProcessor) -> JsonObject:
        return _prompt_figures(job, self._api_server.sendings(job))

    def _end(self, job: OutputProcessor) -> None:
        """Store the figures of a prompt whose samples have all ended."""
        name, _, number = job.request.id.rpartition("-")
        with self._lock:
            record = self._records.get(name)
            if record is not None and int(number) < MAX_PROMPTS:
                record.ended_prompts[int(number)] = self._figures(job)


def _state(
    record: AnswerRecord, live: dict[int, OutputProcessor], any_ended: bool
) -> str:
    """The state of an answer."""
    if any(job.times.started is not None for job in live.values()):
        return "running"
    if live:
        return "waiting"
    if not record.finished:
        return "sending" if any_ended else "preparing"
    return "ended" if any_ended else "refused"


def _prompt_figures(job: OutputProcessor, sendings: Sequence[Sending]) -> JsonObject:
    """The figures of one prompt so far; null where there is none."""
    num_tokens = sum(
        sample.num_flushed + len(sample.new_tokens) for sample in job.samples
    )
    metrics = job.times.metrics(num_tokens)
    first = job.samples[0].ending
    placements = [
        {
            "replica": sending.placed.replica,
            "machine": sending.machine,
            "why": sending.placed.why,
            "hit": sending.placed.hit,
            "blocks": sending.placed.blocks,
        }
        for sending in sendings
    ]
    return {
        "prompt_tokens": len(job.request.prompt),
        "cached_tokens": None if first is None else first.cached,
        "output_tokens": num_tokens,
        "queue_times": dict(metrics.queue_times),
        "ttft": metrics.ttft,
        "tpot": metrics.tpot,
        "latency": metrics.latency,
        "preemptions": metrics.preemptions,
        "draft_tokens": metrics.draft_tokens,
        "accepted_draft_tokens": metrics.accepted_draft_tokens,
        "finish_reasons": [
            "stop"
            if sample.stop_string
            else sample.ending.reason
            if sample.ending
            else None
            for sample in job.samples
        ],
        **({"replicas": placements} if placements else {}),
    }
