"""The folders and the imports between them, read off the syntax trees."""

import ast
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Final

import pytest

import minfer
from bench import structure
from tests.mutation.catalogue import FOLDERS

ROOT: Final = Path(__file__).resolve().parents[1]
TESTS: Final = ROOT / "tests"
UNPACKED: Final = (ROOT / "PKG-INFO").is_file()  # out of a source distribution
DECIDING: Final = sorted(  # what the engine's decisions depend on
    path for folder in ("", *FOLDERS) for path in (ROOT / "minfer" / folder).glob("*.py")
)
FOLLOWERS: Final = sorted(
    path
    for folder in ("journal", "analysis", "simulation")
    for path in (ROOT / "minfer" / folder).rglob("*.py")
)
SPECIFICATION: Final = sorted((ROOT / "minfer" / "testing").rglob("*.py"))
CORE: Final = [*DECIDING, *FOLLOWERS, *SPECIFICATION]
KERNELS: Final = sorted((ROOT / "kernels").rglob("*.py"))
EFFECTS: Final = sorted((ROOT / "effects").rglob("*.py"))
SOURCES: Final = [*CORE, *KERNELS, *EFFECTS]

# The folders of effects, each with those below that it may import. No import leads up,
# and folders of one layer (setup and text, serving and runs) do not import each other.
ENGINE: Final = {"setup", "text", "execution", "net", "models"}  # below all that runs
BELOW: Final[dict[str, set[str]]] = {
    "cli": {"proxy", "serving", "runs", "cluster", "live", *ENGINE},
    "proxy": {"serving", "cluster", "live", *ENGINE},
    "serving": {"cluster", "live", *ENGINE},
    "runs": {"live", *ENGINE},
    "cluster": {"live", *ENGINE},
    "live": ENGINE,
    "setup": {"execution", "net", "models"},
    "text": {"execution", "net", "models"},
    "execution": {"net", "models"},
    "net": set(),
    "models": set(),
}

# The exceptions: files of the core that lead to effects, and what they may import there.
LAZY: Final = {f"minfer.effects.{module}" for module in minfer._LAZY.values()}
EXCEPTIONS: Final = {
    # imported with the first use of LLM, AsyncLLM or another of its names
    ROOT / "minfer" / "__init__.py": LAZY,
    ROOT / "minfer" / "__main__.py": {"minfer.effects.cli.main"},  # is the command line
}

PURE: Final = {"attrs"}  # what a file of the core may import besides the standard library
WORLDLY: Final = {
    "asyncio", "datetime", "io", "logging", "multiprocessing", "os", "pathlib", "random",
    "secrets", "shutil", "socket", "subprocess", "tempfile", "threading", "time", "uuid",
}  # fmt: skip


