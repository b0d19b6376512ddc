"""The settings of conversations: a chat template in place of the checkpoint's, and
variables that every conversation has. They are checked before a model is loaded.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from attrs import evolve, field, frozen

from minfer.effects.setup.custom_template import CustomTemplate, read_custom_template
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.text.tools.formats import Parsers, UnknownFormatError
from minfer.values.checks import ConfigError

UNKNOWN_FORMAT_MESSAGE: Final = (
    "this model's chat template shows no way to call tools that is known here"
)
_DEFAULTS_FIELD: Final = "default_chat_template_kwargs"
_MAX_DEPTH: Final = 64  # of lists and objects in each other, in a variable


@frozen(kw_only=True)
class TemplateSettings:
    """What is rendered in addition to a conversation: plain data, to be sent to a
    process.
    """

    template: str | None = None  # None: the checkpoint's own
    defaults: Mapping[str, Any] = field(factory=dict)  # variables, under a request's


def with_template_read(args: EngineArgs) -> EngineArgs:
    """Returns settings whose template is read, and checked with all that belongs to it.
    Raises ConfigError.
    """
    args = evolve(args, chat_template=read_custom_template(args.chat_template))
    template_settings(args)
    parsers_of(args)
    return args


def template_settings(args: EngineArgs) -> TemplateSettings:
    """Returns the settings of conversations. Raises ConfigError, which names the line of
    an error in a template.
    """
    template = read_custom_template(args.chat_template)
    defaults = dict(args.default_chat_template_kwargs or {})
    if template is not None:
        _check_template(template)
    if defaults:
        _check_defaults(defaults)
    text = None if template is None else template.text
    return TemplateSettings(template=text, defaults=defaults)


def read_call_template(value: str | Path | None) -> str | None:
    """Returns the chat template that a call of Python gives: a file's path, or the text.
    Raises ConfigError.
    """
    template = read_custom_template(value)
    if template is None:
        return None
    _check_template(template)
    return template.text


def parsers_of(args: EngineArgs) -> Parsers:
    """Returns the formats of tool calls and reasoning that the settings name. Raises
    ConfigError.
    """
    try:
        return Parsers(args.tool_call_parser, args.reasoning_parser)
    except UnknownFormatError as error:
        raise ConfigError(str(error)) from error


def _check_template(template: CustomTemplate) -> None:
    from minfer.effects.text.template_rendering import (  # it imports jinja2
        ChatTemplateError,
        check_syntax,
    )

    try:
        check_syntax(template.text)
    except ChatTemplateError as error:
        source = f"chat_template ({template.source})"
        raise ConfigError(f"{source}: {error}; correct the template") from error


def _check_defaults(defaults: Mapping[str, Any]) -> None:
    from minfer.effects.text.chat_templates import (
        PER_REQUEST_NAMES,
        RESERVED_NAMES,
        ChatTemplateError,
        check_names,
    )

    try:
        check_names(defaults, _DEFAULTS_FIELD, RESERVED_NAMES | PER_REQUEST_NAMES)
    except ChatTemplateError as error:
        raise ConfigError(str(error)) from error
    for name, value in defaults.items():
        if not isinstance(name, str):
            raise ConfigError(f"{_DEFAULTS_FIELD}: names are strings, not {name!r:.80}")
        if not _is_json(value):
            rule = f"must be JSON, at most {_MAX_DEPTH} lists and objects deep"
            raise ConfigError(f"{_DEFAULTS_FIELD}: {name!r:.80} {rule}")


def _is_json(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [child for parent in level for child in _children(parent)]
    if level:
        return False
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value
