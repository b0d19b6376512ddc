"""One sample, on its way from tokens to output.

    feed, finish ---> fresh ---> flush ---> tokens, text ---> take

Tokens wait until they are flushed: then they become text, up to a stop string. Flushed
text waits until it is taken; so a slow reader costs no memory beyond the tokens
themselves, and gets them at once.
"""

from attrs import define, evolve, field

from minfer.effects.text.detokenizer import Detokenizer
from minfer.effects.text.logprobs_by_id import logprobs_by_id
from minfer.effects.text.outputs import BeamFinished, CompletionOutput
from minfer.effects.text.stops import StopMatcher
from minfer.records.messages import Finished
from minfer.records.token_logprobs import TokenLogprobs


@define
class OutputBuffer:
    """The tokens of one sample since the last flush, and what was flushed and not yet
    taken.
    """

    decoder: Detokenizer | None
    matcher: StopMatcher | None
    # If requested: of the tokens that were not taken yet, and then of those that the end
    # cut off.
    logprobs: list[TokenLogprobs] | None = None
    min_tokens: int = 0  # output tokens in whose text no stop string may end
    keeps_stop: bool = False  # its text includes the token that ended it
    new_tokens: list[int] = field(factory=list)  # not flushed yet
    ending: Finished | None = None
    num_flushed: int = 0  # output tokens that were ever flushed, or that it began with
    tokens: list[int] = field(factory=list)  # flushed, and not taken yet
    text: str = ""  # likewise
    stop_string: str | None = None  # the stop string that was found
    end_flushed: bool = False  # its end was flushed
    end_taken: bool = False  # its end was taken
    total_logprob: float = 0.0  # log-probability of the tokens taken
    vector: bytes = b""  # instead of tokens, of a prompt that was pooled

    def begin(self, history: tuple[int, ...]) -> None:
        """Continue after output that was taken before: its text is context, and not
        emitted again.
        """
        self.num_flushed = len(history)
        if self.decoder is not None and history:
            unmatched_text = self.decoder.push(history[: self.min_tokens])
            text = self.decoder.push(history[self.min_tokens :])
            if self.matcher is not None:
                self.matcher.push_without_stop(unmatched_text)
                self.matcher.push(text)

    @property
    def has_output(self) -> bool:
        """Whether there is something to take. Tokens without text wait for it, or for the
        end.
        """
        ended = self.end_flushed and not self.end_taken
        return ended or bool(self.tokens if self.decoder is None else self.text)

    def finish(self, ending: Finished) -> None:
        """Note the end, and its length: tokens beyond it do not count."""
        del self.new_tokens[max(0, ending.length - self.num_flushed) :]
        self.ending = ending

    def flush(self, stop_ids: frozenset[int]) -> None:
        """Make new tokens ready to be taken, up to a stop string."""
        new = self.new_tokens
        self.new_tokens = []
        self.end_flushed = self.ending is not None
        if self.decoder is not None and self.stop_string is None:
            # The token that ended the sample belongs to it, but usually not to its text.
            ended = self.ending is not None and self.ending.reason == "stop"
            silent = ended and not self.keeps_stop and new and new[-1] in stop_ids
            spelled = new[:-1] if silent else new
            new = new[: self._decode(self.decoder, spelled)]
        self.tokens += new
        self.num_flushed += len(new)

    def take(self, index: int, stop_token_ids: tuple[int, ...]) -> CompletionOutput:
        """The output that was flushed since the last time."""
        tokens = self.tokens
        output = CompletionOutput(
            index=index, text=self.text, token_ids=tokens, vector=self.vector
        )
        if self.logprobs is not None:
            taken_logprobs = self.logprobs[: len(tokens)]
            del self.logprobs[: len(tokens)]
            tokenizer = None if self.decoder is None else self.decoder.tokenizer
            logprobs = [logprobs_by_id(entry, tokenizer) for entry in taken_logprobs]
            self.total_logprob += sum(entry.logprob for entry in taken_logprobs)
            output = evolve(
                output, logprobs=logprobs, cumulative_logprob=self.total_logprob
            )
        self.tokens = []
        self.text = ""
        self.end_taken = self.end_flushed
        if self.ending is None or not self.end_flushed:
            return output
        return self._with_finish_reason(output, self.ending, stop_token_ids)

    def _decode(self, decoder: Detokenizer, tokens: list[int]) -> int | None:
        """Add the text of tokens; returns after how many of them a stop string was
        complete.
        """
        if self.matcher is None:
            self.text += decoder.push(tokens, final=self.end_flushed)
            return None
        for num_tokens, token in enumerate(tokens, 1):
            text = decoder.push_token(token)
            if self.num_flushed + num_tokens > self.min_tokens:
                text, self.stop_string = self.matcher.push(text)
            else:
                text = self.matcher.push_without_stop(text)
            self.text += text
            if self.stop_string is not None:
                return num_tokens
        if self.end_flushed:
            text, self.stop_string = self.matcher.push(
                decoder.push((), final=True), final=True
            )
            self.text += text
        return None

    def _with_finish_reason(
        self, last: CompletionOutput, ending: Finished, stop_token_ids: tuple[int, ...]
    ) -> CompletionOutput:
        """The last output, with its finish reason for the consumer."""
        if self.stop_string is not None:
            return evolve(
                last,
                finish_reason="stop",
                stop_reason=self.stop_string,
                error=ending.error,
            )
        if isinstance(ending, BeamFinished):
            last = evolve(last, cumulative_logprob=ending.cum_logprob)
        last_ids = last.token_ids[-1:]
        stopped = ending.reason == "stop" and last_ids and last_ids[0] in stop_token_ids
        return evolve(
            last,
            finish_reason="error" if ending.reason == "rejected" else ending.reason,
            stop_reason=last_ids[0] if stopped else None,
            error=ending.error,
        )
