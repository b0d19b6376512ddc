"""From tokens to outputs: the engine's outputs of one request become text and records.

The core knows token ids, lengths and ends of sequence; text is known here. A stop string
is found here, in text, and reported to the engine as a `Finish` with the number of output
tokens it took; what the engine emits after that is dropped on both sides.

    outputs ---> feed, finish ---> flush ---> sink; the consumer calls take
                                  +------> Finish, to be handed to the engine client

The sink is notified once; what comes before the next `take` is added to what waits there.
Unless it streams or looks for stop strings, a request's text is decoded once, at its end.
"""

import threading
from collections.abc import Callable, Sequence

from attrs import define, evolve, field

from minfer.effects.text.best_of import best_of
from minfer.effects.text.detokenizer import Detokenizer
from minfer.effects.text.logprobs_by_id import PromptScores
from minfer.effects.text.output_buffer import OutputBuffer
from minfer.effects.text.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PromptLogprobs,
    RequestOutput,
    normalized,
    shortened,
)
from minfer.effects.text.stops import StopMatcher
from minfer.effects.text.timeline import Timeline
from minfer.effects.text.tokenizer import Tokenizer
from minfer.records.messages import Finish, Finished
from minfer.records.request import Request
from minfer.records.token_logprobs import TokenLogprobs

# Called in the thread in which the engine's messages come: be quick.
Sink = Callable[["OutputProcessor"], None]


