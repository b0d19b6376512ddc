"""Reads the files of effects/deploy: a Dockerfile as stages, YAML and JSON as data."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml
from attrs import frozen

ROOT: Final = Path(__file__).resolve().parents[3]
ROOM: Final = ROOT / "effects" / "deploy"
USER: Final = 10001
PORT: Final = 8000


@frozen
class Instruction:
    """One instruction of a Dockerfile."""

    word: str
    rest: str


@frozen
class Stage:
    """A stage of a Dockerfile: what it is made from, and what is done to it."""

    name: str
    image: str  # or the name of another stage
    steps: tuple[Instruction, ...]

    def of(self, word: str) -> list[str]:
        """What its instructions of a kind say."""
        return [step.rest for step in self.steps if step.word == word]


def instructions(text: str) -> Iterator[Instruction]:
    """The instructions of a Dockerfile, each in one line."""
    code = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for line in code.replace("\\\n", " ").splitlines():
        if line.strip():
            word, rest = line.split(maxsplit=1)
            yield Instruction(word, " ".join(rest.split()))


def stages() -> dict[str, Stage]:
    """The stages of the Dockerfile by name, with its defaults of arguments put in."""
    defaults: dict[str, str] = {}
    by_name: dict[str, Stage] = {}
    steps: list[Instruction] = []
    for instruction in instructions((ROOM / "Dockerfile").read_text("utf-8")):
        if instruction.word == "ARG":
            name, _, default = instruction.rest.partition("=")
            defaults[name] = default
        if instruction.word == "FROM":
            image, name = re.fullmatch(r"(\S+) AS (\S+)", instruction.rest).groups()  # type: ignore[union-attr]  # else: fails
            steps = []
            by_name[name] = Stage(name, _filled(image, defaults), ())
        elif by_name:
            steps.append(
                Instruction(instruction.word, _filled(instruction.rest, defaults))
            )
            last = next(reversed(by_name.values()))
            by_name[last.name] = Stage(last.name, last.image, tuple(steps))
    return by_name


def whole(name: str) -> Stage:
    """A stage with all that the stages it is made from do, from the first on."""
    by_name = stages()
    stage = by_name[name]
    if stage.image not in by_name:
        return stage
    below = whole(stage.image)
    return Stage(name, below.image, (*below.steps, *stage.steps))


def _filled(text: str, defaults: dict[str, str]) -> str:
    return re.sub(r"\$\{(\w+)\}", lambda match: defaults.get(match[1], match[0]), text)


def read_yaml(name: str) -> Any:
    """The only document of a file."""
    return yaml.safe_load((ROOM / name).read_text("utf-8"))


def read_all_yaml(name: str) -> dict[str, Any]:
    """The objects of a manifest, by kind."""
    objects = yaml.safe_load_all((ROOM / name).read_text("utf-8"))
    return {manifest["kind"]: manifest for manifest in objects}


def read_json(name: str) -> Any:
    """What a file of JSON says."""
    return json.loads((ROOM / name).read_text("utf-8"))


def option(arguments: list[str], name: str) -> str:
    """The value of an option of a container's command."""
    return arguments[arguments.index(name) + 1]
