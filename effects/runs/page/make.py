"""A run as one page of HTML, which needs nothing but a browser.

Theory. The columns of the run are deflated, and encoded in base64, which cannot contain a
`<`: no text of a request can become part of the page's markup. The page's own policy
allows only what was inserted here, by digest.
"""

import base64
import hashlib
import json
import zlib
from array import array
from collections.abc import Iterable
from operator import sub
from pathlib import Path
from typing import Any, Final

from minfer.effects.runs.page.columns import KINDS, TABLES, Run
from minfer.effects.runs.page.scripts import joined_scripts
from minfer.records.config import SIZES, EngineConfig
from minfer.records.state import Turn
from minfer.values.checks import ConfigError

_HERE: Final = Path(__file__).parent
_WORD_BYTES: Final = 8  # bytes; columns of doubles begin at multiples of it
_ZLIB_LEVEL: Final = 9  # zlib's level


class ViewError(ConfigError):
    """There is nothing to show, or no place to write it; the message has the reason."""


def page(name: str, config: EngineConfig, turns: Iterable[Turn]) -> bytes:
    """The page of a run named `name`. Raises ViewError if there are no turns."""
    run = Run()
    for turn in turns:
        run.add_turn(turn)
    if not run.time:
        raise ViewError(f"{name} holds no turns yet: there is nothing to show")
    data = zlib.compress(_packed(name, config, run), _ZLIB_LEVEL)
    return template().replace(b"@DATA@", base64.b64encode(data))


def template() -> bytes:
    """The page without its run: the markup with style, scripts and its policy in it."""
    styles = sorted((_HERE / "style").glob("*.css"))
    style = "\n" + "\n".join(path.read_text("utf-8") for path in styles)
    script = "\n" + joined_scripts()
    markup = (_HERE / "page.html").read_text("utf-8")
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"script-src '{_digest(script)}'; style-src '{_digest(style)}'"
    )
    markup = markup.replace("@POLICY@", policy)
    return markup.replace("@STYLE@", style).replace("@SCRIPT@", script).encode()


def _digest(text: str) -> str:
    """The digest of a text for a policy, so that exactly this text may run."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _packed(name: str, config: EngineConfig, run: Run) -> bytes:
    """Length of the header, the header, and the columns as it lists them.

    A column is its first cell and then differences, most of which are small: they deflate
    well. The header is padded, so that the columns are aligned.
    """
    columns: dict[str, array[Any]] = {"turn.time": run.time}
    for table, names in TABLES.items():
        keys = (f"{table}.{column_name}" for column_name in names)
        columns |= zip(keys, run.tables[table], strict=True)
    header = json.dumps(_header(name, config, run, columns)).encode()
    header += b" " * (-len(header) % _WORD_BYTES)
    cells = (
        column[:1] + array(column.typecode, map(sub, column[1:], column))
        for column in columns.values()
    )
    return b"".join(
        (len(header).to_bytes(_WORD_BYTES, "little"), header, *map(bytes, cells))
    )


def _header(
    name: str, config: EngineConfig, run: Run, columns: dict[str, "array[Any]"]
) -> dict[str, object]:
    """The page's data besides its columns."""
    return {
        "name": name,
        "first": run.first,
        "cached": run.cached,
        "prompt": run.prompt,
        "kinds": KINDS,
        "texts": [*run.texts],
        "policy": type(config.policy).__name__,
        **{size: getattr(config, size) for size in SIZES},
        "columns": [
            (key, column.typecode, len(column)) for key, column in columns.items()
        ],
    }


def write_page(path: Path, name: str, config: EngineConfig, turns: Iterable[Turn]) -> int:
    """Write a run's page, whole or not at all; returns its size in bytes. Raises
    ViewError.
    """
    return write_whole(path, page(name, config, turns))


def write_whole(path: Path, data: bytes) -> int:
    """Write a page, whole or not at all; returns its size in bytes. Raises ViewError."""
    partial_path = path.with_name(path.name + ".part")
    try:
        partial_path.write_bytes(data)
        partial_path.replace(path)
    except OSError as error:
        if partial_path.is_file():
            partial_path.unlink()
        raise ViewError(
            f"{path}: {error.strerror or error}; name another place with -o"
        ) from None
    return len(data)
