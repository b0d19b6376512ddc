"""Codex, the program, run without a terminal against a server of ours."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
from attrs import frozen

VERSION: Final = "0.171.0"
_PROGRAM: Final = shutil.which("codex")
NEEDS_CODEX: Final = pytest.mark.skipif(
    _PROGRAM is None,
    reason=f"needs codex on PATH: npm install @openai/codex@{VERSION}",
)
SECONDS: Final = 120
_CONFIG: Final = """
model = "{model}"
model_provider = "minfer"
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
[model_providers.minfer]
name = "minfer"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "MINFER_TEST_KEY"
request_max_retries = 0
stream_max_retries = 0
[analytics]
enabled = false
"""


@frozen
class Codex:
    """Codex with a home and a working folder of its own."""

    home: Path
    work: Path

    @classmethod
    def at(cls, folder: Path, url: str, model: str = "tiny") -> "Codex":
        """Codex that asks the server at this address."""
        home, work = folder / "home", folder / "work"
        home.mkdir(parents=True)
        work.mkdir()
        (home / "config.toml").write_text(_CONFIG.format(url=url, model=model))
        return cls(home, work)

    def start(self, task: str, *options: str) -> "subprocess.Popen[str]":
        """Begin a task; with the options `resume` and `--last`, in the last session."""
        assert _PROGRAM is not None
        command = [_PROGRAM, "exec", *options, "--skip-git-repo-check", "--json", task]
        return subprocess.Popen(
            command,
            cwd=self.work,
            env={**os.environ, "CODEX_HOME": str(self.home), "MINFER_TEST_KEY": "-"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, task: str, *options: str) -> list[dict[str, Any]]:
        """The events of a task that completes."""
        with self.start(task, *options) as process:
            out, errors = process.communicate(timeout=SECONDS)
        events = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        assert process.returncode == 0, (events, errors)
        assert events[-1]["type"] == "turn.completed", (events, errors)
        return events
