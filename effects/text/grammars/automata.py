"""Translates languages to patterns without intersections and complements.

The derivatives of a language are the states of its automaton. State elimination turns the
automaton into a pattern.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from attrs import define, field

from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.effects.text.grammars.languages import (
    ALL_CHARS,
    NON_ASCII,
    Language,
    Languages,
    nested_sets,
    too_large_error,
)

MAX_STATES: Final = 400
MAX_BLOCKS: Final = 64  # sets of characters that a language distinguishes
MAX_PATTERN_CHARS: Final = 16_384
# Line ends of ECMA 262 beyond ASCII, which `.` does not match: no set holds them.
_LINE_ENDS: Final = r"\u2028\u2029"
_START: Final = -1
_END: Final = -2


def pattern_of(languages: Languages, language: Language) -> str:
    """A pattern of a language, to be matched from end to end. Raises GrammarError for one
    that is too large, or has no pattern.
    """
    subpatterns = [pattern_of(languages, part) for part in _pattern_operands(language)]
    match language.kind:
        case "set":
            return language.text or set_pattern(language.chars)
        case "cat":
            return "".join(subpatterns)
        case "or" if subpatterns:
            return f"(?:{'|'.join(subpatterns)})"
        case "repeat" if language is languages.everything:
            return "(?s:.*)"
        case "repeat":
            upper = "" if language.max_count is None else language.max_count
            return f"(?:{subpatterns[0]}){{{language.min_count},{upper}}}"
    return Automaton.of(languages, language).pattern()


def _pattern_operands(language: Language) -> tuple[Language, ...]:
    """The parts of a language that are parts of its pattern."""
    return language.operands if language.kind in ("cat", "or", "repeat") else ()


def _character_blocks(language: Language) -> list[int]:
    """The sets of characters that a language distinguishes from each other."""
    blocks = [ALL_CHARS]
    for part_set in nested_sets(language):
        if part_set.text:
            shown_set = part_set.text[:16]
            raise GrammarError(
                f"a look-ahead beside {shown_set!r} in a pattern cannot be enforced"
            )
        split = [(block & part_set.chars, block & ~part_set.chars) for block in blocks]
        blocks = [block for pair in split for block in pair if block]
        if len(blocks) > MAX_BLOCKS:
            raise too_large_error()
    return blocks


@define
class Automaton:
    """The states of an automaton, and the transitions between them."""

    # By source and target state: alternative patterns of the transition.
    transitions: dict[int, dict[int, list[str]]] = field(factory=dict)
    sources: dict[int, set[int]] = field(factory=lambda: defaultdict(set))

    @staticmethod
    def of(languages: Languages, language: Language) -> "Automaton":
        """The automaton of a language. Raises GrammarError for too many states."""
        blocks = _character_blocks(language)
        states = {language: 0}
        automaton = Automaton()
        automaton._add(_START, 0, "")
        pending = [language]
        while pending:
            state = pending.pop()
            targets = defaultdict[int, int](int)
            for block in blocks:
                after = languages.derivative(state, block)
                if after is languages.nothing:
                    continue
                if after not in states:
                    states[after] = len(states)
                    pending.append(after)
                targets[states[after]] |= block
            if len(states) > MAX_STATES:
                raise too_large_error()
            automaton.transitions[states[state]] = {}
            for target, chars in targets.items():
                automaton._add(states[state], target, set_pattern(chars))
            if state.nullable:
                automaton._add(states[state], _END, "")
        return automaton

    def _add(self, before: int, after: int, pattern: str) -> None:
        self.transitions.setdefault(before, {}).setdefault(after, []).append(pattern)
        self.sources[after].add(before)

    def pattern(self) -> str:
        """The pattern of all texts that lead from the start to the end. Raises
        GrammarError if it is too long, or if there is no such text.
        """
        inner_states = self.transitions.keys() - {_START}
        while inner_states:
            state = min(inner_states, key=self._cost)
            inner_states.discard(state)
            self._eliminate(state)
        if _END not in self.transitions[_START]:
            raise GrammarError("a pattern matches nothing")
        return _alternation(self.transitions[_START][_END])

    def _cost(self, state: int) -> tuple[int, int]:
        """The transitions that eliminating a state adds, and the length they repeat."""
        outgoing = self.transitions[state]
        before = len(self.sources[state] - {state})
        after = len(outgoing.keys() - {state})
        length = sum(
            len(pattern) for alternatives in outgoing.values() for pattern in alternatives
        )
        return before * after, before * length

    def _eliminate(self, state: int) -> None:
        """Replace the transitions through a state by direct ones."""
        outgoing = self.transitions.pop(state)
        loop = outgoing.pop(state, None)
        repeated = "" if loop is None else f"(?:{_alternation(loop)})*"
        for before in self.sources.pop(state, set()) - {state}:
            first = _alternation(self.transitions[before].pop(state))
            for after, last in outgoing.items():
                pattern = f"{first}{repeated}{_alternation(last)}"
                if len(pattern) > MAX_PATTERN_CHARS:
                    raise too_large_error()
                self._add(before, after, pattern)
        for after in outgoing:
            self.sources[after].discard(state)


def _alternation(patterns: list[str]) -> str:
    """The alternation of patterns, which can be part of a longer pattern."""
    nonempty = [pattern for pattern in patterns if pattern]
    if not nonempty:
        return ""
    if len(nonempty) == len(patterns) == 1:
        return nonempty[0]
    return f"(?:{'|'.join(nonempty)}){'?' if len(nonempty) < len(patterns) else ''}"


def set_pattern(chars: int) -> str:
    """A set of characters as a pattern."""
    if chars == ALL_CHARS:
        return "(?s:.)"
    negated = bool(chars & NON_ASCII)
    numbers = [code for code in range(128) if bool(chars >> code & 1) != negated]
    text = "".join(_ranges(numbers))
    return f"[^{text}{_LINE_ENDS}]" if negated else f"[{text}]"


def _ranges(numbers: list[int]) -> Iterator[str]:
    """Numbers of characters as ranges of a set."""
    index = 0
    while index < len(numbers):
        end = index
        while end + 1 < len(numbers) and numbers[end + 1] == numbers[end] + 1:
            end += 1
        low, high = (f"\\x{numbers[position]:02x}" for position in (index, end))
        yield low if index == end else f"{low}-{high}"
        index = end + 1
