"""Every type of zod 4: accepted, or refused by name; and values that hold.

`zod_schemas.json` has the schemas that zod makes of the types in `zod_types.mjs`, as
`zod_schemas.mjs` writes them. Where node and zod are installed (`npm install` in this
folder, or ZOD as the folder of a node_modules), zod's own parsers check values, too.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Final

import jsonschema
import pytest

from tests.circles import claimed, long
from tests.effects.text.grammars.bundled import refusal
from tests.effects.text.grammars.random_texts import Sampler, matcher

FOLDER: Final = Path(__file__).parent
SCHEMAS: Final[Mapping[str, Mapping[str, Any]]] = json.loads(
    (FOLDER / "zod_schemas.json").read_text("utf-8")
)
VALIDATORS: Final = {
    "draft-2020-12": jsonschema.Draft202012Validator,
    "draft-07": jsonschema.Draft7Validator,
    "draft-04": jsonschema.Draft4Validator,
}
# OpenAPI's `nullable` is unknown to the reference; zod checks these.
TYPES: Final = [
    (target, name)
    for target, schemas in SCHEMAS.items()
    for name, schema in schemas.items()
    if schema is not None
]
REFUSED: Final = {
    "never": "required property 'value' is unsatisfiable",
    "xor_objects": "the keyword 'oneOf' cannot be enforced",
}
# The reference, which uses Python's `re`, cannot read these patterns.
UNREADABLE: Final = frozenset({"emoji"})
# What must be within a text, and is hard to guess.
HINTS: Final = {
    "endsWith": b".ts",
    "includes": b"a.b",
    "includes_at": b"b",
    "templateLiteral": b"!",
}
_NOT_SAID: Final = "the schema does not say it"
# Types whose parser refuses what their schema allows, which no grammar can know.
STRICTER_PARSER: Final = {
    "codec": f"the text must be a number: {_NOT_SAID}",
    "creditCard": "the digits have a check sum",
    "emoji": "zod and the compiler know different versions of Unicode",
    "file": "JSON has no files",
    "httpUrl": f"the scheme must be http or https: {_NOT_SAID}",
    "iban": "the digits have a check sum",
    "jwt": "a header is JSON within a text, encoded",
    "jwt_algorithm": "as jwt",
    "pipe": "the schema is the input's, and not that of what follows",
    "promise": "the parser wants a promise, which JSON cannot have",
    "success": "the schema is the output's",
    "record_integers": f"a number must be below 2^53: {_NOT_SAID}",
    "stringbool": f"the text must be one of some words: {_NOT_SAID}",
    "url_bounded": f"the scheme and the host are bounded: {_NOT_SAID}",
}


# Older targets have no propertyNames, and OpenAPI has no prefixItems.
LESS_SAID: Final = {
    "draft-04": ("record", "partialRecord"),
    "openapi-3.0": ("record", "partialRecord", "tuple"),
}


def values_of(target: str, name: str, count: int) -> list[Any]:
    """So many values of a type, which hold; none of a type that is refused."""
    schema = SCHEMAS[target][name]
    if name in REFUSED:
        assert REFUSED[name] in str(refusal(json=schema))
        return []
    seed = f"{target} {name}"
    sampler = Sampler(matcher(schema), Random(seed), HINTS.get(name, b""))
    values = [sampler.value() for _ in range(count)]
    if target in VALIDATORS and name not in UNREADABLE:
        reference = VALIDATORS[target](schema)
        for value in values:
            reference.validate(value)
    return values


@cache
def zod() -> Path | None:
    """A folder with a `node_modules` that has zod, if there is one and node."""
    folders = [FOLDER, Path(os.environ.get("ZOD", FOLDER))]
    with_zod = [
        folder for folder in folders if (folder / "node_modules" / "zod").is_dir()
    ]
    return with_zod[0] if with_zod and shutil.which("node") else None


def run(folder: Path, script: str, stdin: str, tmp_path: Path) -> str:
    """What a script writes, with zod of a folder."""
    for file in FOLDER.glob("*.mjs"):
        shutil.copy(file, tmp_path)
    (tmp_path / "node_modules").symlink_to((folder / "node_modules").resolve())
    finished = subprocess.run(
        ["node", str(tmp_path / script)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return finished.stdout


@pytest.mark.parametrize(("target", "name"), TYPES)
def test_a_type_is_refused_by_name_or_its_values_hold(target: str, name: str) -> None:
    values_of(target, name, 3)


@pytest.mark.parametrize("count", [*long([20]), *claimed([200])])
@pytest.mark.parametrize(("target", "name"), TYPES)
def test_values_of_a_type_hold(
    target: str, name: str, count: int, tmp_path: Path
) -> None:
    values = values_of(target, name, count)
    folder = zod()
    less = name.startswith(LESS_SAID.get(target, ()) or ("-",))
    if folder is not None and name not in STRICTER_PARSER and not less:
        lines = "\n".join(json.dumps([name, value]) for value in values)
        assert run(folder, "zod_parse.mjs", lines, tmp_path) == ""


@pytest.mark.long
def test_the_schemas_are_those_that_zod_makes(tmp_path: Path) -> None:
    folder = zod()
    if folder is None:
        pytest.skip("needs node, and zod (npm install)")
    package = json.loads((folder / "node_modules/zod/package.json").read_text("utf-8"))
    pinned = json.loads((FOLDER / "package.json").read_text("utf-8"))["dependencies"]
    if package["version"] != pinned["zod"]:
        pytest.skip(f"zod is {package['version']}, and not {pinned['zod']}")
    assert json.loads(run(folder, "zod_schemas.mjs", "", tmp_path)) == SCHEMAS
