"""The number of an answer's tokens that are reasoning.

Where the markers of reasoning are tokens of their own, the tokens between them count, as
in vLLM, and special tokens do not. Else the text of the reasoning is tokenized again,
whose number of tokens may differ a little from the model's.
"""

from collections.abc import Sequence
from typing import Protocol

from minfer.effects.serving.protocol import GenerationRequest
from minfer.effects.text.tokenizer import Tokenizer
from minfer.effects.text.tools import harmony
from minfer.effects.text.tools.deltas import CallStart, Delta, ReasoningDelta
from minfer.effects.text.tools.formats import Parsing
from minfer.effects.text.tools.response_template import RESPONSE
from minfer.effects.text.tools.table import HARMONY, TOOLS
from minfer.effects.text.tools.thinking import REASONING


class _Counter(Protocol):
    """Counts the reasoning tokens of one choice."""

    def add(self, tokens: Sequence[int], deltas: Sequence[Delta]) -> None:
        """Take new tokens, and the deltas that they were parsed to."""

    @property
    def count(self) -> int:
        """The number by now."""


class _BetweenMarkers:
    """Counts tokens between two markers, at the beginning of an answer."""

    def __init__(self, tokenizer: Tokenizer, parsing: Parsing, closes: int) -> None:
        self._tokenizer = tokenizer
        self._opens = tokenizer.added_token_id(REASONING[parsing.reasoning].opens)
        self._closes = closes
        tools = TOOLS.get(parsing.tools)
        self._calls = {
            tokenizer.added_token_id(marker) for marker in (tools.opens if tools else ())
        }
        self._inside = parsing.thinking is not None
        self._done = bool(parsing.begun) and not self._inside
        self._tokens = 0
        self._before_call: int | None = None  # tokens before the first call within
        self._has_calls = False

    def add(self, tokens: Sequence[int], deltas: Sequence[Delta]) -> None:
        self._has_calls |= any(isinstance(delta, CallStart) for delta in deltas)
        for token in tokens:
            if self._done:
                return
            if token == self._opens:
                self._inside = True
            elif not self._inside:
                self._done = bool(self._tokenizer.decode([token]).strip())
            elif token == self._closes:
                self._done = True
            else:
                if token in self._calls and self._before_call is None:
                    self._before_call = self._tokens
                self._tokens += token not in self._tokenizer.special_ids

    @property
    def count(self) -> int:
        # A tool call ends reasoning that has no closing marker.
        if self._has_calls and not self._done and self._before_call is not None:
            return self._before_call
        return self._tokens


class _OnChannel:
    """Counts tokens of Harmony's messages on the channel for analysis."""

    def __init__(self, tokenizer: Tokenizer, message: int) -> None:
        self._tokenizer = tokenizer
        self._message = message
        self._stops = {tokenizer.added_token_id(marker) for marker in harmony.STOPS}
        self._header: list[int] | None = []  # None: within a message
        self._inside = False
        self.count = 0

    def add(self, tokens: Sequence[int], deltas: Sequence[Delta]) -> None:
        del deltas
        for token in tokens:
            if token in self._stops and self._header is None:
                self._header, self._inside = [token], False
            elif token == self._message and self._header is not None:
                header = self._tokenizer.decode(self._header, skip_special_tokens=False)
                self._header, self._inside = None, harmony.is_analysis(header)
            elif self._header is not None:
                self._header.append(token)
            else:
                self.count += self._inside


class _OfText:
    """Counts tokens of the reasoning's text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._text = ""

    def add(self, tokens: Sequence[int], deltas: Sequence[Delta]) -> None:
        del tokens
        for delta in deltas:
            if isinstance(delta, ReasoningDelta):
                self._text += delta.text

    @property
    def count(self) -> int:
        return len(self._tokenizer.encode(self._text, add_special_tokens=False))


class ReasoningTokens:
    """Counts the reasoning tokens of an answer, while it comes."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer | None) -> None:
        parsing = request.parsing
        reasons = parsing is not None and (
            parsing.reasoning in REASONING or parsing.tools in (HARMONY, RESPONSE)
        )
        self._parsing = parsing if reasons else None
        self._tokenizer = tokenizer
        self._counters: dict[int, _Counter] = {}  # by choice

    def add(self, choice: int, tokens: Sequence[int], deltas: Sequence[Delta]) -> None:
        """Take the new tokens of a choice, and the deltas that they were parsed to."""
        if self._parsing is None or self._tokenizer is None:
            return
        if choice not in self._counters:
            self._counters[choice] = _counter(self._parsing, self._tokenizer)
        self._counters[choice].add(tokens, deltas)

    @property
    def count(self) -> int:
        """The reasoning tokens of all choices by now."""
        return sum(counter.count for counter in self._counters.values())


def _counter(parsing: Parsing, tokenizer: Tokenizer) -> _Counter:
    """The counter for one choice."""
    if parsing.reasoning in REASONING:
        closes = tokenizer.added_token_id(REASONING[parsing.reasoning].closes)
        if closes is not None:
            return _BetweenMarkers(tokenizer, parsing, closes)
    elif (
        parsing.tools == HARMONY
        and (message := tokenizer.added_token_id(harmony.MESSAGE)) is not None
    ):
        return _OnChannel(tokenizer, message)
    return _OfText(tokenizer)
