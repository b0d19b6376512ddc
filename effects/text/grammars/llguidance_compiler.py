"""Grammars by llguidance: compiled lazily, walked over the vocabulary's prefix tree.

Work is bounded three ways: by its own limits (expressions, states, items), by the size of
the constraint, and by the processor time of one mask, as the limits do not count the work
of long runs of forced bytes and of ambiguous rules.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve
from typing_extensions import override

from minfer.effects.text.grammars.grammar_library import (
    Compiler,
    Grammar,
    GrammarError,
    MatcherUpdate,
)
from minfer.effects.text.grammars.grammar_text import (
    WHITESPACE,
    GrammarText,
    to_grammar_text,
)
from minfer.effects.text.grammars.lark import to_compiled_lark
from minfer.effects.text.grammars.llguidance_matcher import (
    Companions,
    LlguidanceMatcher,
    raise_if_failed,
    shorten_error,
)
from minfer.effects.text.grammars.mask_lines import Lines
from minfer.effects.text.grammars.parallel_masks import ParallelMasks
from minfer.effects.text.grammars.vocabulary import without_markers
from minfer.sampling.structured import StructuredOutputs

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
# Groups of tokens that the library keeps masks of, each without those of the groups
# before it: where a group may come as a whole, its tokens are not looked at one by one.
# Blanks and text within JSON's quotes are its own. With words of small letters, and more
# lengths, expressions of words take half as long, and texts of bounded length a seventh
# less.
_QUOTED: Final = r'[^"\\\x00-\x1F\x7F]'
SLICES: Final = (
    r"[\x20\x0A\x0D\x09]+",
    "[a-z]{1,8}",
    *(_QUOTED + lengths for lengths in ("{1,3}", "{1,6}", "{1,10}", "{1,30}", "+")),
)
COMPANION_GRAMMAR: Final = 'start: "a"'  # any grammar will do
NO_END_TEXT: Final = "<|no end of sequence|>"  # the text of a token that stands for one


class LlguidanceCompiler(Compiler):
    """A `Compiler` for a tokenizer.json, as text, and ids that end a sequence."""

    def __init__(self, tokenizer: str, vocab_size: int, ends: Iterable[int]) -> None:
        import llguidance  # when the first constraint needs it

        ends = sorted({token for token in ends if token < vocab_size})
        self.limits = llguidance.LLParserLimits(
            **LIMITS,  # type: ignore[arg-type]  # of which all are whole numbers
            verbose_errors=False,
        )
        self.stand_in: int | None = None
        make = partial(llguidance.LLTokenizer, slices=list(SLICES))
        try:
            vocabulary = without_markers(tokenizer)
            tokenizer, self._ids = vocabulary.text, vocabulary.ids
            if not ends:  # it needs one
                tokenizer = _with_end_token(tokenizer, vocab_size, make)
                self.stand_in = make(tokenizer, eos_token=[0]).vocab_size - 1
                ends = [self.stand_in]
            self.vocabulary: LLTokenizer = make(
                tokenizer, n_vocab=vocab_size, eos_token=ends
            )
        # Any error about a tokenizer that it cannot read.
        except Exception as error:
            raise GrammarError(
                f"this model's tokenizer cannot be used with grammars: "
                f"{shorten_error(error)}"
            ) from None
        self._parallel = ParallelMasks(self.vocabulary.vocab_size)
        self.words = self._parallel.words
        self._companions = Companions(partial(self._matcher, COMPANION_GRAMMAR))
        stands_in = self.stand_in is not None
        self.forbidden_tokens = frozenset(ends) if stands_in else frozenset[int]()

    @override
    def compile(self, constraint: StructuredOutputs) -> "LlguidanceGrammar":
        param = constraint.param
        grammar_text = to_grammar_text(constraint)
        if constraint.kind == "grammar":
            grammar_text = evolve(
                grammar_text, text=to_compiled_lark(grammar_text.text, self._ids, param)
            )
        try:
            make = partial(self._matcher, _to_library_form(grammar_text, constraint))
            grammar = LlguidanceGrammar(make, self._companions)
            grammar.matcher().mask()
        except GrammarError as error:
            raise GrammarError(f"{param}: {error}", param) from None
        # Any error of the library, also a panic of its own language: the constraint is
        # its cause.
        except BaseException as error:
            raise GrammarError(f"{param}: {shorten_error(error)}", param) from None
        return grammar

    @override
    def masks(
        self, updates: Sequence[MatcherUpdate], lines: Lines
    ) -> dict[int, GrammarError]:
        return self._parallel.masks(updates, lines)

    def _matcher(self, grammar: str) -> "LLMatcher":
        from llguidance import LLMatcher

        return LLMatcher(self.vocabulary, grammar, log_level=0, limits=self.limits)


def _with_end_token(
    tokenizer: str, vocab_size: int, make: "Callable[..., LLTokenizer]"
) -> str:
    """A tokenizer whose last token may represent an end of sequence: a new one, if the
    model has a free id. Else it is one of its own, whose text then cannot come any more.
    """
    count = make(tokenizer, eos_token=[0]).vocab_size
    if count >= vocab_size:
        return tokenizer
    data = json.loads(tokenizer)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    end = {"id": count, "content": NO_END_TEXT, "special": True, **flags}
    data["added_tokens"] = [*(data.get("added_tokens") or ()), end]
    return json.dumps(data)


class LlguidanceGrammar(Grammar):
    """A constraint that can be compiled.

    Each matcher is compiled anew, in half a millisecond or more. Copies of one would
    share its lexer, under a lock: of 32 rows, each mask would wait for those before it,
    whatever the number of threads.
    """

    def __init__(self, make: "Callable[[], LLMatcher]", companions: Companions) -> None:
        self._make = make
        self._companions = companions

    @override
    def matcher(self) -> "LlguidanceMatcher":
        inner = self._make()
        raise_if_failed(inner)
        return LlguidanceMatcher(inner, self._companions)


def _to_library_form(grammar_text: GrammarText, constraint: StructuredOutputs) -> str:
    """A constraint in the form for the library's matchers."""
    from llguidance import LLMatcher

    match grammar_text.kind:
        case "json":
            flexible = not constraint.disable_any_whitespace
            options: Any = {"lenient": False, "whitespace_flexible": flexible}
            if flexible:
                options["whitespace_pattern"] = WHITESPACE
            return LLMatcher.grammar_from_json_schema(
                grammar_text.text, overrides=options
            )
        case "regex":
            return LLMatcher.grammar_from_regex(grammar_text.text)
    return LLMatcher.grammar_from_lark(grammar_text.text)
