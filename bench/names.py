"""How many local names say nothing about their value, and which class names mean two
things. Of this tree, or another.

    python -m bench.names                     this tree
    python -m bench.names --before TREE       another one beside it

Counted are bindings of local names: parameters except self and cls, targets of
assignments, loops and comprehensions, `with ... as`, `except ... as`, `:=`, and captures
of `case`. Those of a module's or a class's own level are left out, except in
comprehensions, and so is `_`. They are counted apart for the product (minfer/, effects/
and kernels/, without the links minfer/effects and minfer/kernels), tests/ and bench/.
"""

import argparse
import ast
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from bench.structure import HERE, commit, print_table, sources

# A name is generic if it fits a value of any kind: a reader has to look up the right-hand
# side to learn what it holds. Left out are words that say enough in most places: `seen`
# (a visited set), `rest` (after a split), `by` (a key or a factor), `other` (of two
# operands), `known`, `wanted`, `due`, `inside`.
_GENERIC: Final = (
    "one ones others another found at part parts "
    "why most least what how where who whom whose whoever when until "
    "its their theirs ours mine own "
    "given came made kept done held said told gone taken got put begun was is "
    "more few fewer some several many each every all whole both either "
    "this that these those it them here there then "
    "about of to within again still alone thing things"
)
GENERIC: Final = frozenset(_GENERIC.split())
# Class names that are right in each of their files, with the reason.
RIGHT_TWICE: Final[dict[str, str]] = {}

_SCOPES: Final = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.Lambda,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
)


def local_names(node: ast.AST, *, is_local: bool = False) -> Iterator[str]:
    """The local names that a tree binds, as often as it does."""
    for child in ast.iter_child_nodes(node):
        name = _bound_name(child)
        if isinstance(child, ast.arg) or (name and is_local):
            yield name
        inner = not isinstance(child, ast.ClassDef) and is_local
        yield from local_names(child, is_local=inner or isinstance(child, _SCOPES))


def _bound_name(node: ast.AST) -> str:
    """The name that a node binds, or an empty string."""
    match node:
        case ast.arg(arg=name) if name not in ("self", "cls"):
            return name
        case ast.Name(id=name, ctx=ast.Store()):
            return name
        case ast.ExceptHandler(name=str(name)):
            return name
        case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            return name
        case ast.MatchMapping(rest=str(name)):
            return name
    return ""


def binding_figures(area: str, files: Iterable[Path]) -> dict[str, Any]:
    """The numbers of bindings in files, of generic ones, and their share."""
    names = [
        name
        for path in files
        for name in local_names(ast.parse(path.read_text("utf-8")))
        if name not in ("", "_")
    ]
    generic = sum(name in GENERIC for name in names)
    return {
        f"local names in {area}": len(names),
        f"generic names in {area}": generic,
        f"% generic in {area}": round(100 * generic / max(1, len(names)), 1),
    }


def repeated_classes(tree: Path) -> dict[str, list[str]]:
    """The files of each class name that several files of the product define, without
    those of `RIGHT_TWICE`.
    """
    files = defaultdict[str, set[str]](set)
    for path in sources(tree):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                files[node.name].add(str(path.relative_to(tree)))
    return {
        name: sorted(paths)
        for name, paths in sorted(files.items())
        if len(paths) > 1 and name not in RIGHT_TWICE
    }


def figures(tree: Path) -> dict[str, Any]:
    """All figures of a tree."""
    return {
        **binding_figures("the product", sources(tree)),
        **binding_figures("tests/", sorted((tree / "tests").rglob("*.py"))),
        **binding_figures("bench/", sorted((tree / "bench").rglob("*.py"))),
        "class names of several files": len(repeated_classes(tree)),
    }


def main() -> int:
    """Print the figures; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--before", type=Path, help="another tree, beside this one")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    trees = [HERE] if options.before is None else [options.before.resolve(), HERE]
    columns = {commit(tree): figures(tree) for tree in trees}
    if options.json:
        print(json.dumps(columns, indent=1))
        return 0
    print_table(columns)
    for name, paths in repeated_classes(HERE).items():
        print(f"class {name}: {', '.join(paths)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
