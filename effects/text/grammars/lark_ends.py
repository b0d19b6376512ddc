"""Whether each rule of a user's grammar has a text that ends.

A rule whose alternatives all lead to itself again has none: an answer that begins it
could neither go on nor end.
"""

import re
from collections.abc import Container, Iterable
from typing import Final

from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.effects.text.grammars.lark_definitions import (
    MAX_SHOWN_CHARS,
    LarkGrammar,
    LarkToken,
)

_OPTIONAL: Final = re.compile(r"[*?]|~\s*0.*|\{0?,.*|\{0\}", re.DOTALL)
_MAX_WORDS_READ: Final = 500_000  # some of them again and again


def check_ends(grammar: LarkGrammar) -> None:
    """Raise GrammarError for a rule without a text that ends."""
    endless = dict.fromkeys(grammar.definitions)
    words = 0
    while True:
        before = len(endless)
        for name in (*endless, *reversed(endless)):
            body = grammar.definitions[name].body
            words += len(body)
            if name in endless and _has_end(body, endless.keys()):
                del endless[name]
        if not endless:
            return
        if len(endless) == before:
            shown = next(iter(endless))[:MAX_SHOWN_CHARS]
            raise GrammarError(f"each way of {shown!r} leads to itself: no text ends it")
        if words > _MAX_WORDS_READ:
            raise GrammarError("has too many rules that lead to each other")


def _has_end(body: Iterable[LarkToken], endless: Container[str]) -> bool:
    """Whether a body has an alternative without one of these names."""
    # Of each open group: whether an earlier alternative ends, and whether the current one
    # does up to its last word; and whether that word does.
    group_ends = [False]
    alternative_ends = [True]
    word_ends = True
    for token in body:
        if token.kind == "times":
            word_ends = word_ends or _OPTIONAL.fullmatch(token.text) is not None
            continue
        if token.kind == "alias":
            continue
        alternative_ends[-1] = alternative_ends[-1] and word_ends
        word_ends = token.kind != "name" or token.text not in endless
        if token.kind == "sign" and token.text in "([":
            group_ends.append(token.text == "[")
            alternative_ends.append(True)
        elif token.kind == "sign" and token.text == "|":
            group_ends[-1], alternative_ends[-1] = (
                group_ends[-1] or alternative_ends[-1],
                True,
            )
        elif token.kind == "sign" and token.text in ")]" and len(group_ends) > 1:
            earlier_ends, current_ends = group_ends.pop(), alternative_ends.pop()
            word_ends = earlier_ends or current_ends
    return group_ends[0] or (alternative_ends[0] and word_ends)
