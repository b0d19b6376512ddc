"""Grammars of the arguments of one call, in the notation of its format."""

import json

from attrs import frozen

from minfer.effects.text.grammars.grammar_text import json_rule
from minfer.effects.text.tools.argument_rules import ArgumentRules, ArgumentSchema
from minfer.effects.text.tools.format import ToolFormat
from minfer.effects.text.tools.gemma import GemmaCalls
from minfer.effects.text.tools.gemma_forms import gemma_form
from minfer.effects.text.tools.marker_rules import MarkerRules
from minfer.effects.text.tools.python_calls import PythonCalls
from minfer.effects.text.tools.python_forms import python_form
from minfer.effects.text.tools.tag_forms import tag_form
from minfer.effects.text.tools.tags import Tags
from minfer.effects.text.tools.text_arguments import TextArgument


@frozen
class Callee:
    """A tool that may be called, and the schema of its arguments, as text."""

    name: str
    schema: str
    lenient: bool = False  # parts of the schema that cannot be enforced are left free
    text: TextArgument | None = None  # in place of the schema


def argument_form(
    tool_format: ToolFormat, marks: MarkerRules, callee: Callee, number: int
) -> ArgumentRules:
    """The rules of the arguments of a tool of this number. Raises GrammarError for a
    schema that cannot be enforced.
    """
    if callee.text is not None:
        return _text_form(tool_format, marks, callee.text, number)
    arguments = ArgumentSchema(
        tool=callee.name,
        number=number,
        root=json.loads(callee.schema),
        marks=marks,
        lenient=callee.lenient,
    )
    match tool_format.dialect:
        case Tags():
            return tag_form(arguments, _tags_around(tool_format))
        case PythonCalls():
            return python_form(arguments)
        case GemmaCalls(quote=quote):
            return gemma_form(arguments, quote)
    return ArgumentRules(json_rule(callee.schema))


def _text_form(
    tool_format: ToolFormat, marks: MarkerRules, text: TextArgument, number: int
) -> ArgumentRules:
    """The rules of arguments that are one text of a grammar."""
    match tool_format.dialect:
        case Tags(value_ends=ends):
            before, _, after = _tags_around(tool_format).partition("{value}")
            before = before.replace("{key}", text.name).replace("{kind}", "true")
            return text.bare(number, marks, before, after, ends)
        case PythonCalls():
            return text.escaped(number, f'{text.name}="', '"')
        case GemmaCalls(quote=quote):
            before, after = f"{{{text.name}:{quote}", f"{quote}}}"
            return text.bare(number, marks, before, after, (quote,))
    return text.escaped(number, f'{{{json.dumps(text.name)}: "', '"}')


def _tags_around(tool_format: ToolFormat) -> str:
    return tool_format.written.parameter if tool_format.written is not None else ""
