"""Imports a module with another syntax tree than its file has."""

import ast
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

Change = Callable[[ast.Module], ast.Module]


class _Changed(SourceFileLoader):
    """Loads one file, its tree changed; neither reads nor writes compiled files."""

    def __init__(self, name: str, path: str, change: Change) -> None:
        super().__init__(name, path)
        self.change = change

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = ast.fix_missing_locations(
            self.change(ast.parse(self.get_data(path), path))
        )
        code: CodeType = compile(tree, path, "exec", dont_inherit=True)
        return code


class _Finder(MetaPathFinder):
    def __init__(self, changes: dict[str, Change]) -> None:
        self.changes = changes

    def find_spec(
        self, fullname: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.changes:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"no module {fullname} to change", name=fullname)
        spec.loader = _Changed(fullname, spec.origin, self.changes[fullname])
        return spec


def install(changes: dict[str, Change]) -> None:
    """From now on these modules are imported changed; none may have been imported yet."""
    late = sorted(changes.keys() & sys.modules.keys())
    if late:
        raise ImportError(f"imported before it could be changed: {', '.join(late)}")
    sys.meta_path.insert(0, _Finder(changes))