# The kit runs policies of others, in processes of its own, with limits and their time.
TESTING: Final = ROOT / "minfer" / "testing"
PROCESSES: Final = {
    TESTING / "bounded.py": {"io", "multiprocessing", "os", "time"},
    TESTING / "second_process.py": {"multiprocessing", "os"},
}


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Every module that a file imports, anywhere in it, or names in a string.

    A string that is a module's name counts too: that is how the command line names its
    commands.
    """
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            inner = (f"{module}.{alias.name}" for alias in node.names)
            names += [name for name in inner if name in modules()] or [module]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            named = node.value if node.value.startswith("minfer.") else ""
            names += [named] if named in modules() else []
    return tuple(names)


@cache
def modules() -> frozenset[str]:
    """The names of all modules of minfer."""
    return frozenset(map(module_of, SOURCES))


def module_of(path: Path) -> str:
    """The name by which a file of minfer is imported."""
    path_parts = path.relative_to(ROOT).with_suffix("").parts
    module_parts = path_parts if path_parts[0] == "minfer" else ("minfer", *path_parts)
    return ".".join(module_parts).removesuffix(".__init__")


def top_folder(module: str) -> str:
    """Which of minfer, effects, kernels a module of minfer is in."""
    words = module.split(".")
    is_inner = (
        words[0] == "minfer" and len(words) > 1 and words[1] in ("effects", "kernels")
    )
    return words[1] if is_inner else "minfer"


def effects_folder(module: str) -> str:
    """Which folder of effects a module is in, or nothing."""
    words = module.split(".")
    return words[2] if top_folder(module) == "effects" and len(words) > 2 else ""


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", CORE, ids=shown)
def test_the_core_imports_nothing_that_touches_the_world(path: Path) -> None:
    for module in set(imports(path)) - EXCEPTIONS.get(path, set()):
        top = module.split(".")[0]
        if top == "minfer":
            assert top_folder(module) == "minfer", f"{shown(path)}: {module}"
        elif top == "immutables":
            assert path.name == "pmap.py", (
                f"{shown(path)}: only pmap knows the map library"
            )
        elif top == "hypothesis":
            assert path in SPECIFICATION, shown(path)
        else:
            assert top in sys.stdlib_module_names or top in PURE, (
                f"{shown(path)}: {module}"
            )
            allowed = PROCESSES.get(path, set())
            assert top not in WORLDLY - allowed, (
                f"{shown(path)}: {module} touches the world"
            )


@pytest.mark.parametrize("path", DECIDING, ids=shown)
def test_what_decides_does_not_know_what_follows(path: Path) -> None:
    for module in imports(path):
        followers = ("minfer.journal", "minfer.analysis", "minfer.simulation")
        assert not module.startswith((*followers, "minfer.testing")), module


@pytest.mark.parametrize("path", FOLLOWERS, ids=shown)
def test_what_follows_does_not_know_the_specification(path: Path) -> None:
    for module in imports(path):
        assert not module.startswith("minfer.testing"), module


@pytest.mark.parametrize("path", KERNELS, ids=shown)
def test_kernels_import_only_torch_and_triton(path: Path) -> None:
    for module in imports(path):
        top = module.split(".")[0]
        allowed = {*sys.stdlib_module_names, "torch", "triton", "flash_attn", "quack"}
        allowed |= {"attrs"}  # of the leaves
        assert top in allowed or top_folder(module) == "kernels", (
            f"{shown(path)}: {module}"
        )


@pytest.mark.parametrize("path", EFFECTS, ids=shown)
def test_no_import_leads_up(path: Path) -> None:
    folder = effects_folder(module_of(path))
    for module in imports(path):
        imported_folder = effects_folder(module)
        if imported_folder and imported_folder != folder:
            assert imported_folder in BELOW[folder], (
                f"{shown(path)} is in {folder} and imports {module}"
            )


def test_every_file_of_effects_is_in_a_known_folder() -> None:
    flat = [path for path in EFFECTS if path.parent == ROOT / "effects"]
    assert [path.name for path in flat] == ["__init__.py"]
    assert {effects_folder(module_of(path)) for path in EFFECTS} - {""} == set(BELOW)


def test_no_modules_import_each_other() -> None:
    lazy = set(EXCEPTIONS)
    graph = {
        module_of(path): {name for name in imports(path) if name in modules()}
        for path in SOURCES
        if path not in lazy
    }
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"a cycle: {' <- '.join(error.args[1])}")


@pytest.mark.long
def test_no_folders_import_each_other_and_no_import_leads_up_on_both_levels() -> None:
    file_pairs = structure.file_imports(ROOT)
    for pairs in (
        structure.between_folders(file_pairs),
        structure.inside_folders(file_pairs),
    ):
        assert len(pairs) > len(structure.LAYERS), "there are imports to look at"
        assert structure.cycles(pairs) == []
        assert [*filter(structure.is_upward, pairs)] == []


def test_cycles_and_upward_imports_are_found() -> None:
    file_pairs = {
        (
            "effects/live/beams/a.py",
            "effects/live/engine/b.py",
        ),  # the engine is above
        ("effects/live/engine/b.py", "effects/live/served.py"),
        ("effects/live/served.py", "effects/live/beams/a.py"),
        ("minfer/journal/c.py", "minfer/engine.py"),
        ("minfer/records/d.py", "minfer/journal/c.py"),  # and so are the followers
    }
    outer, inner = (
        structure.between_folders(file_pairs),
        structure.inside_folders(file_pairs),
    )
    assert structure.cycles(outer) == [["minfer", "minfer/journal"]]
    assert [*filter(structure.is_upward, outer)] == [("minfer", "minfer/journal")]
    (cycle,) = structure.cycles(inner)
    assert cycle == [f"effects/live/{name}" for name in ("beams", "engine", "served.py")]
    assert {*filter(structure.is_upward, inner)} == {
        ("effects/live/beams", "effects/live/engine"),
        ("minfer/records", "minfer/journal"),
    }


def test_the_core_has_few_flat_files() -> None:
    assert len(structure.flat_files(ROOT)) <= 10


FIRST_CIRCLE: Final = [
    path
    for pattern in ("*.py", "core/**/*.py", "mutation/*.py")
    for path in sorted(TESTS.glob(pattern))
    if path.name != Path(__file__).name
]


@pytest.mark.parametrize("path", FIRST_CIRCLE, ids=shown)
def test_the_cores_tests_need_no_torch(path: Path) -> None:
    """They are for every save: nothing of what they import may take seconds to load."""
    for module in imports(path):
        top = module.split(".")[0]
        if top == "tests":
            folders = ("circles", "core", "mutation")
            assert module.split(".")[1] in folders, f"{shown(path)}: {module}"
        elif top == "minfer":
            assert module not in LAZY, f"{shown(path)}: {module}"
            assert top_folder(module) == "minfer", f"{shown(path)}: {module}"
        else:
            light = {*sys.stdlib_module_names, "attrs", "hypothesis", "pytest"}
            assert top in light, f"{shown(path)}: {module}"


@pytest.mark.parametrize("path", [*CORE, *EFFECTS], ids=shown)
def test_nothing_imports_tests_or_benchmarks(path: Path) -> None:
    tops = {module.split(".")[0] for module in imports(path)}
    assert not tops & {"tests", "bench", "effects", "kernels"}, shown(path)


def test_one_import_name() -> None:
    for name in ("effects", "kernels"):
        link = ROOT / "minfer" / name
        if UNPACKED:  # links to folders do not travel: there they are copies
            assert link.is_dir(), f"minfer/{name} is a copy of the folder beside minfer"
        else:
            assert link.is_symlink(), f"minfer/{name} links to the folder beside minfer"
            assert link.resolve() == ROOT / name


def test_no_pickle_and_no_torch_load() -> None:
    for path in SOURCES:
        text = path.read_text("utf-8")
        # Processes that the kit forks and starts itself send any policy's state.
        if path not in PROCESSES:
            assert not {"pickle", "marshal", "shelve"} & set(imports(path)), shown(path)
        assert "torch.load(" not in text, shown(path)


def test_the_top_level_has_the_five_folders_and_nothing_else() -> None:
    folders = {"minfer", "effects", "kernels", "bench", "tests"}
    allowed = folders | {"pyproject.toml", "README.md", "LICENSE", "build", "dist"}
    allowed |= {"PKG-INFO"} if UNPACKED else set()
    names = {p.name for p in ROOT.iterdir() if not p.name.startswith(".")}
    assert {n for n in names - allowed if not n.endswith(".egg-info")} == set()
