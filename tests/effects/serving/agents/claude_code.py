"""Claude Code, run without a terminal against a server of ours.

It is installed by npm into pytest's cache, once. It gets the address of the server on
this machine and nothing else: other hosts are not asked for anything.
"""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final

from attrs import frozen

VERSION: Final = "2.1.332"
PACKAGE: Final = f"@anthropic-ai/claude-code@{VERSION}"
CONTEXT: Final = 400_000  # of the model, whose tokens are bytes
INSTALL_SECONDS: Final = 300
RUN_SECONDS: Final = 120


class NotInstalledError(Exception):
    """The program cannot be had here."""


@frozen
class ClaudeCode:
    """The program, with a home and a working folder of its own."""

    binary: Path
    home: Path
    folder: Path

    def start(self, url: str, *arguments: str) -> subprocess.Popen[str]:
        """Start the program with a model at an address."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return subprocess.Popen(
            [str(self.binary), *arguments, "--dangerously-skip-permissions"],
            cwd=self.folder,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(self.home),
                "ANTHROPIC_BASE_URL": url,
                "ANTHROPIC_AUTH_TOKEN": "none",
                "ANTHROPIC_MODEL": "tiny",
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "DISABLE_AUTOUPDATER": "1",
                "DISABLE_TELEMETRY": "1",
                "IS_SANDBOX": "1",  # root may skip permissions in one
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, url: str, prompt: str, *arguments: str) -> list[dict[str, Any]]:
        """The program's messages about a task, the last of which is its result."""
        form = ["--output-format", "stream-json", "--verbose"]
        program = self.start(url, "-p", prompt, *form, *arguments)
        output, errors = finish(program)
        assert program.returncode == 0, (output[-2000:], errors[-2000:])
        return [json.loads(line) for line in output.splitlines()]


def finish(program: subprocess.Popen[str]) -> tuple[str, str]:
    """The outputs of a program that ends by itself; it is killed if it does not."""
    try:
        return program.communicate(timeout=RUN_SECONDS)
    except subprocess.TimeoutExpired:
        program.kill()
        program.communicate()
        raise


def install(cache: Path) -> Path:
    """The program's path, after npm has installed it. Raises NotInstalledError."""
    binary = cache / "node_modules" / "@anthropic-ai" / "claude-code-linux-x64" / "claude"
    if binary.exists():
        return binary
    npm = shutil.which("npm")
    if npm is None:
        raise NotInstalledError("npm is not installed")
    with tempfile.TemporaryDirectory(dir=cache.parent) as folder:
        command = [npm, "install", "--no-fund", "--no-audit", "--prefix", folder, PACKAGE]
        npm_run = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False
        )
        if npm_run.returncode:
            raise NotInstalledError(
                f"npm cannot install {PACKAGE}: {npm_run.stderr[-500:]}"
            )
        cache.mkdir(parents=True, exist_ok=True)
        if not (cache / "node_modules").exists():  # another process may have made it
            (Path(folder) / "node_modules").rename(cache / "node_modules")
    if not binary.exists():
        raise NotInstalledError(f"{PACKAGE} has no program for this machine")
    return binary
