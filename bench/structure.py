"""The house in figures: rooms, arrows between them, and how it reads. Of this tree, or
another.

    python -m bench.structure                     this tree
    python -m bench.structure --before TREE       another one beside it

A room is a folder of modules. An arrow is a pair of rooms of which one imports the other,
from a file at its top, inside a function, or by a module's full name in a string; arrows
that a type checker alone follows count too. An arrow runs up if the room it leads to
stands on a floor above or beside; two rooms that know each other are a circle. Folders
inside a room that stands on a floor are parts of it: arrows between them are counted, but
run neither up nor in a circle (that the files have no circle is the business of
tests/test_architecture.py). Lengths of functions are those of what is written, signature
and docstring included. Markup, data and generated files are left out.
"""

import argparse
import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parents[1]
FLOORS: Final = (  # from the top down; rooms on one floor do not know each other
    ("effects/cli",),
    ("effects/serving", "effects/runs"),
    ("effects/live",),
    ("effects/setup", "effects/text"),
    ("effects/execution",),
    ("effects/models",),
    ("kernels",),
    ("minfer/testing",),
    ("minfer/runs",),
    ("minfer",),
)
EXCEPTIONS: Final = (
    "minfer/__init__.py",
    "minfer/__main__.py",
    "minfer/testing/__init__.py",
)
WIDE: Final = 90  # columns
LONG: Final = 40  # lines of a function
LONGEST: Final = 60
LARGE: Final = 350  # lines of a file

Arrow = tuple[str, str]


def sources(tree: Path) -> list[Path]:
    """The files of the product, by their own folders and not by links."""
    rooms = (tree / name for name in ("minfer", "effects", "kernels"))
    files = (path for room in rooms for path in sorted(room.rglob("*.py")))
    linked = (tree / "minfer" / "effects", tree / "minfer" / "kernels")
    return [path for path in files if not any(path.is_relative_to(one) for one in linked)]


def module_of(tree: Path, path: Path) -> str:
    """The name by which a file is imported."""
    parts = path.relative_to(tree).with_suffix("").parts
    inside = parts if parts[0] == "minfer" else ("minfer", *parts)
    return ".".join(inside).removesuffix(".__init__")


def imported(path: Path, modules: set[str]) -> set[str]:
    """The modules of minfer that a file imports, or names in a string."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found & modules


def only_holds(path: Path) -> bool:
    """Whether a package has no code of its own."""
    nodes = ast.parse(path.read_text("utf-8")).body
    return path.name == "__init__.py" and all(isinstance(n, ast.Expr) for n in nodes)


def arrows(tree: Path) -> set[Arrow]:
    """Which room imports which."""
    files = sources(tree)
    rooms = {module_of(tree, path): str(path.parent.relative_to(tree)) for path in files}
    holders = {module_of(tree, path) for path in files if only_holds(path)}
    found: set[Arrow] = set()
    for path in files:
        if str(path.relative_to(tree)) in EXCEPTIONS:
            continue
        mine = rooms[module_of(tree, path)]
        for module in imported(path, set(rooms) - holders):
            if rooms[module] != mine:
                found.add((mine, rooms[module]))
    return found


FLOOR_OF: Final = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def room_of(folder: str) -> str:
    """The room on a floor that a folder is part of; itself if it is on no floor."""
    above = (folder, *map(str, Path(folder).parents))
    return next((path for path in above if path in FLOOR_OF), folder)


def between_rooms(found: set[Arrow]) -> set[Arrow]:
    """The arrows that leave a room."""
    pairs = {(room_of(mine), room_of(its)) for mine, its in found}
    return {(mine, its) for mine, its in pairs if mine != its}


def runs_up(arrow: Arrow) -> bool:
    """Whether an arrow between rooms leads to a higher floor, or to a room beside."""
    mine, its = (FLOOR_OF.get(room, -1) for room in arrow)  # without a floor: above all
    return its <= mine


def circles(found: set[Arrow]) -> set[frozenset[str]]:
    """Pairs of rooms that know each other."""
    return {frozenset(arrow) for arrow in found if arrow[::-1] in found}


def functions(path: Path) -> Iterator[tuple[int, str]]:
    """The lengths of a file's functions, with their names."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            end = node.end_lineno or node.lineno
            yield end - node.lineno + 1, node.name


def skips(files: list[Path]) -> int:
    """Places that the formatter is told to leave alone."""
    return sum(path.read_text("utf-8").count("# fmt: " + "skip") for path in files)


def figures(tree: Path) -> dict[str, Any]:
    """All figures of a tree."""
    files = sources(tree)
    lines = {path: path.read_text("utf-8").splitlines() for path in files}
    tests = sorted((tree / "tests").rglob("*.py"))
    bench = sorted((tree / "bench").rglob("*.py"))
    found = arrows(tree)
    lengths = sorted(
        (length, f"{path.relative_to(tree)}: {name}")
        for path in files
        for length, name in functions(path)
    )
    biggest = max(files, key=lambda path: len(lines[path]))
    return {
        "files": len(files),
        "lines": sum(map(len, lines.values())),
        "rooms": len({path.parent for path in files}),
        "arrows": len(found),
        "circles": len(circles(between_rooms(found))),
        "arrows up": sum(map(runs_up, between_rooms(found))),
        "biggest file": f"{biggest.relative_to(tree)} ({len(lines[biggest])})",
        f"files over {LARGE} lines": sum(len(each) > LARGE for each in lines.values()),
        f"functions over {LONG} lines": sum(length > LONG for length, _ in lengths),
        f"functions over {LONGEST} lines": sum(length > LONGEST for length, _ in lengths),
        "longest function": "{1} ({0})".format(*lengths[-1]),
        "fmt: skip": skips(files),
        "fmt: skip in tests and bench": skips([*tests, *bench]),
        f"lines over {WIDE} columns": sum(
            len(line) > WIDE for each in lines.values() for line in each
        ),
    }


def commit(tree: Path) -> str:
    """The commit of a tree, as far as it has one."""
    command = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "?"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--before", type=Path, help="another tree, beside this one")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--arrows", action="store_true", help="list the arrows, too")
    options = parser.parse_args()
    trees = [HERE] if options.before is None else [options.before.resolve(), HERE]
    columns = {commit(tree): figures(tree) for tree in trees}
    if options.json:
        print(json.dumps(columns, indent=1))
        return 0
    width = max(map(len, figures(HERE)))
    print(" " * width, *(f"{name:>24}" for name in columns))
    for what in figures(HERE):
        print(
            f"{what:<{width}}", *(f"{column[what]!s:>24}" for column in columns.values())
        )
    for arrow in sorted(arrows(HERE)) if options.arrows else ():
        print(
            " -> ".join(arrow), "UP" if any(map(runs_up, between_rooms({arrow}))) else ""
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
