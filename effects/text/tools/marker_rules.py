"""Texts of a format in a grammar: markers that are tokens of the model are tokens there.

A text may have the fields of `Written`.
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
        found = {one: token(one) for one in markers if one}
        return cls(markers, {one: i for one, i in found.items() if i is not None})

    def is_token(self, marker: str) -> bool:
        """Whether a text is one token."""
        return marker in self.tokens

    def rule(self, text: str, name: str = "") -> str:
        """A text as a part of a rule, with the name of a call in it."""
        return " ".join(self._part(part) for part in self._parts(text, name))

    def leading(self, text: str) -> str:
        """The marker that begins a text, up to its first token."""
        begun = [one for one in self.markers if text.startswith(one)]
        marker = max(begun, key=len, default="")
        for part in self._parts(marker, ""):
            if part in self.tokens:
                return marker[: marker.index(part) + len(part)]
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
        parts = self._parts(text, "")
        tokens = (i for i, part in enumerate(parts) if part in self.tokens)
        index = next(tokens, len(parts))
        return "".join(parts[:index]), "".join(parts[index:])

    def _parts(self, text: str, name: str) -> list[str]:
        """A text, cut into tokens, fields and other text."""
        whole = sorted([*self.tokens, *_FIELDS], key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, whole))})", text)
        return [part.replace("{name}", name) for part in parts if part]

    def _part(self, part: str) -> str:
        if part in self.tokens:
            return f"<[{self.tokens[part]}]>"
        return _FIELDS.get(part) or quote(part)


def as_regex(text: str) -> str:
    """A text as a regular expression between slashes."""
    return re.escape(text).replace("\\\n", r"\n").replace("/", r"\/")
