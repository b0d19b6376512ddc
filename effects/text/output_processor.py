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
    PromptLogprobs,
    RequestOutput,
    normalized,
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
            keeps = sampling.include_stop_str_in_output
            stops = sampling.stop
            matcher = StopMatcher(stops, kept=keeps) if stops else None
            scored = sampling.logprobs is not None or sampling.chooses
            logprobs = list[TokenLogprobs]() if scored else None
            least = sampling.min_tokens
            sample = OutputBuffer(decoder, matcher, logprobs, least, keeps_stop=keeps)
            sample.begin(self.request.output)
            self.samples.append(sample)
        if sampling.prompt_logprobs is not None:
            self.scores = PromptScores(self.request.prompt, self.tokenizer)

    def _decoder(self) -> Detokenizer | None:
        if self.tokenizer is None:
            return None
        skip = self.request.sampling.skip_special_tokens
        return Detokenizer(self.tokenizer, skip_special_tokens=skip, shown=self.shown)

    @property
    def rejected(self) -> str:
        """Why the engine refused it, or an empty string."""
        done = self.samples[0].done
        return done.error if done is not None and done.reason == "rejected" else ""

    def feed(
        self,
        sample: int,
        tokens: tuple[int, ...],
        now: float,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> None:
        """Add tokens of a sample at the time `now`, and their log-probabilities, if the
        request wants them.
        """
        one = self.samples[sample]
        if one.done is None and one.stop is None:
            one.fresh += tokens
            if one.logprobs is not None:
                one.logprobs.extend(logprobs[: len(tokens)])
            self.times.output(now)

    def pool(self, data: bytes, now: float) -> None:
        """Add the prompt's results at the time `now`: a vector, or log-probabilities."""
        if self.scores is None:
            self.samples[0].vector = data
        else:
            self.scores.unread.append(data)
        if self.request.ends_with_prompt:
            self.times.output(now)

    def finish(self, done: Finished) -> None:
        """Take over the engine's last message on a sample."""
        self.samples[done.sample].finish(done)

    def flush(self, ended: Callable[[str], object] = id) -> tuple[Finish, ...]:
        """Make what is new ready; returns the stops to report to the engine.

        `ended` is called with the id once nothing more comes, before the consumer can
        know it.
        """
        found = []
        over = False
        with self.lock:
            for i, one in enumerate(self.samples):
                if (self.eager and one.fresh) or (one.done is not None and not one.over):
                    one.flush(self.request.stop_ids)
                    over = over or one.over
                    if one.stop is not None and not one.over:
                        found.append(Finish(self.request.id, i, one.count))
            if over:
                self.finished = all(one.over for one in self.samples)
            if self.finished:
                ended(self.request.id)
            has_output = self.finished or self._streams_news()
            notify = has_output and not self.notified
            self.notified = self.notified or has_output
        if notify:
            self.sink(self)
        return tuple(found)

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
            begun_with = len(self.request.output)  # of the only sample
            made = sum(sample.count for sample in self.samples) - begun_with
            new = tuple(
                s.take(i, stops) for i, s in enumerate(self.samples) if s.has_output
            )
            prompt = None if self.scores is None else self.scores.by_token()
            first = self.samples[0].done
            return RequestOutput(
                request_id=self.request.id,
                prompt=self.prompt,
                finished=self.finished,
                prompt_token_ids=self.request.prompt,
                outputs=self._chosen(new, prompt),
                metrics=self.times.metrics(made),
                num_cached_tokens=0 if first is None else first.cached,
                prompt_logprobs=prompt,
            )

    def _chosen(
        self, new: tuple[CompletionOutput, ...], prompt: PromptLogprobs | None
    ) -> tuple[CompletionOutput, ...]:
        """The new outputs of samples, in the form for the consumer."""
        params = self.request.sampling
        if params.chooses:
            new = best_of(new, params.n, scored=params.logprobs is not None)
        if prompt is None:
            return new
        return tuple(evolve(one, prompt_logprobs=prompt) for one in new)

    def embedding(self, *, normalize: bool) -> EmbeddingOutput:
        """The prompt as a vector, once it has ended, of length 1 if `normalize`. Raises
        as `take`.
        """
        with self.lock:
            if self.error is not None:
                raise self.error
            done = self.samples[0].done
            if done is None:
                raise AssertionError(f"{self.request.id} has not ended")
            made = self.samples[0].vector
            reason, why = _ended_pooled(done, made)
            vector = made if reason == "stop" else b""
            return EmbeddingOutput(
                request_id=self.request.id,
                prompt=self.prompt,
                prompt_token_ids=self.request.prompt,
                vector=normalized(vector) if normalize else vector,
                metrics=self.times.metrics(0),
                num_cached_tokens=done.cached,
                finish_reason=reason,
                error=why,
            )

    def _streams_news(self) -> bool:
        return self.streaming and any(one.has_output for one in self.samples)


def _ended_pooled(done: Finished, vector: bytes) -> tuple[str, str]:
    """The finish reason of a pooled prompt, for the consumer, and its error."""
    if done.reason == "cancelled":
        return "cancelled", ""
    if done.reason in ("rejected", "error"):
        return "error", done.error
    return ("stop", "") if vector else ("error", "the executor gave no vector")
