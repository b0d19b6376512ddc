"""The workflows run .ci/run, and publish tags without a stored password."""

from pathlib import Path
from typing import Any, Final

import pytest

yaml = pytest.importorskip("yaml")

FOLDER: Final = Path(__file__).resolve().parents[1] / ".github" / "workflows"


def workflow(name: str) -> dict[Any, Any]:
    loaded: dict[Any, Any] = yaml.safe_load((FOLDER / name).read_text("utf-8"))
    return loaded


def commands(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def test_changes_run_what_has_to_pass() -> None:
    ci = workflow("ci.yml")
    assert {"push", "pull_request"} <= ci[True].keys()  # YAML 1.1 reads `on` as true
    assert commands(ci["jobs"]["run"]) == [".ci/run"]
    assert (FOLDER.parents[1] / ".ci" / "run").stat().st_mode & 0o111


def test_tags_are_published_by_a_trusted_workflow() -> None:
    text = (FOLDER / "publish.yml").read_text("utf-8")
    publish = workflow("publish.yml")
    assert publish[True] == {"push": {"tags": ["v*"]}}
    assert "twine check --strict dist/*" in commands(publish["jobs"]["build"])
    job = publish["jobs"]["publish"]
    assert (job["permissions"], job["environment"]) == ({"id-token": "write"}, "pypi")
    assert "secrets." not in text
    assert "password:" not in text
