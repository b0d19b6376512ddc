"""What the build backend does beside its own work (pyproject.toml names this file)."""

import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

IMAGE = re.compile(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n+", re.MULTILINE)
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:)[^)]*\)")


class IndexReadme(MetadataHookInterface):
    """Gives an index the README without links to files, which an index does not have."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the README to the metadata."""
        text = (Path(self.root) / "README.md").read_text("utf-8")
        text = LINK.sub(r"\1", IMAGE.sub("", text))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


class EditableFolder(BuildHookInterface[Any]):
    """Makes the folder that an editable installation puts on the path.

    It has a link to minfer, and neither tests nor kernels. Type checkers read folders on
    the path, but not the import hooks that the backend has for the same purpose.
    """

    def initialize(self, version: str, _: dict[str, Any]) -> None:
        """Make the folder, if this is an editable installation."""
        link = Path(self.root) / ".editable" / "minfer"
        if version == "editable" and not link.is_symlink():
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(Path("..", "minfer"), target_is_directory=True)
