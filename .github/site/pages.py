"""Pages and tables of the site that are generated from the code."""

import argparse
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, Final, get_args

import attrs

import minfer
from minfer.effects.cli.main import COMMANDS
from minfer.effects.serving.description import description
from minfer.effects.serving.observability.metric_help import HELP
from minfer.effects.setup.option_descriptions import settings_help
from minfer.policy import Policy
from minfer.records import messages
from minfer.sampling.params import ROW_FIELDS

# Methods that minfer's own server calls.
SERVER_METHODS: Final = frozenset(
    {
        "check_constraint",
        "note_reset",
        "render",
        "set_parsers",
        "warm_grammars",
        "with_request_templates",
    }
)
FIRST_COMMANDS: Final = ("serve", "route")
UNBOUNDED: Final = 2**62  # a bound beyond it is that of the number's type
FIRST_CLASSES: Final = ("LLM", "AsyncLLM", "SamplingParams")


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _code(text: str) -> str:
    return f"`{text}`"


def options_page() -> str:
    """Returns all options of all commands, from their parsers."""
    parts = ["# Options\n\nWhat `minfer COMMAND --help-all` shows, for all commands.\n"]
    for entry in sorted(COMMANDS, key=lambda entry: entry.name not in FIRST_COMMANDS):
        command: Any = import_module(entry.module)
        parser = argparse.ArgumentParser(prog=f"minfer {entry.name}")
        command.add_options(parser)
        rows = [row for action in parser._actions for row in _option_row(parser, action)]
        text = command.DESCRIPTION
        options = table(("option", "what it does"), rows)
        parts.append(f"## minfer {entry.name}\n\n{text}\n\n{options}")
    return "\n".join(parts)


def _option_row(
    parser: argparse.ArgumentParser, action: argparse.Action
) -> Iterator[tuple[str, str]]:
    if action.help in (None, argparse.SUPPRESS) or action.dest == "help":
        return
    values = action.metavar or "|".join(map(str, action.choices or ()))
    if action.option_strings:
        shown = "" if action.nargs == 0 else f" {values}"
        names = [f"{name}{shown}".rstrip() for name in action.option_strings]
    else:
        names = [str(action.metavar or action.dest)]
    text = parser._get_formatter()._expand_help(action)
    yield ", ".join(_code(name) for name in names), text


def endpoints_page() -> str:
    """Returns all endpoints and their fields, from the description of the API."""
    api = description()
    operations = [
        (f"`{method.upper()} {path}`", operation["summary"])
        for path, methods in api["paths"].items()
        for method, operation in methods.items()
    ]
    parts = [
        "# Endpoints\n\nAll endpoints of `minfer serve`, from `/openapi.json`.\n",
        "[The page on HTTP](../effects/serving/README.md) explains them.\n",
        table(("endpoint", "what it does"), operations),
    ]
    for path, methods in api["paths"].items():
        name = _body_name(methods)
        if name is not None:
            fields = api["components"]["schemas"][name]["properties"]
            rows = [(_code(key), _type(value)) for key, value in fields.items()]
            parts.append(f"## POST {path}\n\n{table(('field', 'values'), rows)}")
    return "\n".join(parts)


def _body_name(methods: Mapping[str, Any]) -> str | None:
    body = methods.get("post", {}).get("requestBody")
    if body is None:
        return None
    schema = body["content"]["application/json"]["schema"]
    return str(schema["$ref"]).rsplit("/", 1)[1] if "$ref" in schema else None


def _type(schema: Mapping[str, Any]) -> str:
    """Returns the values of a field in words."""
    if "description" in schema and "enum" not in schema:
        return str(schema["description"])
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        prefix = "not supported, except " if "description" in schema else ""
        return prefix + ", ".join(_code(str(value)) for value in values)
    kinds = [_kind(choice) for choice in schema.get("anyOf", [schema])]
    default = schema.get("default")
    shown = f" (default: `{default}`)" if default not in (None, [], {}) else ""
    return " or ".join(kind for kind in dict.fromkeys(kinds) if kind != "null") + shown


def _kind(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return "an object"
    if "const" in schema or "enum" in schema:
        return _type(schema)
    if schema.get("type") == "array":
        return f"a list of: {_kind(schema.get('items', {}))}"
    names = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to"}
    bounds = [
        f" {word} {schema[key]}"
        for key, word in names.items()
        if abs(schema.get(key, UNBOUNDED)) < UNBOUNDED
    ]
    return str(schema.get("type", "anything")) + "".join(bounds)


def metrics_page() -> str:
    """Returns all metrics with their HELP lines."""
    rows = [(_code(f"minfer_{name}"), text) for name, text in HELP.items()]
    return (
        "# Metrics\n\nAll metrics of `/metrics`. Counters end there with `_total`, "
        "and histograms with `_bucket`, `_sum` and `_count`. [Watch a "
        "server](../effects/serving/observability/README.md) says how to use them.\n\n"
        + table(("metric", "meaning"), rows)
    )


def reasons_table() -> str:
    """Returns what the engine says of its decisions: the classes of `Reason`."""
    reasons = get_args(messages.Reason)
    return table(
        ("reason", "when the engine gives it"),
        ((_code(reason.__name__), inspect.getdoc(reason) or "") for reason in reasons),
    )


def python_page() -> str:
    """Returns the classes of the library, from their docstrings."""
    parts = [
        "# Python API\n\nWhat `from minfer import ...` offers, from its docstrings.\n",
        "[The page on Python](../effects/live/README.md) has examples.\n",
        "## Settings\n\nThe parameters of `LLM` and `AsyncLLM`, beside `model`.\n",
        table(
            ("setting", "meaning"),
            ((_code(setting.name), setting.text) for setting in settings_help()),
        ),
        "## Sampling\n\nSampling values of `SamplingParams`.\n",
        table(
            ("value", "meaning"),
            ((_code(name), meaning.help) for name, meaning in ROW_FIELDS.items()),
        ),
    ]
    parts += [_class(cls) for cls in (*_api(), Policy)]
    return "\n".join(parts)


def _api() -> list[type]:
    """Returns the classes that a program imports from minfer, without errors."""
    names = dict.fromkeys((*FIRST_CLASSES, *minfer.__all__))
    found = [getattr(minfer, name) for name in names]
    classes = (item for item in found if isinstance(item, type))
    return [cls for cls in dict.fromkeys(classes) if not issubclass(cls, Exception)]


def _class(cls: type) -> str:
    text = f"## {cls.__name__}\n\n{_prose(cls)}\n"
    if attrs.has(cls):
        names = ", ".join(_code(field.name) for field in attrs.fields(cls))
        text += f"\nFields: {names}.\n"
    for name, method in inspect.getmembers(cls, inspect.isfunction):
        if not name.startswith("_") and method.__doc__ and name not in SERVER_METHODS:
            text += (
                f"\n### {cls.__name__}.{name}\n\n{_signature(method)}{_prose(method)}\n"
            )
    return text


def _signature(method: Callable[..., object]) -> str:
    signature = inspect.signature(method)
    plain = [
        parameter.replace(annotation=parameter.empty)
        for parameter in signature.parameters.values()
        if parameter.name != "self"
    ]
    shown = signature.replace(parameters=plain, return_annotation=signature.empty)
    return f"```python\n{method.__name__}{shown}\n```\n\n"


def _prose(item: object) -> str:
    """Returns a docstring as Markdown; its indented parts are code there, too."""
    return inspect.getdoc(item) or ""
