"""From tokens to outputs: what the engine emits for one request becomes text and records.

The core knows token ids, lengths and ends of sequence; text is known here. A stop string is found
here, in text, and told to the engine as a `Finish` event with the number of output tokens it took;
what the engine emits after that is dropped on both sides.

    Emit ---> feed, finish ---> flush ---> sink: there is news
                                  |                 whoever asked calls take ---> RequestOutput
                                  +------> Finish events, to be posted to the driver

The sink is told once; what comes before the next `take` joins what waits there already. So a slow
reader costs no memory beyond the tokens themselves. Unless it streams or looks for stop strings,
a request's text is decoded once, at its end.
"""

import threading
from collections.abc import Callable
from typing import Final

from attrs import define, field

from minfer.effects.outputs import CompletionOutput, RequestMetrics, RequestOutput
from minfer.effects.text import Detokenizer, StopMatcher, Tokenizer
from minfer.messages import Finish, Finished
from minfer.request import Request

Sink = Callable[["Assembly"], None]  # called in the engine's thread: be quick
_REASONS: Final = {"rejected": "error"}


@define
class _Sample:
    """One sample: its tokens, and the text they have become so far."""

    decoder: Detokenizer | None
    matcher: StopMatcher | None
    tokens: list[int] = field(factory=list)
    decoded: int = 0  # tokens that went into the text
    text: str = ""
    stop: str | None = None  # the stop string that was found
    done: Finished | None = None
    fresh: bool = False  # since the last flush
    ready: int = 0  # tokens that were flushed: they may be taken
    over: bool = False  # its end was flushed
    sent_tokens: int = 0
    sent_text: int = 0
    closed: bool = False  # its end was taken

    @property
    def news(self) -> bool:
        """Whether there is something to take. Tokens without text wait for it, or for the end."""
        if self.over or self.decoder is None:
            return not self.closed and (self.over or self.ready > self.sent_tokens)
        return len(self.text) > self.sent_text

    def advance(self, stop_ids: frozenset[int]) -> bool:
        """Turn new tokens into text; True if that found a stop string."""
        if self.decoder is None or self.stop is not None:
            return False
        end = len(self.tokens)
        # The token that ended the sample belongs to it, but not to its text.
        if self.done is not None and self.done.reason == "stop" and self.tokens[-1:]:
            end -= self.tokens[-1] in stop_ids
        new = self.tokens[self.decoded : end]
        if self.matcher is None:
            self.decoded = max(self.decoded, end)
            self.text += self.decoder.push(new) + (self.decoder.flush() if self.done else "")
            return False
        for token in new:
            self.decoded += 1
            if self._found(self.matcher, self.decoder.push((token,))):
                del self.tokens[self.decoded :]
                return True
        if self.done is None:
            return False
        if self._found(self.matcher, self.decoder.flush()):
            return True
        self.text += self.matcher.flush()
        return False

    def _found(self, matcher: StopMatcher, piece: str) -> bool:
        safe, self.stop = matcher.push(piece)
        self.text += safe
        return self.stop is not None


