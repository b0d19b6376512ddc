"""The rooms and the arrows between them, read off the syntax trees."""

import ast
import sys
from functools import cache
from pathlib import Path

import pytest

import minfer

ROOT = Path(__file__).resolve().parents[1]
CORE = sorted((ROOT / "minfer").glob("*.py")) + sorted((ROOT / "minfer" / "testing").rglob("*.py"))
KERNELS = sorted((ROOT / "kernels").rglob("*.py"))
EFFECTS = sorted((ROOT / "effects").rglob("*.py"))
TESTS = ROOT / "tests"

# What a room may import besides the standard library and itself.
# From minfer/__init__.py only, when LLM, AsyncLLM or what goes with them is asked for.
LAZY = {f"minfer.effects.{module}" for module in minfer._LAZY.values()}
PURE = {"attrs"}


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Every module that a file imports, anywhere in it."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.append(node.module or "")
    return tuple(found)


def room(module: str) -> str:
    """Which room a module of minfer is in."""
    parts = module.split(".")
    return parts[1] if parts[0] == "minfer" and len(parts) > 1 else "minfer"


@pytest.mark.parametrize("path", CORE, ids=lambda p: p.name)
def test_the_core_imports_nothing_that_touches_the_world(path: Path) -> None:
    for module in imports(path):
        top = module.split(".")[0]
        if top == "minfer":
            lazy = path.name == "__init__.py" and module in LAZY
            assert lazy or room(module) not in ("effects", "kernels"), f"{path.name}: {module}"
        elif top == "immutables":
            assert path.name == "pmap.py", f"{path.name}: only pmap knows the map library"
        elif top == "hypothesis":
            assert path.parent.name == "testing", path.name
        else:
            assert top in sys.stdlib_module_names or top in PURE, f"{path.name}: {module}"
            assert top not in WORLDLY, f"{path.name}: {module} touches the world"


WORLDLY = {
    "asyncio", "datetime", "io", "logging", "multiprocessing", "os", "pathlib", "random",
    "secrets", "shutil", "socket", "subprocess", "tempfile", "threading", "time", "uuid",
}  # fmt: skip


@pytest.mark.parametrize("path", KERNELS, ids=lambda p: p.name)
def test_kernels_import_torch_and_triton_alone(path: Path) -> None:
    for module in imports(path):
        top = module.split(".")[0]
        allowed = {*sys.stdlib_module_names, "torch", "triton", "flash_attn", "quack"}
        assert top in allowed or room(module) == "kernels", f"{path.name}: {module}"


FIRST_CIRCLE = [
    path
    for where in ("*.py", "core/*.py", "mutation/*.py")
    for path in sorted(TESTS.glob(where))
    if path.name != Path(__file__).name
]


@pytest.mark.parametrize("path", FIRST_CIRCLE, ids=lambda p: p.name)
def test_the_cores_tests_need_no_torch(path: Path) -> None:
    """They are for every save: nothing of what they import may take seconds to load."""
    for module in imports(path):
        top = module.split(".")[0]
        if top == "tests":
            assert module.split(".")[1] in ("circles", "core", "mutation"), f"{path.name}: {module}"
        elif top == "minfer":
            assert module not in LAZY, f"{path.name}: {module}"
            assert room(module) not in ("effects", "kernels"), f"{path.name}: {module}"
        else:
            light = {*sys.stdlib_module_names, "attrs", "hypothesis", "pytest"}
            assert top in light, f"{path.name}: {module}"


def test_effects_do_not_import_tests_or_benchmarks() -> None:
    for path in EFFECTS:
        tops = {module.split(".")[0] for module in imports(path)}
        assert not tops & {"tests", "bench", "effects", "kernels"}, path.name


def test_one_import_name() -> None:
    for name in ("effects", "kernels"):
        link = ROOT / "minfer" / name
        assert link.is_symlink(), f"minfer/{name} links to the folder beside minfer"
        assert link.resolve() == ROOT / name


def test_no_pickle_and_no_torch_load() -> None:
    for path in (*CORE, *KERNELS, *EFFECTS):
        text = path.read_text("utf-8")
        assert not {"pickle", "marshal", "shelve"} & set(imports(path)), path.name
        assert "torch.load(" not in text, path.name


def test_top_level_holds_the_five_rooms_and_nothing_else() -> None:
    allowed = {"minfer", "effects", "kernels", "bench", "tests", "pyproject.toml", "README.md",
               "LICENSE", "build"}  # fmt: skip
    seen = {p.name for p in ROOT.iterdir() if not p.name.startswith(".")}
    assert {n for n in seen - allowed if not n.endswith(".egg-info")} == set()
