"""Outputs that hold all of a request so far, made from those that hold what is new.

Theory. An answer of n tokens has up to n outputs, and copying all tokens into each of
them would cost n^2. So the parts of a sample are kept once, in lists that only grow, and
an output remembers how long they were when it was made. Its text, token ids and
log-probabilities are made when they are first read; a reader of the last output alone
pays for that one.
"""

from functools import partial
from typing import Any, Final

from attrs import evolve, fields

from minfer.effects.text.outputs import CompletionOutput, Logprob, RequestOutput

_PART_FIELDS: Final = ("text", "token_ids", "logprobs")


class SampleParts:
    """All parts of one sample so far."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[dict[int, Logprob]] | None = None
        self._joined = ""  # the first `_num_joined` texts
        self._num_joined = 0

    def add(self, delta: CompletionOutput) -> None:
        """Add what is new."""
        self.texts.append(delta.text)
        self.tokens += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += delta.logprobs

    def text(self, num_texts: int) -> str:
        """Returns the first texts as one; fast for more texts than the last time."""
        if num_texts < self._num_joined:
            return "".join(self.texts[:num_texts])
        self._joined += "".join(self.texts[self._num_joined : num_texts])
        self._num_joined = num_texts
        return self._joined


class CumulativeOutput(CompletionOutput):
    """All of a sample up to some moment, made when it is read."""

    __slots__ = ("_logprobs", "_num_texts", "_num_tokens", "_parts", "_tokens")
    _logprobs: list[dict[int, Logprob]] | None
    _num_texts: int
    _num_tokens: int
    _parts: SampleParts
    _tokens: list[int] | None

    def __init__(self, parts: SampleParts, last: CompletionOutput) -> None:
        """Make the output of all `parts`, of which `last` came last."""
        assign = object.__setattr__  # the class is frozen
        for name in _OTHER_FIELDS:
            assign(self, name, getattr(last, name))
        assign(self, "_parts", parts)
        assign(self, "_num_texts", len(parts.texts))
        assign(self, "_num_tokens", len(parts.tokens))
        assign(self, "_tokens", None)
        assign(self, "_logprobs", None)

    @property
    def text(self) -> str:
        """The text so far."""
        return self._parts.text(self._num_texts)

    @property
    def token_ids(self) -> list[int]:
        """The token ids so far, in a list of this output's own."""
        if self._tokens is not None:
            return self._tokens
        tokens = self._parts.tokens[: self._num_tokens]
        object.__setattr__(self, "_tokens", tokens)
        return tokens

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        """Log-probabilities of the tokens so far, if requested."""
        if self._logprobs is None and self._parts.logprobs is not None:
            logprobs = self._parts.logprobs[: self._num_tokens]
            object.__setattr__(self, "_logprobs", logprobs)
        return self._logprobs

    def __reduce__(self) -> Any:
        """Copy and pickle it as a plain output."""
        values = {name: getattr(self, name) for name in (*_OTHER_FIELDS, *_PART_FIELDS)}
        return partial(CompletionOutput, **values), ()


_OTHER_FIELDS: Final = tuple(
    field.name for field in fields(CompletionOutput) if field.name not in _PART_FIELDS
)


class CumulativeRequest:
    """The outputs of one request so far."""

    def __init__(self) -> None:
        self._parts: dict[int, SampleParts] = {}  # by the sample's index
        self._last: dict[int, CompletionOutput] = {}

    def add(self, delta: RequestOutput) -> RequestOutput:
        """Returns an output of all that came so far, with all samples that have any."""
        for sample in delta.outputs:
            parts = self._parts.setdefault(sample.index, SampleParts())
            parts.add(sample)
            self._last[sample.index] = CumulativeOutput(parts, sample)
        outputs = [self._last[index] for index in sorted(self._last)]
        return evolve(delta, outputs=outputs)
