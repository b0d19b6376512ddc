"""Grammars of a call whose only argument is a text of a grammar: of a custom tool.

Within quotes the text has JSON's escapes, which Python reads, too, and a quote ends it.
Between markers it is bare, and the first text that a reader takes for its end ends it: so
no text has any within it.
"""

from collections.abc import Sequence

from attrs import frozen

from minfer.effects.text.grammars.grammar_text import quote
from minfer.effects.text.grammars.lark_terminals import TextGrammar
from minfer.effects.text.tools.argument_rules import ArgumentRules
from minfer.effects.text.tools.marker_rules import MarkerRules, as_regex


@frozen
class TextArgument:
    """The only argument of a tool: a text of a grammar."""

    name: str
    grammar: TextGrammar

    def escaped(self, number: int, before: str, after: str) -> ArgumentRules:
        """The arguments of the tool of this number, with JSON's escapes between two
        texts. Raises GrammarError.
        """
        prefix = f"TEXT_{number}_"
        if nested := self.grammar.nested():
            return ArgumentRules(f"{quote(before)} {nested} {quote(after)}")
        terminals = self.grammar.terminals(prefix, escaped=True)
        body = f"{quote(before)} {prefix}0 {quote(after)}"
        return ArgumentRules(body, tuple(terminals))

    def bare(
        self,
        number: int,
        marks: MarkerRules,
        before: str,
        after: str,
        ends: Sequence[str],
    ) -> ArgumentRules:
        """The arguments between two texts with markers; `ends` are those that readers
        take for its end. Raises GrammarError.
        """
        rule, prefix = f"text_{number}", f"TEXT_{number}_"
        forbidden = "|".join(as_regex(end) for end in ends if not marks.is_token(end))
        exclusion = rf" & ~/(?s:.*)({forbidden})(?s:.*)/" if forbidden else ""
        terminal = f"({prefix}0{exclusion})"
        end, token = marks.split_at_token(after)
        if token:  # the lexer takes what is before it for the text's
            terminal += f" {quote(end)}" if end else ""
        lazy, rest = ("", token) if token else ("[lazy]", after)
        return ArgumentRules(
            f"{marks.rule(before)} {rule}",
            (
                f"{rule}{lazy}: {prefix}TEXT {marks.rule(rest)}",
                f"{prefix}TEXT: {terminal}",
                *self.grammar.terminals(prefix, escaped=False),
            ),
        )
