"""Files of a split GGUF model, as llama.cpp names them: `NAME-00001-of-00003.gguf` ...

The first has the metadata of the model; the tensors are divided among all of them.
"""

import re
from pathlib import Path
from typing import Final

from minfer.effects.models.config_reader import UnsupportedModelError
from minfer.effects.models.json_files import damaged

MAX_FILES: Final = 1 << 10
_NAME: Final = re.compile(
    r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?=\.gguf$)"
)


def split_paths(path: Path) -> tuple[Path, ...]:
    """Returns the files of a model by the path of the first of them; of a model that is
    not split, the path alone.

    Raises `UnsupportedModelError` for the path of another one than the first, and
    `CorruptFileError` for one that is missing.
    """
    match = _NAME.match(path.name)
    if match is None:
        return (path,)
    count = int(match["count"])
    if not 1 <= count <= MAX_FILES:
        raise UnsupportedModelError(
            f"{path}: the name says that the model is split into {count} files; 1 to "
            f"{MAX_FILES} are supported"
        )
    ending = path.name[match.end() :]
    paths = tuple(
        path.with_name(f"{match['stem']}-{number:05}-of-{count:05}{ending}")
        for number in range(1, count + 1)
    )
    if path != paths[0]:
        raise UnsupportedModelError(
            f"{path}: is a later file of a split model; give the first one, {paths[0]}"
        )
    for file in paths[1:]:
        if not file.is_file():
            raise damaged(file, f"not found, though {path.name} says there are {count}")
    return paths
