"""Grammars of Harmony's answers with tool calls: rules in Lark.

    must         analysis* call+
    otherwise    (analysis | commentary)* (call+ | final)
                 analysis* (call+ | final with JSON), of answers with a schema

An answer is messages, and the template has begun the first: so between two of them are
the mark that ends one, and `<|start|>assistant`. A call is a message to a function, which
is named at one of two places in the header; gpt-oss was trained on both, and ends its
answer with a call (`<|call|>` is one of its ends of sequence), so that where several are
allowed it makes one. Functions that may not be called cannot be written at all.
"""

import re
from collections.abc import Callable, Sequence
from typing import Final

from attrs import frozen

from minfer.effects.text.grammars.grammar_text import TEXT, quote
from minfer.effects.text.tools.harmony import (
    CHANNEL,
    CONSTRAIN,
    ENDS,
    MESSAGE,
    START,
    TO,
)

END, CALL, RETURN = ENDS
ASSISTANT: Final = "assistant"  # the author of all messages of an answer
_TO: Final = f"{TO}functions."


@frozen(kw_only=True)
class HarmonyRules:
    """The messages of an answer, and the form of markers."""

    names: Sequence[str]  # of functions; arguments_0 and on are the rules of theirs
    must: bool  # calls are required; else they are allowed
    several: bool  # there may be more than one
    answer: str | None  # the rule of a final message that is no text
    mark: Callable[[str], str]  # a marker in a rule
    ending: Callable[[str, str], list[str]]  # the rules of text up to a marker

    def rules(self) -> list[str]:
        """The rules, from the beginning of an answer down to arguments."""
        mark = self.mark
        begins = f"{mark(START)} {quote(ASSISTANT)}"
        head = f"{mark(MESSAGE)} texts {begins}"
        more_calls = f"({mark(CALL)} {begins} call)*" if self.several else ""
        return [
            f"start: {self._start()}",
            f'thought: {mark(CHANNEL)} "analysis" {head}',
            f'preamble: {mark(CHANNEL)} "commentary" {head}',
            *self.ending("texts", END),
            f"calls: call {more_calls} {mark(CALL)}?",
            f"call: {' | '.join(self._calls())}",
            f'kind: " "? {mark(CONSTRAIN)} "json" | " json"',
            f"last: ({mark(END)} | {mark(RETURN)})?",
        ]

    def _start(self) -> str:
        if self.must:
            return "thought* calls"
        final = f'{self.mark(CHANNEL)} "final"'
        message = self.mark(MESSAGE)
        if self.answer is not None:
            reply = f"{final} kind? {message} answer last"
            return f"thought* (calls | {reply})\nanswer: {self.answer}"
        kinds = f'{self.mark(CHANNEL)} ("analysis" | "commentary" | "final" kind?)'
        text = _text_without(START, CHANNEL)
        # Without a header; what begins so is read as one, wherever a function is named.
        header_begin = "|".join(map(re.escape, (TO, CONSTRAIN)))
        plain = f"{text} & ~/({header_begin}){TEXT}/"
        reply = f"({kinds} {message} FREE | PLAIN) last"
        start = f"(thought | preamble)* (calls | {reply})"
        return f"{start}\nFREE: {text}\nPLAIN: {plain}"

    def _calls(self) -> list[str]:
        """A call of each function: its name in the channel's part, or before it."""
        channel, message = self.mark(CHANNEL), self.mark(MESSAGE)
        calls = []
        for i, name in enumerate(self.names):
            to = quote(f"{_TO}{name}")
            name_after = f'{channel} "commentary" {to} kind?'
            name_before = f'{to} {channel} "commentary" kind?'
            calls.append(f"({name_after} | {name_before}) {message} arguments_{i}")
        return calls


def _text_without(*markers: str) -> str:
    """A terminal of text without these, where they are text."""
    alternatives = "|".join(re.escape(marker) for marker in markers)
    return rf"/{TEXT}/ & ~/{TEXT}({alternatives}){TEXT}/"
