"""The searches of transformers' parsers of contents, with a bound of time.

A `response_template` may have patterns of its own for the content of a region, and
transformers has some: they may take time that grows with the square of the text, or
exponentially, and transformers sets no bound. So each is searched for here first.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

_JSON_STRING: Final = r'"(?:\\.|[^"\\])*"'


def check_time(text: str, parser: str, args: Mapping[str, Any], seconds: float) -> None:
    """Search as transformers' parser of this name does. Raises TimeoutError if that takes
    more than `seconds`; other errors are those of the parser.
    """
    import regex  # which transformers needs, and this module only with it

    def replace(pattern: str, text: str) -> str:
        return str(regex.sub(pattern, "", text, flags=regex.DOTALL, timeout=seconds))

    values: Sequence[str] = ()
    if parser == "json":
        for begins, ends in args.get("string_delims", ()):
            text = replace(f"{re.escape(begins)}.*?{re.escape(ends)}", text)
        if args.get("unquoted_keys"):
            replace(_JSON_STRING, text)
    elif parser == "xml-inline":
        matches = regex.finditer(
            args["tag_pattern"], text, flags=regex.DOTALL, timeout=seconds
        )
        values = [match.groupdict().get("value") or "" for match in matches]
    elif parser == "kv-lines":
        values = text.split(args.get("line_sep", "\n"))
    if isinstance(value_parser := args.get("value_parser"), Mapping):
        name, args = value_parser.get("name", ""), value_parser.get("args", {})
        for value in values:
            check_time(value, name, args, seconds)
