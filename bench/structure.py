"""The structure of the code in figures: folders, imports, cycles, and how long files are.
Of this tree, or another.

    python -m bench.structure                     this tree
    python -m bench.structure --before TREE       another one beside it

An import is a pair of files of which one imports the other: at its top, inside a
function, for type checkers only, or by a module's full name in a string. Imports are
looked at on two levels. Between folders: those of effects/, kernels/, and minfer/ with
its followers, journal/, analysis/, simulation/ and testing/. And inside each of these:
between its subfolders, and its own files, each of which counts as a folder there. The
links minfer/effects and minfer/kernels are replaced by their folders.

A cycle is a group of folders that all import each other, directly or through others. An
import is upward if it leads to a higher layer, or to another folder of the same layer
(`LAYERS`). That files have no cycle is tested by tests/test_architecture.py. Lengths of
functions include signature and docstring. Markup, data and generated files are left out.
"""

import argparse
import ast
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parents[1]
# From the top down; folders of one layer do not import each other.
LAYERS: Final = (
    ("effects/cli",),
    ("effects/proxy",),
    ("effects/serving", "effects/runs"),
    ("effects/cluster",),
    ("effects/live",),
    ("effects/setup", "effects/text"),
    ("effects/execution",),
    ("effects/net", "effects/models"),
    ("kernels",),
    ("minfer/testing",),
    ("minfer/simulation",),
    ("minfer/analysis",),
    ("minfer/journal",),
    ("minfer",),
)
# Likewise for the subfolders of each folder, one in each layer.
SUBFOLDERS: Final = {
    "minfer": "testing simulation analysis journal routing planning speculate tiers "
    "lifecycle policies records sampling blocks values",
    "effects/cli": "compare verify",
    "effects/serving": "processes input_workers tokens observability "
    "openai anthropic adapters request_parsing access wire page",
    "effects/runs": "page",
    "effects/cluster": "ray processes engine_client engine_server dispatch link",
    "effects/live": "input_processing engine adapters beams constraints journal",
    "effects/text": "tools grammars",
    "effects/execution": "warming running ranks cuda packing cpu tiers device",
    "effects/models": "draft_heads adapters fallback checkpoint layout architecture "
    "formats gguf families",
}
EXCEPTIONS: Final = (
    "minfer/__init__.py",
    "minfer/__main__.py",
    "minfer/testing/__init__.py",
)
WIDE_COLUMNS: Final = 90  # columns
LONG_FUNCTION_LINES: Final = 40  # lines of a function
VERY_LONG_FUNCTION_LINES: Final = 60
LARGE_FILE_LINES: Final = 350  # lines of a file

Import = tuple[str, str]  # which imports which


def sources(tree: Path) -> list[Path]:
    """The files of the product, by their own folders and not by links."""
    tops = (tree / name for name in ("minfer", "effects", "kernels"))
    files = (path for top in tops for path in sorted(top.rglob("*.py")))
    linked = (tree / "minfer" / "effects", tree / "minfer" / "kernels")
    return [
        path for path in files if not any(path.is_relative_to(link) for link in linked)
    ]


def module_of(tree: Path, path: Path) -> str:
    """The name by which a file is imported."""
    path_parts = path.relative_to(tree).with_suffix("").parts
    module_parts = path_parts if path_parts[0] == "minfer" else ("minfer", *path_parts)
    return ".".join(module_parts).removesuffix(".__init__")


def imported(path: Path, modules: Collection[str]) -> set[str]:
    """The modules of minfer that a file imports, or names in a string."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return names & set(modules)


def has_no_code(path: Path) -> bool:
    """Whether a file is that of a package without code of its own."""
    nodes = ast.parse(path.read_text("utf-8")).body
    return path.name == "__init__.py" and all(isinstance(n, ast.Expr) for n in nodes)


def file_imports(tree: Path) -> set[Import]:
    """Which file imports which, by their paths in the tree."""
    files = {module_of(tree, path): path for path in sources(tree)}
    names = {name: str(path.relative_to(tree)) for name, path in files.items()}
    with_code = {name for name, path in files.items() if not has_no_code(path)}
    return {
        (names[name], names[module])
        for name, path in files.items()
        if names[name] not in EXCEPTIONS
        for module in imported(path, with_code - {name})
    }


LAYER_OF: Final = {name: number for number, names in enumerate(LAYERS) for name in names}
LAYER_INSIDE: Final = {
    f"{folder}/{name}": number
    for folder, names in SUBFOLDERS.items()
    for number, name in enumerate(names.split())
}


def folder_of(path: str) -> str:
    """The folder of a layer that a file is in; its own folder if that is in none."""
    folders = [*map(str, Path(path).parents)]
    return next((folder for folder in folders if folder in LAYER_OF), folders[0])


def part_of(folder: str, path: str) -> str:
    """The subfolder of a folder that a file is in, or the file if it is in none."""
    return f"{folder}/{Path(path).relative_to(folder).parts[0]}"


def between_folders(imports: set[Import]) -> set[Import]:
    """The imports between folders."""
    pairs = {(folder_of(source), folder_of(target)) for source, target in imports}
    return {(source, target) for source, target in pairs if source != target}


def inside_folders(imports: set[Import]) -> set[Import]:
    """The imports between the parts of a folder, of all folders."""
    tops = [name for names in LAYERS for name in names]
    tops = [top for top in tops if not top.startswith("minfer/")]  # parts of minfer, here
    pairs = {
        (part_of(top, source), part_of(top, target))
        for source, target in imports
        for top in tops
        if source.startswith(f"{top}/") and target.startswith(f"{top}/")
    }
    return {(source, target) for source, target in pairs if source != target}


def is_upward(pair: Import) -> bool:
    """Whether an import leads to a higher layer, or to another folder of its layer. Files
    are in no layer; a folder in none counts as above all.
    """
    if any(name.endswith(".py") for name in pair):
        return False
    is_inside = all(name in LAYER_INSIDE for name in pair)
    layers = LAYER_INSIDE if is_inside else LAYER_OF
    source_layer, target_layer = (layers.get(name, -1) for name in pair)
    return target_layer <= source_layer


def cycles(imports: set[Import]) -> list[list[str]]:
    """The groups of folders that import each other, directly or through others."""
    targets = defaultdict[str, set[str]](set)
    for source, target in imports:
        targets[source].add(target)

    def reached(name: str) -> set[str]:
        seen, left = set[str](), [name]
        while left:
            new = targets[left.pop()] - seen
            seen |= new
            left += new
        return seen

    reach = {name: reached(name) for name in tuple(targets)}
    groups = {
        frozenset(member for member in names if name in reach.get(member, ()))
        for name, names in reach.items()
    }
    return sorted(sorted(group) for group in groups if group)


def functions(path: Path) -> Iterator[tuple[int, str]]:
    """The lengths of a file's functions, with their names."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            end = node.end_lineno or node.lineno
            yield end - node.lineno + 1, node.name


