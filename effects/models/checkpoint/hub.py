"""Checkpoints by name: `org/name` or `org/name@revision` becomes a folder of the local
hub cache.

Only data is downloaded: safetensors, JSON and tokenizers of the top folder, templates.
Code and pickles never are. Without a network, the cache's content is used.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from minfer.values.checks import ConfigError
from minfer.values.texts import without_breaks

_ID: Final = re.compile(r"([\w-][\w.-]*/)?[\w-][\w.-]*(@\w[\w./+-]*)?", re.ASCII)
ALLOW_PATTERNS: Final = [
    "*.safetensors",
    "*.json",
    "*.jinja",
    "*.model",
    "*.txt",
    "*.tiktoken",
]
# Of subfolders only the chat templates, and not the vendor's own copy of the weights.
IGNORE_PATTERNS: Final = [f"*/{name}" for name in ALLOW_PATTERNS if name != "*.jinja"] + [
    "consolidated*"
]
NOT_FOUND: Final = (
    "is neither a folder here nor a model on the hub; correct the name, or, if it is "
    "private, run `hf auth login`"
)
OTHER_REVISION: Final = "correct or leave out what follows the @"
OFFLINE: Final = (
    "is neither a folder here nor complete in the hub's local cache, and the hub "
    "cannot be reached: connect to the network (and unset HF_HUB_OFFLINE), or give a "
    "folder"
)


class HubError(ConfigError):
    """A checkpoint cannot be found or downloaded. The message names the cause and the
    remedy.
    """


def is_id(model: str) -> bool:
    """Returns whether this could name a checkpoint on the hub."""
    return _ID.fullmatch(model) is not None


def snapshot(
    model: str,
    cache_dir: str | Path | None = None,
    files: Sequence[str] = ALLOW_PATTERNS,
) -> Path:
    """Returns the folder of the checkpoint `model`, downloaded if necessary, into
    `cache_dir` or the user's own cache: those of its files that these patterns match.
    Raises HubError.
    """
    from huggingface_hub import constants, errors, snapshot_download

    name, _, revision = model.partition("@")
    try:
        patterns: Any = {
            "allow_patterns": [*files],
            "ignore_patterns": IGNORE_PATTERNS,
            "cache_dir": cache_dir,
        }
        return Path(snapshot_download(name, revision=revision or None, **patterns))
    except errors.GatedRepoError:
        page = f"{constants.ENDPOINT}/{name}"
        reason = f"is gated: ask for access at {page}, then run `hf auth login`"
    except errors.RepositoryNotFoundError:
        reason = NOT_FOUND
    except errors.RevisionNotFoundError:
        reason = f"has no revision {revision!r} on the hub; {OTHER_REVISION}"
    except errors.LocalEntryNotFoundError:
        reason = OFFLINE
    except errors.HFValidationError as error:
        reason = f"is neither a folder here nor a name of the hub: {error}"
    except Exception as error:  # an error of its HTTP library, or a full disk
        reason = f"cannot be downloaded ({error}); try again, or give a folder"
    raise HubError(f"model {model!r} {without_breaks(reason)}")
