"""From tokens to outputs: what the engine emits for one request becomes text and records.

The core knows token ids, lengths and ends of sequence; text is known here. A stop string
is found here, in text, and told to the engine as a `Finish` event with the number of
output tokens it took; what the engine emits after that is dropped on both sides.

    Emit ---> feed, finish ---> flush ---> sink: there is news; whoever asked calls take
                                  +------> Finish events, to be posted to the driver

The sink is told once; what comes before the next `take` joins what waits there already.
So a slow reader costs no memory beyond the tokens themselves. Unless it streams or looks
for stop strings, a request's text is decoded once, at its end.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import define, evolve, field

from minfer.effects.execution.executor import Scores
from minfer.effects.text.detokenizer import Detokenizer
from minfer.effects.text.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from minfer.effects.text.stops import StopMatcher
from minfer.effects.text.tokenizer import Tokenizer
from minfer.messages import Admitted, Finish, Finished, Preempted
from minfer.plan import TokenLogprobs
from minfer.request import Request

Sink = Callable[["Assembly"], None]  # called in the engine's thread: be quick


@define
class _Sample:
    """One sample: what came since the last flush, and what was flushed and
    not taken yet.
    """

    decoder: Detokenizer | None
    matcher: StopMatcher | None
    fresh: list[int] = field(factory=list)  # tokens that came
    done: Finished | None = None
    count: int = 0  # tokens that were ever flushed
    tokens: list[int] = field(factory=list)  # to be taken
    text: str = ""  # likewise
    stop: str | None = None  # the stop string that was found
    over: bool = False  # its end was flushed
    closed: bool = False  # its end was taken
    # Of the tokens from the next that will be taken, if asked for. Those that an end cuts
    # off stay.
    scores: list[TokenLogprobs] | None = None
    total: float = 0.0  # log-probability of the tokens taken

    @property
    def news(self) -> bool:
        """Whether there is something to take. Tokens without text wait for it, or for the
        end.
        """
        ended = self.over and not self.closed
        return ended or bool(self.tokens if self.decoder is None else self.text)

    def flush(self, stop_ids: frozenset[int]) -> None:
        """Make what came ready to be taken, up to a stop string."""
        new, self.fresh, self.over = self.fresh, [], self.done is not None
        if self.decoder is not None and self.stop is None:
            # The token that ended the sample belongs to it, but not to its text.
            silent = self.done is not None and self.done.reason == "stop" and new
            spelled = new[:-1] if silent and new[-1] in stop_ids else new
            new = new[: self._spell(self.decoder, spelled)]
        self.tokens += new
        self.count += len(new)

    def _spell(self, decoder: Detokenizer, tokens: list[int]) -> int | None:
        """Add the text of tokens; returns after how many of them a stop string was
        complete.
        """
        if self.matcher is None:
            self.text += decoder.push(tokens, final=self.over)
            return None
        for at, token in enumerate(tokens, 1):
            text, self.stop = self.matcher.push(decoder.push((token,)))
            self.text += text
            if self.stop is not None:
                return at
        if self.over:
            text, self.stop = self.matcher.push(decoder.push((), final=True), final=True)
            self.text += text
        return None

    def take(self, index: int, stop_token_ids: tuple[int, ...]) -> CompletionOutput:
        """What was flushed since the last time."""
        done, tokens = self.done, tuple(self.tokens)
        new = CompletionOutput(index=index, text=self.text, token_ids=tokens)
        if self.scores is not None:
            logprobs = tuple(map(self._spelled, tokens, self.scores))
            del self.scores[: len(tokens)]
            self.total += sum(
                by_id[t].logprob for t, by_id in zip(tokens, logprobs, strict=True)
            )
            new = evolve(new, logprobs=logprobs, cumulative_logprob=self.total)
        self.tokens, self.text, self.closed = [], "", self.over
        if done is None or not self.over:
            return new
        stop: int | str | None = self.stop
        reason = "stop" if stop else "error" if done.reason == "rejected" else done.reason
        if reason == "stop" and stop is None and tokens and tokens[-1] in stop_token_ids:
            stop = tokens[-1]
        return evolve(new, finish_reason=reason, stop_reason=stop, error=done.error)

    def _spelled(self, token: int, beside: TokenLogprobs) -> dict[int, Logprob]:
        """A token's log-probabilities by id, its own first."""
        ids = [token, *beside.likeliest]
        values = [beside.logprob, *beside.logprobs]
        ranks = [beside.rank, *range(1, len(ids))]
        spelled = None if self.decoder is None else self.decoder.tokenizer.token_bytes
        texts = [spelled and spelled(one).decode(errors="replace") for one in ids]
        return dict(zip(ids, map(Logprob, values, ranks, texts), strict=True))


