"""The server under attack: its checkpoint, its process, its memory and its blocks."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from bench.results import ROOT
from bench.shapes import qwen

BUNDLED: Final = ROOT / "effects" / "bundled" / "target"
ANSWER_SECONDS: Final = 20.0  # seconds
GAUGES: Final = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
# A template that a request can send round in circles.
LOOP: Final = (
    "{% if loops %}{% for a in range(loops) %}{% for b in range(loops) %}"
    "{% endfor %}{% endfor %}{% endif %}"
)


def write_checkpoint(folder: Path, shape: str) -> None:
    """A shape's configuration with the bundled tokenizer: bytes pairs, as real ones."""
    bundled = json.loads((BUNDLED / "config.json").read_text("utf-8"))
    config = {**qwen(shape), "vocab_size": bundled["vocab_size"]}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    shutil.copy(BUNDLED / "tokenizer.json", folder)
    facts = json.loads((BUNDLED / "tokenizer_config.json").read_text("utf-8"))
    facts["chat_template"] += LOOP
    (folder / "tokenizer_config.json").write_text(json.dumps(facts), "utf-8")


@frozen
class Server:
    """A server that runs."""

    port: int
    process: int

    def load(self) -> dict[str, float]:
        """Requests and blocks, from its metrics."""
        url = f"http://127.0.0.1:{self.port}/metrics"
        with urllib.request.urlopen(url, timeout=ANSWER_SECONDS) as answer:  # our own
            text = answer.read().decode()
        gauges = {}
        for name in GAUGES:
            line = re.search(rf"^minfer_{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
            gauges[name] = float(line[1]) if line else 0.0
        return gauges

    def memory(self) -> int:
        """Megabytes of all its processes; what they share counts once for each."""
        return sum(self.resident(process) for process in self.family()) // 1024

    @staticmethod
    def resident(process: int) -> int:
        """KB of memory; 0 if it has ended."""
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{process}/status").read_text()
            if match := re.search(r"^VmRSS:\s+(\d+)", text, re.MULTILINE):
                return int(match[1])
        return 0

    def descriptors(self) -> int:
        """Open files and sockets of all its processes."""
        count = 0
        for process in self.family():
            with contextlib.suppress(OSError):
                count += len(os.listdir(f"/proc/{process}/fd"))
        return count

    def family(self) -> set[int]:
        """Its process and all below it."""
        parents: dict[int, int] = {}
        for status in Path("/proc").glob("[0-9]*/status"):
            with contextlib.suppress(OSError):
                parent = re.search(r"^PPid:\s+(\d+)", status.read_text(), re.MULTILINE)
                parents[int(status.parent.name)] = int(parent[1]) if parent else 0
        family = {self.process}
        while (
            children := {child for child, by in parents.items() if by in family} - family
        ):
            family |= children
        return family


@contextlib.contextmanager
def served(tree: Path, cores: Sequence[int], options: Sequence[str]) -> Iterator[Server]:
    """A server of a tree, on these processors (all, if none is named)."""
    command = [sys.executable, "-m", "minfer", "serve", "--port", "0", *options]
    path = os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])
    env: dict[str, Any] = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(
        pinned(command, cores), stdout=subprocess.PIPE, text=True, env=env, cwd=tree
    ) as running:
        assert running.stdout is not None
        try:
            ready = running.stdout.readline()
            if not ready:
                raise RuntimeError("the server did not start")
            port = int(ready.split()[-1].removesuffix("/v1").rsplit(":", 1)[1])
            yield Server(port, running.pid)
        finally:
            running.terminate()
            try:
                running.wait(30)
            except subprocess.TimeoutExpired:
                running.kill()


def pinned(command: Sequence[str], cores: Sequence[int]) -> list[str]:
    """The command, on these processors alone."""
    if not cores:
        return list(command)
    return ["taskset", "--cpu-list", ",".join(map(str, cores)), *command]
