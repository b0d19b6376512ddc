"""What results say of their circumstances."""

import subprocess
from pathlib import Path

import pytest

from bench import results


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit, of a file and a result."""
    code, result = tmp_path / "code.py", tmp_path / "bench" / "results" / "old.json"
    result.parent.mkdir(parents=True)
    for file in (code, result):
        file.write_text("1\n")
    me = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*me, "commit", "-q", "-m", "all"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(results, "ROOT", tmp_path)
    return tmp_path


def test_results_are_of_the_commit_though_others_were_written(tree: Path) -> None:
    results.write("old", {"figure": 2}, folder=tree / "bench" / "results")
    results.write("new", {"figure": 1}, folder=tree / "bench" / "results")
    circumstances = results.circumstances(seed=3)
    assert len(circumstances["commit"]) == 40
    assert (circumstances["changed"], circumstances["seed"]) == (False, 3)


def test_results_are_not_of_the_commit_if_code_has_changed(tree: Path) -> None:
    (tree / "code.py").write_text("2\n")
    assert results.circumstances(seed=None)["changed"] is True
