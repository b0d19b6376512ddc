"""Grammars by llguidance: compiled lazily, walked over the vocabulary's prefix tree.

Its matchers never raise; they fall into a state of error, which is looked for after each
call. Work is bounded three ways: by its own limits (expressions, states, items), by the
size of what is asked, and by the processor time of one mask, for the limits count no
work that long runs of forced bytes and ambiguous rules make.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from minfer.effects.text.grammars.protocol import GrammarError, MissingLibraryError
from minfer.effects.text.grammars.spelled import WHITESPACE, Spelled, spelled
from minfer.structured import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Of what a lexer and a parser may do; a third to a fifth of the library's own, which are
# for one user. A schema of ten formats and 400 optional properties is within them.
LIMITS: Final = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 70_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
}
MOST_SECONDS: Final = 0.1  # of a processor, for one mask
MOST_CHARS: Final = 300  # of the library's errors that are handed on
MISSING: Final = "needs llguidance: pip install 'minfer[grammar]'"


class LlguidanceCompiler:
    """A `Compiler` for a tokenizer.json, as text, and ids that end a sequence."""

    def __init__(self, tokenizer: str, vocab_size: int, ends: Iterable[int]) -> None:
        try:
            import llguidance
        except ModuleNotFoundError:
            raise MissingLibraryError(MISSING) from None
        ends = sorted({one for one in ends if one < vocab_size})
        self.limits = llguidance.LLParserLimits(
            **LIMITS,  # type: ignore[arg-type]  # of which all are whole numbers
            verbose_errors=False,
        )
        self.stand_in: int | None = None
        make = partial(llguidance.LLTokenizer, tokenizer)
        try:
            if not ends:
                # It needs one. The text of that token cannot come any more.
                self.stand_in = make(eos_token=[0]).vocab_size - 1
                ends = [self.stand_in]
            self.vocabulary: LLTokenizer = make(n_vocab=vocab_size, eos_token=ends)
        # Whatever it says of a tokenizer that it cannot read.
        except Exception as error:
            raise GrammarError(
                f"this model's tokenizer cannot be used with grammars: {_cut(error)}"
            ) from None

    def compile(self, asked: StructuredOutputs) -> "LlguidanceGrammar":
        """As `Compiler` says."""
        param = asked.param
        told = spelled(asked)
        try:
            make = partial(self._matcher, _as_library_has_it(told, asked))
            grammar = LlguidanceGrammar(make, self.stand_in)
            grammar.matcher().mask()
        except GrammarError as error:
            raise GrammarError(f"{param}: {error}", param) from None
        # Whatever the library raises, a panic of its own language included: it is about
        # what was asked.
        except BaseException as error:
            raise GrammarError(f"{param}: {_cut(error)}", param) from None
        return grammar

    def _matcher(self, grammar: str) -> "LLMatcher":
        from llguidance import LLMatcher

        return LLMatcher(self.vocabulary, grammar, log_level=0, limits=self.limits)


class LlguidanceGrammar:
    """A constraint that can be compiled.

    Each matcher is compiled anew, in half a millisecond. Copies of one would share its
    lexer, under a lock: of 32 rows, each mask would wait for those before it, whatever
    the number of threads.
    """

    def __init__(self, make: "Callable[[], LLMatcher]", stand_in: int | None) -> None:
        self._make = make
        self._stand_in = stand_in

    def matcher(self) -> "LlguidanceMatcher":
        """As `Grammar` says."""
        inner = self._make()
        _check(inner)
        return LlguidanceMatcher(inner, self._stand_in)


class LlguidanceMatcher:
    """One output on its way."""

    def __init__(self, inner: "LLMatcher", stand_in: int | None) -> None:
        self._inner = inner
        self._stand_in = stand_in

    def advance(self, tokens: Sequence[int]) -> None:
        """As `Matcher` says."""
        self._inner.consume_tokens(list(tokens))
        _check(self._inner)

    def rollback(self, count: int) -> None:
        """As `Matcher` says."""
        if count:
            self._inner.rollback(count)
            _check(self._inner)

    def mask(self) -> bytes:
        """As `Matcher` says."""
        begun = time.thread_time()
        bits = self._inner.compute_bitmask()
        _check(self._inner)
        if (spent := time.thread_time() - begun) > MOST_SECONDS:
            raise GrammarError(
                f"took {spent:.2f} s to say what may come next, of at most "
                f"{MOST_SECONDS}; make it simpler"
            )
        return bits if self._stand_in is None else _without(bits, self._stand_in)

    @property
    def may_end(self) -> bool:
        """As `Matcher` says."""
        return self._inner.is_accepting()

    @property
    def must_end(self) -> bool:
        """As `Matcher` says."""
        return self._inner.is_stopped() and not self._inner.is_error()

    def forced(self) -> int | None:
        """As `Matcher` says."""
        allowed = int.from_bytes(self.mask(), "little")
        return allowed.bit_length() - 1 if allowed.bit_count() == 1 else None


def _as_library_has_it(told: Spelled, asked: StructuredOutputs) -> str:
    """A constraint as the library's matchers take it."""
    from llguidance import LLMatcher

    match told.kind:
        case "json":
            flexible = not asked.disable_any_whitespace
            options: Any = {"lenient": False, "whitespace_flexible": flexible}
            if flexible:
                options["whitespace_pattern"] = WHITESPACE
            return LLMatcher.grammar_from_json_schema(told.text, overrides=options)
        case "regex":
            return LLMatcher.grammar_from_regex(told.text)
    return LLMatcher.grammar_from_lark(told.text)


def _without(bits: bytes, token: int) -> bytes:
    """A mask that does not allow a token."""
    cleared = bytearray(bits)
    cleared[token // 8] &= ~(1 << token % 8)
    return bytes(cleared)


def _check(inner: "LLMatcher") -> None:
    """Raise GrammarError if the library could not go on."""
    if not inner.is_error():
        return
    said = _cut(inner.get_error())
    if said.startswith("NoExtension"):
        said = "there is no text that it allows"
    raise GrammarError(said)


def _cut(error: object) -> str:
    text = str(error).replace("<non-verbose/>", "").strip()
    return text if len(text) <= MOST_CHARS else text[: MOST_CHARS - 3] + "..."
