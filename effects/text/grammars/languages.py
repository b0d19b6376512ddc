"""Regular languages, with intersections and complements.

A language is a tree of records, each of which exists once in its `Languages`. The
(Brzozowski) derivative of a language by a character is the language of the texts that may
follow that character.

The characters are ASCII, and one more for all others. A set of characters is a bit mask.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from attrs import define, field, frozen

from minfer.effects.text.grammars.grammar_library import GrammarError

NON_ASCII: Final = 1 << 128  # the characters beyond ASCII
ALL_CHARS: Final = (NON_ASCII << 1) - 1
MAX_WORK: Final = 300_000  # parts of all languages: they take some tenths of a second


def too_large_error() -> GrammarError:
    """The error about a pattern that takes too much work."""
    causes = "look-aheads in a pattern, or lengths beside it,"
    return GrammarError(f"{causes} are too large; leave them out")


@frozen(eq=False)
class Language:
    """A set of texts."""

    number: int  # by which languages are ordered
    kind: str  # "set", "cat", "or", "and", "not", "repeat"
    operands: tuple["Language", ...] = ()
    chars: int = 0  # of a set
    min_count: int = 0  # of a repetition
    max_count: int | None = None
    nullable: bool = False  # whether it has the empty text
    text: str = ""  # a set as the pattern had it, if it is not one of `chars`


@define
class Languages:
    """Makes the languages of one pattern. Methods raise GrammarError after `MAX_WORK`."""

    _made: dict[object, Language] = field(factory=dict)
    _work: int = 0  # parts of all languages
    _derivatives: dict[tuple[Language, int], Language] = field(factory=dict)

    # --- how languages are made ---------------------------------------------------------

    def chars(self, chars: int, text: str = "") -> Language:
        """One of these characters; `text` is a set that a bit mask cannot hold."""
        if not chars and not text:
            return self.nothing
        return self._make("set", chars=chars, text=text)

    @property
    def empty(self) -> Language:
        """The empty text alone."""
        return self._make("cat", nullable=True)

    @property
    def nothing(self) -> Language:
        """No text."""
        return self._make("or")

    @property
    def everything(self) -> Language:
        """All texts."""
        return self.repeat(self.chars(ALL_CHARS), 0, None)

    def concatenate(self, *languages: Language) -> Language:
        """Texts of these, one after the other."""
        flat = [operand for language in languages for operand in _flat("cat", language)]
        if self.nothing in flat:
            return self.nothing
        if len(flat) == 1:
            return flat[0]
        return self._make(
            "cat", tuple(flat), nullable=all(operand.nullable for operand in flat)
        )

    def union(self, languages: Iterable[Language]) -> Language:
        """Texts of any of these."""
        flat = dict.fromkeys(
            operand for language in languages for operand in _flat("or", language)
        )
        if self.everything in flat:
            return self.everything
        sets = [operand for operand in flat if operand.kind == "set" and not operand.text]
        if len(sets) > 1:
            chars = 0
            for operand in sets:
                chars |= operand.chars
                del flat[operand]
            flat[self.chars(chars)] = None
        if len(flat) == 1:
            return next(iter(flat))
        nullable = any(operand.nullable for operand in flat)
        return self._make("or", _ordered(flat), nullable=nullable)

    def intersection(self, languages: Iterable[Language]) -> Language:
        """Texts that are in all of these."""
        flat = dict.fromkeys(
            operand for language in languages for operand in _flat("and", language)
        )
        flat.pop(self.everything, None)
        if self.nothing in flat:
            return self.nothing
        if self.empty in flat:
            return (
                self.empty if all(operand.nullable for operand in flat) else self.nothing
            )
        if not flat:
            return self.everything
        if len(flat) == 1:
            return next(iter(flat))
        nullable = all(operand.nullable for operand in flat)
        return self._make("and", _ordered(flat), nullable=nullable)

    def complement(self, language: Language) -> Language:
        """Texts that are not in this one."""
        if language is self.nothing:
            return self.everything
        if language is self.everything:
            return self.nothing
        if language.kind == "not":
            return language.operands[0]
        return self._make("not", (language,), nullable=not language.nullable)

    def repeat(
        self, language: Language, min_count: int, max_count: int | None
    ) -> Language:
        """`min_count` to `max_count` texts of this language, one after the other."""
        if max_count == 0 or language is self.empty:
            return self.empty
        if language is self.nothing:
            return self.nothing if min_count else self.empty
        if (min_count, max_count) == (1, 1):
            return language
        nullable = min_count == 0 or language.nullable
        return self._make(
            "repeat",
            (language,),
            nullable=nullable,
            min_count=min_count,
            max_count=max_count,
        )

    def _make(
        self, kind: str, operands: tuple[Language, ...] = (), **fields: object
    ) -> Language:
        key = (kind, tuple(map(id, operands)), *fields.items())
        self._work += 1 + len(operands)
        if self._work > MAX_WORK:
            raise too_large_error()
        if (language := self._made.get(key)) is None:
            language = Language(len(self._made), kind, operands, **fields)  # type: ignore[arg-type]  # by name
            self._made[key] = language
        return language

    # --- what follows a character -------------------------------------------------------

    def derivative(self, language: Language, chars: int) -> Language:
        """The texts that follow one of these characters, which the language does not
        distinguish.
        """
        key = (language, chars)
        if (derivative := self._derivatives.get(key)) is None:
            derivative = self._derivatives[key] = self._derive(language, chars)
        return derivative

    def _derive(self, language: Language, chars: int) -> Language:
        operands = language.operands
        match language.kind:
            case "set":
                return self.empty if language.chars & chars else self.nothing
            case "or":
                return self.union(self.derivative(operand, chars) for operand in operands)
            case "and":
                return self.intersection(
                    self.derivative(operand, chars) for operand in operands
                )
            case "not":
                return self.complement(self.derivative(operands[0], chars))
            case "repeat":
                upper = None if language.max_count is None else language.max_count - 1
                rest = self.repeat(operands[0], max(language.min_count - 1, 0), upper)
                return self.concatenate(self.derivative(operands[0], chars), rest)
        alternatives = []
        for index, operand in enumerate(operands):
            alternatives.append(
                self.concatenate(self.derivative(operand, chars), *operands[index + 1 :])
            )
            if not operand.nullable:
                break
        return self.union(alternatives)


def _flat(kind: str, language: Language) -> tuple[Language, ...]:
    return language.operands if language.kind == kind else (language,)


def _ordered(languages: Iterable[Language]) -> tuple[Language, ...]:
    """Parts in one order, so that the same ones are the same language."""
    return tuple(sorted(languages, key=lambda language: language.number))


def nested_sets(language: Language) -> Iterator[Language]:
    """All sets in a language."""
    pending, visited = [language], set[Language]()
    while pending:
        current = pending.pop()
        if current in visited:
            continue
        visited.add(current)
        pending += current.operands
        if current.kind == "set":
            yield current
