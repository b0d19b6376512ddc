"""A chat template that the settings give, in place of the checkpoint's.

As in vLLM, the setting is the path of a file or the template's text. The file is read
once, when the settings are made: processes that start later render as those before them.
"""

from pathlib import Path
from typing import Any, Final

from attrs import frozen

from minfer.values.checks import ConfigError

_SETTING: Final = "chat_template"
_MAX_BYTES: Final = 2**22  # of a file; the longest templates have some 40 KB
_TEMPLATE_MARK: Final = "{"  # in every template, and in few paths
_MAX_SHOWN_CHARS: Final = 200


@frozen
class CustomTemplate:
    """A chat template, and where it comes from, for errors."""

    text: str
    source: str


def read_custom_template(value: Any) -> CustomTemplate | None:
    """Returns the template of a setting: of the file at this path, or else the text
    itself, if it has a `{`. Raises ConfigError.
    """
    if value is None or isinstance(value, CustomTemplate):
        return value
    if not isinstance(value, str | Path):
        allowed = "the path of a file, or a template's text"
        raise ConfigError(f"{_SETTING} must be {allowed}, not a {type(value).__name__}")
    path = Path(value)
    if _exists(path):
        return CustomTemplate(_text(path), str(path))
    if isinstance(value, str) and _TEMPLATE_MARK in value:
        return CustomTemplate(value, "the text of the setting")
    raise ConfigError(
        f"{_SETTING}: there is no file {_shown(value)}, and it is no template, which "
        f"would have a {_TEMPLATE_MARK}; give the path of a file, or a template's text"
    )


def _exists(path: Path) -> bool:
    """Whether there is a file or folder; a template's text may be no possible path."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _text(path: Path) -> str:
    source = f"{_SETTING} {_shown(path)}"
    if not path.is_file():
        raise ConfigError(f"{source} is not a file; give the path of a file")
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(f"{source} cannot be read: {reason}") from error
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"{source} has more than {_MAX_BYTES} bytes; is it a template?")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source} is not text in UTF-8: {error}") from error
    if not text.strip():
        raise ConfigError(f"{source} is empty; give a template")
    return text


def _shown(value: str | Path) -> str:
    return repr(str(value)[:_MAX_SHOWN_CHARS])
