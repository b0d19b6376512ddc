"""GET /docs: the description of all endpoints, as a page that needs nothing but itself.

It is written here, from `description`: no script runs in it, and it asks no network for
anything.
"""

import json
from collections.abc import Iterator
from html import escape
from typing import Any, Final

from minfer.effects.serving.page.icon import DATA_URL

JsonObject = dict[str, Any]
_JSON: Final = "application/json"
_EVENTS: Final = "text/event-stream"
_SERVER: Final = "http://127.0.0.1:8000"  # where `minfer serve` listens by default
_STYLE: Final = """
:root { color-scheme: light dark; --page: #fff; --ink: #222; --soft: #666; --line: #ddd;
        --accent: #06c; --sunken: #f3f4f7 }
@media (prefers-color-scheme: dark) {
  :root { --page: #14181e; --ink: #e6e9ef; --soft: #9aa5b5; --line: #2b323d;
          --accent: #8ab0ff; --sunken: #0e1116 }
}
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto;
       padding: 0 1rem; color: var(--ink); background: var(--page) }
a { color: var(--accent) }
h2 { font-size: 1.1rem; margin: 2.5rem 0 0; padding-top: 1rem;
     border-top: 1px solid var(--line) }
h2 b { color: var(--accent); text-transform: uppercase; font-size: .8em;
       margin-right: .5em }
h3 { font-size: .9rem; color: var(--soft); margin: 1rem 0 0 }
code, pre, td:first-child { font-family: ui-monospace, monospace; font-size: .9em }
pre { margin: .3rem 0; padding: .6rem .8rem; overflow-x: auto; white-space: pre-wrap;
      overflow-wrap: anywhere; background: var(--sunken); border-radius: 6px }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 }
td { border-top: 1px solid var(--line); padding: .2rem .8rem .2rem 0;
     vertical-align: top }
td:nth-child(3) { color: var(--soft) }
"""


def page(about: JsonObject) -> str:
    """The page of an OpenAPI description."""
    info = about["info"]
    schemas = about["components"]["schemas"]
    title = f"{info['title']} {info['version']}"
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<link rel="icon" href="{DATA_URL}">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1><p>{escape(info['description'])} Programs read ",
        '<a href="openapi.json">openapi.json</a>.</p>',
    ]
    for path, methods in about["paths"].items():
        for method, operation in methods.items():
            parts += _operation(method, path, operation)
    parts.append("<h1>Objects</h1>")
    for name, schema in schemas.items():
        parts.append(f'<h2 id="{escape(name)}">{escape(name)}</h2>')
        parts += _table(schema)
    return "".join([*parts, "</body></html>"])


def _operation(method: str, path: str, operation: JsonObject) -> Iterator[str]:
    yield f"<h2><b>{escape(method)}</b><code>{escape(path)}</code></h2>"
    yield f"<p>{escape(operation['summary'])}"
    asked = operation.get("requestBody", {}).get("content", {}).get(_JSON, {})
    if asked:
        yield f" Body: {_type(asked['schema'])}."
    yield "</p>"
    answered = operation["responses"].get("200", {}).get("content", {})
    if "example" not in answered.get(_JSON, {}):
        return
    yield _shown("For example", _command(path, asked.get("example")))
    yield _shown("Answer", json.dumps(answered[_JSON]["example"], indent=1))
    if stream := answered.get(_EVENTS, {}).get("example"):
        yield _shown('With "stream": true', stream)


def _command(path: str, body: JsonObject | None) -> str:
    """What one types to try it."""
    asked = f"curl {_SERVER}{path}"
    if body is None:
        return asked
    data = json.dumps(body).replace("'", "'\\''")  # as a shell reads it
    return f"{asked} -H 'Content-Type: {_JSON}' -d '{data}'"


def _shown(title: str, text: str) -> str:
    return f"<h3>{escape(title)}</h3><pre>{escape(text)}</pre>"


def _table(schema: JsonObject) -> Iterator[str]:
    """The fields of an object."""
    needed = schema.get("required", ())
    yield "<table>"
    for name, field in schema.get("properties", {}).items():
        notes = ["needed"] if name in needed else []
        if field.get("default") is not None:
            notes.append(f"default {json.dumps(field['default'])}")
        notes += [field["description"]] if "description" in field else []
        about = escape("; ".join(notes))
        yield f"<tr><td>{escape(name)}</td><td>{_type(field)}</td><td>{about}</td></tr>"
    yield "</table>"


_BOUNDS: Final = {
    "minimum": "from",
    "exclusiveMinimum": "above",
    "maximum": "to",
    "exclusiveMaximum": "below",
    "maxLength": "characters up to",
    "maxItems": "items up to",
}


def _type(schema: JsonObject) -> str:
    """A type in words, as HTML."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        kinds = [one for one in schema["anyOf"] if one != {"type": "null"}]
        return " or ".join(map(_type, kinds))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        shown = [f"<code>{escape(json.dumps(one))}</code>" for one in values]
        return ", ".join(shown)
    return _plain(schema)


def _plain(schema: JsonObject) -> str:
    kind = schema.get("type", "anything")
    said = " or ".join(kind) if isinstance(kind, list) else str(kind)
    if kind == "array":
        said = f"list of {_type(schema.get('items', {}))}"
    bounds = [f"{word} {schema[key]}" for key, word in _BOUNDS.items() if key in schema]
    return ", ".join([said, *map(escape, bounds)])
