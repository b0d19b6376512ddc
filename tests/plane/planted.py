"""Bugs to plant in the product: a harness that finds none of them proves nothing."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

from attrs import evolve

from minfer.effects.live.client import EngineMessage, TurnOutputs
from minfer.effects.live.frontend import Frontend
from minfer.effects.live.journal import journal_writer as journal
from minfer.effects.live.request_registry import RequestRecord
from minfer.effects.serving.answer_task import AnswerTask
from minfer.effects.serving.observability import metrics
from minfer.effects.text import output_processor

Change = Callable[[Any], Callable[..., Any]]  # of a method


def _lost_end(finish: Any) -> Callable[..., Any]:
    """The last word on some samples does not arrive."""
    return lambda job, ending: None if ending.length == 5 else finish(job, ending)


def _lost_finish(flush: Any) -> Callable[..., Any]:
    """The engine does not hear of stop strings."""
    return lambda job, *note_end: flush(job, *note_end)[:0]


def _token_twice(feed: Any) -> Callable[..., Any]:
    """Some tokens are delivered twice."""
    return lambda job, sample, tokens, *more: feed(
        job, sample, tokens + tokens[-1:] * (tokens[-1] % 7 == 3), *more
    )


def _unwritten_turn(write: Any) -> Callable[..., Any]:
    """A turn in forty is not in the journal."""
    return lambda writer, turn: None if turn.number % 40 == 13 else write(writer, turn)


def _counted_twice(note_end: Any) -> Callable[..., Any]:
    """Requests count as two."""
    return lambda counts, job: (note_end(counts, job), note_end(counts, job))


def _kept_job(hear: Any) -> Callable[..., Any]:
    """Some requests that have ended are still among those that are served."""

    def planted(self: Frontend, message: EngineMessage) -> None:
        jobs = dict(self.processors)
        hear(self, message)
        for name, job in jobs.items():
            if job.finished and job.request.n > 1:
                self._processors[name] = job
                self.client.live.setdefault(name, RequestRecord(job.request, read=True))

    return planted


def _set_order(hear: Any) -> Callable[..., Any]:
    """Outputs are delivered in the order of a set of strings."""

    def ordered(news: TurnOutputs) -> TurnOutputs:
        names = list({name for name, _ in news.ids})
        pairs = zip(news.ids, news.tokens, strict=True)
        columns = zip(
            *sorted(pairs, key=lambda pair: names.index(pair[0][0])), strict=True
        )
        ids, tokens = columns if names else ((), ())
        return evolve(news, ids=tuple(ids), tokens=tuple(tokens))

    def planted(self: Frontend, message: EngineMessage) -> None:
        hear(self, ordered(message) if isinstance(message, TurnOutputs) else message)

    return planted


def _ends_of_the_engine(note_end: Any) -> Callable[..., Any]:
    """Requests are counted as the engine saw them end, not as their clients did."""

    def planted(counts: metrics.Metrics, job: output_processor.OutputProcessor) -> None:
        ends = dict(counts.ends)
        note_end(counts, job)
        counts.ends = ends
        for sample in job.samples:
            counts.ends[
                metrics._FINISHED_REASONS.get(
                    sample.ending.reason if sample.ending else "", "error"
                )
            ] += 1

    return planted


def _overtaking(write: Any) -> Callable[..., Any]:
    """A part of an answer does not wait until a slow client has taken the one before."""

    async def planted(answer: AnswerTask, events: Any, *, last: bool) -> None:
        answer.writing = asyncio.Lock()
        await write(answer, events, last=last)

    return planted


def _name_again(fresh: Any) -> Callable[..., Any]:
    """A run takes a name whose first segment is not there, though others are."""

    def planted(folder: Path, numbers: Any) -> Path:
        run, _, suffix = fresh(folder, numbers).name.partition(".")
        paths = (folder / f"{run}.{n}-{suffix.partition('-')[2]}" for n in count())
        return next(path for path in paths if not path.exists())

    return planted


# minfer had them: see `__init__`
REAL = ("set order", "overtaking", "ends of the engine", "name again")
PLANTED: dict[str, tuple[Any, str, Change]] = {
    "lost end": (output_processor.OutputProcessor, "finish", _lost_end),
    "lost finish": (output_processor.OutputProcessor, "flush", _lost_finish),
    "token twice": (output_processor.OutputProcessor, "feed", _token_twice),
    "unwritten turn": (journal.JournalWriter, "_write_turn", _unwritten_turn),
    "counted twice": (metrics.Metrics, "note_end", _counted_twice),
    "kept job": (Frontend, "handle_message", _kept_job),
    "ends of the engine": (metrics.Metrics, "note_end", _ends_of_the_engine),
    "overtaking": (AnswerTask, "_write", _overtaking),
    "set order": (Frontend, "handle_message", _set_order),
    "name again": (journal, "_new_run_path", _name_again),
}


def planted(name: str) -> AbstractContextManager[Any]:
    """A context in which that bug is there."""
    owner, method, change = PLANTED[name]
    return mock.patch.object(owner, method, change(getattr(owner, method)))
