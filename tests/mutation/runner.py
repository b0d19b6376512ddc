"""Runs mutants, several at once, and keeps what became of each in a file of lines of
JSON.
"""

import ast
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Final

from attrs import asdict, frozen

from tests.mutation.catalogue import CORE, FOLDERS, Mutant, source_of
from tests.mutation.plugin import ENDLESS, MUTANT, NOTES, RUN_CPU, TEST_CPU, UNFINISHED

ROOT: Final = CORE.parent
TESTS: Final = ROOT / "tests" / "core"

# Tests that mutants do not run, and why not.
NOT_RUN: Final = {
    "test_planted.py": "runs the swarm on planted bugs, for minutes",
    "test_swarm.py": "runs for minutes; `worlds` has a few of its worlds",
}
# Files of tests in which a mutant of a file is likeliest to fail, beside that of its
# name.
ALSO: Final = {
    "lifecycle/arrive.py": ("test_events.py", "tiers/test_external.py"),
    "engine.py": ("test_events.py",),
    "policies/builtin.py": ("policies/test_policy_answers.py",),
    "records/policy.py": ("policies/test_policy_answers.py",),
    "lifecycle/stop.py": ("test_events.py",),
    "planning/load.py": ("tiers/test_external.py", "tiers/test_tiers.py"),
    "records/tiers.py": ("tiers/test_external.py", "tiers/test_tiers.py"),
    "tiers/finish.py": ("tiers/test_external.py", "tiers/test_tiers.py"),
    "tiers/store.py": ("tiers/test_external.py", "tiers/test_tiers.py"),
}
LAST: Final = (
    "blocks/test_sinks.py",
    "blocks/test_window.py",
    "test_machine.py",
    "policies/test_builtin.py",
    "sampling/test_reference_sampler.py",
)


@frozen
class Fate:
    """What became of a mutant."""

    key: str
    source: str  # digest of the file that was changed, as it is without the change
    tests: str  # digest of the core and of all tests that were run
    # "killed", "endless" (a test never ended: killed), "survived", "unfinished"
    outcome: str
    by: str  # the test that failed
    cpu: float  # seconds

    @property
    def dead(self) -> bool:
        """Whether a test noticed; running out of time is not noticing."""
        return self.outcome in ("killed", "endless")


