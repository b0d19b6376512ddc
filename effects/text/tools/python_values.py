"""Values in Python's notation, which models write in place of JSON: `['x', True]`.

Only values that JSON has are accepted: lists and tuples, dictionaries with texts for
keys, texts, numbers, True, False and None; and JSON's own words among them. Nothing is
executed: the text is parsed, and its tree is read.
"""

import ast
import json
import warnings
from typing import Any, Final

from minfer.effects.text.tools.json_scanner import JsonScanner

_MAX_LITERAL_CHARS: Final = 1 << 16  # characters: a tree takes a hundred times as much
_NAMES: Final = {"true": True, "false": False, "null": None}
_CONTAINER_BEGINNINGS: Final = ("[", "{", "(")


def container_json(text: str) -> str | None:
    """An array or object in Python's notation as JSON; None if it is none."""
    return literal_json(text) if text.startswith(_CONTAINER_BEGINNINGS) else None


def literal_json(text: str) -> str | None:
    """A value in Python's notation, or in JSON, as JSON; None if it is neither."""
    scanner = JsonScanner()
    end = scanner.feed(text)
    scanner.end()
    if scanner.done and end == len(text):
        return scanner.take_accepted()
    if len(text) > _MAX_LITERAL_CHARS and text.startswith(_CONTAINER_BEGINNINGS):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            tree = ast.parse(text, mode="eval")
        json_text = json.dumps(_value(tree.body), ensure_ascii=False, allow_nan=False)
        json_text.encode()
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    return json_text


def _value(node: ast.expr) -> Any:
    """The value of a part of the tree. Raises ValueError if JSON has no such value."""
    match node:
        case ast.Constant(value=value) if isinstance(value, str | int | float | None):
            return value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)):
            if isinstance(value, int | float):
                return -value
        case ast.List(elts=values) | ast.Tuple(elts=values):
            return [_value(element) for element in values]
        case ast.Dict(keys=keys, values=values):
            names = [None if key is None else _value(key) for key in keys]
            if all(isinstance(name, str) for name in names):
                return dict(zip(names, map(_value, values), strict=True))
    raise ValueError("this is not JSON")