class Assembly:
    """One request on its way back to whoever asked.

    `sink` hears once all samples have ended; with `streaming`, as soon as there is something new
    that it was not told of yet. `take` then gives it. Everything but `take` belongs to the engine.
    """

    def __init__(
        self,
        request: Request,
        sink: Sink,
        *,
        prompt: str | None = None,
        tokenizer: Tokenizer | None = None,
        streaming: bool = False,
    ) -> None:
        self.request, self.sink, self.prompt, self.streaming = request, sink, prompt, streaming
        self.arrived = 0.0  # seconds on the engine's clock; set when it is submitted
        self.started: float | None = None  # when it was first admitted
        self.first: float | None = None
        self.last: float | None = None
        stops = request.sampling.stop
        self.eager = streaming or bool(stops)
        self.samples = [
            _Sample(
                None if tokenizer is None else Detokenizer(tokenizer),
                StopMatcher(stops) if stops else None,
            )
            for _ in range(request.n)
        ]
        self.finished = False
        self.error: Exception | None = None
        self.told = False  # of all that can be taken
        self.lock = threading.Lock()  # between `flush` and `take`

    @property
    def rejected(self) -> str:
        """Why the engine did not let it in, or nothing."""
        done = self.samples[0].done
        return done.error if done is not None and done.reason == "rejected" else ""

    def feed(self, sample: int, tokens: tuple[int, ...]) -> None:
        """Take over new tokens of a sample."""
        one = self.samples[sample]
        if one.done is None and one.stop is None:
            one.tokens += tokens
            one.fresh = True

    def finish(self, done: Finished) -> None:
        """Take over the engine's last word on a sample."""
        one = self.samples[done.sample]
        del one.tokens[done.length :]
        one.done, one.fresh = done, True

    def flush(self, now: float) -> tuple[Finish, ...]:
        """Make what is new at the time `now` ready; returns what the engine should be told."""
        found = []
        with self.lock:
            for i, one in enumerate(self.samples):
                if not one.fresh:
                    continue
                one.fresh = False
                if len(one.tokens) > one.ready:
                    self.first, self.last = now if self.first is None else self.first, now
                if self.eager or one.done is not None:
                    stopped = one.advance(self.request.stop_ids)
                    if stopped and one.done is None:
                        found.append(Finish(self.request.id, i, len(one.tokens), "stop"))
                one.ready, one.over = len(one.tokens), one.done is not None
            self.finished = all(one.over for one in self.samples)
            news = self.finished or (self.streaming and any(one.news for one in self.samples))
            tell, self.told = news and not self.told, self.told or news
        if tell:
            self.sink(self)
        return tuple(found)

    def fail(self, error: Exception) -> None:
        """Say that nothing more will come."""
        with self.lock:
            self.error, self.finished = error, True
            tell, self.told = not self.told, True
        if tell:
            self.sink(self)

    def take(self) -> RequestOutput:
        """What has become ready since the last time. Raises what ended it if the engine broke."""
        with self.lock:
            if self.error is not None:
                raise self.error
            self.told = False
            return self._output(
                tuple(self._delta(i) for i, one in enumerate(self.samples) if one.news)
            )

    def _delta(self, index: int) -> CompletionOutput:
        """What of a sample was not sent yet: all of it, unless it streams."""
        one = self.samples[index]
        tokens, text = tuple(one.tokens[one.sent_tokens : one.ready]), one.text[one.sent_text :]
        one.sent_tokens, one.sent_text, one.closed = one.ready, len(one.text), one.over
        done = one.done
        if done is None or not one.over:
            return CompletionOutput(index=index, text=text, token_ids=tokens)
        reason = "stop" if one.stop is not None else _REASONS.get(done.reason, done.reason)
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=tokens,
            finish_reason=reason,
            stop_reason=one.stop if one.stop is not None else self._stop_token(one),
            error=done.error,
        )

    def _stop_token(self, one: _Sample) -> int | None:
        """The token of `stop_token_ids` that ended a sample."""
        ended = one.done is not None and one.done.reason == "stop" and one.tokens
        asked_for = ended and one.tokens[-1] in self.request.sampling.stop_token_ids
        return one.tokens[-1] if asked_for else None

    def _output(self, outputs: tuple[CompletionOutput, ...]) -> RequestOutput:
        return RequestOutput(
            request_id=self.request.id,
            prompt=self.prompt,
            prompt_token_ids=self.request.prompt,
            outputs=outputs,
            finished=self.finished,
            metrics=RequestMetrics(
                arrival_time=self.arrived,
                first_token_time=self.first,
                last_token_time=self.last,
                output_tokens=sum(one.ready for one in self.samples),
            ),
            num_cached_tokens=max((s.done.cached for s in self.samples if s.done), default=0),
        )
