"""Grammars of a call whose only argument is a text of a grammar: of a custom tool.

Within JSON the text has JSON's escapes, and a quote ends it. In tags it is bare, and the
first tag that a reader takes for its end ends it: no text has any within it.
"""

import json
from typing import Final

from attrs import frozen

from minfer.effects.text.grammars.grammar_text import quote
from minfer.effects.text.grammars.lark_terminals import TextGrammar

_TAG_ENDS: Final = "\n</parameter>\n"
_TAGS: Final = r"<\/parameter>|\n<parameter=|\n<\/function>"  # that end a text


@frozen
class TextRules:
    """The rules of such a call's arguments."""

    body: str  # of a rule
    rules: tuple[str, ...]  # that it needs


@frozen
class TextArgument:
    """The only argument of a tool: a text of a grammar."""

    name: str
    grammar: TextGrammar

    def as_json(self, number: int) -> TextRules:
        """The arguments of the tool of this number as JSON. Raises GrammarError."""
        prefix = f"TEXT_{number}_"
        head, tail = quote(f'{{{json.dumps(self.name)}: "'), quote('"}')
        if nested := self.grammar.nested():
            return TextRules(f"{head} {nested} {tail}", ())
        terminals = self.grammar.terminals(prefix, escaped=True)
        return TextRules(f"{head} {prefix}0 {tail}", tuple(terminals))

    def in_tags(self, number: int) -> TextRules:
        """The arguments in the tags of Qwen's coders. Raises GrammarError."""
        rule, prefix = f"tagged_{number}_0", f"TEXT_{number}_"
        head = quote(f"<parameter={self.name}>\n")
        return TextRules(
            f"{head} {rule}",
            (
                f"{rule}[lazy]: {prefix}TEXT {quote(_TAG_ENDS)}",
                f"{prefix}TEXT: {prefix}0 & ~/(?s:.*)({_TAGS})(?s:.*)/",
                *self.grammar.terminals(prefix, escaped=False),
            ),
        )
