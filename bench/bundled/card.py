"""Write the models' card and `training.json` from what was measured.

    python -m bench.bundled.card --models MODELS --evaluated evaluated.json \\
        --measured measured.json --logs target.log draft.log
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, Final

from bench.bundled import corpus
from bench.bundled.model import SHAPES
from bench.bundled.prepare import CORPUS, FOLDER
from bench.bundled.probe import BY_HEART
from bench.bundled.tasks.code import recipes
from bench.bundled.tasks.tasks import TASKS

_ROLES: Final = ("target", "draft")
WIDTH: Final = 118  # characters of a line of a list
TEXT: Final = Path(__file__).with_name("card.md")


def card(found: Mapping[str, Any]) -> str:
    """The card, of the contents of training.json."""
    data, measured, evaluated = found["data"], found["measured"], found["evaluated"]
    licences = (f"{name} ({kind})" for name, kind in data["licences"].items())
    held, talk = measured["held_out"], measured["answers"]
    return TEXT.read_text("utf-8").format(
        **{
            **data,
            **evaluated["circles"],
            "licences": _filled(f"Licences: {', '.join(licences)}."),
            "sizes": _sizes(measured),
            "tasks": _tasks(evaluated),
            "problems": evaluated["problems"],
            "refused": evaluated["refused"],
            "later": _later(found.get("later", ())),
            "functions": _filled(", ".join(f"`{one.name}`" for one in recipes())),
            "agreement": held["agreement"],
            "overlap": held["overlap"],
            "talk_agreement": talk["agreement"],
            "talk_overlap": talk["overlap"],
        }
    )


def _filled(text: str) -> str:
    return fill(text, WIDTH, break_on_hyphens=False)


def _sizes(measured: Mapping[str, Any]) -> str:
    shapes = [SHAPES[role] for role in _ROLES]
    bits = measured["held_out_bits_per_byte"]
    values: dict[str, list[Any]] = {
        "parameters": [f"{measured['parameters'][role]:,}" for role in _ROLES],
        "layers": [one.layers for one in shapes],
        "hidden size": [one.hidden for one in shapes],
        "feed-forward size": [one.feed_forward for one in shapes],
        "heads: query, key-value": [f"{s.heads}, {s.shared_heads}" for s in shapes],
        "folder, bytes": [f"{measured['folder_bytes'][role]:,}" for role in _ROLES],
        "held-out Python, bits per byte": [bits[role] for role in _ROLES],
    }
    rows = [f"| {name} | {one} | {other} |" for name, (one, other) in values.items()]
    return "\n".join(["| | target | draft |", "| --- | --- | --- |", *rows])


def _tasks(evaluated: Mapping[str, Any]) -> str:
    thought = evaluated["right, having reasoned"]
    rows = [
        "| task | what is asked | right | right, where it reasons first |",
        "| --- | --- | --- | --- |",
    ]
    for name, share in evaluated["right"].items():
        mark = "*" if name in BY_HEART else ""
        what = (TASKS[name].draw.__doc__ or "").split("\n")[0].rstrip(".")
        rows.append(f"| {name}{mark} | {what} | {share:.0%} | {thought[name]:.0%} |")
    return "\n".join(rows)


def _later(names: Sequence[str]) -> str:
    """What has to be said of tasks that the models were not trained for as they are."""
    if not names:
        return ""
    told = "Added or made harder since the models were trained, as people ask such things"
    return f"{told}: {', '.join(names)}.\n"


def _log(path: Path) -> list[Any]:
    """The lines of JSON in a log."""
    lines = path.read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--models", type=Path, required=True, help="where the card goes")
    add("--evaluated", type=Path, required=True, help="what `evaluate` wrote")
    add("--measured", type=Path, required=True, help="what `measure` printed")
    add("--logs", type=Path, nargs="*", default=[], help="what `train` printed")
    add("--later", nargs="*", default=[], help="tasks that came after the training")
    add("--data", type=Path, default=FOLDER)
    args = parser.parse_args()
    found = {
        "data": corpus.read(args.data / CORPUS).about,
        "evaluated": json.loads(args.evaluated.read_text("utf-8")),
        "measured": json.loads(args.measured.read_text("utf-8")),
        "training": {log.stem: _log(log) for log in args.logs},
        "later": args.later,
    }
    text = json.dumps(found, indent=1) + "\n"
    (args.models / "training.json").write_text(text, "utf-8")
    (args.models / "README.md").write_text(card(found), "utf-8")


if __name__ == "__main__":
    main()