@cache
def imported(module: str) -> frozenset[str]:
    """The modules of minfer and of the tests that a module imports itself."""
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not path.exists():
        return frozenset()  # a name in a module
    names, tree = {module.rpartition(".")[0]}, ast.parse(path.read_text("utf-8"))
    tree.body = [
        statement for statement in tree.body if not isinstance(statement, ast.If)
    ]  # for type checkers
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update(
                (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
            )
    return frozenset(
        name for name in names if name.partition(".")[0] in ("minfer", "tests")
    )


@cache
def reached(module: str) -> frozenset[str]:
    """All modules that are imported with a module."""
    modules: set[str] = set()
    todo = [module]
    while todo:
        new = imported(todo.pop()) - modules
        modules |= new
        todo += new
    return frozenset(modules)


def test_files(file: str) -> list[str]:
    """The tests that a mutant of this file runs, the likeliest and the cheapest first.

    Tests that do not import the file, not even through others, are left out. For no file:
    all.
    """
    # Those of journals, analysis and simulation are of what follows, and are left out.
    folders = ("", *FOLDERS, "testing")
    paths = [path for folder in folders for path in (TESTS / folder).glob("test_*.py")]
    names = sorted(
        path.relative_to(TESTS).as_posix() for path in paths if path.name not in NOT_RUN
    )
    stem, prefix = file.removesuffix(".py").replace("/", "."), "tests.core."
    if file:
        names = [
            n
            for n in names
            if f"minfer.{stem}"
            in reached(prefix + n.removesuffix(".py").replace("/", "."))
        ]
    folder, slash, file_name = file.rpartition("/")
    namesake = f"{folder}{slash}test_{file_name}"
    first = [name for name in (*ALSO.get(file, ()), namesake) if name in names]
    middle = [name for name in names if name not in first and name not in LAST]
    last = [name for name in LAST if name in names and name not in first]
    files = [f"tests/core/{name}" for name in [*first, *middle, *last]]
    worlds = not file or f"minfer.{stem}" in reached("tests.mutation.worlds")
    return [*files, "tests/mutation/worlds.py"] if worlds else files


def tests_digest() -> str:
    """A digest of the core and of the tests that mutants run."""
    digest = hashlib.sha256()
    inner = (*FOLDERS, "testing")
    folders = [
        f"{top}/{inner_folder}"
        for top in ("minfer", "tests/core")
        for inner_folder in inner
    ]
    for folder in ("minfer", "tests/core", "tests/mutation", *folders):
        for path in sorted((ROOT / folder).glob("*.py")):
            if path.name not in NOT_RUN and path.name != "equivalents.py":
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def run(mutant: Mutant | None, tests: str) -> Fate:
    """Run the tests on one mutant, or on the core as it is."""
    key, file = (mutant.key, mutant.file) if mutant else ("", "")
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes"
        notes.touch()
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONHASHSEED": "0",
            MUTANT: key,
            NOTES: str(notes),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_ADDOPTS": "",
        }
        flags = [
            "-x",
            "-q",
            "-p",
            "tests.mutation.plugin",
            "-p",
            "no:cacheprovider",
            "--assert=plain",
        ]
        command = [sys.executable, "-m", "pytest", *flags, *test_files(file)]
        with Popen(command, cwd=ROOT, env=env, stdout=DEVNULL, stderr=DEVNULL) as process:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        record = [json.loads(line) for line in notes.read_text().splitlines()]
    outcome, failed_test = _judged(process.returncode, record)
    source = source_of(file) if mutant else ""
    return Fate(
        key,
        source,
        tests,
        outcome,
        failed_test,
        round(usage.ru_utime + usage.ru_stime, 2),
    )


def _judged(status: int, emitted: list[dict[str, object]]) -> tuple[str, str]:
    """What an exit status and notes mean: the outcome, and which test it was."""
    test = next(
        (str(entry["test"]) for entry in reversed(emitted) if "test" in entry), ""
    )
    failed = next((str(entry["failed"]) for entry in emitted if "failed" in entry), "")
    if status == 0:
        return "survived", ""
    if status == ENDLESS:
        return "endless", test
    if status == UNFINISHED or status < 0:
        # Killed from outside, deaf to signals: endless if it had been in one test for so
        # long.
        began = next(
            (entry["cpu"] for entry in reversed(emitted) if "test" in entry), 0.0
        )
        assert isinstance(began, float | int)
        long = status < 0 and RUN_CPU - began > TEST_CPU
        return ("endless" if long else "unfinished"), test
    return "killed", failed or "import"


def known(path: Path) -> dict[str, Fate]:
    """What a file says of earlier runs, the last word on each mutant."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {fate.key: fate for fate in (Fate(**json.loads(line)) for line in lines)}


def stands(fate: Fate, tests: str) -> bool:
    """Whether an earlier result still holds: a killed one does while its file says the
    same.
    """
    if not fate.key or not fate.dead:
        return fate.tests == tests
    return fate.source == source_of(fate.key.partition(" | ")[0])


def run_all(
    mutants: Iterable[Mutant], jobs: int, out: Path | None, tell: Callable[[Fate], None]
) -> list[Fate]:
    """Run what `out` does not know yet; returns what became of each, in order."""
    tests, mutants = tests_digest(), list(mutants)
    fates = {
        key: fate
        for key, fate in (known(out) if out else {}).items()
        if stands(fate, tests)
    }
    todo = [mutant for mutant in mutants if mutant.key not in fates]
    with ThreadPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(run, mutant, tests) for mutant in todo]):
            fate = future.result()
            fates[fate.key] = fate
            if out:
                with out.open("a") as file:
                    file.write(json.dumps(asdict(fate)) + "\n")
            tell(fate)
    return [fates[mutant.key] for mutant in mutants]
