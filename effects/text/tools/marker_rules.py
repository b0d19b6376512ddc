"""Texts of a format in a grammar: markers that are tokens of the model are tokens there.

A text may have the fields of `CallForm`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from attrs import frozen

from minfer.effects.text.grammars.grammar_text import TEXT, quote

_FIELDS: Final = {"{index}": "INDEX", "{id}": "CALL_ID", "{gap}": '" "?'}


@frozen
class MarkerRules:
    """The markers of a format, and the ids of those that are tokens."""

    markers: Sequence[str]
    tokens: Mapping[str, int]
    shared: tuple[str, ...] = ("INDEX: /[0-9]{1,4}/", "CALL_ID: /[A-Za-z0-9_-]{1,40}/")

    @classmethod
    def of(
        cls, markers: Sequence[str], token: Callable[[str], int | None]
    ) -> "MarkerRules":
        """The rules for these markers; `token` finds the id of an added token."""
        ids = {marker: token(marker) for marker in markers if marker}
        return cls(
            markers,
            {
                marker: token_id
                for marker, token_id in ids.items()
                if token_id is not None
            },
        )

    def is_token(self, marker: str) -> bool:
        """Whether a text is one token."""
        return marker in self.tokens

    def rule(self, text: str, name: str = "") -> str:
        """A text as a part of a rule, with the name of a call in it."""
        return " ".join(self._part(piece) for piece in self._parts(text, name))

    def leading_marker(self, form_text: str) -> str:
        """The longest marker at the beginning of a text, cut behind its first token."""
        candidates = [
            candidate for candidate in self.markers if form_text.startswith(candidate)
        ]
        marker = max(candidates, key=len, default="")
        for piece in self._parts(marker, ""):
            if piece in self.tokens:
                return marker[: marker.index(piece) + len(piece)]
        return marker

    def ending(self, name: str, marker: str) -> list[str]:
        """The rules of text up to a marker. Where that is text, too, the first counts."""
        before, rest = self.split_at_token(marker)
        if not rest:
            return [f"{name}[lazy]: TEXT {quote(marker)}"]
        if not before:
            return [f"{name}: TEXT {self.rule(rest)}"]
        terminal = f"{name.upper()}_TEXT"
        return [
            f"{name}: {terminal} {self.rule(rest)}",
            f"{terminal}: /{TEXT}{as_regex(before)}/",
        ]

    def split_at_token(self, text: str) -> tuple[str, str]:
        """A text before its first token, and from it on; the latter is empty if the text
        has no token.
        """
        pieces = self._parts(text, "")
        tokens = (i for i, piece in enumerate(pieces) if piece in self.tokens)
        index = next(tokens, len(pieces))
        return "".join(pieces[:index]), "".join(pieces[index:])

    def _parts(self, text: str, name: str) -> list[str]:
        """A text, cut into tokens, fields and other text."""
        separators = sorted([*self.tokens, *_FIELDS], key=len, reverse=True)
        pieces = re.split(f"({'|'.join(map(re.escape, separators))})", text)
        return [piece.replace("{name}", name) for piece in pieces if piece]

    def _part(self, piece: str) -> str:
        if piece in self.tokens:
            return f"<[{self.tokens[piece]}]>"
        return _FIELDS.get(piece) or quote(piece)


def as_regex(text: str) -> str:
    """A text as a regular expression between slashes."""
    return re.escape(text).replace("\\\n", r"\n").replace("/", r"\/")
