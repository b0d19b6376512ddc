"""Docstrings, comments and READMEs name modules and files that exist."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDERS: Final = ("minfer", "effects", "kernels", "bench", "tests")
PYTHON: Final = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if not any(parent.is_symlink() for parent in path.parents)
)
READMES: Final = [
    ROOT / "README.md",
    *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("README.md"))),
]
CARD: Final = ROOT / "effects" / "bundled" / "README.md"  # names a script of the past
PATHS: Final = [f"/{path.relative_to(ROOT).as_posix()}" for path in PYTHON]
# A dotted name in backticks or behind `python -m`, and a file's name, with or without
# folders. NAME stands for any name.
MODULE: Final = re.compile(rf"(?:`|-m )((?:{'|'.join(FOLDERS)})(?:\.(?!NAME)\w+)+)")
FILE: Final = re.compile(r"(?<![\w/.*<])(?:\.\./)*((?:\w[\w-]*/)*(?!NAME)\w[\w-]*\.py)\b")


def texts(path: Path) -> Iterator[str]:
    """Yields the docstrings and comments of a Python file, or the whole of a README."""
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        yield text
    elif MODULE.search(text) or FILE.search(text):
        for node in ast.walk(ast.parse(text)):
            if isinstance(
                node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            ):
                yield ast.get_docstring(node) or ""
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.string


def file_exists(name: str) -> bool:
    """Returns whether the path of a file ends with this name."""
    return any(path.endswith(f"/{name}") for path in PATHS)


def module_exists(name: str) -> bool:
    """Returns whether a dotted name is a module's, or a module's with a word of its text
    behind it.
    """
    words = name.removeprefix("minfer.").split(".")
    if words[0] not in FOLDERS:
        words = ["minfer", *words]
    for length in range(len(words), 0, -1):
        module = ROOT.joinpath(*words[:length])
        for path in (module.with_suffix(".py"), module / "__init__.py"):
            if path.is_file():
                inner = words[length : length + 1]
                return {*inner} <= {*re.findall(r"\w+", path.read_text("utf-8"))}
    return False


def missing_names(text: str) -> list[str]:
    """Returns the modules and files that a text names and that do not exist."""
    modules = [name for name in MODULE.findall(text) if not module_exists(name)]
    return modules + [name for name in FILE.findall(text) if not file_exists(name)]


def test_named_modules_and_files_exist() -> None:
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in (*PYTHON, *READMES)
        if path != CARD
        for text in texts(path)
        for name in missing_names(text)
    ]
    assert not missing


def test_names_of_what_does_not_exist_are_found() -> None:
    text = (
        "`kernels.gone.norm`, `minfer.records.plan`, runs/planning.py, ../gone.py, gqa.py"
    )
    missing = ["kernels.gone.norm", "runs/planning.py", "gone.py"]
    assert missing_names(text) == missing
    assert missing_names("`minfer.records.config.gone_word` `python -m bench.NAME`") == [
        "minfer.records.config.gone_word"
    ]