@define(eq=False)
class OutputProcessor:
    """The outputs of one request on their way back to its consumer.

    `sink` is called once all samples have ended; with `streaming`, as soon as there is
    something new of which it was not yet notified. `take` then returns it. Everything but
    `take` belongs to the thread in which the engine's messages come.

    A request that continues after `output` of an earlier life returns only what is new.
    """

    request: Request
    sink: Sink
    prompt: str | None = None
    tokenizer: Tokenizer | None = None
    streaming: bool = False
    shown: frozenset[int] = frozenset()  # special tokens that its text has
    session: str = ""  # requests of a session continue each other
    times: Timeline = field(factory=Timeline)
    finished: bool = False
    error: Exception | None = None
    notified: bool = False  # the sink was notified of all that can be taken
    lock: threading.Lock = field(factory=threading.Lock)  # between `flush` and `take`
    samples: list[OutputBuffer] = field(factory=list, init=False)
    scores: PromptScores | None = field(default=None, init=False)  # if requested
    eager: bool = field(default=False, init=False)  # text is decoded before the end

    def __attrs_post_init__(self) -> None:
        sampling = self.request.sampling
        self.eager = self.streaming or bool(sampling.stop)
        for _ in range(self.request.n):
            decoder = self._decoder()
            keep_stop = sampling.include_stop_str_in_output
            stops = sampling.stop
            matcher = StopMatcher(stops, keep_stops=keep_stop) if stops else None
            scored = sampling.logprobs is not None or sampling.chooses
            logprobs = list[TokenLogprobs]() if scored else None
            min_tokens = sampling.min_tokens
            sample = OutputBuffer(
                decoder, matcher, logprobs, min_tokens, keeps_stop=keep_stop
            )
            sample.begin(self.request.output)
            self.samples.append(sample)
        if sampling.prompt_logprobs is not None:
            self.scores = PromptScores(self.request.prompt, self.tokenizer)

    def _decoder(self) -> Detokenizer | None:
        if self.tokenizer is None or not self.request.sampling.detokenize:
            return None
        skip = self.request.sampling.skip_special_tokens
        return Detokenizer(self.tokenizer, skip_special_tokens=skip, shown=self.shown)

    @property
    def rejected(self) -> str:
        """Why the engine refused it, or an empty string."""
        ending = self.samples[0].ending
        return ending.error if ending is not None and ending.reason == "rejected" else ""

    def feed(
        self,
        index: int,
        tokens: tuple[int, ...],
        now: float,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> None:
        """Add tokens of a sample at the time `now`, and their log-probabilities, if the
        request wants them.
        """
        sample = self.samples[index]
        if sample.ending is None and sample.stop_string is None:
            sample.new_tokens += tokens
            if sample.logprobs is not None:
                sample.logprobs.extend(logprobs[: len(tokens)])
            self.times.record_output(now)

    def pool(self, data: bytes, now: float) -> None:
        """Add the prompt's results at the time `now`: a vector, or log-probabilities."""
        if self.scores is None:
            self.samples[0].vector = data
        else:
            self.scores.unread_chunks.append(data)
        if self.request.prompt_only is not None:
            self.times.record_output(now)

    def finish(self, ending: Finished) -> None:
        """Take over the engine's last message on a sample."""
        self.samples[ending.sample].finish(ending)

    def flush(self, on_end: Callable[[str], object] = id) -> tuple[Finish, ...]:
        """Make what is new ready; returns the stops to report to the engine.

        `on_end` is called with the id once nothing more comes, before the consumer can
        know it.
        """
        finishes = []
        any_ended = False
        with self.lock:
            for i, sample in enumerate(self.samples):
                if (self.eager and sample.new_tokens) or (
                    sample.ending is not None and not sample.end_flushed
                ):
                    sample.flush(self.request.stop_ids)
                    any_ended = any_ended or sample.end_flushed
                    if sample.stop_string is not None and not sample.end_flushed:
                        finishes.append(Finish(self.request.id, i, sample.num_flushed))
            if any_ended:
                self.finished = all(sample.end_flushed for sample in self.samples)
            if self.finished:
                on_end(self.request.id)
            has_output = self.finished or self._has_new_output()
            notify = has_output and not self.notified
            self.notified = self.notified or has_output
        if notify:
            self.sink(self)
        return tuple(finishes)

    def fail(self, error: Exception) -> None:
        """End all with an error: nothing more will come."""
        with self.lock:
            self.error = error
            self.finished = True
            notify = not self.notified
            self.notified = True
        if notify:
            self.sink(self)

    def take(self) -> RequestOutput:
        """What has become ready since the last time. Raises the error that ended it if
        the engine broke.
        """
        with self.lock:
            if self.error is not None:
                raise self.error
            self.notified = False
            stops = self.request.sampling.stop_token_ids
            num_earlier_tokens = len(self.request.output)  # of the only sample
            num_output_tokens = (
                sum(sample.num_flushed for sample in self.samples) - num_earlier_tokens
            )
            outputs = [
                sample.take(i, stops)
                for i, sample in enumerate(self.samples)
                if sample.has_output
            ]
            prompt = None if self.scores is None else self.scores.by_token()
            ending = self.samples[0].ending
            return RequestOutput(
                request_id=self.request.id,
                prompt=self.prompt,
                finished=self.finished,
                prompt_ids=self.request.prompt,
                outputs=self._for_consumer(outputs, prompt),
                metrics=self.times.metrics(num_output_tokens),
                num_cached_tokens=0 if ending is None else ending.cached,
                prompt_logprobs=prompt,
            )

    def _for_consumer(
        self, outputs: list[CompletionOutput], prompt: PromptLogprobs | None
    ) -> list[CompletionOutput]:
        """The new outputs of samples, in the form for the consumer."""
        params = self.request.sampling
        if params.chooses:
            outputs = best_of(outputs, params.n, scored=params.logprobs is not None)
        if prompt is None:
            return outputs
        return [evolve(output, prompt_logprobs=prompt) for output in outputs]

    def embedding(
        self, *, normalize: bool, dimensions: int | None = None
    ) -> EmbeddingRequestOutput:
        """The prompt as a vector, once it has ended: its first `dimensions` numbers, of
        length 1 if `normalize`. Raises as `take`.
        """
        with self.lock:
            if self.error is not None:
                raise self.error
            ending = self.samples[0].ending
            if ending is None:
                raise AssertionError(f"{self.request.id} has not ended")
            pooled = self.samples[0].vector
            reason, error = _pooled_finish_reason(ending, pooled)
            vector = pooled if reason == "stop" else b""
            if dimensions is not None:
                vector = shortened(vector, dimensions)
            return EmbeddingRequestOutput(
                request_id=self.request.id,
                prompt=self.prompt,
                prompt_ids=self.request.prompt,
                outputs=EmbeddingOutput(normalized(vector) if normalize else vector),
                metrics=self.times.metrics(0),
                num_cached_tokens=ending.cached,
                finish_reason=reason,
                error=error,
            )

    def _has_new_output(self) -> bool:
        return self.streaming and any(sample.has_output for sample in self.samples)


def _pooled_finish_reason(ending: Finished, vector: bytes) -> tuple[str, str]:
    """The finish reason of a pooled prompt, for the consumer, and its error."""
    if ending.reason == "cancelled":
        return "cancelled", ""
    if ending.reason in ("rejected", "error"):
        return "error", ending.error
    return ("stop", "") if vector else ("error", "the executor gave no vector")