@define(eq=False)
class Assembly:
    """One request on its way back to whoever asked.

    `sink` hears once all samples have ended; with `streaming`, as soon as there is
    something new that it was not told of yet. `take` then gives it. Everything but `take`
    belongs to the engine.
    """

    request: Request
    sink: Sink
    prompt: str | None = None
    tokenizer: Tokenizer | None = None
    streaming: bool = False
    arrived: float = 0.0  # seconds on the engine's clock; set when it is submitted
    started: float | None = None  # when it was first admitted
    line: Mapping[str, float] = field(
        factory=dict
    )  # see `Worker.waits`; when it came in line
    queued: Mapping[str, float] = field(
        factory=dict
    )  # seconds by cause, once it is admitted
    preempted: int = 0  # times, all samples together
    first: float | None = None  # when its first and last tokens came
    last: float | None = None
    finished: bool = False
    error: Exception | None = None
    told: bool = False  # of all that can be taken
    lock: threading.Lock = field(factory=threading.Lock)  # between `flush` and `take`
    samples: list[_Sample] = field(factory=list, init=False)
    eager: bool = field(default=False, init=False)  # its text is looked at before its end

    def __attrs_post_init__(self) -> None:
        stops, scored = (
            self.request.sampling.stop,
            self.request.sampling.logprobs is not None,
        )
        self.eager = self.streaming or bool(stops)
        for _ in range(self.request.n):
            decoder = None if self.tokenizer is None else Detokenizer(self.tokenizer)
            matcher = StopMatcher(stops) if stops else None
            self.samples.append(_Sample(decoder, matcher, scores=[] if scored else None))

    @property
    def rejected(self) -> str:
        """Why the engine did not let it in, or nothing."""
        done = self.samples[0].done
        return done.error if done is not None and done.reason == "rejected" else ""

    def note(
        self, reason: Admitted | Preempted, now: float, waits: Mapping[str, float]
    ) -> None:
        """Learn that a sample was let in, or sent back; `waits` are as `line` was."""
        self.preempted += isinstance(reason, Preempted)
        if self.started is None:
            spent = {cause: s - self.line.get(cause, 0.0) for cause, s in waits.items()}
            spent["step"] = (
                now - self.arrived - sum(spent.values()) + spent.get("step", 0.0)
            )
            self.started, self.queued = (
                now,
                {cause: s for cause, s in spent.items() if s > 0},
            )

    def feed(
        self,
        sample: int,
        tokens: tuple[int, ...],
        now: float,
        scores: Sequence[TokenLogprobs] = (),
    ) -> None:
        """Take over tokens of a sample at the time `now`, and their scores if it asked
        for them.
        """
        one = self.samples[sample]
        if one.done is None and one.stop is None:
            one.fresh += tokens
            if one.scores is not None:
                one.scores.extend(scores[: len(tokens)])
            self.first, self.last = now if self.first is None else self.first, now

    def finish(self, done: Finished) -> None:
        """Take over the engine's last word on a sample."""
        one = self.samples[done.sample]
        del one.fresh[max(0, done.length - one.count) :]
        one.done = done

    def flush(self, ended: Callable[[str], object] = id) -> tuple[Finish, ...]:
        """Make what is new ready; returns what the engine should be told.

        `ended` hears the id once there is nothing to come, before whoever asked can know
        it.
        """
        found = []
        with self.lock:
            for i, one in enumerate(self.samples):
                if (self.eager and one.fresh) or (one.done is not None and not one.over):
                    one.flush(self.request.stop_ids)
                    if one.stop is not None and not one.over:
                        found.append(Finish(self.request.id, i, one.count))
            self.finished = all(one.over for one in self.samples)
            if self.finished:
                ended(self.request.id)
            news = self.finished or (
                self.streaming and any(one.news for one in self.samples)
            )
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
        """What has become ready since the last time. Raises what ended it if the engine
        broke.
        """
        with self.lock:
            if self.error is not None:
                raise self.error
            self.told = False
            wanted, count = (
                self.request.sampling.stop_token_ids,
                sum(s.count for s in self.samples),
            )
            times: dict[str, Any] = {
                "first_token_time": self.first,
                "last_token_time": self.last,
                "first_scheduled_time": self.started,
                "queue_times": self.queued,
                "preemptions": self.preempted,
            }
            return RequestOutput(
                request_id=self.request.id,
                prompt=self.prompt,
                finished=self.finished,
                prompt_token_ids=self.request.prompt,
                outputs=tuple(
                    s.take(i, wanted) for i, s in enumerate(self.samples) if s.news
                ),
                metrics=RequestMetrics(
                    arrival_time=self.arrived, output_tokens=count, **times
                ),
                num_cached_tokens=self.samples[0].done.cached
                if self.samples[0].done
                else 0,
            )
