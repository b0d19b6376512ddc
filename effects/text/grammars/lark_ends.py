"""Whether each rule of a user's grammar has a text that ends.

A rule of which each way leads to itself again has none: an answer that begins it could
neither go on nor end.
"""

import re
from collections.abc import Container, Iterable
from typing import Final

from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.effects.text.grammars.lark_definitions import (
    MAX_SHOWN,
    LarkGrammar,
    LarkToken,
)

_OPTIONAL: Final = re.compile(r"[*?]|~\s*0.*|\{0?,.*|\{0\}", re.DOTALL)
_MAX_WORDS: Final = 500_000  # that are read, some of them again and again


def check_ends(grammar: LarkGrammar) -> None:
    """Raise GrammarError for a rule without a text that ends."""
    endless = dict.fromkeys(grammar.definitions)
    words = 0
    while True:
        before = len(endless)
        for name in (*endless, *reversed(endless)):
            body = grammar.definitions[name].body
            words += len(body)
            if name in endless and _ends(body, endless.keys()):
                del endless[name]
        if not endless:
            return
        if len(endless) == before:
            shown = next(iter(endless))[:MAX_SHOWN]
            raise GrammarError(f"each way of {shown!r} leads to itself: no text ends it")
        if words > _MAX_WORDS:
            raise GrammarError("has too many rules that lead to each other")


def _ends(body: Iterable[LarkToken], endless: Container[str]) -> bool:
    """Whether a body has a way without one of these names."""
    ways = [False]  # of each open group: whether a way before ends
    right = [True]  # and whether the way that is read does, up to its last word
    last = True  # and that word
    for token in body:
        if token.kind == "times":
            last = last or _OPTIONAL.fullmatch(token.text) is not None
            continue
        if token.kind == "alias":
            continue
        right[-1] = right[-1] and last
        last = token.kind != "name" or token.text not in endless
        if token.kind == "sign" and token.text in "([":
            ways.append(token.text == "[")
            right.append(True)
        elif token.kind == "sign" and token.text == "|":
            ways[-1], right[-1] = ways[-1] or right[-1], True
        elif token.kind == "sign" and token.text in ")]" and len(ways) > 1:
            way, rest = ways.pop(), right.pop()
            last = way or rest
    return ways[0] or (right[0] and last)
