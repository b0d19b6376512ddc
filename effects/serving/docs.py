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
_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto;
       padding: 0 1rem; color: #222; background: #fff }
h2 { font-size: 1.1rem; margin: 2.5rem 0 0; padding-top: 1rem;
     border-top: 1px solid #ddd }
h2 b { color: #06c; text-transform: uppercase; font-size: .8em; margin-right: .5em }
code, td:first-child { font-family: ui-monospace, monospace; font-size: .9em }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 }
td { border-top: 1px solid #eee; padding: .2rem .8rem .2rem 0; vertical-align: top }
td:nth-child(3) { color: #777 }
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
    if body := operation.get("requestBody"):
        yield f" Body: {_type(body['content']['application/json']['schema'])}."
    yield "</p>"


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
