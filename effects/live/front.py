"""A front: the callers' end of the engine client.

It keeps the requests that were submitted through it, each as an `Assembly` that turns
tokens into text, and passes every message of the engine client on to them. It finds stop
strings, and reports to the engine where the samples ended.

    caller ---> submit ----------------> client ---> engine
       ^                                    |
       +--- sink <--- Assembly <--- hear <--+
                         +--- finish -----> client

In this process `hear` runs in the engine's thread: it passes outputs to a sink, and the
caller takes them from there in its own thread.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Final

from minfer.effects.live.beams.beam_searches import Searches
from minfer.effects.live.client import Died, EngineClient, Message, News
from minfer.effects.live.errors import EngineDeadError, RequestError
from minfer.effects.text.assembly import Assembly
from minfer.records.messages import Admitted, Preempted, clip

POLL: Final = 0.02  # seconds between two checks while waiting for an end


class Front:
    """The requests of one process that use an engine client.

    `on_end` is called with each request that the engine has ended, after its sink, and
    `after` is called when all outputs of a message are delivered: both in the thread in
    which messages come. The engine breaks if they raise.
    """

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.searches = Searches(client)
        self.jobs: dict[str, Assembly] = {}  # by id, until they end
        self.entry = threading.Lock()  # held while submitting
        self.on_end: list[Callable[[Assembly], None]] = []
        self.after: list[Callable[[], None]] = []
        client.listen(self.hear)

    def check(self, job: Assembly) -> None:
        """Raise the error with which a request would be refused now: see
        `EngineClient.check`.
        """
        self._check_new(job)
        self.searches.check(job.request)

    def submit(self, jobs: Sequence[Assembly]) -> None:
        """Submit requests: all of them, or none. Raises as `EngineClient.submit`."""
        with self.entry:
            for job in jobs:
                self._check_new(job)
            now = self.client.clock()
            for job in jobs:
                job.times.arrived = now
                self.jobs[job.request.id] = job
            try:
                self.searches.submit([job.request for job in jobs])
            except (EngineDeadError, RequestError):  # all of them were refused
                for job in jobs:
                    self._forget(job.request.id)
                raise

    def cancel(self, ids: Iterable[str] | None = None) -> None:
        """End requests, or all; their outputs so far end as "cancelled"."""
        self.searches.cancel(list(self.jobs) if ids is None else ids)

    def drop(self, jobs: Iterable[Assembly]) -> None:
        """Cancel requests whose outputs are not needed, and wait until they are gone."""
        # A request refused for its duplicate id must not cancel the other one with that
        # id.
        names = {job.request.id for job in jobs if self.jobs.get(job.request.id) is job}
        served = self.searches.cancel(names)
        for name in names - served:  # an interrupt came before they were submitted
            self._forget(name)
        while self.client.working and not self.jobs.keys().isdisjoint(served):
            time.sleep(POLL)

    def abandon(self, error: Exception) -> None:
        """Cancel all, and fail their jobs at once: a running step may take a while."""
        self.cancel()
        for job in list(self.jobs.values()):
            job.fail(error)

    def hear(self, message: Message) -> None:
        """Pass a message of the engine on."""
        for told in self.searches.heard(message):
            match told:
                case News():
                    self._take(told)
                case Died():
                    self._bury(told)
        for ring in self.after:
            ring()

    def _forget(self, name: str) -> None:
        self.jobs.pop(name, None)

    def _check_new(self, job: Assembly) -> None:
        if job.request.id in self.jobs:
            name = clip(job.request.id)
            raise RequestError(
                f"a request with the id {name!r} is being served; ids must differ"
            )

    def _take(self, news: News) -> None:
        self._note(news)
        self._note_drafts(news)
        # In the order of the batch: that of a set would differ from process to process.
        ready = dict[str, Assembly]()
        logprobs = news.logprobs or repeat(())
        each = zip(news.ids, news.tokens, logprobs, strict=False)  # endless, if none
        for (name, sample), tokens, beside in each:
            if tokens and (job := self.jobs.get(name)) is not None:
                job.feed(sample, tokens, news.time, beside)
                if job.eager:
                    ready[name] = job
        for (name, _), vector in zip(news.ids, news.pooled, strict=False):
            if vector and (job := self.jobs.get(name)) is not None:
                job.pool(vector, news.time)
        for done in news.finished:
            if (job := self.jobs.get(done.id)) is not None:
                job.finish(done)
                ready[done.id] = job
        for job in ready.values():
            if found := job.flush(self._forget):
                self.client.finish(found)
            if job.finished:
                for ended in self.on_end:
                    ended(job)

    def _note(self, news: News) -> None:
        """Note when requests entered the queue, were admitted, or were preempted."""
        for name in news.arrived:
            if name in self.jobs:
                self.jobs[name].times.waits_before = news.waits
        for reason in news.reasons:
            if isinstance(reason, Admitted | Preempted) and reason.id in self.jobs:
                times = self.jobs[reason.id].times
                times.note(reason, news.time, news.waits)

    def _note_drafts(self, news: News) -> None:
        """Note the requests' drafts, and how many were accepted."""
        each = zip(news.ids, news.tokens, news.drafts, strict=False)
        for (name, _), tokens, drafts in each:
            if drafts and (job := self.jobs.get(name)) is not None:
                job.times.drafted(drafts, len(tokens))

    def _bury(self, death: Died) -> None:
        """Fail the requests that died with the engine, once."""
        for name in death.ids:
            if (job := self.jobs.pop(name, None)) is not None:
                broke = EngineDeadError(death.why)
                # Its traceback shows the place: in a policy, for example.
                broke.__cause__ = self.client.dead
                job.fail(broke)
