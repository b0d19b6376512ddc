"""Files of this Python's standard library that the bundled models were not trained on.

About one file in twenty, chosen by a hash of its path. The model card in
effects/bundled/README.md says how the models were trained.
"""

import hashlib
import sysconfig
from pathlib import Path
from typing import Final

FILES_PER_HELD_OUT: Final = 20  # one of as many files is held out
MIN_CHARACTERS: Final = 200  # characters of a file that counts
NOT_TEXT: Final = "pydoc_data/topics.py"  # the language reference, as one dictionary
SKIPPED: Final = frozenset(  # folders that the training did not read either
    [
        "test",
        "tests",
        "idle_test",
        "testing",
        "site-packages",
        "__pycache__",
        "encodings",
        "msilib",
        "lib-dynload",
        "ensurepip",
        "__phello__",
        "_vendor",
    ]
)
SKIPPED_PREFIXES: Final = ("_sysconfigdata", "config-", "test_")


def held_out_texts() -> list[str]:
    """The texts of the held-out files, in the order of their paths."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in sorted(stdlib.rglob("*.py")) if _held_out(path, stdlib)]
    texts = (_text(path) for path in paths)
    return [text for text in texts if len(text) > MIN_CHARACTERS]


def _held_out(path: Path, stdlib: Path) -> bool:
    relative = path.relative_to(stdlib)
    if any(p in SKIPPED or p.startswith(SKIPPED_PREFIXES) for p in relative.parts):
        return False
    name = relative.as_posix()
    digest = hashlib.sha256(name.encode()).digest()[:8]
    return name != NOT_TEXT and int.from_bytes(digest, "big") % FILES_PER_HELD_OUT == 0


def _text(path: Path) -> str:
    """A file's text; nothing for a file that is not UTF-8."""
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError:
        return ""