def skips(files: list[Path]) -> int:
    """The number of places that the formatter leaves alone."""
    return sum(path.read_text("utf-8").count("# fmt: " + "skip") for path in files)


def flat_files(tree: Path) -> list[Path]:
    """The files of the core that are in no subfolder."""
    return sorted((tree / "minfer").glob("*.py"))


def import_figures(tree: Path) -> dict[str, int]:
    """The figures of a tree's imports, on both levels."""
    imports = file_imports(tree)
    outer, inner = between_folders(imports), inside_folders(imports)
    return {
        "imports between folders": len(outer),
        "cycles of folders": len(cycles(outer)),
        "upward imports": sum(map(is_upward, outer)),
        "imports inside folders": len(inner),
        "cycles inside folders": len(cycles(inner)),
        "upward imports inside folders": sum(map(is_upward, inner)),
        "flat files in minfer/": len(flat_files(tree)),
    }


def figures(tree: Path) -> dict[str, Any]:
    """All figures of a tree."""
    files = sources(tree)
    lines = {path: path.read_text("utf-8").splitlines() for path in files}
    tests = sorted((tree / "tests").rglob("*.py"))
    bench = sorted((tree / "bench").rglob("*.py"))
    lengths = sorted(
        (length, f"{path.relative_to(tree)}: {name}")
        for path in files
        for length, name in functions(path)
    )
    biggest = max(files, key=lambda path: len(lines[path]))
    return {
        "files": len(files),
        "lines": sum(map(len, lines.values())),
        "folders": len({path.parent for path in files}),
        **import_figures(tree),
        "biggest file": f"{biggest.relative_to(tree)} ({len(lines[biggest])})",
        f"files over {LARGE_FILE_LINES} lines": sum(
            len(file_lines) > LARGE_FILE_LINES for file_lines in lines.values()
        ),
        f"functions over {LONG_FUNCTION_LINES} lines": sum(
            length > LONG_FUNCTION_LINES for length, _ in lengths
        ),
        f"functions over {VERY_LONG_FUNCTION_LINES} lines": sum(
            length > VERY_LONG_FUNCTION_LINES for length, _ in lengths
        ),
        "longest function": "{1} ({0})".format(*lengths[-1]),
        "fmt: skip": skips(files),
        "fmt: skip in tests and bench": skips([*tests, *bench]),
        f"lines over {WIDE_COLUMNS} columns": sum(
            len(line) > WIDE_COLUMNS
            for file_lines in lines.values()
            for line in file_lines
        ),
    }


def commit(tree: Path) -> str:
    """The commit of a tree, as far as it has one."""
    command = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    return process.stdout.strip() or "?"


def print_table(columns: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the figures of trees, by their commits, side by side."""
    names = [*next(iter(columns.values()))]
    width = max(map(len, names))
    print(" " * width, *(f"{name:>24}" for name in columns))
    for name in names:
        cells = (f"{column[name]!s:>24}" for column in columns.values())
        print(f"{name:<{width}}", *cells)


def import_lines(tree: Path, *, list_all: bool) -> Iterator[str]:
    """The imports of cycles, and upward ones, on both levels; or `list_all` one."""
    imports = file_imports(tree)
    for pairs in (between_folders(imports), inside_folders(imports)):
        groups = cycles(pairs)
        for source, target in sorted(pairs):
            in_cycle = any(source in group and target in group for group in groups)
            marks = ["CYCLE"] * in_cycle + ["UPWARD"] * is_upward((source, target))
            if list_all or marks:
                yield " ".join([source, "->", target, *marks])


def main() -> int:
    """Print the figures; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--before", type=Path, help="another tree, beside this one")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--arrows", action="store_true", help="list all imports, too")
    options = parser.parse_args()
    trees = [HERE] if options.before is None else [options.before.resolve(), HERE]
    columns = {commit(tree): figures(tree) for tree in trees}
    if options.json:
        print(json.dumps(columns, indent=1))
        return 0
    print_table(columns)
    for line in import_lines(HERE, list_all=options.arrows):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
