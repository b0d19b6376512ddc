"""An API server: the callers' end of the engine client.

It reads the outputs of requests that were submitted through it, each by an
`OutputProcessor` that turns tokens into text, and passes every message of the engine
client on to them. It finds stop strings, and reports to the engine where the samples
ended.

    caller ---> submit --------------------------> client ---> engine
       ^                                              |
       +- sink <- OutputProcessor <- handle_message <-+
                         +--- finish ---------------> client

`handle_message` runs in the thread in which messages come: the engine's, or, over an
engine of another process, the event loop's. It passes outputs to a sink, and the caller
takes them from there in its own thread.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import Final
from weakref import WeakKeyDictionary

from minfer.effects.live.beams.beam_searches import BeamSearches
from minfer.effects.live.client import (
    EngineClient,
    EngineDied,
    EngineMessage,
    TurnOutputs,
)
from minfer.effects.live.errors import EngineDeadError, RequestError
from minfer.effects.live.request_registry import Sending
from minfer.effects.text.output_processor import OutputProcessor
from minfer.records.messages import Admitted, Preempted

_log = logging.getLogger("minfer.front")
POLL_SECONDS: Final = 0.02  # between two checks while waiting for an end


class Frontend:
    """The requests of one process that use an engine client.

    `on_end` is called with each request that the engine has ended, after its sink, and
    `after` is called when all outputs of a message are delivered: both in the thread in
    which messages come. What they raise is logged, and a request whose outputs cannot be
    processed fails with that error: the outputs of the others follow all the same.
    """

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.searches = BeamSearches(client)
        self._live = client.live
        self._processors: dict[str, OutputProcessor] = {}  # by request id
        # `on_end` reads them when the live request is gone.
        self._sendings: WeakKeyDictionary[OutputProcessor, Sequence[Sending]]
        self._sendings = WeakKeyDictionary()
        self.entry = threading.Lock()  # held while submitting
        self.on_end: list[Callable[[OutputProcessor], None]] = []
        self.after: list[Callable[[], None]] = []
        client.listen(self.handle_message)

    @property
    def processors(self) -> dict[str, OutputProcessor]:
        """The processors of all its requests, by id, until they end."""
        return self._processors.copy()

    def processor(self, name: str) -> OutputProcessor | None:
        """Returns the processor of a request, if it is one of its own."""
        return self._processors.get(name)

    def sendings(self, processor: OutputProcessor) -> Sequence[Sending]:
        """Returns where a request was sent, and why, where there are several engines."""
        return self._sendings.get(processor, ())

    def check(self, processor: OutputProcessor) -> None:
        """Raise the error with which a request would be refused now: see
        `EngineClient.check`.
        """
        self._live.check_new(processor.request)
        self.searches.check(processor.request)

    def submit(self, processors: Sequence[OutputProcessor]) -> None:
        """Submit requests: all of them, or none. Raises as `EngineClient.submit`."""
        with self.entry:
            for processor in processors:
                self._live.check_new(processor.request)
            now = self.client.clock()
            for processor in processors:
                processor.times.arrived = now
                # First: an interrupt may come in between, and then `drop` removes both.
                self._processors.setdefault(processor.request.id, processor)
                record = self._live.add(processor.request, read=True)
                record.session = processor.session
                self._sendings[processor] = record.sendings
            try:
                # All requests pass through it: it submits those that are no searches as
                # they are.
                self.searches.submit([processor.request for processor in processors])
            except (EngineDeadError, RequestError):  # all of them were refused
                for processor in processors:
                    self._release(processor.request.id)
                raise

    def cancel(self, ids: Iterable[str] | None = None) -> None:
        """End requests, or all; their outputs so far end as "cancelled"."""
        self.searches.cancel(self.processors if ids is None else ids)

    def drop(self, processors: Iterable[OutputProcessor]) -> None:
        """Cancel requests whose outputs are not needed, and wait until they are gone."""
        # A request refused for its duplicate id must not cancel the other one with that
        # id.
        names = {
            processor.request.id
            for processor in processors
            if self.processor(processor.request.id) is processor
        }
        served = self.searches.cancel(names)
        for name in names - served:  # an interrupt came before they were submitted
            self._release(name)
        while self.client.working and any(map(self.processor, served)):
            time.sleep(POLL_SECONDS)

    def abandon(self, error: Exception) -> None:
        """Cancel all, and fail their jobs at once: a running step may take a while."""
        self.cancel()
        for processor in self.processors.values():
            processor.fail(error)

    def handle_message(self, message: EngineMessage) -> None:
        """Pass a message of the engine on."""
        for translated in self.searches.translate(message):
            match translated:
                case TurnOutputs():
                    self._process_outputs(translated)
                case EngineDied():
                    self._fail_requests(translated)
        for notify in self.after:
            _call(notify)

    def _process_outputs(self, outputs: TurnOutputs) -> None:
        self._note_times(outputs)
        self._note_drafts(outputs)
        # In the order of the batch: that of a set would differ from process to process.
        ready, processors = dict[str, OutputProcessor](), self._processors
        logprobs = outputs.logprobs or repeat(())
        rows = zip(
            outputs.ids, outputs.tokens, logprobs, strict=False
        )  # endless, if none
        for (name, sample), tokens, token_logprobs in rows:
            processor = processors.get(name)
            if tokens and processor is not None:
                processor.feed(sample, tokens, outputs.time, token_logprobs)
                if processor.eager:
                    ready[name] = processor
        for (name, _), vector in zip(outputs.ids, outputs.pooled, strict=False):
            if vector and (processor := self.processor(name)) is not None:
                processor.pool(vector, outputs.time)
        for end in outputs.finished:
            if (processor := self.processor(end.id)) is not None:
                processor.finish(end)
                ready[end.id] = processor
        for processor in ready.values():
            self._flush(processor)

    def _flush(self, processor: OutputProcessor) -> None:
        """Have a request's new outputs delivered."""
        try:
            if ends := processor.flush(self._release):
                self.client.finish(ends)
        except Exception as error:  # of any kind: outputs of others follow
            self._fail(processor, error)
            return
        if processor.finished:
            for notify in self.on_end:
                _call(partial(notify, processor))

    def _fail(self, processor: OutputProcessor, error: Exception) -> None:
        """End a request whose outputs cannot be processed."""
        name = processor.request.id
        _log.error("the outputs of request %r cannot be processed", name, exc_info=error)
        self.cancel([name])
        self._release(name)
        processor.fail(error)

    def _release(self, name: str) -> None:
        """Note that the outputs of a request are not read any more."""
        self._processors.pop(name, None)
        self._live.release(name)

    def _note_times(self, outputs: TurnOutputs) -> None:
        """Note when requests entered the queue, were admitted, or were preempted."""
        for name in outputs.arrived:
            if (processor := self.processor(name)) is not None:
                processor.times.waits_before = outputs.waits
        for reason in outputs.reasons:
            processor = self.processor(reason.id)
            if isinstance(reason, Admitted | Preempted) and processor is not None:
                processor.times.record_scheduling(reason, outputs.time, outputs.waits)

    def _note_drafts(self, outputs: TurnOutputs) -> None:
        """Note the requests' drafts, and how many were accepted."""
        rows = zip(outputs.ids, outputs.tokens, outputs.drafts, strict=False)
        for (name, _), tokens, drafts in rows:
            if drafts and (processor := self.processor(name)) is not None:
                processor.times.record_drafts(drafts, len(tokens))

    def _fail_requests(self, death: EngineDied) -> None:
        """Fail the requests that died with the engine, once."""
        for name in death.ids:
            if (processor := self.processor(name)) is not None:
                self._release(name)
                error = EngineDeadError(death.reason)
                # Its traceback shows the place: in a policy, for example.
                error.__cause__ = self.client.dead
                processor.fail(error)


def _call(notify: Callable[[], None]) -> None:
    """Call what must not harm the outputs of requests."""
    try:
        notify()
    except Exception:  # of any kind, as what is called may do anything
        _log.exception("what was to hear of outputs failed")
