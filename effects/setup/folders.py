"""Finds the folder of a model: a local one, one of the hub's, or the bundled one; a GGUF
file is in the place of a folder.
"""

from importlib import resources
from pathlib import Path
from typing import Final

from minfer.effects.models.gguf.container import is_gguf
from minfer.values.checks import ConfigError

_CHECKPOINT: Final = (
    "give the path of a Hugging Face checkpoint (config.json, safetensors, "
    "tokenizer.json) or of a GGUF file, or the checkpoint's name on the hub "
    "(org/name)"
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


def model_folder(model: str | None, download_dir: str | Path | None = None) -> Path:
    """Returns the folder of the checkpoint that `model` names, here or on the hub, or the
    path of a GGUF file. `download_dir` is the hub's cache, by default the user's.

    Raises ConfigError.
    """
    if model is None:
        return bundled_folder()
    try:
        return _named(model, download_dir)
    except OSError as error:  # the name is too long, or a parent folder is not readable
        raise ConfigError(
            f"model {str(model)!r:.200}: {error.strerror or error}; {_CHECKPOINT}"
        ) from error


def _named(model: str, download_dir: str | Path | None) -> Path:
    """Returns the folder of that name. Raises ConfigError, and OSError if it cannot be
    checked.
    """
    path = Path(model)
    if path.is_dir():
        files = sorted(file.name for file in path.iterdir() if is_gguf(file))
        if files and not (path / "config.json").is_file():
            raise ConfigError(
                f"model {str(model)!r} is a folder of GGUF files; name one of them, such "
                f"as {str(path / files[0])!r}"
            )
        return path
    if is_gguf(path):
        if not path.is_file():
            raise ConfigError(
                f"model {str(model)!r}: there is no such file; give the path of a GGUF "
                f"file here: those of the hub are downloaded first, with `hf download`"
            )
        return path
    if path.is_file():
        raise ConfigError(
            f"model {str(model)!r} is a file; give the folder that it is in, with "
            "config.json and tokenizer.json"
        )
    from minfer.effects.models.checkpoint.hub import (  # its import takes a while
        is_id,
        snapshot,
    )

    if is_id(str(model)):
        return snapshot(str(model), download_dir)
    raise ConfigError(f"model {str(model)!r} is not a folder; {_CHECKPOINT}")
