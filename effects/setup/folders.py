"""Finds the folder of a model: a local one, one of the hub's, or the bundled one."""

from importlib import resources
from pathlib import Path
from typing import Final

from minfer.values.checks import ConfigError

_GGUF: Final = (
    "GGUF files are not read yet: give the Hugging Face checkpoint that it was made "
    "from (config.json, safetensors, tokenizer.json), as a folder or by its name on "
    "the hub (org/name)"
)
_CHECKPOINT: Final = (
    "give the path of a Hugging Face checkpoint (config.json, safetensors, "
    "tokenizer.json) or its name on the hub (org/name), or leave it out for the "
    "bundled model"
)


def bundled_folder(name: str = "target") -> Path:
    """Returns the folder of a model that comes with the package.

    Raises ConfigError if it is missing.
    """
    folder = Path(str(resources.files("minfer.effects"))) / "bundled" / name
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder}: the bundled model is missing; install minfer again, or name a "
            "folder with --model"
        )
    return folder


def model_folder(model: str | None) -> Path:
    """Returns the folder of the checkpoint that `model` names, here or on the hub.

    Raises ConfigError.
    """
    if model is None:
        return bundled_folder()
    try:
        return _named(model)
    except OSError as error:  # the name is too long, or a parent folder is not readable
        raise ConfigError(
            f"model {str(model)!r:.200}: {error.strerror or error}; {_CHECKPOINT}"
        ) from error


def _named(model: str) -> Path:
    """Returns the folder of that name. Raises ConfigError, and OSError if it cannot be
    checked.
    """
    path = Path(model)
    if path.is_dir():
        if any(path.glob("*.gguf")) and not (path / "config.json").is_file():
            raise ConfigError(f"model {str(model)!r}: {_GGUF}")
        return path
    if path.suffix.lower() == ".gguf":
        raise ConfigError(f"model {str(model)!r}: {_GGUF}")
    if path.is_file():
        raise ConfigError(
            f"model {str(model)!r} is a file; give the folder that it is in, with "
            "config.json and tokenizer.json"
        )
    from minfer.effects.models.hub import is_id, snapshot  # its import takes a while

    if is_id(str(model)):
        return snapshot(str(model))
    raise ConfigError(f"model {str(model)!r} is not a folder; {_CHECKPOINT}")
