"""The scripts of the page are modules that hold together, and join into one."""

import re
from collections import Counter
from graphlib import CycleError
from pathlib import Path

import pytest

from minfer.effects.runs.page.scripts import IMPORT, SCRIPTS, joined_scripts

SOURCES = {path.stem: path.read_text("utf-8") for path in SCRIPTS.glob("*.js")}
DECLARED = re.compile(
    r"^(?:export )?(?:async )?(?:function|const|let) ([\w$]+)", re.MULTILINE
)
EXPORTED = re.compile(r"^export (?:async )?(?:function|const|let) ([\w$]+)", re.MULTILINE)
MAX_FUNCTION_LINES = 60  # lines of a function


def imported(source: str) -> list[tuple[str, str]]:
    """Every name that a script imports, and the script that it is from."""
    return [
        (name.strip(), module)
        for names, module in IMPORT.findall(source)
        for name in names.split(",")
        if name.strip()
    ]


@pytest.mark.parametrize("script", SOURCES)
def test_a_script_imports_what_is_there_and_what_it_uses(script: str) -> None:
    source = SOURCES[script]
    body = IMPORT.sub("", source).replace("...", " ")
    assert "import " not in re.sub(r"//.*", "", body), "an import that is not joined"
    for name, module in imported(source):
        assert name in EXPORTED.findall(SOURCES[module]), f"{module} exports no {name}"
        assert re.search(rf"(?<![\w$.]){re.escape(name)}(?![\w$])", body), name


def test_what_is_exported_is_imported_somewhere() -> None:
    requested = {
        (module, name) for source in SOURCES.values() for name, module in imported(source)
    }
    exported = {
        (script, name)
        for script, source in SOURCES.items()
        for name in EXPORTED.findall(source)
    }
    assert exported == requested


def test_a_name_is_declared_once_in_all_of_them() -> None:
    names = Counter(
        name for source in SOURCES.values() for name in DECLARED.findall(source)
    )
    assert [name for name, times in names.items() if times > 1] == []


def test_they_are_laid_out_to_be_read() -> None:
    for script, source in SOURCES.items():
        lines = source.splitlines()
        assert lines[0].startswith("// "), f"{script} does not say what it is"
        assert len(lines) <= 350, script
        assert max(map(len, lines)) <= 90, script
        for function in re.findall(
            r"^(?:export )?(?:async )?function .*?^}", source, re.M | re.S
        ):
            assert function.count("\n") < MAX_FUNCTION_LINES, f"{script}: {function[:40]}"


def test_a_script_stands_after_those_that_it_imports_from(tmp_path: Path) -> None:
    write = {
        "a": (
            'import { two } from "./b.js";\nimport { one } from "./c.js";\n\n'
            "use(one, two);\n"
        ),
        "b": 'import {\n  one,\n} from "./c.js";\n\nexport const two = one + one;\n',
        "c": "// the first\n\nexport let one = 1;\nexport async function f() {}\n",
    }
    for name, source in write.items():
        (tmp_path / f"{name}.js").write_text(source)
    assert joined_scripts(tmp_path) == (
        '"use strict";\n\n// the first\n\nlet one = 1;\nasync function f() {}\n\n'
        "const two = one + one;\n\nuse(one, two);\n"
    )
    (tmp_path / "c.js").write_text('import { two } from "./b.js";\n')
    with pytest.raises(CycleError):
        joined_scripts(tmp_path)
    (tmp_path / "c.js").write_text('import { nothing } from "./nowhere.js";\n')
    with pytest.raises(KeyError, match="nowhere"):
        joined_scripts(tmp_path)
